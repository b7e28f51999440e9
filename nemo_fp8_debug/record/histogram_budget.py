"""Fewer histograms, which are most of a record: of some roles at some samples, and of experts as one and the worst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

from ..core.sample import Sample
from ..core.table import Columns
from .expert_histograms import HARM, one_and_worst, worst_experts
from .schema import TABLES


@dataclass(frozen=True)
class HistogramBudget:
    """What the options `histogram_interval` and `expert_histograms` leave of a sample; metrics stay as they are.

    Args:
        interval: steps from one histogram to the next: of all roles, or by role, and of others at each sample.
        experts: "all", or "worst".

    Example:
        >>> budget = HistogramBudget({"weight": 1000})
        >>> budget.is_due("weight", 100), budget.is_due("weight", 1000), budget.is_due("input", 100)
        (False, True, True)
    """

    interval: int | Mapping[str, int] = field(default_factory=dict)
    experts: str = "all"

    def is_due(self, role: str, step: int) -> bool:
        """Whether histograms of a role are recorded at a step."""
        interval = self.interval if isinstance(self.interval, int) else self.interval.get(role, 1)
        return step % interval == 0

    def applied(self, sample: Sample) -> Sample:
        """The sample with its metrics, and the histograms that are due; all, if it is out of turn or has NaN or infinity."""
        tables = dict(sample.tables)
        for table in TABLES.values():
            if histograms := sample.table(table.histograms):
                tables[table.histograms] = self._of_table(sample, histograms, sample.table(table.name))
        return replace(sample, tables=tables)

    def _of_table(self, sample: Sample, histograms: Columns, metrics: Columns) -> Columns:
        if sample.trigger is None and sample.first_nonfinite() is None:
            due = [self.is_due(role, sample.step) for role in histograms["role"]]
            histograms = histograms if all(due) else _rows(histograms, due)
        if self.experts == "worst" and histograms and metrics:
            in_use = [source != "what-if" for source in metrics["scale_source"]]
            names = ("layer", "role", "n", *HARM)
            worst = worst_experts(_rows({name: metrics[name] for name in names}, in_use))
            histograms = one_and_worst(histograms, worst) if worst else histograms
        return histograms


def _rows(columns: Columns, kept: Sequence[bool]) -> Columns:
    """Some of the rows; nothing at all if there are none."""
    return {name: list(compress(values, kept)) for name, values in columns.items()} if any(kept) else {}
