"""Accept a run, or not, by its gap to a baseline and by the losses of its evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Protocol

import numpy as np
from scipy.special import stdtrit

from ...errors import ConfigError
from .. import thresholds
from .curve import LossCurve
from .gap import FEWEST, PART, Gap, align_losses, measure_aligned_gap

#: chance of passing a run whose gap is the limit, and of failing one whose gap is the limit
ERROR = 0.05
PASS, FAIL, CANNOT_TELL = "pass", "fail", "cannot tell"
#: gaps to BF16, or as it says, that were published for recipes that were accepted
PUBLISHED = (
    ("below 0.25%", "FP8 with fine scaling, 671B mixture of experts (DeepSeek-V3, arXiv:2412.19437)"),
    ("below 1%, 1.5% at the end", "NVFP4 against FP8, 12B on 10T tokens (arXiv:2509.25149)"),
)


@dataclass(frozen=True)
class Gate:
    """The answer, with what it rests on."""

    #: percent
    max_gap: float
    #: percent, its standard error and degrees of freedom
    gap: float
    error: float
    freedom: int
    #: `this pair` or `the recipe`
    of: str
    #: of the runs, in their order, each against its baseline or the mean of all
    gaps: Sequence[Gap]
    #: steps from one loss to the next, and the part of the run that is looked at; 1: all after a step
    spacing: int
    part: float
    #: losses that are judged together: one of them above the limit fails the run
    together: int = 1

    @property
    def bounds(self) -> tuple[float, float]:
        """Percent above which, and below which, the gap lies with a confidence of 95% each. Of several losses, all are above
        theirs with 95%."""
        return self.gap - self._reach(1 - ERROR / self.together), self.gap + self._reach(1 - ERROR)

    def _reach(self, confidence: float) -> float:
        return self.error * float(stdtrit(self.freedom, confidence)) if self.error else 0.0

    @property
    def outcome(self) -> str:
        """`pass`: the gap is below the limit; `fail`: the gap is above it, or the loss is far below; `cannot tell`."""
        low, high = self.bounds
        if self.is_far_below:
            return FAIL
        if high < self.max_gap:
            return PASS
        return FAIL if low > self.max_gap else CANNOT_TELL

    @property
    def is_far_below(self) -> bool:
        """Whether the loss ends so far below the baseline's that the data must be checked before it counts as a gain."""
        return self.bounds[1] < min(self.max_gap, 0.0) - thresholds.OTHER_SEEDS

    @property
    def more_steps(self) -> int | None:
        """About how many more steps would tell if the gap is what it seems; None: it has told, or seeds are missing."""
        if self.outcome != CANNOT_TELL or self.of != THIS_PAIR:
            return None
        apart, n = abs(self.gap - self.max_gap), self.gaps[0].n
        if not apart:
            return None
        # The standard error falls with the square root of the losses.
        needed = n * (self._reach(1 - ERROR) / apart) ** 2
        return max(1, math.ceil((needed - n) * self.spacing / self.part))

    def to_json(self) -> dict[str, Any]:
        """Return what JSON shows, for `make_jsonable`."""
        low, high = self.bounds
        return {
            "outcome": self.outcome,
            "max_gap": self.max_gap,
            "gap": self.gap,
            "low": low,
            "high": high,
            "of": self.of,
            "is_far_below": self.is_far_below,
            "more_steps": self.more_steps,
            "gaps": self.gaps,
            "published": [{"gap": gap, "of": what} for gap, what in PUBLISHED],
        }


THIS_PAIR, THE_RECIPE = "this pair", "the recipe"


def gate(
    runs: Sequence[LossCurve],
    baselines: Sequence[LossCurve],
    max_gap: float,
    part: float = PART,
    after: int | None = None,
    fewest: int = FEWEST,
) -> Gate | None:
    """Judge the mean gap over the last part of the runs.

    One run and one baseline tell the gap of this pair: what the recipe does and what the seed does cannot be told apart.
    Several runs, each with a baseline of the same batches, or several baselines, tell that of the recipe.

    Args:
        runs: one, or several that differ in their seed.
        baselines: likewise; if as many as runs, the first belongs to the first run, and so on.
        max_gap: percent.
        part: of the steps that both cover, from the end.
        after: step; only later ones are compared, instead of `part`.
        fewest: losses that the last part takes at least, if there are as many.

    Returns:
        None if a run and its baseline share fewer than 10 losses, or the baseline's are all zero.

    Raises:
        ConfigError: the numbers of runs and baselines do not fit, or a limit cannot be used.

    Example:
        >>> import polars as pl
        >>> noise = np.random.default_rng(0).normal(0, 0.02, 500)
        >>> run, baseline = (
        ...     LossCurve.of(pl.DataFrame({"step": range(500), "loss": 2 * (1 + noise) * factor})) for factor in (1.002, 1.0)
        ... )
        >>> found = gate([run], [baseline], max_gap=0.5)
        >>> found.outcome, round(found.gap, 2), found.of
        ('pass', 0.2, 'this pair')
    """
    _check(runs, baselines, max_gap, part)
    pairs = [align_losses(run, baseline) for run, baseline in _pairs(runs, baselines)]
    gaps = [measure_aligned_gap(pair, part, after, fewest) for pair in pairs]
    known = [gap for gap in gaps if gap is not None]
    if len(known) < len(gaps):
        return None
    of = THIS_PAIR if len(gaps) == 1 else THE_RECIPE
    measured = _of_the_recipe(runs, baselines, known) if len(gaps) > 1 else _of_a_pair(known[0])
    if of == THE_RECIPE and len(runs) > 1 and len(runs) != len(baselines):
        known = known[: len(runs)]
    return Gate(max_gap, *measured, of, known, pairs[0].spacing, 1.0 if after is not None else part)


def _check(runs: Sequence[LossCurve], baselines: Sequence[LossCurve], max_gap: float, part: float) -> None:
    if not math.isfinite(max_gap) or not 0 < part <= 1:
        raise ConfigError(
            f"max_gap is a number of percent and the last part above 0% and at most 100%, not {max_gap}, {part:%}"
        )
    if not runs or not baselines or (len(runs) > 1 and len(runs) != len(baselines)):
        raise ConfigError(
            f"{len(runs)} runs and {len(baselines)} baselines: give one run with one or several baselines, or as many "
            "baselines as runs, in the order of the runs that they belong to"
        )
    for which, curves in (("runs", runs), ("baselines", baselines)):
        if any(one.same_as(other) for one, other in combinations(curves, 2)):
            raise ConfigError(f"two of the {which} have the same losses: give each once, or the gap seems surer than it is")


def _pairs(runs: Sequence[LossCurve], baselines: Sequence[LossCurve]) -> list[tuple[LossCurve, LossCurve]]:
    return [(runs[0], baseline) for baseline in baselines] if len(runs) == 1 else list(zip(runs, baselines, strict=True))


def _of_a_pair(gap: Gap) -> tuple[float, float, int]:
    return gap.percent, gap.error, gap.freedom


def _of_the_recipe(
    runs: Sequence[LossCurve], baselines: Sequence[LossCurve], gaps: Sequence[Gap]
) -> tuple[float, float, int]:
    """Mean gap, and its standard error from what seeds differ by."""
    percents = np.array([gap.percent for gap in gaps])
    n = len(percents)
    spread = float(percents.std(ddof=1))
    # Of one run, its own seed adds as much as each of the baselines'.
    error = spread / np.sqrt(n) if len(runs) == len(baselines) else spread * np.sqrt(1 + 1 / n)
    return float(percents.mean()), float(error), n - 1


TRAINING = "training"


class Recorded(Protocol):
    """What is read of a run."""

    @property
    def loss(self) -> LossCurve:
        """Of training."""

    @property
    def validation(self) -> Mapping[str, LossCurve]:
        """Losses of evaluations by name."""


@dataclass(frozen=True)
class Acceptance:
    """The answer, with what it rests on."""

    #: by training
    loss: Gate
    #: by each loss of the evaluations
    validation: Mapping[str, Gate]
    #: losses of evaluations that are not judged, and why
    not_judged: Mapping[str, str]

    @property
    def gates(self) -> Mapping[str, Gate]:
        """All by name, that of training first."""
        return {TRAINING: self.loss} | {f"validation, {name}": each for name, each in self.validation.items()}

    @property
    def outcome(self) -> str:
        """`pass`: all gaps are below the limit; `fail`: one is above it, or a loss is far below; `cannot tell`."""
        found = [each.outcome for each in self.gates.values()]
        return FAIL if FAIL in found else CANNOT_TELL if CANNOT_TELL in found else PASS

    @property
    def decisive(self) -> str:
        """The name of the first loss that has this outcome."""
        return next(name for name, each in self.gates.items() if each.outcome == self.outcome)

    def to_json(self) -> dict[str, Any]:
        """Return what JSON shows, for `make_jsonable`: the training loss, and by name those of evaluations."""
        whole = {"outcome": self.outcome, "validation": self.validation, "not_judged": self.not_judged}
        return self.loss.to_json() | whole


def accept(
    runs: Sequence[Recorded],
    baselines: Sequence[Recorded],
    max_gap: float,
    part: float = PART,
    after: int | None = None,
) -> Acceptance | None:
    """Judge runs by all losses that they and their baselines record; arguments as those of `gate`.

    A gap of an evaluation is one of the same data, so its noise is that of the weights alone, which move slowly: fewer than
    20 evaluations give no interval that holds what it says.

    Returns:
        None if a run and its baseline share fewer than 10 training losses, or the baseline's are all zero.

    Raises:
        ConfigError: as `gate`.
    """
    trained = gate([run.loss for run in runs], [run.loss for run in baselines], max_gap, part, after)
    if trained is None:
        return None
    validation, not_judged = dict[str, Gate](), dict[str, str]()
    for name in dict.fromkeys(name for run in (*runs, *baselines) for name in run.validation):
        if not all(name in run.validation for run in (*runs, *baselines)):
            not_judged[name] = "not all runs have it"
            continue
        mine, theirs = ([run.validation[name] for run in each] for each in (runs, baselines))
        found = gate(mine, theirs, max_gap, part, after, fewest=0)
        fewest = 0 if found is None else min(each.n for each in found.gaps)
        if found is None or fewest < FEWEST:
            few = str(fewest) if found is not None else "fewer than 10"
            not_judged[name] = f"{few} evaluations are in the steps that count, and {FEWEST} are needed"
        else:
            validation[name] = found
    together = 1 + len(validation)
    judged = {name: replace(each, together=together) for name, each in validation.items()}
    return Acceptance(replace(trained, together=together), judged, not_judged)
