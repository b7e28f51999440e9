"""Lines about copies in the summary of a step."""

from __future__ import annotations

from ...core.sample import Sample
from ...record.scalars import ScalarTags, StepSummary
from .table import TABLES

#: names of the scalars in the summary
LABELS = {"replicas_apart": "replicas apart"}


def add_scalars(sample: Sample, tags: ScalarTags) -> None:
    """Add nothing, because the summary contains the number of differing copies."""


def add_summary(sample: Sample, summary: StepSummary) -> None:
    """Add the number of tensors whose copies differ."""
    if apart := sample.get_table(TABLES[0].name).get("ranks_apart"):
        summary.scalars["replicas_apart"] = sum(bool(count) for count in apart)
