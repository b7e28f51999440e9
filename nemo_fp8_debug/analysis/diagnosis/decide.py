"""The decision: which finding a run's trouble began with.

All findings are put in one list. One that another explains is a consequence. Of the others the strongest counts, of equally
strong ones the earliest. `finding.EXPLAINS` says which kind explains which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import thresholds
from .finding import EXPLAINS, OF_FP8, Finding

_ORDER = tuple(EXPLAINS)


@dataclass(frozen=True)
class Circumstances:
    """What the decision rests on besides findings."""

    #: step from which the run is harmed; None: it is not, or nobody knows
    harmed_since: int | None
    #: steps from one sample to the next
    interval: int
    #: first step whose scales are not made up
    settled: int
    #: whether there is a baseline
    paired: bool
    #: whether samples are enough to see an operand leave before the loss does
    judged: bool
    #: whether the loss rises for good, which changes values: one that only lies above the baseline's changes none
    diverges: bool = True
    #: False if a reference run in higher precision does the same
    by_precision: bool = True
    #: steps by which smoothing may place the harm too early
    slack: int = 0

    def bracket(self, found: Finding) -> tuple[int, int]:
        """Return the first step at which a finding may have begun, and the last one.

        Three samples in a row show what one does not, so a sample more or less tells nothing. Scales of the first samples
        are made up, so they do not tell in which of them something began.
        """
        if found.since is None:
            return -1, -1
        if found.is_exact:
            return found.since, found.since
        if found.slack:
            return found.since, found.since + found.slack
        if found.or_earlier:
            return -1, found.since + self.interval
        last = self.settled if found.since < self.settled else found.since + self.interval - 1
        return found.since - self.interval + 1, last

    @property
    def latest(self) -> int | None:
        """The last step at which the cause of the harm may be seen first: one sample after it; None: there is no harm."""
        return None if self.harmed_since is None else self.harmed_since + self.interval + self.slack


@dataclass(frozen=True)
class Decision:
    """The answer."""

    #: what it rests on; None: on what is missing
    finding: Finding | None
    #: one of CAUSES
    cause: str
    #: other tensors that went wrong by themselves in time to add to the harm
    also: Sequence[Finding] = ()
    #: the likeliest causes if none is sure, the likelier first
    likeliest: Sequence[Finding] = ()

    @property
    def culprit(self) -> Finding | None:
        """The tensor that it began in; None: none, or nobody knows."""
        return self.finding if self.finding is not None and self.finding.operand else None


def decide(findings: Sequence[Finding], evidence: Circumstances) -> Decision:
    """Return the cause that findings add up to."""
    candidates = [f for f in findings if _may_be_cause(f, findings, evidence)]
    first = [f for f in candidates if not any(_explains(other, f, evidence) for other in candidates if other is not f)]
    ranked = sorted(first, key=_rank)
    sure = [f for f in ranked if f.strength != "hint"]
    # A hint also occurs in healthy runs. It counts if there is harm to explain and a baseline that does not show it.
    chosen = next(iter(sure or (ranked if evidence.paired and evidence.harmed_since is not None else [])), None)
    if chosen is not None:
        also = [f for f in candidates if f is not chosen and _is_also_wrong(f, chosen)]
        return Decision(chosen, chosen.cause, also)
    if evidence.harmed_since is None:
        return Decision(None, "none" if evidence.judged else "unknown", likeliest=ranked[:2])
    return Decision(None, "software" if evidence.paired and evidence.judged else "unknown", likeliest=ranked[:2])


def _rank(found: Finding) -> tuple[int, int, int, bool, float]:
    """Order by strength, then time, then precedence, tensors before the run as a whole, then how far out."""
    since = -1 if found.since is None else found.since
    return -found.weight, since, _ORDER.index(found.kind), found.operand is None, -(found.excess or 0.0)


def _may_be_cause(found: Finding, findings: Sequence[Finding], evidence: Circumstances) -> bool:
    """Return True if a finding names a cause, and was there in time to do the harm."""
    unnamed = found.cause == "unknown" and (found.operand is None or found.strength == "hint")
    if found.cause == "none" or unnamed or (found.kind in OF_FP8 and not evidence.by_precision):
        return False
    if evidence.harmed_since is None or found.since is None or evidence.latest is None:
        return True
    if found.since > evidence.latest:
        return found.or_earlier
    # What the first samples show was there before any loss could bring it about.
    between = found.kind == "between" and not evidence.diverges
    late = found.since >= max(evidence.harmed_since, evidence.settled)
    follows = found.may_follow_the_loss and late and not between
    return not follows or _stands_out(found, findings, evidence.latest)


def _stands_out(found: Finding, findings: Sequence[Finding], latest: int) -> bool:
    """Return True if at most one other tensor is out by nearly as much: a loss that diverges pushes many out."""
    if found.excess is None:
        return False
    near = [
        f
        for f in findings
        if f.excess is not None and _tensor(f) != _tensor(found)
        if (f.since or 0) <= latest and thresholds.TIMES_USUAL * f.excess >= found.excess
    ]
    return len({_tensor(f) for f in near}) <= 1 and all(f.cause == found.cause for f in near)


def _tensor(found: Finding) -> tuple[object, ...]:
    """Return what findings about one tensor share: several GEMMs may read the same X."""
    return found.role, found.since, found.excess, found.layer and found.layer.rpartition(".")[0]


def _explains(other: Finding, found: Finding, evidence: Circumstances) -> bool:
    """Return True if a finding is a consequence of another one.

    If both may have begun at the same step, the order of kinds decides.
    """
    if found.kind not in EXPLAINS[other.kind] or other.weight < found.weight:
        return False
    (began, seen), (other_began, other_seen) = evidence.bracket(found), evidence.bracket(other)
    return other_seen < began or (other_began <= seen and _ORDER.index(other.kind) < _ORDER.index(found.kind))


def _is_also_wrong(found: Finding, culprit: Finding) -> bool:
    """Return True if another tensor went wrong by itself too: its scale did, or its values as those of the culprit."""
    if found.operand is None or found.strength == "hint" or found.operand == culprit.operand or found.kind not in OF_FP8:
        return False
    alike = (found.cause, found.since) == (culprit.cause, culprit.since)
    near = (
        found.excess is not None and culprit.excess is not None and thresholds.TIMES_USUAL * found.excess >= culprit.excess
    )
    return not found.may_follow_the_loss or (alike and near)
