"""What the summary of a step says of copies that ranks hold."""

from __future__ import annotations

from ...core.sample import Sample
from ...record.scalars import StartHere, Tags
from .table import TABLES

#: what the summary calls its scalars
LABELS = {"replicas_apart": "replicas apart"}


def add_scalars(sample: Sample, tags: Tags) -> None:
    """Add nothing: the summary says how many are apart."""


def add_summary(sample: Sample, summary: StartHere) -> None:
    """Add how many tensors have copies that differ."""
    if apart := sample.table(TABLES[0].name).get("ranks_apart"):
        summary.scalars["replicas_apart"] = sum(bool(count) for count in apart)
