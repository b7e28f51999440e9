"""Decide which finding shows the cause of a run's trouble.

A finding is a consequence if another finding explains it. Among all findings that are no consequences, the strongest shows
the cause. If several are equally strong, the earliest of them shows the cause. `finding.EXPLAINS` lists the kinds that each
kind explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import thresholds
from .finding import EXPLAINS, OF_FP8, Finding

_ORDER = tuple(EXPLAINS)


@dataclass(frozen=True)
class DecisionInputs:
    """The evidence for a decision, in addition to the findings."""

    #: step from which the run is harmed; None if no harm is known
    harmed_since: int | None
    #: number of steps from one sample to the next
    interval: int
    #: first sampled step at which scales no longer have their initial values
    settled: int
    #: whether there is a baseline
    paired: bool
    #: whether there are enough samples to see an operand leave its band before the loss rises
    judged: bool
    #: whether the loss diverges; a divergence changes values, but a loss that is merely above the baseline's loss does not
    diverges: bool = True
    #: False if a reference run in higher precision fails in the same way
    by_precision: bool = True
    #: `harmed_since` may be too early by up to this number of steps, because losses are smoothed
    slack: int = 0

    def bracket(self, found: Finding) -> tuple[int, int]:
        """Return the first and the last step at which the fault of a finding may have begun.

        A fault may begin at any step since the previous sample. If the fault is visible in the first samples, in which
        scales have initial values, it may have begun at any of these samples.
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
        """Return the last step at which the cause can become visible: one sample after the harm begins. Return None without
        harm.
        """
        return None if self.harmed_since is None else self.harmed_since + self.interval + self.slack


@dataclass(frozen=True)
class Decision:
    """The cause of a run's trouble, and the finding that shows the cause."""

    #: the chosen finding; None if the cause follows from the absence of findings
    finding: Finding | None
    #: one of CAUSES
    cause: str
    #: findings about other tensors that went wrong independently, early enough to add to the harm
    also: Sequence[Finding] = ()
    #: the most likely findings if no finding is certain, most likely first
    likeliest: Sequence[Finding] = ()

    @property
    def culprit(self) -> Finding | None:
        """Return the finding about the first faulty tensor, or None if no tensor is to blame or the tensor is unknown."""
        return self.finding if self.finding is not None and self.finding.tensor_name else None


def decide_cause(findings: Sequence[Finding], evidence: DecisionInputs) -> Decision:
    """Decide which cause the findings show."""
    candidates = [f for f in findings if _may_be_cause(f, findings, evidence)]
    first = [f for f in candidates if not any(_explains(other, f, evidence) for other in candidates if other is not f)]
    ranked = sorted(first, key=_rank)
    sure = [f for f in ranked if f.strength != "hint"]
    # A hint also occurs in healthy runs. It counts only if there is harm to explain, and a baseline that does not show the
    # hint.
    chosen = next(iter(sure or (ranked if evidence.paired and evidence.harmed_since is not None else [])), None)
    if chosen is not None:
        also = [f for f in candidates if f is not chosen and _is_also_wrong(f, chosen)]
        return Decision(chosen, chosen.cause, also)
    if evidence.harmed_since is None:
        return Decision(None, "none" if evidence.judged else "unknown", likeliest=ranked[:2])
    return Decision(None, "software" if evidence.paired and evidence.judged else "unknown", likeliest=ranked[:2])


def _rank(found: Finding) -> tuple[int, int, int, bool, float]:
    """Return the sort key of a finding: strength, time, precedence of its kind, whether it is about a tensor, and excess."""
    since = -1 if found.since is None else found.since
    return -found.strength_rank, since, _ORDER.index(found.kind), found.tensor_name is None, -(found.excess or 0.0)


def _may_be_cause(found: Finding, findings: Sequence[Finding], evidence: DecisionInputs) -> bool:
    """Return True if a finding names a cause, and the fault began early enough to cause the harm."""
    unnamed = found.cause == "unknown" and (found.tensor_name is None or found.strength == "hint")
    if found.cause == "none" or unnamed or (found.kind in OF_FP8 and not evidence.by_precision):
        return False
    if evidence.harmed_since is None or found.since is None or evidence.latest is None:
        return True
    if found.since > evidence.latest:
        return found.or_earlier
    # A fault in the first samples existed before any divergence of the loss could cause it. A loss that is merely above the
    # baseline's loss changes neither weights nor what runs between GEMMs.
    needs_divergence = found.kind in ("between", "weights") and not evidence.diverges
    late = found.since >= max(evidence.harmed_since, evidence.settled)
    follows = found.may_follow_the_loss and late and not needs_divergence
    return not follows or _stands_out(found, findings, evidence.latest)


def _stands_out(found: Finding, findings: Sequence[Finding], latest: int) -> bool:
    """Return True if at most one other tensor is out of band by a similar amount. A diverging loss pushes many out."""
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
    """Return a key for the tensor of a finding. GEMMs that read the same X get the same key."""
    return found.role, found.since, found.excess, found.layer and found.layer.rpartition(".")[0]


def _explains(other: Finding, found: Finding, evidence: DecisionInputs) -> bool:
    """Return True if `found` is a consequence of `other`.

    If both may have begun at the same step, the order of their kinds decides.
    """
    if found.kind not in EXPLAINS[other.kind] or other.strength_rank < found.strength_rank:
        return False
    (began, seen), (other_began, other_seen) = evidence.bracket(found), evidence.bracket(other)
    return other_seen < began or (other_began <= seen and _ORDER.index(other.kind) < _ORDER.index(found.kind))


def _is_also_wrong(found: Finding, culprit: Finding) -> bool:
    """Return True if another tensor also went wrong independently: because of its scale, or, like the culprit, because of
    its values.
    """
    if (
        found.tensor_name is None
        or found.strength == "hint"
        or found.tensor_name == culprit.tensor_name
        or found.kind not in OF_FP8
    ):
        return False
    alike = (found.cause, found.since) == (culprit.cause, culprit.since)
    near = (
        found.excess is not None and culprit.excess is not None and thresholds.TIMES_USUAL * found.excess >= culprit.excess
    )
    return not found.may_follow_the_loss or (alike and near)
