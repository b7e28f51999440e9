"""The table printed at each sampled step: the worst tensors first."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from ..core.keys import SHOWN_AS
from ..core.layer_names import find_aggregate_key, limit_experts_per_layer
from ..core.sample import Recorder, Sample
from ..core.scale_sources import HIGH_PRECISION, NOT_READ, QUANTIZED, classify_run_quantization, make_unquantized_note
from ..core.text import (
    ABSENT,
    ELLIPSIS,
    PLAINLY,
    TENSOR,
    TableColumn,
    find_terminal_width,
    format_count,
    format_number,
    format_table,
)

#: for each metric, by its column in the record: heading, significant digits, and rank; a narrow terminal leaves out the
#: highest ranks first
_METRICS = {
    "relative_error": ("relative error", 3, 0),
    "underflow_pct": ("underflow %", 3, 0),
    "overflow_pct": ("overflow %", 3, 0),
    "amax": ("amax", 3, 1),
    "scale": ("delayed scale", 3, 2),
    "scale_current": ("current scale", 3, 3),
    "cosine": ("cosine", 4, 4),
    "amin": ("amin", 3, 5),
    "mse": ("MSE", 3, 6),
}
_COLUMNS = (
    *TENSOR,
    TableColumn("cast", "text"),
    *(TableColumn(heading, rank=rank) for heading, _, rank in _METRICS.values()),
)

#: first words of the table's title
_SUBJECTS = {QUANTIZED: "FP8", HIGH_PRECISION: "Nothing is quantized: what FP8 would do", NOT_READ: "What FP8 would do"}


def print_safely(text: str, file: TextIO | None = None) -> None:
    """Print to standard output, or to a file. Replace characters that its encoding lacks with plain characters."""
    file = file or sys.stdout
    encoding = file.encoding or "utf-8"
    print(text.encode(encoding, PLAINLY).decode(encoding), file=file, flush=True)


class ConsoleTableRecorder(Recorder):
    """Prints the worst tensors: those with the most underflow and overflow first, then those with the largest relative
    error.

    Quantized tensors come before tensors that the run does not quantize. The experts of a layer have one row, for the worst
    expert.
    """

    def __init__(self, rows: int, file: TextIO | None = None) -> None:
        """
        Args:
            rows: largest number of rows to print.
            file: file to print to, or None for standard output.
        """
        self._rows = rows
        self._file = file
        self._fingerprint: Mapping[str, Any] = {}

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Store the fingerprint. The table's title uses it to show whether the run quantizes."""
        self._fingerprint = fingerprint

    def record(self, sample: Sample) -> None:
        """Print one sampled step."""
        print_safely(self.format_sample_table(sample), self._file)

    def format_sample_table(self, sample: Sample) -> str:
        """Return the table of one sampled step as text."""
        columns = sample.operand_columns
        known = classify_run_quantization(columns["scale_source"], self._fingerprint)
        marks = [make_unquantized_note(source, known) for source in columns["scale_source"]]

        def harm(i: int) -> tuple[bool, float, float]:
            lost = (columns["underflow_pct"][i] or 0) + (columns["overflow_pct"][i] or 0)
            return not marks[i], lost, columns["relative_error"][i] or 0

        by_harm = sorted(range(len(sample)), key=harm, reverse=True)
        ranked = limit_experts_per_layer(by_harm, lambda i: find_aggregate_key(columns["layer"][i], columns["role"][i]), 1)
        worst = ranked[: self._rows]
        loss = sample.scalars.get("loss")
        title = f"{_SUBJECTS[known]} at step {sample.step}"
        title += "" if loss is None else f", loss {format_number(loss, digits=4)}"
        title += f": {len(worst)} of {format_count(len(ranked), 'tensor')}, worst first"
        title += f"; {sample.describe_anomalies}" if sample.describe_anomalies else ""
        if not worst:
            return title
        quantized = "quantized" if any(marks[i] for i in worst) else ABSENT
        rows = [_show_row({name: values[i] for name, values in columns.items()}, marks[i] or quantized) for i in worst]
        # We do not use Rich, because it would hold the GIL for longer than computing all metrics takes.
        found = format_table(_COLUMNS, rows, find_terminal_width(self._file or sys.stdout))
        title += f"; {ELLIPSIS} stands for {found.beginning}" if found.beginning else ""
        return "\n".join([title, *found.heading[:-1], *(line for lines in found.rows for line in lines)])


def _show_row(row: Mapping[str, Any], mark: str) -> list[str]:
    delayed = row["scale_source"] != "current" and not row["recipe"].startswith("current")
    values = row if delayed else {**row, "scale": None}  # current scaling has no delayed scale
    shown = [format_number(values[name], digits=digits) for name, (_, digits, _) in _METRICS.items()]
    return [SHOWN_AS[row["role"]], row["layer"], mark, *shown]
