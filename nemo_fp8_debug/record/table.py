"""The table printed at each sampled step: the worst tensors first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..names import few_experts, fold_key
from ..sample import SHOWN_AS, Sample

_COLUMNS = ("amin", "amax", "scale_current", "scale", "cosine", "mse", "underflow_pct", "overflow_pct")
_HEADINGS = ("amin", "amax", "current scale", "delayed scale", "cosine", "MSE", "underflow %", "overflow %")


class TableRecorder:
    """Prints the rows that lose most to underflow, overflow and rounding, in this order; of a layer's experts the worst."""

    in_callers_thread = False

    def __init__(self, rows: int, console: Console | None = None) -> None:
        self._rows = rows
        self._console = console

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Nothing to prepare."""

    def record(self, sample: Sample) -> None:
        """Print one sampled step."""
        console = self._console or Console()
        if not console.is_terminal:
            console.width = max(console.width, 200)  # a log file has no width to respect
        console.print(self.table(sample))

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        """Not shown."""

    def close(self) -> None:
        """Nothing is held."""

    def table(self, sample: Sample) -> Table:
        """The table as rich renders it."""
        columns = sample.columns

        def harm(i: int) -> tuple[float, float]:
            lost = (columns["underflow_pct"][i] or 0) + (columns["overflow_pct"][i] or 0)
            return lost, columns["relative_error"][i] or 0

        by_harm = sorted(range(len(sample)), key=harm, reverse=True)
        ranked = few_experts(by_harm, lambda i: fold_key(columns["layer"][i], columns["role"][i]), 1)
        worst = ranked[: self._rows]
        loss = sample.scalars.get("loss")
        title = f"FP8 at step {sample.step}" + ("" if loss is None else f", loss {loss:.4g}")
        title += f": {len(worst)} of {len(ranked)} tensors, worst first" + (f"; {sample.remarks}" if sample.remarks else "")
        table = Table(title=escape(title), title_justify="left")
        table.add_column("layer", no_wrap=True)
        table.add_column("tensor", min_width=6)
        for heading in _HEADINGS:
            table.add_column(heading, justify="right", no_wrap=True)
        # One cell a column, of many lines: rich lays that out in a third of the time that a cell each takes.
        rows = [_cells({name: values[i] for name, values in columns.items()}) for i in worst]
        table.add_row(*("\n".join(column) for column in zip(*rows, strict=True)))
        return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    delayed = row["scale_source"] != "current" and not row["recipe"].startswith("current")
    scale = row["scale"] if delayed else None  # current scaling has no delayed scale
    values = [scale if name == "scale" else row[name] for name in _COLUMNS]
    shown = ["-" if value is None else f"{value:.4g}" for value in values]
    return [escape(row["layer"]), SHOWN_AS[row["role"]], *shown]
