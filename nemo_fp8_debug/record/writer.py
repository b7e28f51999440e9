"""Write the run record: a folder of Parquet parts, one for each sampled step. A part is written whole or not at all.

    RUN/attempt-0.json                      fingerprint of the run, one for each start of the process
    RUN/metrics/attempt-0-step-00000120-9f3c02d1.parquet
    RUN/histograms/attempt-0-step-00000120-51d0e7c4.parquet
    RUN/steps/attempt-0-step-00000120-0b77aa90.parquet

Small parts are merged later (see `merging`). A resumed run adds another attempt, and nothing is overwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import polars as pl

from ..core.sample import Recorder, Sample
from ..errors import ConfigError, warn
from . import parquet
from .merging import HISTOGRAMS, MERGED, PartMerger, WrittenPartInfo
from .parts import list_parts_in_folder
from .schema import STEP_SCALARS, TABLES, VERSION, Part, make_arrow_schema, make_arrow_table, parse_attempt_number
from .storage import FolderStorage

#: maximum size in bytes of the parts that we keep in memory while the record cannot be written
BACKLOG = 256 << 20


class RunRecordWriter(Recorder):
    """Writes the record of one run. While the record cannot be written, up to `BACKLOG` bytes are kept in memory."""

    def __init__(self, address: str | os.PathLike[str], histogram_interval: int = 1) -> None:
        """
        Args:
            address: a folder, or any fsspec address.
            histogram_interval: steps between two samples for which histograms are written.

        Raises:
            ConfigError: the address cannot be used.
        """
        self.storage = FolderStorage.open_for_writing(address)
        self._histogram_interval = histogram_interval
        self.attempt = 0
        #: samples that were written or wait in the backlog
        self.samples = 0
        #: parts that could not be written
        self.lost = 0
        self._backlog: deque[tuple[str, Part, bytes]] = deque()
        self._warned = False
        self._merger = PartMerger(self.storage)
        self._tidy = False
        self._fingerprint = b""

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Start an attempt.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        try:
            self._make_folders()
            self._claim_attempt(fingerprint)
        except Exception as error:  # every driver of a remote file system has its own errors
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"the run record cannot be written to {self.storage}: {reason}") from None

    def _make_folders(self) -> None:
        for table in ("metrics", "steps"):  # each other folder appears with its first part
            self.storage.make_folder(table)

    def _claim_attempt(self, fingerprint: Mapping[str, Any]) -> None:
        """Claim the next attempt number. Two processes that start at the same time get different numbers."""
        there = self.storage.list_names()
        taken = [parse_attempt_number(name) for name in there]
        tables = (table for table in TABLES if table in there)
        taken += [part.attempt for table in tables for part in list_parts_in_folder(self.storage, table)]
        self.attempt = 1 + max((a for a in taken if a is not None), default=-1)
        while True:
            content = {"schema_version": VERSION, "attempt": self.attempt, **fingerprint}
            self._fingerprint = json.dumps(content, indent=2, default=str).encode()
            name = f"attempt-{self.attempt}.json"
            with contextlib.suppress(FileExistsError):
                self.storage.create_file(name, self._fingerprint)
                self.storage.anchor = name
                return
            self.attempt += 1

    def record(self, sample: Sample) -> None:
        """Write one sampled step.

        Write its histograms if they are due by `histogram_interval`, if a trigger caused the sample, or if the sample has
        NaN or infinity.
        """
        is_due = sample.step % self._histogram_interval == 0 or sample.trigger is not None
        skipped = () if is_due or sample.describe_first_nonfinite() is not None else HISTOGRAMS
        # Histograms are large, so write them last.
        for table in sorted(map(TABLES.__getitem__, sample.tables), key=lambda table: table.by_step):
            if (columns := sample.tables[table.name]) and table.name not in skipped:
                rows = table.count_rows(columns)
                keys: dict[str, list[Any]] = {"attempt": [self.attempt] * rows, "step": [sample.step] * rows}
                if "consumed_samples" in table.columns:
                    keys["consumed_samples"] = [sample.scalars.get("consumed_samples")] * rows
                self.write_part(table.name, {**keys, **columns}, sample.step)
        self.samples += 1
        self._tidy_up()

    def record_steps(self, steps: Mapping[int, Mapping[str, Any]]) -> None:
        """Write the scalars of the steps since the last call. Leave out names that are not in the schema."""
        if steps:
            rows = [{"attempt": self.attempt, "step": step, **scalars} for step, scalars in steps.items()]
            names = ("attempt", "step", "time", *STEP_SCALARS, "trigger")
            self.write_part("steps", {name: [row.get(name) for row in rows] for name in names}, max(steps))

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Write the losses of an evaluation."""
        if not (rows := len(losses)):
            return
        keys = {"attempt": [self.attempt] * rows, "step": [step] * rows, "time": [time.time()] * rows}
        self.write_part("validation", {**keys, "name": list(losses), "loss": list(losses.values())}, step)

    def close(self) -> None:
        """Write the backlog. Warn about parts that are lost."""
        self.storage.allow_next_request()
        self._write_backlog()
        if self._backlog and self.storage.is_local:  # perhaps because the folder was deleted
            with contextlib.suppress(Exception):
                self._make_folders()
                self.storage.create_file(self.storage.anchor, self._fingerprint)
            self._write_backlog()
        self.lost += len(self._backlog)
        self._backlog.clear()
        if self.lost:
            warn(f"{self.lost} parts of the record were lost, because {self.storage} could not be written")

    def write_part(self, table: str, columns: Mapping[str, Any], first: int, last: int | None = None) -> None:
        """Write a part of a table with the rows of step `first`. If `last` is given, write all steps from `first` to
        `last`.
        """
        content, checksum = parquet.encode_parquet(make_arrow_table(table, columns))
        self._backlog.append((table, Part.make_part_name(table, self.attempt, first, last, checksum), content))
        self._write_backlog()

    def _write_backlog(self) -> None:
        """Write the backlog, oldest part first, until a write fails."""
        try:
            while self._backlog:
                table, part, content = self._backlog[0]
                self.storage.replace_file(part.path, content)
                self._backlog.popleft()
                if not part.merged:
                    self._merger.add_written_part(table, WrittenPartInfo(part, len(content)))
            self._warned = False
        except Exception as error:
            self._hold_back(error)

    def _hold_back(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"the record at {self.storage} cannot be written ({type(error).__name__}: {error}); the run goes on, and "
                f"up to {BACKLOG >> 20} MiB are kept in memory until it can be"
            )
        while sum(len(content) for _, _, content in self._backlog) > BACKLOG:
            # Histograms are large and the least important, so drop them first.
            doomed = next((entry for entry in self._backlog if TABLES[entry[0]].by_step), self._backlog[0])
            self._backlog.remove(doomed)
            self.lost += 1

    def _tidy_up(self) -> None:
        """Merge small parts of earlier attempts. This runs once for each attempt, in the background."""
        if self.attempt and not self._tidy and not self._backlog:
            self._tidy = True
            self._merger.merge_earlier_attempts(self.attempt)


def add_rows_to_table(storage: FolderStorage, table: str, rows: pl.DataFrame) -> None:
    """Add rows to a table that several processes may write, but that no run writes."""
    for (attempt,), of_attempt in rows.group_by("attempt", maintain_order=True):
        steps = of_attempt["step"].unique().sort()
        for first in range(0, len(steps), MERGED):
            chunk = steps[first : first + MERGED]
            part = (
                of_attempt.filter(pl.col("step").is_between(chunk[0], chunk[-1])).to_arrow().cast(make_arrow_schema(table))
            )
            content, checksum = parquet.encode_parquet(part)
            storage.replace_file(Part.make_part_name(table, int(attempt), chunk[0], chunk[-1], checksum).path, content)
