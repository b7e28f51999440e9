"""Whether a run is harmed, from its loss and from what else is known of it."""

from __future__ import annotations

from math import inf

from ..loss.outcome import LIKELY, LossOutcome
from ..loss.step_change import higher_in_the_end
from ..runs.grid import Ints
from .rules.finding import Finding

#: how many times the limit a gap must be that another seed may explain, by the severity of what is found too; the same of a
#: gap to another model, which lie farther apart, and of one to the mean of several baselines
_TIMES, _OTHER_MODELS, _SEVERAL = (3.0, 2.5, -1.0), (inf, 2.5, 1.0), (3.0, 2.5, 0.5)
#: causes that make no gap likelier to be theirs: recipes are changed on purpose, and NaN that harms shows in the loss itself
_NO_EVIDENCE = ("changed_recipe", "nonfinite")


def is_likely(loss: LossOutcome, blamed: Finding | None, sampled: Ints) -> bool:
    """Whether harm is likely that the loss alone cannot tell.

    With a baseline of other batches two things must agree: a gap, which another seed may explain, and something that may
    harm. To a baseline of the same model that is two and a half times the limit beside what harmed up to half of the
    benchmark's runs that had it. It is three times the limit beside anything that is no change of recipe and no NaN that the
    loss got over, unless the run lay as high above the baseline before that. Beside what harmed most of them it is enough
    that the run does not end below the baseline by more than the limit; or, of several, above their mean by half of it.
    Alone, something that harmed most of them.

    Args:
        blamed: what the verdict names; None: nothing.
        sampled: int64 [S]: steps of the samples, ascending.
    """
    if loss.harm != "unknown" or blamed is None or blamed.confidence == "low":
        return False
    if loss.gap is None:
        return blamed.severity >= 2
    if loss.gap.paired:
        return False
    if blamed.severity == 0 and blamed.cause in _NO_EVIDENCE:
        return False
    times = _OTHER_MODELS if not loss.same_model else _TIMES if loss.seeds is None else _SEVERAL
    if loss.gap.percent <= loss.beyond_seeds(times[blamed.severity], LIKELY):
        return False
    return blamed.severity > 0 or _came_with(loss, blamed, sampled)


def _came_with(loss: LossOutcome, blamed: Finding, sampled: Ints) -> bool:
    """Whether the run lies higher above the baseline than before what is blamed, or that cannot be told."""
    if loss.baseline is None or blamed.since is None:
        return True
    return higher_in_the_end(loss.run, loss.baseline, blamed.since, sampled) > loss.max_gap
