"""What a run's loss came to: above a baseline's or not, since when, by how much, and what could not have been seen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .. import thresholds
from ..formatting import format_number
from .curve import LossCurve
from .gap import Gap, find_rise_above, measure_gap
from .seeds import Seeds
from .step_change import find_jump, measure_rise

#: percent by which the mean loss over the last part may lie above the baseline's before it counts as harm
MAX_GAP = thresholds.MAX_GAP
#: of several baselines: confidence that a gap is harm by itself, and that it is beyond other seeds; and the part of other
#: seeds that is passed where harm begins
_LIKELY, _MOST = 0.95, 0.8
#: what follows percents that are not of the level of a loss
OF_RANGE = " of the loss's range"


@dataclass(frozen=True)
class LossOutcome:
    """A run's loss, judged against a baseline's, or alone against its own minimum."""

    run: LossCurve
    baseline: LossCurve | None = None
    #: percent
    max_gap: float = MAX_GAP
    #: step at which something else went wrong and the loss rose, and by how many percent; None: none is known
    rise: tuple[int, float] | None = None
    #: whether the baseline is of the same model, as far as can be told
    same_model: bool = False
    #: of several baselines of other batches, whose mean `baseline` is; None: it is one run
    seeds: Seeds | None = None
    #: loss of a run that differs from this one in precision alone; None: there is none
    reference: LossCurve | None = None

    @classmethod
    def of(
        cls,
        run: LossCurve,
        baseline: LossCurve | None,
        max_gap: float = MAX_GAP,
        same_model: bool = False,
        seeds: Seeds | None = None,
    ) -> LossOutcome:
        """Against a baseline, if it has enough losses to be one."""
        known = baseline is not None and baseline.has_enough
        return cls(run, baseline if known else None, max_gap, same_model=same_model, seeds=seeds)

    @cached_property
    def gap(self) -> Gap | None:
        """To the baseline, over the last part; None without one, or with too few losses in common."""
        return None if self.baseline is None else measure_gap(self.run, self.baseline)

    @cached_property
    def reference_outcome(self) -> LossOutcome | None:
        """The reference run's loss, judged against the same baseline; None without a reference that has losses."""
        if self.reference is None or not self.reference.has_enough:
            return None
        other = None if self.baseline is self.reference else self.baseline
        return LossOutcome(self.reference, other, self.max_gap, same_model=self.same_model, seeds=self.seeds)

    @cached_property
    def gap_to_reference(self) -> Gap | None:
        """How far the run lies above the reference run, over the last part; None if that cannot be measured."""
        return None if self.reference is None else measure_gap(self.run, self.reference)

    @property
    def differs_from_reference(self) -> bool | None:
        """Whether the run lies above the reference run; None if nobody can tell.

        True if the 95% interval of their gap lies above 0. False if the interval also excludes a gap as large as the run's
        own to the baseline, or as large as counts as harm, up to the end of the run.
        """
        found = self.gap_to_reference
        if found is None:
            return None
        low, high = found.interval() if not found.infinite else (np.inf, np.inf)
        if low > 0:
            return True
        explained = self.max_gap if self.gap is None else max(self.max_gap, self.gap.percent)
        return False if high < explained and self._lasts(found) else None

    @property
    def reference_lasts(self) -> bool:
        """Whether the reference run reaches the last twentieth of the run."""
        return self.gap_to_reference is not None and self._lasts(self.gap_to_reference)

    def _lasts(self, found: Gap) -> bool:
        return bool(found.last >= self.run.steps[int(0.95 * (len(self.run.steps) - 1))])

    @cached_property
    def since(self) -> int | None:
        """First step from which the loss stays above the baseline's, or alone above its own minimum; None: it does not.

        Of one that rises at a known step it is that step: another seed explains that it lay above before. Beside several
        baselines it is that from which it stays above what most other seeds would reach, if it does.
        """
        stays = None if self.rise else self._risen
        found = (stays, self.run.lost_at, self.rise and self.rise[0], self.stepped_up and self.stepped_up[0])
        return min((step for step in found if step is not None), default=None)

    @cached_property
    def stepped_up(self) -> tuple[int, float] | None:
        """The step at which it goes up to another level, and by how many percent; None: at none, or that is not asked.

        With a baseline it is asked where the run ends above one of other batches: another seed explains that, but no jump.
        """
        if self.baseline is None:
            return self.run.stepped_up
        if self.gap is None or self.gap.infinite or self.gap.paired or self.gap.percent <= self.max_gap:
            return None
        if self.gap.interval()[0] <= 0:  # noise may have brought it to where it ends
            return None
        return find_jump(self.run, self.baseline, self.max_gap)

    @cached_property
    def _risen(self) -> int | None:
        if self.baseline is None:
            return self.run.diverged_at
        since = None if self.seeds is None else find_rise_above(self.run, self.baseline.raised(self.seeds.reach(_MOST)))
        return find_rise_above(self.run, self.baseline) if since is None else since

    @property
    def lies_above(self) -> bool:
        """Return True if the 95% interval of the gap lies above `max_gap`. Another seed may explain such a gap."""
        return self.gap is not None and self.gap.interval()[0] > self.max_gap

    @property
    def harm(self) -> str:
        """`harmful`; `likely`: it goes up to another level at a step; `gap`: above the baseline's by no more than `max_gap`;
        `none`; or `unknown`: there are too few losses, a gap of more than `max_gap` cannot be excluded, or the run ends far
        below the baseline."""
        if self.run.lost_at is not None or self.rise is not None:
            return "harmful"
        if not self.run.has_enough:
            return "unknown"
        if self.baseline is None:
            if self.is_negative_from_zero:
                return "unknown"
            return "harmful" if self._risen is not None else "unknown" if self.stepped_up is None else "likely"
        if self.is_far_below:
            return "unknown"
        if self.since is not None:
            return self._harm_of(self.gap)
        if self.gap is None or self.gap.interval()[1] > self.max_gap:
            return "unknown"
        return "gap" if self.gap.interval()[0] > 0 else "none"

    def _harm_of(self, found: Gap | None) -> str:
        """Of a loss that stays above the baseline's."""
        if found is None or found.infinite:
            return "harmful"
        if found.percent <= self.max_gap:
            return "gap"
        if found.paired or found.percent > self.beyond_seeds:
            return "harmful"
        assert self.since is not None
        rise = measure_rise(self.run, self.baseline, self.since)
        least = thresholds.OTHER_SEEDS if self.same_model else 2 * thresholds.OTHER_SEEDS
        if rise is not None and rise > least:
            return "harmful"
        # The loss of a deeper model falls farther, but neither rises by itself nor at a step.
        moved = rise is not None or self.run.diverged_at is not None or self.run.stepped_up is not None
        if moved and found.percent > 2 * thresholds.OTHER_SEEDS:
            return "harmful"
        return "unknown" if self.stepped_up is None else "likely"

    @property
    def is_far_below(self) -> bool:
        """Whether the loss ends so far below the baseline's that another seed hardly explains that."""
        if self.gap is None:
            return False
        least = thresholds.OTHER_SEEDS if self.same_model else thresholds.OTHER_MODELS
        if self.seeds is not None:
            least = max(least, self.seeds.reach(_LIKELY))
        return self.gap.interval()[1] < -least

    @property
    def beyond_seeds(self) -> float:
        """Percent beyond which another seed does not explain a gap.

        The mean of several baselines lies nearer than one of them does, and what they differ by tells more than what seeds
        usually do.
        """
        least = max(thresholds.OTHER_SEEDS if self.same_model else thresholds.OTHER_MODELS, self.max_gap)
        if self.seeds is None or not self.same_model:
            return least
        nearer = min(self.seeds.nearer * least, self.max_gap + self.seeds.reach(thresholds.SURE))
        return max(nearer, self.seeds.reach(_LIKELY))

    @property
    def is_negative_from_zero(self) -> bool:
        """Whether the loss begins at zero and is negative, as in reinforcement learning.

        Such a loss is a mean advantage, so a rise by itself is no harm.
        """
        return self.run.is_negative_from_zero

    @property
    def diverges(self) -> bool:
        """Whether the loss rises for good: above its own minimum, or to what is no number."""
        return self.run.lost_at is not None or self.run.diverged_at is not None

    @property
    def harmful_since(self) -> int | None:
        """`since` of a run that is harmed, or likely to be; None: it is not, or that is not known."""
        return self.since if self.harm in ("harmful", "likely") else None

    def percents(self, value: float, step: int | None = None) -> str:
        """Return percents of the loss in words, with what they are of unless that is its level.

        Args:
            step: at which the loss rises; None: it is about a gap, or about a rise above its minimum.
        """
        alone = self.run.scale_to_lowest if step is None else self.run.scale_before(step)
        scale = alone if self.baseline is None else self.baseline.scale
        return f"{format_number(value)}%{OF_RANGE if scale is not None and scale.is_range else ''}"
