"""Loggers of Lightning that are no client of a tracker: a CSV file, and any other."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..start_here import LayerMap

#: beside the logger's own `metrics.csv`
FILE = "fp8_metrics.csv"


class _Scalars:
    """Has no place for anything but scalars."""

    owned = False

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Nothing to prepare."""

    def tell(self, texts: Mapping[str, str]) -> None:
        """No place for it."""

    def show(self, layer_map: LayerMap) -> None:
        """No place for it."""

    def attach(self, page: Path) -> None:
        """No place for it."""

    def close(self, failed: bool) -> None:
        """Nothing is held back."""


class CsvSink(_Scalars):
    """A file beside that of a CSVLogger, which rewrites its own and must not be called from two threads."""

    name = "CSVLogger"

    def __init__(self, folder: str) -> None:
        """
        Args:
            folder: of the logger's file.
        """
        self._file = Path(folder) / FILE
        self._columns: list[str] = []

    def log(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Append; with the first row that has further columns, write the file anew."""
        new: list[dict[str, Any]] = [{"step": step, **scalars} for step, scalars in rows.items()]
        columns = list(dict.fromkeys([*self._columns, *(name for row in new for name in row)]))
        if columns != self._columns:
            if self._columns:
                with self._file.open(newline="", encoding="utf-8") as file:
                    new = [*csv.DictReader(file), *new]
            self._columns = columns
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(columns)
        with self._file.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, columns).writerows(new)


class AnyLoggerSink(_Scalars):
    """A logger with Lightning's `log_metrics(metrics, step)`, which the user says may be called from another thread."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.name = type(logger).__name__

    def log(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """A call a step."""
        for step, scalars in rows.items():
            self._logger.log_metrics(dict(scalars), step)
