"""Accept or reject a run by the gaps of its training and evaluation losses to the losses of a baseline."""

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

#: probability that a run with a gap equal to the limit passes, and also the probability that it fails
ERROR = 0.05
PASS, FAIL, CANNOT_TELL = "pass", "fail", "cannot tell"
#: published loss gaps of accepted recipes, compared with BF16 unless the entry names another format
PUBLISHED = (
    ("below 0.25%", "FP8 with fine scaling, 671B mixture of experts (DeepSeek-V3, arXiv:2412.19437)"),
    ("below 1%, 1.5% at the end", "NVFP4 against FP8, 12B on 10T tokens (arXiv:2509.25149)"),
)


@dataclass(frozen=True)
class LossGate:
    """The outcome for one loss, with the gap and limits on which it is based."""

    #: limit of the gap, in percent
    max_gap: float
    #: gap in percent, its standard error and degrees of freedom
    gap: float
    error: float
    freedom: int
    #: subject of the gap: `this pair` or `the recipe`
    of: str
    #: gap of each pair of a run and a baseline, in order
    gaps: Sequence[Gap]
    #: number of steps from one loss to the next, and the fraction of the run that is checked (1 if `after` is given)
    spacing: int
    part: float
    #: number of losses that are checked together; the run fails if the gap of one of these losses is above the limit
    together: int = 1

    @property
    def confidence_bounds(self) -> tuple[float, float]:
        """Return one-sided lower and upper bounds of the gap, in percent, each with 95% confidence.

        If several losses are checked, all lower bounds are valid together with 95% confidence.
        """
        return self.gap - self._reach(1 - ERROR / self.together), self.gap + self._reach(1 - ERROR)

    def _reach(self, confidence: float) -> float:
        return self.error * float(stdtrit(self.freedom, confidence)) if self.error else 0.0

    @property
    def outcome(self) -> str:
        """Return `pass` (gap below the limit), `fail` (gap above the limit, or loss far below the baseline's loss) or
        `cannot tell`.
        """
        low, high = self.confidence_bounds
        if self.is_far_below:
            return FAIL
        if high < self.max_gap:
            return PASS
        return FAIL if low > self.max_gap else CANNOT_TELL

    @property
    def is_far_below(self) -> bool:
        """Return True if the loss ends so far below the baseline's loss that the data must be checked first."""
        return self.confidence_bounds[1] < min(self.max_gap, 0.0) - thresholds.OTHER_SEEDS

    @property
    def estimated_steps_to_decide(self) -> int | None:
        """Estimate how many more steps are needed for a decision if the gap stays constant. Return None if the outcome is
        already decided, or if only more seeds can decide it.
        """
        if self.outcome != CANNOT_TELL or self.of != THIS_PAIR:
            return None
        apart, n = abs(self.gap - self.max_gap), self.gaps[0].n
        if not apart:
            return None
        # The standard error falls with the square root of the number of losses.
        needed = n * (self._reach(1 - ERROR) / apart) ** 2
        return max(1, math.ceil((needed - n) * self.spacing / self.part))

    def to_json(self) -> dict[str, Any]:
        """Return the gate as plain values, for `make_jsonable`."""
        low, high = self.confidence_bounds
        return {
            "outcome": self.outcome,
            "max_gap": self.max_gap,
            "gap": self.gap,
            "low": low,
            "high": high,
            "of": self.of,
            "is_far_below": self.is_far_below,
            "more_steps": self.estimated_steps_to_decide,
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
) -> LossGate | None:
    """Accept or reject runs by the mean gap over their last part.

    With one run and one baseline, the result is the gap of this pair, in which the effects of recipe and seed are mixed.
    With several baselines, or with several runs and a baseline of the same batches for each run, the result is the gap of
    the recipe.

    Args:
        runs: one run, or several runs that differ in their seed.
        baselines: one or several baselines. If there are as many baselines as runs, they are paired in order.
        max_gap: limit of the gap, in percent.
        part: last part of the shared steps that is compared.
        after: compare only steps after this step, instead of `part`.
        fewest: least number of losses in the last part, if both losses have so many.

    Returns:
        The gate, or None if a run and its baseline have fewer than 10 losses in common, or if all losses of the baseline are
        zero.

    Raises:
        ConfigError: the numbers of runs and baselines do not match, or a limit is invalid.

    Example:
        >>> import polars as pl
        >>> noise = np.random.default_rng(0).normal(0, 0.02, 500)
        >>> run, baseline = (
        ...     LossCurve.from_steps_table(pl.DataFrame({"step": range(500), "loss": 2 * (1 + noise) * factor}))
        ...     for factor in (1.002, 1.0)
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
    return LossGate(max_gap, *measured, of, known, pairs[0].spacing, 1.0 if after is not None else part)


def _check(runs: Sequence[LossCurve], baselines: Sequence[LossCurve], max_gap: float, part: float) -> None:
    if not math.isfinite(max_gap) or not 0 < part <= 1:
        raise ConfigError(
            f"max_gap must be a finite percentage, and the last part must be above 0% and at most 100%: {max_gap}, {part:%}"
        )
    if not runs or not baselines or (len(runs) > 1 and len(runs) != len(baselines)):
        raise ConfigError(
            f"{len(runs)} runs and {len(baselines)} baselines: give one run with one or several baselines, or as many "
            "baselines as runs, in the same order"
        )
    for which, curves in (("runs", runs), ("baselines", baselines)):
        if any(one.has_equal_losses(other) for one, other in combinations(curves, 2)):
            raise ConfigError(f"two of the {which} have the same losses: give each run once, or the gap looks too certain")


def _pairs(runs: Sequence[LossCurve], baselines: Sequence[LossCurve]) -> list[tuple[LossCurve, LossCurve]]:
    return [(runs[0], baseline) for baseline in baselines] if len(runs) == 1 else list(zip(runs, baselines, strict=True))


def _of_a_pair(gap: Gap) -> tuple[float, float, int]:
    return gap.percent, gap.error, gap.freedom


def _of_the_recipe(
    runs: Sequence[LossCurve], baselines: Sequence[LossCurve], gaps: Sequence[Gap]
) -> tuple[float, float, int]:
    """Return the mean gap, its standard error from the spread between seeds, and its degrees of freedom."""
    percents = np.array([gap.percent for gap in gaps])
    n = len(percents)
    spread = float(percents.std(ddof=1))
    # The seed of a single run adds as much variance as the seed of a baseline.
    error = spread / np.sqrt(n) if len(runs) == len(baselines) else spread * np.sqrt(1 + 1 / n)
    return float(percents.mean()), float(error), n - 1


TRAINING = "training"


class RecordedLosses(Protocol):
    """The losses of a run that `gate_all_losses` reads."""

    @property
    def loss(self) -> LossCurve:
        """Return the training loss."""

    @property
    def validation(self) -> Mapping[str, LossCurve]:
        """Return the losses of evaluations by name."""


@dataclass(frozen=True)
class GateResult:
    """The outcome for all losses of a run."""

    #: outcome for the training loss
    loss: LossGate
    #: outcomes for the losses of evaluations, by name
    validation: Mapping[str, LossGate]
    #: reasons why some evaluation losses are not checked, by name
    not_judged: Mapping[str, str]

    @property
    def gates(self) -> Mapping[str, LossGate]:
        """Return all gates by name, with the training loss first."""
        return {TRAINING: self.loss} | {f"validation, {name}": each for name, each in self.validation.items()}

    @property
    def outcome(self) -> str:
        """Return `pass` (all gaps below the limit), `fail` (a gap above the limit, or a loss far below the baseline's loss)
        or `cannot tell`.
        """
        found = [each.outcome for each in self.gates.values()]
        return FAIL if FAIL in found else CANNOT_TELL if CANNOT_TELL in found else PASS

    @property
    def decisive_loss_name(self) -> str:
        """Return the name of the first loss whose outcome is also the overall outcome."""
        return next(name for name, each in self.gates.items() if each.outcome == self.outcome)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `make_jsonable`: the training loss's gate, and the evaluations' gates by name."""
        whole = {"outcome": self.outcome, "validation": self.validation, "not_judged": self.not_judged}
        return self.loss.to_json() | whole


def gate_all_losses(
    runs: Sequence[RecordedLosses],
    baselines: Sequence[RecordedLosses],
    max_gap: float,
    part: float = PART,
    after: int | None = None,
) -> GateResult | None:
    """Accept or reject runs by all losses that both the runs and their baselines record. The arguments are as in `gate`.

    Evaluations use the same data each time, so the noise of their gap comes only from the weights, which change slowly. With
    fewer than 20 evaluations, the interval is not reliable.

    Returns:
        The outcome, or None if a run and its baseline have fewer than 10 training losses in common, or if all losses of the
        baseline are zero.

    Raises:
        ConfigError: as in `gate`.
    """
    trained = gate([run.loss for run in runs], [run.loss for run in baselines], max_gap, part, after)
    if trained is None:
        return None
    validation, not_judged = dict[str, LossGate](), dict[str, str]()
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
    return GateResult(replace(trained, together=together), judged, not_judged)
