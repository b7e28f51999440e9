"""Scalars for TensorBoard or any other logger: tags that lead with the question, few enough to stay readable."""

from __future__ import annotations

import itertools
import math
import os
import re
import socket
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import google_crc32c
from tensorboard.compat import tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import summary as summaries

from ..core.keys import ROLES, SHOWN_AS
from ..core.layer_names import few_experts, fold_key, fold_of, is_fold
from ..core.sample import Sample
from ..numerics.metric_names import FIGURES, UNITS, WORSE
from .storage import Place

#: streamed as scalars, each tensor its own tag
STREAMED = ("scale", *FIGURES)
#: charts of the custom-scalars tab, beside the loss
_CHARTS = ("underflow_pct", "overflow_pct", "mse", "cosine", "scale_ratio_log2", "amax")
_WORST_SHOWN = 5
#: experts of a layer that get tags of their own beside their fold, for each figure the worst
EXPERTS_SHOWN = 3
#: figures that are streamed for recipes that were not in use
_WEIGHED = ("underflow_pct", "overflow_pct", "relative_error")
#: seconds that events may wait to be handed to the disk
_FLUSH = 120.0
_files = itertools.count()
_LOSS_TAGS = r"(reduced_)?(train(ing)?[_/])?loss(_step)?$"

Write = Callable[[dict[str, float], int], None]


class TagBudget:
    """Which tensors get tags of their own when not all can: the worst of each role, kept once chosen.

    Of the experts of a layer it is a few in any case, and where not all tensors can have tags, they come last.
    """

    def __init__(self, max_tags: int) -> None:
        self._free = max_tags
        self._max_tags = max_tags
        self._admitted: dict[tuple[str, str], set[str]] = defaultdict(set)

    def choose(self, figure: str, role: str, worst_first: Sequence[str], tensors: int) -> set[str]:
        """Layers whose `figure` of `role` is written, in this step and all that follow.

        Args:
            worst_first: layers with a value in this step.
            tensors: how many tensors could have tags in this step, over all roles.
        """
        admitted = self._admitted[figure, role]
        quota = self._free
        if tensors * len(STREAMED) > self._max_tags:
            quota = min(quota, self._max_tags // (len(STREAMED) * len(ROLES)) - len(admitted))
        few = few_experts(dict.fromkeys((*admitted, *worst_first)), fold_of, EXPERTS_SHOWN)
        new = sorted((layer for layer in few if layer not in admitted), key=lambda layer: fold_of(layer) is not None)
        new = new[: max(0, quota)]
        self._free -= len(new)
        admitted.update(new)
        return admitted


class ScalarRecorder:
    """Streams figures as scalars through `write(tags, step)`."""

    #: loggers are not made for use from two threads
    in_callers_thread = True

    def __init__(self, write: Write, max_tags: int) -> None:
        self._write = write
        self._budget = TagBudget(max_tags)

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Nothing to prepare."""

    def record(self, sample: Sample) -> None:
        """Write one sampled step."""
        tags, _ = self.scalars(sample)
        self._write(tags, sample.step)

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        """The host logs its loss itself."""

    def close(self) -> None:
        """Nothing is held back."""

    def scalars(self, sample: Sample) -> tuple[dict[str, float], dict[tuple[str, str], list[str]]]:
        """The tags of a step, and by (figure, role) the layers that have one, worst first."""
        tags: dict[str, float] = {}
        worst: dict[tuple[str, str], list[str]] = {}
        keys = list(zip(sample.columns["layer"], sample.columns["role"], strict=True))
        tensors = len(few_experts(keys, lambda key: fold_key(*key), EXPERTS_SHOWN))
        for role in ROLES:
            rows = [i for i, r in enumerate(sample.columns["role"]) if r == role]
            for figure in STREAMED:
                values = {sample.columns["layer"][i]: sample.columns[figure][i] for i in rows}
                values = {layer: v for layer, v in values.items() if v is not None and math.isfinite(v)}
                if not values:
                    continue
                found, worst[figure, role] = self._streamed(figure, role, values, tensors)
                tags |= found
        return tags | self._outputs(sample, tensors) | _true_units(sample) | _what_if(sample), worst

    def _streamed(
        self, figure: str, of: str, values: Mapping[str, float], tensors: int
    ) -> tuple[dict[str, float], list[str]]:
        """Tags of a figure of a role or product, by layer, and the layers that have one of their own, worst first."""
        sign = WORSE.get(figure, 1)
        ranked = sorted(values, key=lambda layer: sign * values[layer], reverse=True)
        chosen = self._budget.choose(figure, of, ranked, tensors)
        shown = [layer for layer in ranked if layer in chosen]
        tags = {f"fp8_{figure}/{of}/{layer}": values[layer] for layer in shown}
        if single := [values[layer] for layer in ranked if not is_fold(layer)]:
            tags[f"fp8/{figure}/{of}/worst"] = single[0]
            tags[f"fp8/{figure}/{of}/median"] = statistics.median(single)
        return tags, shown

    def _outputs(self, sample: Sample, tensors: int) -> dict[str, float]:
        """The relative error of what GEMMs put out, by product."""
        columns, values = sample.outputs, defaultdict[str, dict[str, float]](dict)
        rows = zip(*(columns[name] for name in ("product", "layer", "relative_error")), strict=True) if columns else ()
        for product, layer, error in rows:
            if error is not None:
                values[product][layer] = error
        return {t: v for p, of in values.items() for t, v in self._streamed("output_error", p, of, tensors)[0].items()}


def _true_units(sample: Sample) -> dict[str, float]:
    """The worst and the median of what dY is in the units of the loss, and what it is multiplied by."""
    multiplier, tags = sample.scalars.get("grad_multiplier"), dict[str, float]()
    for figure in UNITS if multiplier else ():
        if found := [value for value in sample.columns[f"true_{figure}"] if value is not None and math.isfinite(value)]:
            tags[f"fp8/true_{figure}/grad_output/worst"] = max(found) if WORSE[figure] > 0 else min(found)
            tags[f"fp8/true_{figure}/grad_output/median"] = statistics.median(found)
    return tags | ({"fp8/grad_multiplier": multiplier} if multiplier else {})


def _what_if(sample: Sample) -> dict[str, float]:
    """The worst and the median of each role under each recipe that was weighed, beside those in use."""
    columns, tags = sample.what_if, dict[str, float]()
    for figure in _WEIGHED if columns else ():
        values: dict[str, list[float]] = defaultdict(list)
        of_rows = zip(columns["layer"], columns["recipe"], columns["role"], columns[figure], strict=True)
        for layer, recipe, role, value in of_rows:
            if value is not None and math.isfinite(value) and not is_fold(layer):
                values[f"{role}/{recipe}"].append(value)
        for name, found in values.items():
            tags[f"fp8_what_if/{figure}/{name}/worst"] = max(found)
            tags[f"fp8_what_if/{figure}/{name}/median"] = statistics.median(found)
    return tags


class EventWriter(Protocol):
    """What is used of a SummaryWriter."""

    file_writer: Any

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Markdown."""

    def add_custom_scalars(self, layout: Mapping[str, Any]) -> None:
        """The page of charts; the last one written is shown."""

    def flush(self) -> None:
        """Hand everything to the disk."""


class TensorBoardRecorder(ScalarRecorder):
    """Scalars, a page that puts loss and worst layers side by side, and the run's fingerprint as text."""

    in_callers_thread = False

    def __init__(self, writer: EventWriter, max_tags: int, log_losses: bool = False) -> None:
        """
        Args:
            log_losses: also write the loss, where no host does.
        """
        super().__init__(self._write_scalars, max_tags)
        self._writer = writer
        self._log_losses = log_losses
        self._layout: dict[str, Any] = {}

    @property
    def folder(self) -> str | None:
        """Where events go, as an absolute path or address."""
        folder = getattr(self._writer, "log_dir", None)
        return str(Place(folder)) if isinstance(folder, (str, os.PathLike)) else None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Write the fingerprint."""
        self._writer.add_text("fp8_debug/fingerprint", _as_markdown(fingerprint), 0)

    def record(self, sample: Sample) -> None:
        """Write one sampled step, and the layout where the worst layers have changed."""
        tags, worst = self.scalars(sample)
        self._write(tags, sample.step)
        if sample.remarks:
            self._writer.add_text("fp8_debug/remarks", sample.remarks, sample.step)
        layout = _layout(worst)
        if layout != self._layout:
            self._writer.add_custom_scalars(layout)
            self._layout = layout

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        """Write losses, if no host does."""
        for step, scalars in steps.items():
            if self._log_losses and "loss" in scalars:
                self._write_scalars({"loss": scalars["loss"]}, step)

    def close(self) -> None:
        """Hand everything to the disk."""
        self._writer.flush()

    def _write_scalars(self, tags: Mapping[str, float], step: int) -> None:
        # One event for all tags: an event each would wait on the writer's queue of ten.
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self._writer.file_writer.add_summary(Summary(value=values), step)


class EventFile:
    """A TensorBoard event file, written in the caller's thread; after a fault another one is begun.

    What SummaryWriter writes in a thread of its own ends for good with the first fault, as of a disk that is full.
    """

    def __init__(self, folder: str) -> None:
        self.file_writer = self
        self.log_dir = folder
        self._file: Any = None
        self._flushed = time.monotonic()
        tf.io.gfile.makedirs(folder)

    def add_summary(self, summary: Summary, step: int) -> None:
        """Write an event; it is lost where the folder cannot be written, of which the record in it tells."""
        try:
            self._file = self._file or self._begun()
            self._write(self._file, Event(wall_time=time.time(), step=step, summary=summary))
        except Exception as error:
            self._file = None  # it may end in half an event, and nothing after that would be read
            if not isinstance(error, OSError):
                raise

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Markdown."""
        self.add_summary(summaries.text(tag, text), step)

    def add_custom_scalars(self, layout: Mapping[str, Any]) -> None:
        """The page of charts; the last one written is shown."""
        self.add_summary(summaries.custom_scalars(layout), 0)

    def flush(self) -> None:
        """Hand everything to the disk."""
        if self._file:
            self._file.flush()
        self._flushed = time.monotonic()

    def _begun(self) -> Any:
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        file = tf.io.gfile.GFile(f"{self.log_dir}/{name}", "wb")
        self._write(file, Event(wall_time=time.time(), file_version="brain.Event:2"))
        return file

    def _write(self, file: Any, event: Event) -> None:
        file.write(_framed(event.SerializeToString()))
        if time.monotonic() - self._flushed > _FLUSH:  # each time sends the whole file, where it is a remote one
            file.flush()
            self._flushed = time.monotonic()


def _framed(data: bytes) -> bytes:
    """A record of a TFRecord file. TensorBoard's own writer takes the checksums in Python, in longer than all figures take.

    Source: `tensorflow/core/lib/io/record_writer.h`.
    """
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _layout(worst: Mapping[tuple[str, str], Sequence[str]]) -> dict[str, Any]:
    """Custom-scalars layout: a category a role, in it the loss and for each figure the worst layers."""
    layout: dict[str, Any] = {}
    for role in (r for r in ROLES if any(r == role for _, role in worst)):
        charts: dict[str, Any] = {"loss": ["Multiline", [_LOSS_TAGS]]}
        for figure in _CHARTS:
            layers = sorted(few_experts(worst.get((figure, role), []), fold_of, 1)[:_WORST_SHOWN])
            if layers:
                charts[f"{figure}: worst layers"] = [
                    "Multiline",
                    [f"fp8_{figure}/{role}/{re.escape(layer)}$" for layer in layers],
                ]
        layout[f"FP8 {SHOWN_AS[role]} ({role})"] = charts
    return layout


#: a bar would end the cell of a Markdown table
BAR = "&#124;"


def _as_markdown(fingerprint: Mapping[str, Any]) -> str:
    sections = []
    for title, content in fingerprint.items():
        rows = [f"| {key} | {str(value).replace('|', BAR)} |" for key, value in content.items()]
        sections.append("\n".join([f"### {title}", "", "| | |", "|---|---|", *rows]))
    return "\n\n".join(sections)
