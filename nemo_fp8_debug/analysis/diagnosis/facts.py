"""Facts of a run. Each fact is measured once from the record, and then all rules use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import polars as pl

from ..bands.bands import JudgedRun
from ..comparison.compare import Comparison, select_quantized_operands
from ..loss.outcome import LossOutcome
from ..runs.grid import Ints
from ..runs.run import Run
from .limits import find_operands_over_limit

Value_co = TypeVar("Value_co", covariant=True)


@dataclass(frozen=True)
class DiagnosedRecords:
    """The records that facts are measured from."""

    run: Run
    baseline: Run | None = None
    #: comparison of both runs, if there is a baseline
    comparison: Comparison | None = None
    #: the result of checking the run by bands of healthy runs, if there is no baseline
    bands: JudgedRun | None = None
    #: sentences about records that were left out
    notes: Sequence[str] = ()

    @cached_property
    def operands_over_limit(self) -> pl.DataFrame:
        """Return the operands of the run beyond a limit; see `find_operands_over_limit`."""
        return find_operands_over_limit(select_quantized_operands(self.run.metrics))


def subtract_baseline_tensors(
    read: Callable[[Run], pl.DataFrame], run: Run, baseline: Run | None, keys: Sequence[str] = ("layer", "role")
) -> pl.DataFrame:
    """Return the rows that `read` returns for a run, without tensors for which `read` also returns rows of the baseline.

    Args:
        keys: columns that identify a tensor.
    """
    rows = read(run)
    return rows if baseline is None else rows.join(read(baseline), on=keys, how="anti", maintain_order="left")


class Fact(Generic[Value_co]):
    """A named measurement. If you call it with the facts of a run, it returns its value and stores the value in the
    facts.
    """

    def __init__(self, measure: Callable[[DiagnosedRecords], Value_co]) -> None:
        self.name, self.measure, self.__doc__ = measure.__name__, measure, measure.__doc__

    def __call__(self, facts: Facts) -> Value_co:
        """Return the value. Measure it on the first call."""
        if self.name not in facts.values:
            assert facts.records is not None, f"{self.name} was not measured before the records were dropped"
            facts.values[self.name] = self.measure(facts.records)
        value: Value_co = facts.values[self.name]
        return value


def define_fact(measure: Callable[[DiagnosedRecords], Value_co]) -> Fact[Value_co]:
    """Turn a function of records into a fact.

    Example:
        >>> @define_fact
        ... def sampled_steps(records):
        ...     return records.run.metrics.steps
        >>> sampled_steps.name
        'sampled_steps'
    """
    return Fact(measure)


@dataclass
class Facts:
    """All facts of a run that rules may read, without the run's record."""

    #: unit of the steps, such as `step` or `sample`
    unit: str
    #: sampled steps of the run, int64 [S]
    steps: Ints
    #: the outcome of the run's loss, compared with the loss of the baseline or the reference run, or with its own minimum
    loss: LossOutcome
    #: whether a baseline is given
    paired: bool
    #: a constant of `core.scale_sources` that says whether the run quantizes
    quantization: str
    #: layer and role of the recorded operands
    tensors: pl.DataFrame
    #: last sampled step of a baseline that ends before the run, otherwise -1
    baseline_end: int = -1
    #: the records; None if all needed facts are measured
    records: DiagnosedRecords | None = None
    #: facts of the run alone, without its baseline, if the baseline ends before the run
    past_baseline: Facts | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_records(cls, records: DiagnosedRecords, loss: LossOutcome) -> Facts:
        """Return the facts of a run. Each fact is measured when it is first used."""
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
            facts.past_baseline = cls.from_records(DiagnosedRecords(run, bands=records.bands), alone)
        return facts

    @cached_property
    def has_same_batches(self) -> bool:
        """Return True if run and baseline saw the same batches."""
        return self.loss.gap is not None and self.loss.gap.paired

    def measure_all(self, needed: Mapping[str, Fact[object]]) -> Facts:
        """Measure all needed facts and release the records."""
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
