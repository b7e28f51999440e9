"""A run in TensorBoard: scalars, charts that put the loss beside the worst layers, and how the run was set up."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary

from ..core.keys import ROLES, SHOWN_AS
from ..core.layer_names import aggregate_of, few_experts
from ..core.sample import Sample
from ..core.table import load_modules
from .event_file import EventWriter
from .scalars import ScalarRecorder, tag_of
from .start_here import Overview
from .storage import Storage

#: charts of the custom-scalars tab: of the summary, of which a few have a chart for each role, and of single layers
_SUMMED_UP = ("underflow_pct", "overflow_pct", "relative_error")
_CHARTS = (*_SUMMED_UP, "mse", "scale_ratio_log2", "amax")
_WORST_SHOWN = 3
#: before the tags of the summary: Time Series shows the group that sorts first at the top
START_HERE = "00 FP8 start here/"
#: what is written in it, and how charts call metrics
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
        self._overview = Overview()
        self._worst_tensors = ""

    @property
    def folder(self) -> str | None:
        """Where events go, as an absolute path or address."""
        folder = getattr(self._writer, "log_dir", None)
        return str(Storage(folder)) if isinstance(folder, (str, os.PathLike)) else None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Write the fingerprint."""
        self._overview.open(fingerprint)
        self._writer.add_text("fp8_debug/fingerprint", _as_markdown(fingerprint), 0)

    def record(self, sample: Sample) -> None:
        """Write one sampled step, and the layout where the worst layers have changed."""
        tags = self.scalars(sample)
        found = self._overview.of(sample)
        summary = {tag: value for name, value in found.scalars.items() if (tag := summary_tag(name))}
        self._write(tags.values | summary, sample.step)
        if (names := _as_markdown({"worst tensor": _worst_tensors(found.texts)})) != self._worst_tensors:
            self._writer.add_text("fp8_debug/worst_tensors", names, sample.step)
            self._worst_tensors = names
        if sample.remarks:
            self._writer.add_text("fp8_debug/remarks", sample.remarks, sample.step)
        layout = _layout(tags.worst)
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


def summary_tag(name: str) -> str | None:
    """The tag of a scalar of the summary; None: it has none, since medians have one elsewhere, and the coverage is constant.

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
    """Return what the summary calls its scalars, those of each feature among them."""
    own = [getattr(module, "LABELS", {}) for module in load_modules("scalars")]
    return _LABELS | {name: label for labels in own for name, label in labels.items()}


def _worst_tensors(texts: Mapping[str, str]) -> dict[str, str]:
    prefix = "worst_tensor/"
    return {name.removeprefix(prefix): text for name, text in texts.items() if name.startswith(prefix)}


def _layout(worst: Mapping[tuple[str, str], Sequence[str]]) -> dict[str, Any]:
    """Custom-scalars layout: the loss beside the summary; then a category a role, with a chart for each of the worst layers.

    A chart has one line a run and its title names the layer: TensorBoard shows the names of lines in a closed fold.
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
            for layer in few_experts(worst.get((metric, role), []), aggregate_of, 1)[:_WORST_SHOWN]:
                tag = f"fp8_{tag_of(metric)}/{role}/{re.escape(layer)}$"
                charts[f"{_LABELS[metric]}: {SHOWN_AS[role]} of {layer}"] = ["Multiline", [tag]]
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
