"""The table printed at each sampled step: the worst tensors first."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from ..core.keys import SHOWN_AS
from ..core.layer_names import aggregate_key, few_experts
from ..core.sample import Recorder, Sample
from ..core.scale_sources import HIGH_PRECISION, NOT_READ, QUANTIZED, classify_sources

_COLUMNS = ("amin", "amax", "scale_current", "scale", "cosine", "mse", "underflow_pct", "overflow_pct")
_TEXTS = ("layer", "tensor")
_HEADINGS = (*_TEXTS, "amin", "amax", "current scale", "delayed scale", "cosine", "MSE", "underflow %", "overflow %")

#: how a title begins
_SUBJECTS = {QUANTIZED: "FP8", HIGH_PRECISION: "Nothing is quantized: what FP8 would do", NOT_READ: "What FP8 would do"}


def print_safely(text: str, file: TextIO | None = None) -> None:
    """Print on standard output, or to a file, what its encoding has."""
    file = file or sys.stdout
    encoding = file.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), file=file, flush=True)


class TableRecorder(Recorder):
    """Prints the rows that lose most to underflow, overflow and rounding, in this order; of a layer's experts the worst."""

    def __init__(self, rows: int, file: TextIO | None = None) -> None:
        """
        Args:
            rows: at the most.
            file: standard output where not given.
        """
        self._rows = rows
        self._file = file
        self._fingerprint: Mapping[str, Any] = {}

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """The title says whether the run quantizes."""
        self._fingerprint = fingerprint

    def record(self, sample: Sample) -> None:
        """Print one sampled step."""
        print_safely(self.table(sample), self._file)

    def table(self, sample: Sample) -> str:
        """The table as it is printed."""
        columns = sample.columns

        def harm(i: int) -> tuple[float, float]:
            lost = (columns["underflow_pct"][i] or 0) + (columns["overflow_pct"][i] or 0)
            return lost, columns["relative_error"][i] or 0

        by_harm = sorted(range(len(sample)), key=harm, reverse=True)
        ranked = few_experts(by_harm, lambda i: aggregate_key(columns["layer"][i], columns["role"][i]), 1)
        worst = ranked[: self._rows]
        loss = sample.scalars.get("loss")
        title = _SUBJECTS[classify_sources(columns["scale_source"], self._fingerprint)]
        title += f" at step {sample.step}" + ("" if loss is None else f", loss {loss:.4g}")
        title += f": {len(worst)} of {len(ranked)} tensors, worst first" + (f"; {sample.remarks}" if sample.remarks else "")
        rows = [_cells({name: values[i] for name, values in columns.items()}) for i in worst]
        return "\n".join([title, *(_ruled([_HEADINGS, *rows]) if rows else [])])


def _cells(row: Mapping[str, Any]) -> list[str]:
    delayed = row["scale_source"] != "current" and not row["recipe"].startswith("current")
    scale = row["scale"] if delayed else None  # current scaling has no delayed scale
    values = [scale if name == "scale" else row[name] for name in _COLUMNS]
    shown = ["-" if value is None else f"{value:.4g}" for value in values]
    return [row["layer"], SHOWN_AS[row["role"]], *shown]


def _ruled(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first row is a heading. Rich would hold the GIL for longer than all metrics take."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str], bar: str) -> str:
        places = enumerate(zip(cells, widths, strict=True))
        return f"{bar} " + f" {bar} ".join(c.ljust(w) if i < len(_TEXTS) else c.rjust(w) for i, (c, w) in places) + f" {bar}"

    def rule(left: str, middle: str, right: str, dash: str) -> str:
        return left + middle.join(dash * (width + 2) for width in widths) + right

    heading, *body = rows
    top, below, end = rule("┏", "┳", "┓", "━"), rule("┡", "╇", "┩", "━"), rule("└", "┴", "┘", "─")
    return [top, line(heading, "┃"), below, *(line(row, "│") for row in body), end]
