"""Tags of errors of what GEMMs put out."""

from __future__ import annotations

from ...core.sample import Sample
from ...record.scalars import Tags
from .table import TABLES


def add_scalars(sample: Sample, tags: Tags) -> None:
    """Add the error of each product."""
    tags.stream_products(sample.table(TABLES[0].name), "relative_error", "output_error")
