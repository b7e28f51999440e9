"""What a run's loss came to: above a baseline's or not, since when, by how much, and what could not have been seen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..formatting import number
from .curve import LossCurve
from .divergence import above
from .gap import CHECK_DATA, FAR_BELOW, Gap, gap
from .seeds import Seeds
from .step_change import jumps_at, rises_at

#: percent by which the mean loss over the last part may lie above the baseline's before it counts as harm
MAX_GAP = 2.0
#: how many times that a run of other batches may lie above all along before another seed, or another model, does not
#: explain it
OTHER_SEEDS, OTHER_MODELS = 6.0, 20.0
#: how many times that it may rise by at a step that was searched for, if the models are the same, and if they are not; the
#: latter is also how far above another model it may lie once it has risen at all
SEARCHED, RISEN = 5.0, 10.0
#: confidence, going by what several baselines differ by, that a gap is above the limit: of one that is harm by itself, and
#: of one that makes harm likely beside what else is found; and the part of other seeds that is passed where harm begins
SURE, LIKELY, MOST = 0.999, 0.95, 0.8
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
        return None if self.baseline is None else gap(self.run, self.baseline)

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
        return None if self.reference is None else gap(self.run, self.reference)

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
        return False if high < explained and self._reference_lasts(found) else None

    def _reference_lasts(self, found: Gap) -> bool:
        """Whether the reference run reaches the last twentieth of the run."""
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
        return jumps_at(self.run, self.baseline, self.max_gap)

    @cached_property
    def _risen(self) -> int | None:
        if self.baseline is None:
            return self.run.diverged_at
        since = None if self.seeds is None else above(self.run, self.baseline.raised(self.seeds.reach(MOST)))
        return above(self.run, self.baseline) if since is None else since

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
        if found.paired or found.percent > self._no_seed_explains():
            return "harmful"
        assert self.since is not None
        rise = rises_at(self.run, self.baseline, self.since)
        least = SEARCHED if self.same_model else RISEN
        if rise is not None and rise > least * self.max_gap:
            return "harmful"
        # The loss of a deeper model falls farther, but neither rises by itself nor at a step.
        moved = rise is not None or self.run.diverged_at is not None or self.run.stepped_up is not None
        if moved and found.percent > RISEN * self.max_gap:
            return "harmful"
        return "unknown" if self.stepped_up is None else "likely"

    @property
    def is_far_below(self) -> bool:
        """Whether the loss ends so far below the baseline's that another seed hardly explains that."""
        if self.gap is None:
            return False
        least = FAR_BELOW if self.same_model else OTHER_MODELS * MAX_GAP
        if self.seeds is not None:
            least = max(least, self.seeds.reach(LIKELY))
        return self.gap.interval()[1] < -least

    def beyond_seeds(self, times: float, sure: float) -> float:
        """Percent beyond which another seed does not explain a gap. The mean of several baselines lies nearer than one of
        them does, and what they differ by tells more than what seeds usually do.

        Args:
            times: the limit, beside one baseline.
            sure: confidence that the limit is exceeded, going by what several differ by.
        """
        if self.seeds is None or not self.same_model:
            return times * self.max_gap
        return min(self.seeds.nearer * times * self.max_gap, self.max_gap + self.seeds.reach(sure))

    def _no_seed_explains(self) -> float:
        """Percent beyond which no other seed explains a gap, whatever else is found."""
        least = self.beyond_seeds(OTHER_SEEDS if self.same_model else OTHER_MODELS, SURE)
        return least if self.seeds is None else max(least, self.seeds.reach(LIKELY))

    @property
    def harmful_since(self) -> int | None:
        """`since` of a run that is harmed, or likely to be; None: it is not, or that is not known."""
        return self.since if self.harm in ("harmful", "likely") else None

    def told(self, unit: str = "step") -> str:
        """In a sentence or two.

        Args:
            unit: what steps are counted in.
        """
        if self.run.lost_at is not None:
            return f"The loss is NaN or infinite from {unit} {self.run.lost_at} on."
        if not self.run.has_enough:
            return f"{len(self.run.losses)} losses are too few to tell whether the run is harmed."
        if self.rise is not None:
            return f"The loss rises by {self.percents(self.rise[1], self.rise[0])} at {unit} {self.rise[0]}."
        if self.baseline is None:
            return self._alone(unit)
        if self.gap is None:
            since = f"The loss stays above the baseline's from {unit} {self.since} on. " if self.since is not None else ""
            return f"{since}No gap can be measured: fewer than 10 losses are in common, or the baseline's are zero."
        return self._against_the_baseline(self.gap, unit)

    def describe_reference(self, unit: str = "step") -> str:
        """Return what the reference run's loss came to, next to the run's; empty without a reference run.

        Args:
            unit: what steps are counted in.
        """
        if self.reference is None:
            return ""
        other, apart = self.reference_outcome, self.gap_to_reference
        if other is None:
            return "The reference run has too few losses to judge."
        gap = "" if other.gap is None or other.gap.infinite else _interval_told(other.gap)
        lasts = apart is not None and self._reference_lasts(apart)
        if other.harmful_since is not None:
            too = " too" if self.harmful_since is not None else ""
            lead = (
                f"The reference run diverges{too}, from {unit} {other.harmful_since} on{gap and f', with a gap of {gap}'}."
            )
        elif self.harmful_since is not None and lasts:
            lead = f"The reference run does not diverge{gap and f': its gap is {gap}'}."
        else:
            lead = gap and f"The reference run's gap is {gap}."
        if self.baseline is self.reference:
            rest = ""  # the gap is told already
        elif apart is None:
            rest = "We cannot compare the losses of the run and the reference run."
        elif not lasts:
            rest = f"The reference run ends at {unit} {self.reference.steps[-1]}, too early to judge the run's end."
        else:
            rest = "" if apart.infinite else f"The run's gap to the reference run is {_interval_told(apart)}"
            if self.harm != "none" and not self.is_far_below and not self.differs_from_reference:
                unknown = self.differs_from_reference is None
                rest += (
                    ", so nobody can tell whether FP8 explains the loss" if unknown else ", so FP8 does not explain the loss"
                )
            rest += "." if rest else ""
        return f"{lead} {rest}".strip()

    def percents(self, value: float, step: int | None = None) -> str:
        """Return percents of the loss in words, with what they are of unless that is its level.

        Args:
            step: at which the loss rises; None: it is about a gap, or about a rise above its minimum.
        """
        alone = self.run.range_to_lowest if step is None else self.run.range_before(step)
        of = alone if self.baseline is None else self.baseline.range
        return f"{number(value)}%{'' if of is None else OF_RANGE}"

    def _alone(self, unit: str) -> str:
        if self._risen is not None:
            return f"The loss diverges: it stays above its own minimum from {unit} {self.since} on."
        if self.stepped_up is not None:
            step, percent = self.stepped_up
            return f"The loss goes up by {self.percents(percent, step)} at {unit} {step} and stays there, so harm is likely."
        visible = f" We could have seen a rise of {self.percents(self.run.visible_rise)} or more."
        visible = visible if np.isfinite(self.run.visible_rise) else ""
        return f"The loss does not rise above its own minimum.{visible} Without a baseline, we cannot see a gap."

    def _against_the_baseline(self, found: Gap, unit: str) -> str:
        measured = described(found, unit, self.seeds)
        whose = "the baseline's" if self.seeds is None else "the baselines' mean"
        whose = "the reference run's" if self.baseline is self.reference else whose
        if self.is_far_below:
            return f"The loss ends {self.percents(-found.percent)} below {whose}: {measured}. {CHECK_DATA}"
        if self.harm == "harmful":
            return f"The loss diverges from {unit} {self.since} on: {measured}."
        if self.harm == "likely" and self.stepped_up is not None:
            step, percent = self.stepped_up
            jump = f"The loss jumps by {self.percents(percent, step)} at {unit} {step} and ends above {whose}: {measured}."
            return f"{jump} Another seed may explain the gap but not the jump, so harm is likely."
        if self.harm == "gap":
            limit = f"less than the {self.max_gap:g}% that count as harm"
            since = "is" if self.since is None else f"stays from {unit} {self.since} on"
            return f"The loss {since} above {whose}: {measured}, {limit}."
        visible = f"We could have seen a gap of {self.percents(found.visible)} or more."
        if self.harm == "none":
            return f"The loss follows {whose}: {measured}. {visible}"
        if not found.paired and found.interval()[0] > self.max_gap:
            return f"The loss is above {whose}: {measured}. {self._another_seed(found)}"
        return f"We cannot tell whether the loss is {self.percents(self.max_gap)} above {whose}: {measured}. {visible}"

    def _another_seed(self, found: Gap) -> str:
        """What it may explain, in a sentence or two."""
        if self.seeds is None:
            return "Another seed may explain that; one pair cannot tell."
        reach = self.seeds.reach(LIKELY)
        if found.percent > reach:
            return "Fewer than 1 in 20 runs of another seed would end as far above; that alone is not sure enough."
        return f"Another seed may explain that: 1 in 20 would end {number(reach)}% or more above this mean."


def _interval_told(found: Gap) -> str:
    low, high = found.interval()
    return f"{found.percent:+.3g}%{OF_RANGE if found.of_range else ''} (95% interval {low:+.3g} to {high:+.3g}%)"


def described(found: Gap, unit: str, seeds: Seeds | None = None) -> str:
    """A gap, in a clause."""
    low, high = found.interval()
    order = "the same batches" if found.paired else "other batches"
    if seeds is not None:
        spread = f"a standard deviation of {number(seeds.spread)}%"
        order = f"the mean of {seeds.n} runs of other batches, whose last losses have {spread}"
    where = f"the last {found.n} losses, {unit}s {found.first} to {found.last}"
    if found.infinite:
        return f"over {where} no number is left"
    of = OF_RANGE if found.of_range else ""
    return f"a gap of {found.percent:+.3g}%{of} (95% interval {low:+.3g} to {high:+.3g}%; {where}; {order})"
