"""The run record: a folder of Parquet parts, one a sampled step, written whole or not at all.

    RUN/attempt-0.json                      fingerprint of the run, one a start of the process
    RUN/figures/attempt-0-step-00000120-9f3c02d1.parquet
    RUN/sketches/attempt-0-step-00000120-51d0e7c4.parquet
    RUN/steps/attempt-0-step-00000120-0b77aa90.parquet

The last part of a name is the CRC-32 of the file: a damaged file is found before a Parquet reader, which may not survive
it, opens it.

A resumed run is another attempt beside the first: nothing is overwritten. Columns: docs/record.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import ConfigError, RecordError
from ..numerics.figures import FIGURES
from ..sample import Sample

SCHEMA_VERSION = 1

_KEYS = {"attempt": pl.Int32, "step": pl.Int64}
FIGURE_SCHEMA: dict[str, Any] = {
    **_KEYS,
    "consumed_samples": pl.Float64,
    "layer": pl.String,
    "gemm": pl.String,
    "role": pl.String,
    "recipe": pl.String,
    "format": pl.String,
    "dtype": pl.String,
    "scale_source": pl.String,
    "calls": pl.Int64,
    "n": pl.Int64,
    "nan": pl.Int64,
    "inf": pl.Int64,
    "scale": pl.Float64,
    "scale_current": pl.Float64,
    **dict.fromkeys(FIGURES, pl.Float64),
}
#: one row for each operand and scale: its occupied bins, ascending, and how many values each counts
SKETCH_SCHEMA: dict[str, Any] = {
    **_KEYS,
    "layer": pl.String,
    "role": pl.String,
    "recipe": pl.String,
    "format": pl.String,
    "dtype": pl.String,
    "rounded": pl.Boolean,
    "scale": pl.Float64,
    "bins": pl.List(pl.UInt16),
    "counts": pl.List(pl.Int64),
}
#: every step; what is read on sampled steps only is null on others
STEP_SCHEMA: dict[str, Any] = {
    **_KEYS,
    "time": pl.Float64,
    **dict.fromkeys(("loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples"), pl.Float64),
}
SCHEMAS = {"figures": FIGURE_SCHEMA, "sketches": SKETCH_SCHEMA, "steps": STEP_SCHEMA}


_ARROW_TYPES = {
    pl.Boolean: pa.bool_(),
    pl.UInt16: pa.uint16(),
    pl.Int32: pa.int32(),
    pl.Int64: pa.int64(),
    pl.Float64: pa.float64(),
    pl.String: pa.string(),
}


class RunRecord:
    """Writes the record of one run."""

    in_callers_thread = False

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._attempt = 0

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Start an attempt.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        try:
            for name in SCHEMAS:
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            self._claim_attempt()
            content = {"schema_version": SCHEMA_VERSION, "attempt": self._attempt, **fingerprint}
            self._write(self.folder / f"attempt-{self._attempt}.json", json.dumps(content, indent=2, default=str).encode())
        except OSError as error:
            raise ConfigError(f"the run record cannot be written to {self.folder}: {error.strerror or error}") from None

    def _claim_attempt(self) -> None:
        """Take the first number that no other start of a process has, even if it starts at the same moment."""
        self._attempt = 1 + max(_attempts([*self.folder.iterdir(), *self.folder.glob("*/*")]), default=-1)
        while True:
            with contextlib.suppress(FileExistsError):
                (self.folder / f"attempt-{self._attempt}.json").touch(exist_ok=False)
                return
            self._attempt += 1

    def record(self, sample: Sample) -> None:
        """Write one sampled step."""
        for table, columns in (("figures", sample.columns), ("sketches", sample.sketches)):
            if columns:
                rows = len(columns["layer"])
                keys: dict[str, list[Any]] = {"attempt": [self._attempt] * rows, "step": [sample.step] * rows}
                if table == "figures":
                    keys["consumed_samples"] = [sample.scalars.get("consumed_samples")] * rows
                self._write_part(table, sample.step, {**keys, **columns})

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        """Write the scalars of the steps since the last call; names that the schema does not have are left out."""
        if steps:
            rows = [{"attempt": self._attempt, "step": step, **scalars} for step, scalars in steps.items()]
            self._write_part("steps", max(steps), {name: [row.get(name) for row in rows] for name in STEP_SCHEMA})

    def close(self) -> None:
        """Nothing is held back."""

    def _write_part(self, table: str, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        # Not by polars: its thread pool does not survive a fork, and would hang the workers of a data loader that use it.
        types = {name: _arrow_type(kind) for name, kind in SCHEMAS[table].items()}
        arrays = {name: pa.array(columns[name], kind) for name, kind in types.items()}
        content = io.BytesIO()
        pq.write_table(pa.table(arrays), content, compression="zstd")
        checksum = zlib.crc32(content.getbuffer())
        name = f"attempt-{self._attempt}-step-{step:08d}-{checksum:08x}.parquet"
        self._write(self.folder / table / name, content.getvalue())

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)  # the folder may have been moved away in mid-run
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        temporary.write_bytes(content)
        temporary.replace(path)


def _arrow_type(kind: Any) -> pa.DataType:
    if isinstance(kind, pl.List):
        return pa.list_(_arrow_type(kind.inner))
    return _ARROW_TYPES[kind]


def find_run(path: str | os.PathLike[str]) -> Path:
    """The record at or below `path`.

    Raises:
        RecordError: there is none, or several.
    """
    root = Path(path)
    found = sorted({p.parent for p in root.rglob("attempt-*.json") if _attempts([p])}) if root.is_dir() else []
    if not found:
        raise RecordError(f"{root} holds no run record (a folder with attempt-0.json)")
    if len(found) > 1:
        raise RecordError(f"{root} holds {len(found)} run records; name one of {', '.join(map(str, found[:4]))}")
    return found[0]


def read_table(run: Path, table: str) -> pl.DataFrame:
    """All parts of a table, `figures`, `sketches` or `steps`; where attempts overlap, the latest one's rows of a step.

    Raises:
        RecordError: a part cannot be read; names it.
    """
    schema = SCHEMAS[table]
    frames = [pl.DataFrame(schema=schema)]
    for part in sorted((run / table).glob("*.parquet")):
        try:
            frames.append(pl.read_parquet(_checked(part)).select(list(schema)).match_to_schema(schema))
        except Exception as error:
            raise RecordError(f"{part} cannot be read as a part of {table}: {str(error).splitlines()[0]}") from None
    rows = pl.concat(frames)
    latest = rows.group_by("step").agg(pl.max("attempt"))
    return rows.join(latest, on=["step", "attempt"], how="semi").sort("step", maintain_order=True)


def _checked(part: Path) -> bytes:
    """The content of a part whose name tells its checksum."""
    content = part.read_bytes()
    if not part.stem.endswith(f"-{zlib.crc32(content):08x}"):
        raise ValueError("it is damaged or foreign: its name does not end in its checksum")
    return content


def read_fingerprint(run: Path) -> dict[str, Any]:
    """The fingerprint of the latest attempt.

    Raises:
        RecordError: it cannot be read.
    """
    path = run / f"attempt-{max(_attempts(run.glob('*.json')), default=0)}.json"
    try:
        content: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} is not a fingerprint: {error}") from None
    if not isinstance(content, dict):
        raise RecordError(f"{path} is not a fingerprint: a JSON object is expected")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise RecordError(f"{path} has schema version {content.get('schema_version')}; this release reads {SCHEMA_VERSION}")
    return content


def _attempts(paths: Iterable[Path]) -> list[int]:
    """The attempts that files belong to, by their names; other files are passed over."""
    names = (re.fullmatch(r"attempt-(\d+)(-step-\d+-[0-9a-f]+\.parquet|\.json)", path.name) for path in paths)
    return [int(name[1]) for name in names if name]
