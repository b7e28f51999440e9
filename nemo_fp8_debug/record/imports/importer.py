"""The result of an import: rows by step, scalars of each step, and counts of values that were left out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.keys import KEYS
from ...core.layer_names import strip_wrappers
from ...core.sample import Sample
from ...errors import warn

#: (layer, role, recipe, whether the recipe is a what-if recipe)
Key = tuple[str, str, str | None, bool]


@dataclass
class ImportedLog:
    """The contents of another tool's log, as rows and scalars for our record."""

    tool: str
    files: list[Path]
    #: metrics by step and row
    rows: dict[int, dict[Key, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    #: scalars of each step, such as time and loss
    steps: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    #: number of imported values, by metric
    mapped: Counter[str] = field(default_factory=Counter)
    #: number of values or strings left out, by kind and reason
    left_out: Counter[str] = field(default_factory=Counter)
    #: full sentences with caveats about the rows
    notes: list[str] = field(default_factory=list)

    def add_value(self, step: int, key: Key, metric: str, value: float, rounded_to: int | None = None) -> None:
        """Add a value to its row. If the value is not finite, or too small for the log's rounding, count it as left out
        instead.

        Args:
            rounded_to: number of decimals in the log, for metrics that we compare as ratios. None for other metrics, and for
                logs that do not round.
        """
        if not math.isfinite(value):
            self.left_out[f"{metric}: NaN or infinity in the log"] += 1
        elif rounded_to is not None and abs(value) < 5 * 10.0**-rounded_to:
            self.left_out[f"{metric}: so small that the {rounded_to} decimals of the log leave an error above 10%"] += 1
        else:
            self.rows[step].setdefault(key, {})[metric] = value
            self.mapped[metric] += 1

    def samples(self) -> Iterator[Sample]:
        """Yield a sample for each step that has a metric."""
        for step, rows in sorted(self.rows.items()):
            in_use = self._columns({key: row for key, row in rows.items() if not key[3]})
            what_if = self._columns({key: row for key, row in rows.items() if key[3]})
            yield Sample(step, {"metrics": in_use, "what_if": what_if}, {})

    def _columns(self, rows: dict[Key, dict[str, Any]]) -> dict[str, list[Any]]:
        if not rows:
            return {}
        layers, roles, recipes, _ = zip(*rows, strict=True)
        gemms = [layer.rpartition(".")[2] for layer in layers]
        metrics = dict.fromkeys(name for row in rows.values() for name in row)
        return {
            **dict(zip(KEYS, (list(layers), gemms, list(roles)), strict=True)),
            "recipe": list(recipes),
            "scale_source": [self.tool] * len(rows),
            **{name: [row.get(name) for row in rows.values()] for name in metrics},
        }

    @property
    def tensors(self) -> set[tuple[str, str]]:
        """Return (layer, role) of every row."""
        return {key[:2] for rows in self.rows.values() for key in rows}


class LineErrors:
    """Collects the unreadable lines of a file, so that one warning reports them all."""

    def __init__(self, path: Path, expected: str) -> None:
        self._path = path
        self._expected = expected
        self._lines: list[int] = []
        self._reason = ""

    def add_unreadable_line(self, line: int, reason: str) -> None:
        """Note that line `line`, counted from 1, is left out."""
        self._reason = self._reason or reason
        self._lines.append(line)

    def warn_of_unreadable_lines(self) -> None:
        """Warn about the first unreadable line, and state how many there are."""
        if self._lines:
            more = f", and {len(self._lines) - 1} more lines" if len(self._lines) > 1 else ""
            warn(f"{self._path}, line {self._lines[0]}{more}: {self._reason}; left out, {self._expected} is expected")


def read_numbered_lines(path: Path, faults: LineErrors) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers from 1. Skip blank lines. Add an error to `faults` if the last line is
    cut off.
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                faults.add_unreadable_line(number, "the line is cut off")
            elif line.strip():
                yield number, line.strip()


def read_first_lines(path: Path, n: int) -> list[str]:
    """Return the first `n` lines of a file. Long lines are cut."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return [line for _ in range(n) if (line := file.readline(1000))]


def normalize_layer_name(name: str) -> str:
    """Return a layer's name without the parts that wrappers add."""
    return strip_wrappers(name) or "model"
