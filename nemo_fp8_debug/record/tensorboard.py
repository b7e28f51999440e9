"""Write a run to TensorBoard: scalars, charts of the loss next to the worst layers, and the fingerprint.

Event files are written in the caller's thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import google_crc32c
from tensorboard.compat import tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard import summary as summaries

from ..core.keys import ROLES, SHOWN_AS
from ..core.layer_names import find_expert_aggregate, limit_experts_per_layer
from ..core.sample import Sample
from ..core.table import load_feature_modules
from .scalars import SampleSummarizer, ScalarRecorder, make_metric_tag
from .storage import FolderStorage

#: seconds after which events are flushed to the disk
_FLUSH = 120.0
_files = itertools.count()


class EventFileWriter:
    """A TensorBoard event file that is written in the caller's thread. After an error we start a new file.

    We do not use SummaryWriter, because its thread stops forever after the first error, such as a full disk.
    """

    def __init__(self, folder: str | os.PathLike[str] | FolderStorage) -> None:
        """
        Args:
            folder: folder of the events: a path, an fsspec address, or the storage of a run's record.
        """
        self.file_writer = self
        self._storage = folder if isinstance(folder, FolderStorage) else FolderStorage(folder)
        self.log_dir = str(self._storage)
        self._file: Any = None
        self._name = ""  # name of the open file; a second attempt to begin it reuses the name
        self._flushed = time.monotonic()
        if self._storage.is_local:
            tf.io.gfile.makedirs(self.log_dir)

    def add_summary(self, summary: Summary, step: int) -> None:
        """Write an event. If the folder cannot be written, the event is lost. We do not warn here, because the run record in
        the same folder warns.
        """
        try:
            self._file = self._file or self._begun()
            self._write(self._file, Event(wall_time=time.time(), step=step, summary=summary))
            self._name = ""
        except Exception as error:
            self._file = None  # it may end in an incomplete event, at which readers stop
            if not isinstance(error, OSError):
                raise

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Write a text as Markdown."""
        self.add_summary(summaries.text(tag, text), step)

    def add_custom_scalars(self, layout: Mapping[str, Any]) -> None:
        """Write the layout of the charts page. TensorBoard shows the last layout."""
        self.add_summary(summaries.custom_scalars(layout), 0)

    def flush(self) -> None:
        """Flush everything to the disk."""
        if self._file:
            self._file.flush()
        self._flushed = time.monotonic()

    def _begun(self) -> Any:
        if not self._name:
            self._name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        local, name = self._storage.is_local, self._name
        file = tf.io.gfile.GFile(f"{self.log_dir}/{name}", "wb") if local else _RemoteFile(self._storage, name)
        self._write(file, Event(wall_time=time.time(), file_version="brain.Event:2"))
        return file

    def _write(self, file: Any, event: Event) -> None:
        file.write(_framed(event.SerializeToString()))
        if time.monotonic() - self._flushed > _FLUSH:  # each flush of a remote file uploads all of it
            file.flush()
            self._flushed = time.monotonic()


class _RemoteFile:
    """A remote file that is uploaded whole at each flush. If an upload fails, the next flush repeats it.

    We use the driver that writes the record, because TensorBoard's own driver has other credentials and time limits.
    """

    def __init__(self, storage: FolderStorage, name: str) -> None:
        self._storage, self._name = storage, name
        self._content = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the run

    def write(self, data: bytes) -> None:
        self._content.write(data)

    def flush(self) -> None:
        self._content.seek(0)
        content = self._content.read()
        with contextlib.suppress(Exception):  # the record in the same folder warns
            self._storage.replace_file(self._name, content)


def _framed(data: bytes) -> bytes:
    """Encode data as a record of a TFRecord file.

    TensorBoard's own writer computes the checksums in Python, which takes longer than all metrics.

    Source: `tensorflow/core/lib/io/record_writer.h`.
    """
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


#: metrics in the charts of the custom-scalars tab: one chart for each metric and role, then charts of single layers
_SUMMED_UP = ("underflow_pct", "overflow_pct", "relative_error")
_CHARTS = (*_SUMMED_UP, "mse", "scale_ratio_log2", "amax")
_WORST_SHOWN = 3
#: prefix of the summary's tags, which sorts first, so that Time Series shows the summary at the top
START_HERE = "00 FP8 start here/"
#: names that charts use for the scalars of the summary
_LABELS = {
    "underflow_pct": "underflow %",
    "overflow_pct": "overflow %",
    "relative_error": "relative error",
    "scale_ratio_log2": "log2 of the scale ratio",
    "mse": "log10 of MSE",
    "amax": "amax",
    "early_warning": "early warning",
    "nan_count": "NaN count",
    "inf_count": "infinity count",
}
_LOSS_TAGS = r"(reduced_)?(train(ing)?[_/])?loss(_step)?$"


class TensorBoardRecorder(ScalarRecorder):
    """Writes scalars, a page of charts with the loss and the worst layers, and the fingerprint as text."""

    in_callers_thread = False

    def __init__(self, writer: EventFileWriter | SummaryWriter, max_tags: int, log_losses: bool = False) -> None:
        """
        Args:
            log_losses: whether to write the loss too, because no framework logs it.
        """
        super().__init__(self._write_scalars, max_tags)
        self._writer: Any = writer
        self._log_losses = log_losses
        self._layout: dict[str, Any] = {}
        self._overview = SampleSummarizer()
        self._worst_tensors = ""

    @property
    def folder(self) -> str | None:
        """Return the folder of the events, as an absolute path or address."""
        folder = getattr(self._writer, "log_dir", None)
        return str(FolderStorage(folder)) if isinstance(folder, (str, os.PathLike)) else None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Write the fingerprint."""
        self._overview.read_observed_share(fingerprint)
        self._writer.add_text("fp8_debug/fingerprint", _as_markdown(fingerprint), 0)

    def record(self, sample: Sample) -> None:
        """Write one sampled step. If the worst layers have changed, write the layout too."""
        tags = self.collect_tags(sample)
        found = self._overview.summarize_sample(sample)
        summary = {tag: value for name, value in found.scalars.items() if (tag := summary_tag(name))}
        self._write(tags.values | summary, sample.step)
        prefix = "worst_tensor/"
        worst = {name.removeprefix(prefix): text for name, text in found.texts.items() if name.startswith(prefix)}
        if (names := _as_markdown({"worst tensor": worst})) != self._worst_tensors:
            self._writer.add_text("fp8_debug/worst_tensors", names, sample.step)
            self._worst_tensors = names
        if sample.describe_anomalies:
            self._writer.add_text("fp8_debug/remarks", sample.describe_anomalies, sample.step)
        layout = _layout(tags.worst)
        if layout != self._layout:
            self._writer.add_custom_scalars(layout)
            self._layout = layout

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        """Write the losses, if no framework logs losses."""
        for step, scalars in steps.items():
            if self._log_losses and "loss" in scalars:
                self._write_scalars({"loss": scalars["loss"]}, step)

    def close(self) -> None:
        """Flush everything to the disk."""
        self._writer.flush()

    def _write_scalars(self, tags: Mapping[str, float], step: int) -> None:
        # Write one event for all tags: separate events would wait for the writer's queue of ten.
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self._writer.file_writer.add_summary(Summary(value=values), step)


def summary_tag(name: str) -> str | None:
    """Return the tag of a scalar of the summary.

    Return None for medians, which other tags contain, and for the coverage, which is constant.

    >>> summary_tag("underflow_pct/input/worst")
    '00 FP8 start here/underflow %, worst X'
    """
    if name in (labels := _summary_labels()):
        return START_HERE + labels[name]
    metric, _, rest = name.partition("/")
    role, _, kind = rest.partition("/")
    return f"{START_HERE}{_LABELS[metric]}, worst {SHOWN_AS[role]}" if kind == "worst" else None


@cache
def _summary_labels() -> dict[str, str]:
    """Return the chart names of the summary's scalars, including the scalars of each feature."""
    own = [getattr(module, "LABELS", {}) for module in load_feature_modules("scalars")]
    return _LABELS | {name: label for labels in own for name, label in labels.items()}


def _layout(worst: Mapping[tuple[str, str], Sequence[str]]) -> dict[str, Any]:
    """Return the layout: first charts of the loss and the summary, then for each role a chart for each of the worst layers.

    A chart has one line for each run. The chart's title names the layer, because TensorBoard hides the names of lines.
    """
    roles = [r for r in ROLES if any(r == role for _, role in worst)]
    summary: dict[str, Any] = {"loss": ["Multiline", [_LOSS_TAGS]]}
    for metric in _SUMMED_UP:
        for role in roles:
            tag = re.escape(f"{START_HERE}{_LABELS[metric]}, worst {SHOWN_AS[role]}")
            summary[f"{_LABELS[metric]}, worst {SHOWN_AS[role]}"] = ["Multiline", [f"{tag}$"]]
    layout = {"FP8: start here": summary}
    for role in roles:
        charts: dict[str, Any] = {}
        for metric in _CHARTS:
            for layer in limit_experts_per_layer(worst.get((metric, role), []), find_expert_aggregate, 1)[:_WORST_SHOWN]:
                tag = f"fp8_{make_metric_tag(metric)}/{role}/{re.escape(layer)}$"
                charts[f"{_LABELS[metric]}: {SHOWN_AS[role]} of {layer}"] = ["Multiline", [tag]]
        layout[f"FP8 {SHOWN_AS[role]} ({role})"] = charts
    return layout


#: replacement for the character |, which would end a cell of a Markdown table
BAR = "&#124;"


def _as_markdown(fingerprint: Mapping[str, Any]) -> str:
    sections = []
    for title, content in fingerprint.items():
        rows = [f"| {key} | {str(value).replace('|', BAR)} |" for key, value in content.items()]
        sections.append("\n".join([f"### {title}", "", "| | |", "|---|---|", *rows]))
    return "\n\n".join(sections)
