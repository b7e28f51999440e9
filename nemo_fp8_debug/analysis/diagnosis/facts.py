"""Facts of a run: each is measured once, from the record, and then serves all rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import polars as pl

from ..bands.bands import JudgedRun
from ..comparison.compare import Comparison
from ..loss.outcome import LossOutcome
from ..runs.grid import Ints
from ..runs.run import Run

Value_co = TypeVar("Value_co", covariant=True)


@dataclass(frozen=True)
class Records:
    """The records that facts are measured from."""

    run: Run
    baseline: Run | None = None
    #: with a baseline only
    comparison: Comparison | None = None
    #: bands of healthy runs that stand for a baseline
    bands: JudgedRun | None = None
    #: what was left out, in sentences
    notes: Sequence[str] = ()


def read_unusual(
    read: Callable[[Run], pl.DataFrame], run: Run, baseline: Run | None, keys: Sequence[str] = ("layer", "role")
) -> pl.DataFrame:
    """Return the rows that `read` finds in a run, without those of tensors that it finds in the baseline too.

    Args:
        keys: columns that tell a tensor.
    """
    rows = read(run)
    return rows if baseline is None else rows.join(read(baseline), on=keys, how="anti", maintain_order="left")


class Fact(Generic[Value_co]):
    """A measurement by name: called with the facts of a run, it returns its value, which is kept."""

    def __init__(self, measure: Callable[[Records], Value_co]) -> None:
        self.name, self.measure, self.__doc__ = measure.__name__, measure, measure.__doc__

    def __call__(self, facts: Facts) -> Value_co:
        """Return the value, measured when first asked for."""
        if self.name not in facts.values:
            assert facts.records is not None, f"{self.name} was not measured before the records were dropped"
            facts.values[self.name] = self.measure(facts.records)
        value: Value_co = facts.values[self.name]
        return value


def fact(measure: Callable[[Records], Value_co]) -> Fact[Value_co]:
    """Make a function of records a fact.

    Example:
        >>> @fact
        ... def sampled_steps(records):
        ...     return records.run.metrics.steps
        >>> sampled_steps.name
        'sampled_steps'
    """
    return Fact(measure)


@dataclass
class Facts:
    """All that is known of a run to rules, without its record."""

    #: what steps are counted in
    unit: str
    #: int64 [S]: sampled steps of the run
    steps: Ints
    #: against the baseline's, or the reference run's, or alone
    loss: LossOutcome
    #: whether a baseline is given
    paired: bool
    #: as `core.scale_sources` has it: whether the run quantizes
    quantization: str
    #: operands that are recorded: layer, role
    tensors: pl.DataFrame
    #: last sampled step of a baseline that ends before the run; -1: it does not
    baseline_end: int = -1
    #: None: all facts that are needed are measured
    records: Records | None = None
    #: facts of the run without its baseline, if that ends before the run
    past_baseline: Facts | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Records, loss: LossOutcome) -> Facts:
        """Return the facts of a run, each of which is measured when first asked for."""
        run, baseline = records.run, records.baseline
        facts = cls(
            run.unit,
            run.metrics.steps,
            loss,
            baseline is not None,
            run.quantization,
            run.metrics.tensors,
            _end_of(run, baseline),
            records,
        )
        if facts.baseline_end >= 0:
            alone = LossOutcome(run.loss, None, loss.max_gap)
            facts.past_baseline = cls.of(Records(run, bands=records.bands), alone)
        return facts

    @cached_property
    def same_batches(self) -> bool:
        """Whether run and baseline saw the same batches."""
        return self.loss.gap is not None and self.loss.gap.paired

    def measure_all(self, needed: Mapping[str, Fact[object]]) -> Facts:
        """Measure all of some facts and let go of the records."""
        for each in needed.values():
            each(self)
        if self.past_baseline is not None:
            self.past_baseline.measure_all(needed)
        self.records = None
        return self


def _end_of(run: Run, baseline: Run | None) -> int:
    if baseline is None or baseline.metrics.is_empty() or run.metrics.is_empty():
        return -1
    end = int(baseline.metrics.steps[-1])
    return end if run.metrics.steps[-1] > end else -1
