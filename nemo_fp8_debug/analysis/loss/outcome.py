"""Decide whether a run's loss was harmed, from which step on, and by how much, and how small a rise would be visible."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...core.text import format_number
from .. import thresholds
from .curve import LossCurve
from .gap import Gap, find_rise_above_baseline, measure_gap
from .seeds import SeedSpread
from .step_change import find_largest_loss_jump, measure_loss_rise_at_step

#: largest gap that does not count as harm, in percent of the baseline's mean loss over the last part of the run
MAX_GAP = thresholds.MAX_GAP
#: for several baselines: confidence with which we exclude that a different seed explains a gap, and fraction of runs with
#: other seeds that a rise must exceed
_LIKELY, _MOST = 0.95, 0.8
#: suffix of percentages that are relative to a loss's range instead of its level
OF_RANGE = " of the loss's range"


@dataclass(frozen=True)
class LossOutcome:
    """The outcome of a run's loss, compared with a baseline's loss or, without a baseline, with its own minimum."""

    run: LossCurve
    baseline: LossCurve | None = None
    #: largest gap that does not count as harm, in percent
    max_gap: float = MAX_GAP
    #: step at which both a finding begins and the loss rises, and the rise in percent; None: unknown
    rise: tuple[int, float] | None = None
    #: whether the baseline has the same model, according to its record
    same_model: bool = False
    #: spread of several baselines of other batches, if `baseline` is their mean; None for one baseline
    seeds: SeedSpread | None = None
    #: loss of the reference run, which differs from this run only in precision; None without a reference run
    reference: LossCurve | None = None

    @classmethod
    def judge_loss(
        cls,
        run: LossCurve,
        baseline: LossCurve | None,
        max_gap: float = MAX_GAP,
        same_model: bool = False,
        seeds: SeedSpread | None = None,
    ) -> LossOutcome:
        """Evaluate a run's loss against a baseline's loss, or alone if the baseline has too few losses."""
        known = baseline is not None and baseline.has_enough_losses
        return cls(run, baseline if known else None, max_gap, same_model=same_model, seeds=seeds)

    @cached_property
    def gap(self) -> Gap | None:
        """Return the gap to the baseline over the last part, or None without a baseline or with too few losses in common."""
        return None if self.baseline is None else measure_gap(self.run, self.baseline)

    @cached_property
    def reference_outcome(self) -> LossOutcome | None:
        """Return the outcome of the reference run's loss against the same baseline, or None if there is no reference run or
        it has too few losses.
        """
        if self.reference is None or not self.reference.has_enough_losses:
            return None
        other = None if self.baseline is self.reference else self.baseline
        return LossOutcome(self.reference, other, self.max_gap, same_model=self.same_model, seeds=self.seeds)

    @cached_property
    def gap_to_reference(self) -> Gap | None:
        """Return the gap of the run to the reference run over the last part, or None if it cannot be measured."""
        return None if self.reference is None else measure_gap(self.run, self.reference)

    @property
    def differs_from_reference(self) -> bool | None:
        """Return True if the run's loss is above the reference run's loss, False if it is not, or None if this is undecided.

        The result is True if the 95% interval of their gap is above 0. It is False if the reference run reaches the end of
        the run, and the interval is below the limit for harm or below the run's own gap to the baseline. If the reference
        run is harmed too, a gap below the limit for harm is no difference.
        """
        found = self.gap_to_reference
        if found is None:
            return None
        low, high = found.compute_confidence_interval() if not found.ends_nonfinite else (np.inf, np.inf)
        other = self.reference_outcome
        both_harmed = other is not None and other.harm == "harmful" and high < self.max_gap
        if low > 0 and not both_harmed:
            return True
        explained = self.max_gap if self.gap is None else max(self.max_gap, self.gap.percent)
        return False if high < explained and self._lasts(found) else None

    @property
    def reference_reaches_end(self) -> bool:
        """Return True if the reference run reaches the last twentieth of the run."""
        return self.gap_to_reference is not None and self._lasts(self.gap_to_reference)

    def _lasts(self, found: Gap) -> bool:
        return bool(found.last >= self.run.steps[int(0.95 * (len(self.run.steps) - 1))])

    @cached_property
    def rise_step(self) -> int | None:
        """Return the first step from which the loss stays above the baseline's loss or above its own minimum, or None.

        If the loss rises at the step of a finding, return this step, because a different seed may explain an earlier gap.
        With several baselines, return the step from which the loss stays above most other seeds, if there is such a step.
        """
        stays = None if self.rise else self._risen
        found = (
            stays,
            self.run.all_nonfinite_from_step,
            self.rise and self.rise[0],
            self.level_shift and self.level_shift[0],
        )
        return min((step for step in found if step is not None), default=None)

    @cached_property
    def level_shift(self) -> tuple[int, float] | None:
        """Return the step at which the loss goes up to another level, and the rise in percent, or None if there is no such
        step.

        With a baseline, search only if the run ends above the baseline and saw other batches, because a different seed can
        explain a gap, but not a jump.
        """
        if self.baseline is None:
            return self.run.level_shift
        if self.gap is None or self.gap.ends_nonfinite or self.gap.paired or self.gap.percent <= self.max_gap:
            return None
        if self.gap.compute_confidence_interval()[0] <= 0:  # noise may explain the gap
            return None
        return find_largest_loss_jump(self.run, self.baseline, self.max_gap)

    @cached_property
    def _risen(self) -> int | None:
        if self.baseline is None:
            return self.run.divergence_step
        since = (
            None
            if self.seeds is None
            else find_rise_above_baseline(self.run, self.baseline.raise_by_percent(self.seeds.compute_seed_limit(_MOST)))
        )
        return find_rise_above_baseline(self.run, self.baseline) if since is None else since

    @property
    def exceeds_max_gap(self) -> bool:
        """Return True if the 95% interval of the gap is above `max_gap`. A different seed may explain such a gap."""
        return self.gap is not None and self.gap.compute_confidence_interval()[0] > self.max_gap

    @property
    def harm(self) -> str:
        """Return `harmful`, `likely` (the loss goes up to another level), `gap` (a gap of at most `max_gap`), `none` or
        `unknown`.

        The harm is unknown if there are too few losses, if the gap may exceed `max_gap`, or if the run ends far below the
        baseline.
        """
        if self.run.all_nonfinite_from_step is not None or self.rise is not None:
            return "harmful"
        if not self.run.has_enough_losses:
            return "unknown"
        if self.baseline is None:
            if self.is_negative_from_zero:
                return "unknown"
            return "harmful" if self._risen is not None else "unknown" if self.level_shift is None else "likely"
        if self.is_far_below:
            return "unknown"
        if self.rise_step is not None:
            return self._harm_of(self.gap)
        if self.gap is None or self.gap.compute_confidence_interval()[1] > self.max_gap:
            return "unknown"
        return "gap" if self.gap.compute_confidence_interval()[0] > 0 else "none"

    def _harm_of(self, found: Gap | None) -> str:
        """Return the harm of a loss that stays above the baseline's loss."""
        if found is None or found.ends_nonfinite:
            return "harmful"
        if found.percent <= self.max_gap:
            return "gap"
        if found.paired or found.percent > self.seed_gap_limit:
            return "harmful"
        assert self.rise_step is not None
        rise = measure_loss_rise_at_step(self.run, self.baseline, self.rise_step)
        least = thresholds.OTHER_SEEDS if self.same_model else 2 * thresholds.OTHER_SEEDS
        if rise is not None and rise > least:
            return "harmful"
        # The loss of a shallower model ends above the loss of a deeper baseline, but does not rise or jump.
        moved = rise is not None or self.run.divergence_step is not None or self.run.level_shift is not None
        if moved and found.percent > 2 * thresholds.OTHER_SEEDS:
            return "harmful"
        return "unknown" if self.level_shift is None else "likely"

    @property
    def is_far_below(self) -> bool:
        """Return True if the loss ends so far below the baseline's loss that a different seed is no likely explanation."""
        if self.gap is None:
            return False
        least = thresholds.OTHER_SEEDS if self.same_model else thresholds.OTHER_MODELS
        if self.seeds is not None:
            least = max(least, self.seeds.compute_seed_limit(_LIKELY))
        return self.gap.compute_confidence_interval()[1] < -least

    @property
    def seed_gap_limit(self) -> float:
        """Return the percentage above which a different seed does not explain a gap.

        With several baselines of the same model, we adapt this percentage, because their mean is usually closer to the run
        than a single baseline, and their spread is more accurate than the usual spread.
        """
        least = max(thresholds.OTHER_SEEDS if self.same_model else thresholds.OTHER_MODELS, self.max_gap)
        if self.seeds is None or not self.same_model:
            return least
        nearer = min(
            self.seeds.distance_from_mean_factor * least, self.max_gap + self.seeds.compute_seed_limit(thresholds.SURE)
        )
        return max(nearer, self.seeds.compute_seed_limit(_LIKELY))

    @property
    def is_negative_from_zero(self) -> bool:
        """Return True if the loss begins at zero and is negative, as in reinforcement learning.

        Such a loss is a mean advantage, so a rise alone does not show harm.
        """
        return self.run.is_negative_from_zero

    @property
    def diverges(self) -> bool:
        """Return True if the loss stays above its own minimum or ends in NaN or infinity."""
        return self.run.all_nonfinite_from_step is not None or self.run.divergence_step is not None

    @property
    def harm_onset_step(self) -> int | None:
        """Return `since` if the run is harmed or likely harmed, otherwise None."""
        return self.rise_step if self.harm in ("harmful", "likely") else None

    def format_percentage(self, value: float, step: int | None = None) -> str:
        """Format a percentage of the loss. If it is relative to the loss's range and not to its level, name the range.

        Args:
            step: step at which the loss rises; None for a gap, or for a rise above the minimum.
        """
        alone = self.run.percent_base_above_minimum if step is None else self.run.measure_percent_base_before(step)
        scale = alone if self.baseline is None else self.baseline.percent_base
        return f"{format_number(value)}%{OF_RANGE if scale is not None and scale.is_range else ''}"
