"""A run in TensorBoard: scalars, charts that put the loss beside the worst layers, and how the run was set up."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary

from ..core.keys import ROLES, SHOWN_AS
from ..core.layer_names import aggregate_of, few_experts
from ..core.sample import Sample
from .event_file import EventWriter
from .scalars import ScalarRecorder
from .storage import Storage

#: charts of the custom-scalars tab, beside the loss
_CHARTS = ("underflow_pct", "overflow_pct", "mse", "cosine", "scale_ratio_log2", "amax")
_WORST_SHOWN = 5
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

    @property
    def folder(self) -> str | None:
        """Where events go, as an absolute path or address."""
        folder = getattr(self._writer, "log_dir", None)
        return str(Storage(folder)) if isinstance(folder, (str, os.PathLike)) else None

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


def _layout(worst: Mapping[tuple[str, str], Sequence[str]]) -> dict[str, Any]:
    """Custom-scalars layout: a category a role, in it the loss and for each metric the worst layers."""
    layout: dict[str, Any] = {}
    for role in (r for r in ROLES if any(r == role for _, role in worst)):
        charts: dict[str, Any] = {"loss": ["Multiline", [_LOSS_TAGS]]}
        for metric in _CHARTS:
            layers = sorted(few_experts(worst.get((metric, role), []), aggregate_of, 1)[:_WORST_SHOWN])
            if layers:
                charts[f"{metric}: worst layers"] = [
                    "Multiline",
                    [f"fp8_{metric}/{role}/{re.escape(layer)}$" for layer in layers],
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
