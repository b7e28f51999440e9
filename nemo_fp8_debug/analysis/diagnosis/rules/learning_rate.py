"""A rule about learning rates that depart from the baseline's learning rate, or that rise after their warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl

from ....core.text import format_number
from ... import thresholds
from ...runs.settings import read_learning_rates
from ..facts import DiagnosedRecords, Facts, define_fact
from ..finding import Finding
from ..rule import register_rule


class LearningRates(NamedTuple):
    """Tables with step and lr of the run, and of the baseline, which may be None."""

    run: pl.DataFrame
    baseline: pl.DataFrame | None


@define_fact
def learning_rates(records: DiagnosedRecords) -> LearningRates:
    """Return positive learning rates by step."""
    mine, theirs = (None if each is None else read_learning_rates(each.steps) for each in (records.run, records.baseline))
    assert mine is not None
    return LearningRates(mine, theirs)


@register_rule("learning rate", ("learning_rate",), (learning_rates,), event="lr")
def find_learning_rate(facts: Facts) -> Iterator[Finding]:
    """Name a learning rate that departs from the baseline's learning rate, or that rises after its warm-up.

    Example: a resumed run starts its schedule again, so the rate is 2,896 times the baseline's rate at step 130.
    """
    rates = learning_rates(facts)
    if rates.baseline is None:
        yield from _rises(rates.run, facts.unit)
        return
    both = rates.run.join(rates.baseline, on="step", suffix="_baseline").sort("step")
    ratios = (both["lr"] / both["lr_baseline"]).to_numpy()
    first = _first_in_a_row(np.abs(np.log2(ratios)) > np.log2(thresholds.RATE_DIFFERS))
    if first is None:
        return
    farthest = first + int(np.argmax(np.abs(np.log2(ratios[first:]))))
    # If rates are reported only at some steps, the departure may be at any step after the last equal rates.
    since = int(both["step"][first - 1]) + 1 if first else int(both["step"][0])
    times = float(ratios[farthest])
    what = f"{format_number(times)} times" if times > 1 else f"1/{format_number(1 / times)} of"
    before = f"after {facts.unit} {both['step'][first - 1]}" if first else "from the start"
    evidence = (
        f"it left the baseline's {before} and was {what} it at {facts.unit} {both['step'][farthest]}: "
        f"{format_number(both['lr'][farthest])} instead of {format_number(both['lr_baseline'][farthest])}"
    )
    strength = "clear" if times > thresholds.FACTOR else "hint"
    yield Finding("learning rate", "learning_rate", strength, evidence, since=since, is_exact=True)


def _rises(mine: pl.DataFrame, unit: str) -> Iterator[Finding]:
    rates, steps = mine["lr"].to_numpy(), mine["step"].to_numpy()
    for i in range(thresholds.FEW, len(rates)):
        highest = float(rates[:i].max())
        level = not (np.diff(rates[i - thresholds.FEW : i]) > 0).any()
        if level and rates[i:].min() >= highest and rates[i:].max() > thresholds.FACTOR * highest:
            rise = i + int(np.argmax(rates[i:] > thresholds.RATE_DIFFERS * highest))
            most = format_number(float(rates[i:].max()))
            evidence = f"it rose from {format_number(highest)} at {unit} {steps[rise - 1]} to {most} after its warm-up"
            yield Finding("learning rate", "learning_rate", "clear", evidence, since=int(steps[rise - 1]) + 1, is_exact=True)
            return


def _first_in_a_row(differs: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int | None:
    """Return the index of the first two consecutive True values, or None. If there is only one value, a single True is
    enough.
    """
    needed = min(thresholds.IN_A_ROW, len(differs))
    if not needed:
        return None
    rows = np.lib.stride_tricks.sliding_window_view(differs, needed).all(-1)
    return int(np.argmax(rows)) if rows.any() else None
