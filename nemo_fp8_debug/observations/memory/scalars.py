"""Tags of memory: the ranks with the least and the most."""

from __future__ import annotations

from ...core.sample import Sample
from ...record.scalars import SPREAD, Tags
from .table import METRICS, TABLES


def add_scalars(sample: Sample, tags: Tags) -> None:
    """Add the spread of each metric over ranks."""
    columns = sample.table(TABLES[0].name)
    tags.sum_up({f"fp8_memory/{name}": list(columns[name]) for name in METRICS if columns}, SPREAD)
