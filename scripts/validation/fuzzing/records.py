"""A small real record, and the same with values that no run writes, under checksums that hold."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.record import parquet
from nemo_fp8_debug.record.schema import Part

from .mutations import TEXTS

_OPTIONS: dict[str, Any] = {"what_if": ["current"], "output_rows": 4, "states": ["first_moment"], "activations": ["norm"]}
_STEPS = 6


def train(folder: Path) -> Path:
    """A record of a real run of a few steps, with most tables."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8)).bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = Monitor(model, folder, interval=1, table_rows=0, **_OPTIONS)
    for step in range(_STEPS):
        with monitor.step(step) as report:
            loss = model(torch.randn(8, 16).bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(loss=loss, lr=1e-2, grad_norm=1.0, consumed_samples=8.0 * step)
    monitor.report_validation(loss=1.0)
    monitor.close()
    for events in folder.glob("events.out.*"):
        events.unlink()
    return folder


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    """A part with other rows, under the name that they give it.

    Args:
        path: of a part; its file goes.
    """
    part = Part.parse_part_name(path.parent.name, path.name)
    assert part is not None
    content, checksum = parquet.encode_parquet(change(pq.read_table(path)))
    path.unlink()
    new = path.with_name(
        Part.make_part_name(part.folder, part.attempt, part.first, part.last if part.merged else None, checksum).name
    )
    new.write_bytes(content)
    return new


def with_value(column: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    """Rows of which one has another value in a column; what its type cannot hold is left as it was."""

    def change(rows: pa.Table) -> pa.Table:
        if column not in rows.column_names or not len(rows):
            return rows
        field = rows.schema.field(column)
        values = rows[column].to_pylist()
        values[row % len(rows)] = value
        try:
            return rows.set_column(rows.schema.get_field_index(column), field, pa.array(values, field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError, UnicodeError):
            return rows

    return change


def _rearranged(how: str) -> Callable[[pa.Table], pa.Table]:
    def change(rows: pa.Table) -> pa.Table:
        if how == "empty":
            return rows.slice(0, 0)
        if how == "twice":
            return pa.concat_tables([rows, rows])
        if how == "reversed":
            return rows.take(pa.array(range(len(rows) - 1, -1, -1), pa.int64()))
        if how == "holes":
            return rows.take(pa.array(range(0, len(rows), 3), pa.int64()))
        return rows.drop_columns([rows.column_names[len(how) % rows.num_columns]])

    return change


_NUMBERS = (0, -1, 1, 7, 2**31, 2**62, -(2**63), 0.0, -0.0, -1.0, 7.5, 1e308, 5e-324, *map(float, ("nan", "inf", "-inf")))
_WORDS = ("input", "weight", "engine", "what-if", "bf16", "layers.*.experts.*.fc1")
_LISTS: Sequence[list[Any]] = ([], [0], [1, 1], [40000], [-1], [None], [2**62] * 3)
_VALUES: Sequence[Any] = (None, *_NUMBERS, *(text for text in TEXTS if text != "\ud800"), *_WORDS, *_LISTS)


def changes(columns: Sequence[str]) -> st.SearchStrategy[list[Callable[[pa.Table], pa.Table]]]:
    """A few changes of the rows of a table."""
    values = st.builds(with_value, st.sampled_from(list(columns)), st.integers(0, 50), st.sampled_from(_VALUES))
    order = st.builds(_rearranged, st.sampled_from(("empty", "twice", "reversed", "holes", "without", "without one")))
    return st.lists(st.one_of(values, values, values, order), min_size=1, max_size=4)


def copied(record: Path, folder: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(record, folder))
