"""What findings add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.keys import GRADIENTS
from .rules.finding import NO_RECIPE, NOT_FP8, Finding

#: how many times as far out as others an operand must be, to be blamed if it is first seen with the loss; and how many may
#: be as far out as it, of those that are first seen with it
STANDS_OUT, TOGETHER = 4.0, 1
#: rules about what lies between GEMMs, and about steps of weights
BETWEEN = ("attention", "router", "steps of weights")
#: rules about the loss and about settings, whose findings put no value out of band
_NO_VALUES = ("divergence", "versions", "features")


@dataclass(frozen=True)
class Blame:
    """The answer."""

    #: what it rests on; None: on what is missing
    finding: Finding | None
    #: one of CAUSES
    cause: str
    #: how sure the cause is, one of CONFIDENCE; None: we found no cause, but cannot rule one out
    confidence: str | None
    #: other operands whose scale surely went wrong in time to add to the harm
    besides: Sequence[Finding] = ()

    @property
    def culprit(self) -> Finding | None:
        """The operand that it began in; None: none, or it cannot be told."""
        return self.finding if self.finding is not None and self.finding.operand else None


@dataclass(frozen=True)
class Evidence:
    """What the answer is made of."""

    #: of all rules, those of operands by onset
    findings: Sequence[Finding]
    #: step from which the run is harmed; None: it is not, or that cannot be told
    harmed_since: int | None
    #: step at which what caused the harm may have been seen first, one sample after it; None: there is no harm
    latest: int | None
    #: whether there are enough samples to have seen one leave the band
    judged: bool
    #: whether there is a baseline
    paired: bool
    #: whether the loss follows the baseline's, by an interval that excludes harm
    unharmed: bool = False
    #: False if the run does not end above a reference run in higher precision
    by_precision: bool = True

    def of(self, rule: str) -> Finding | None:
        """What a rule found first."""
        return next((f for f in self.findings if f.rule == rule), None)

    def before(self) -> list[Finding]:
        """Operands that can have caused the harm; all, if there is none."""
        return [f for f in self.findings if f.rule == "operand" and (self.latest is None or self._precedes(f))]

    def besides(self, culprit: Finding) -> list[Finding]:
        """Other operands that surely went wrong in time to add to the harm: their scale did, which no loss brings about, or
        their values as those of the culprit, at the same sample and as far."""
        sure = [
            f for f in self.before() if f.confidence == "high" and f.cause != "nonfinite" and f.operand != culprit.operand
        ]
        return [f for f in sure if not f.may_follow_the_loss or _alike(f, culprit)]

    def _precedes(self, found: Finding) -> bool:
        """Whether it can have caused the harm: what that itself may cause must be there before it."""
        assert found.since is not None and self.harmed_since is not None and self.latest is not None
        if not found.may_follow_the_loss or found.since < self.harmed_since:
            return found.since <= self.latest
        return found.since <= self.latest and self._stands_out(found)

    def _stands_out(self, found: Finding) -> bool:
        """Whether hardly another operand is nearly as far out by then: a loss that diverges changes many."""
        assert self.latest is not None and found.excess is not None
        near = [
            f
            for f in self.findings
            if f.rule == "operand"
            and not _same_tensor(f, found)
            and (f.since or 0) <= self.latest
            and f.excess is not None
            and STANDS_OUT * f.excess >= found.excess
        ]
        tensors = {_tensor(f) for f in near}
        return len(tensors) <= TOGETHER and all(f.cause == found.cause for f in near)


def _alike(found: Finding, culprit: Finding) -> bool:
    """Whether both show the same since the same sample, and about as far."""
    near = found.excess is not None and culprit.excess is not None and STANDS_OUT * found.excess >= culprit.excess
    return near and (found.cause, found.since) == (culprit.cause, culprit.since)


def _same_tensor(one: Finding, other: Finding) -> bool:
    """Whether both are an X that several GEMMs read, or the same operand."""
    return _tensor(one) == _tensor(other)


def _tensor(found: Finding) -> tuple[object, ...]:
    """The same of all findings about one tensor."""
    return found.role, found.since, found.excess, found.layer and found.layer.rpartition(".")[0]


def blamed(evidence: Evidence) -> Blame:
    """The culprit, the cause, how sure that is, and what else went wrong by itself."""
    blame = _blamed(evidence)
    if not evidence.by_precision and blame.cause not in (*NOT_FP8, *NO_RECIPE, "none", "unknown"):
        plain = next((f for f in evidence.findings if f.cause in NO_RECIPE and f.confidence != "low"), None)
        found = _nothing_found(evidence, bool(evidence.before()))
        return found if plain is None else Blame(plain, plain.cause, plain.confidence)
    return blame if blame.culprit is None else replace(blame, besides=evidence.besides(blame.culprit))


def _blamed(evidence: Evidence) -> Blame:
    if (wrong := _wrong_by_proof(evidence)) is not None:
        return Blame(wrong, wrong.cause, wrong.confidence)
    multiplied = next((f for f in evidence.findings if f.cause == "multiplier" and f.confidence == "high"), None)
    if multiplied is not None:
        return Blame(multiplied, "multiplier", "high")
    if (changed := evidence.of("recipe")) is not None:
        return Blame(changed, changed.cause, changed.confidence)
    before = evidence.before()
    if (rate := _learning_rate(evidence, before)) is not None:
        return Blame(rate, rate.cause, rate.confidence)
    if evidence.of("reference") is not None:
        # A scale that went wrong before is evidence to the contrary.
        return Blame(None, "software", "medium" if any(f.confidence == "high" for f in before) else "high")
    # Without a baseline a hint is no more than what metrics of runs that go well do, too; and gradients follow the loss.
    hinted = [f for f in before if not _follows(f)]
    explain = evidence.paired and evidence.harmed_since is not None
    sure = [f for f in before if f.confidence != "low"]
    first = next(iter([*sure, *(hinted if explain else [])]), None)
    lost, other = evidence.of("nonfinite"), _besides_operands(evidence, first)
    if other is not None and not (lost is not None and _is_earlier(lost, other)):
        return Blame(other, other.cause, other.confidence)
    if first is not None and not (lost is not None and _is_earlier(lost, first)):
        told = _behind_gradients(evidence, first) or first
        return Blame(told, told.cause, told.confidence)
    if lost is not None:
        return Blame(lost, lost.cause, lost.confidence)
    if (zero := _no_gradients(evidence)) is not None:
        return Blame(zero, zero.cause, zero.confidence)
    stopped = evidence.of("optimizer steps")
    if stopped is not None and stopped.confidence == "high":
        return Blame(stopped, stopped.cause, "high")
    if not before and (found := _around_operands(evidence)) is not None:
        return Blame(found, found.cause, found.confidence)
    return _nothing_found(evidence, bool(before))


def _wrong_by_proof(evidence: Evidence) -> Finding | None:
    """What needs no comparison, in time to have caused the harm: a wrong product or sum, copies that differ."""
    found = [f for f in evidence.findings if f.rule in ("product", "reduction", "replicas") and f.since is not None]
    in_time = [f for f in found if evidence.latest is None or (f.since or 0) <= evidence.latest]
    return min(in_time, key=lambda f: f.since or 0, default=None)


def _learning_rate(evidence: Evidence, before: Sequence[Finding]) -> Finding | None:
    """The learning rate, if it departed before the harm and no scale went wrong earlier."""
    rate = evidence.of("learning rate")
    if rate is None or rate.confidence == "low" or rate.since is None:
        return None
    told = [f for f in before if f.confidence != "low" and f.since is not None]
    if any(f.since < rate.since for f in told if f.since is not None and not f.may_follow_the_loss):
        return None
    if evidence.latest is None:  # it explains operands that went out after it, or is so high that nothing else is needed
        return rate if told or rate.severity == 2 else None
    return rate if rate.since <= evidence.latest else None


def _besides_operands(evidence: Evidence, first: Finding | None) -> Finding | None:
    """Gradients that are multiplied, or weights that shrink, in time to have caused the harm and what operands show.

    Args:
        first: the first operand out of band; None: there is none.
    """
    for found in evidence.findings:
        if found.rule not in ("gradient norm", "weights") or found.cause in ("unknown", "dead") or found.since is None:
            continue
        in_time = evidence.latest is None or found.since <= evidence.latest
        # A multiplied gradient changes every dY, and no X or W at that step.
        explains = first is None or (
            first.since is not None and found.since <= first.since and (found.rule == "weights" or first.role in GRADIENTS)
        )
        if in_time and explains:
            return found
    return None


def _no_gradients(evidence: Evidence) -> Finding | None:
    """Return a gradient norm that stays zero, in time to have caused the harm. Operands that are zero go before it."""
    zero = next((f for f in evidence.findings if (f.rule, f.cause) == ("gradient norm", "dead")), None)
    if zero is None or zero.confidence == "low" or zero.since is None:
        return None
    return zero if evidence.latest is None or zero.since <= evidence.latest else None


def _around_operands(evidence: Evidence) -> Finding | None:
    """Weights that no longer learn, inputs or a loss that go to another level, in time to be the harm."""
    still = evidence.of("still weights")
    # Momentum hides it for a while, so with a baseline it may have begun before the loss did, as nothing else has. Alone, a
    # loss that diverges for another reason may have brought it about.
    if still is not None and (evidence.paired or evidence.latest is None or (still.since or 0) <= evidence.latest):
        return still
    moved, level = evidence.of("inputs"), evidence.of("level")
    if moved is not None and (evidence.latest is None or (moved.since or 0) <= evidence.latest):
        return _between_gemms(evidence, moved.since or 0) or moved
    in_time = level is not None and evidence.latest is not None and (level.since or 0) <= evidence.latest
    return level if in_time else None


def _is_earlier(lost: Finding, first: Finding) -> bool:
    """Whether the first NaN came before, or is that of, the first operand out of band."""
    assert lost.since is not None and first.since is not None
    return lost.since < first.since or (lost.since == first.since and first.cause == "nonfinite")


def _behind_gradients(evidence: Evidence, first: Finding) -> Finding | None:
    """What went wrong between GEMMs by then, if all that operands show is gradients held worse because of their values."""
    if not _follows(first):
        return None
    return _between_gemms(evidence, first.since)


def _follows(found: Finding) -> bool:
    """Whether it is about gradients whose values make them be held worse: they follow from much."""
    return found.role in GRADIENTS and found.may_follow_the_loss


def _between_gemms(evidence: Evidence, latest: int | None) -> Finding | None:
    """What went wrong first between GEMMs, or with the steps of a weight, if it did by then; None: whenever it did."""
    found = [f for f in evidence.findings if f.rule in BETWEEN and f.since is not None]
    in_time = [f for f in found if latest is None or (f.since or 0) <= latest]
    return min(in_time, key=lambda f: f.since or 0, default=None)


def _nothing_found(evidence: Evidence, hints: bool) -> Blame:
    found = _between_gemms(evidence, None if evidence.harmed_since is None else evidence.harmed_since - 1)
    # Without a baseline and without harm, logits may grow and weights stand still in a run that goes well, too.
    if found is not None and (evidence.paired or evidence.harmed_since is not None):
        return Blame(found, found.cause, found.confidence)
    if not evidence.judged or (not evidence.paired and (hints or found is not None)):
        return Blame(None, "unknown", "low")
    if evidence.harmed_since is None:
        rate = evidence.of("learning rate")
        if evidence.paired and rate is not None and rate.confidence != "low":
            return Blame(rate, rate.cause, rate.confidence)  # nothing else is found, and runs are not alike
        out = [f for f in evidence.findings if f.rule not in _NO_VALUES and f.cause != "none"]
        return Blame(None, "none", "high" if evidence.paired and evidence.unharmed and not out else None)
    return Blame(None, "software", "medium") if evidence.paired else Blame(None, "unknown", "low")
