"""What is wrong with a run: rules that each print their evidence, and what they add up to. "Cannot tell" is an answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from ..errors import RecordError
from .compare import Comparison, compare, quantised
from .onset import onsets
from .rules.departure import departure, left_at_the_start
from .rules.finding import CAUSES, Finding
from .rules.multiplier import multiplier
from .rules.operand import Course, why
from .rules.outputs import reach
from .rules.settings import settings
from .rules.spikes import compared
from .run import Run

#: operands that are looked into, the first to leave
_LOOKED_INTO = 8
#: part of a run's samples that the rest is compared with where there is no good run, and how many those must be
_BEGINNING, _FEW = 0.25, 6


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and what it adds up to."""

    bad: Run
    good: Run | None
    #: with a good run only
    comparison: Comparison | None
    #: all that rules found, those of operands by onset
    findings: Sequence[Finding]
    #: the operand that it began in; None: none, or it cannot be told
    culprit: Finding | None
    #: one of CAUSES
    cause: str
    #: of it, one of CONFIDENCE
    confidence: str
    #: step from which the loss stays above the good run's, or else above its own minimum; None: it does not
    loss_left: int | None

    @property
    def harm(self) -> str:
        """`harmful`: the loss has left; `harmless so far`: something is out of order and the loss stays; `none`; `unknown`
        without losses."""
        if self.bad.loss.final is None or (self.good is not None and self.good.loss.final is None):
            return "unknown"
        if self.loss_left is not None:
            return "harmful"
        return "none" if self.cause == "none" else "harmless so far"

    @property
    def lead(self) -> int | None:
        """Steps from the culprit's onset to the loss's; None where either is missing."""
        if self.culprit is None or self.culprit.since is None or self.loss_left is None:
            return None
        return self.loss_left - self.culprit.since

    def verdict(self) -> str:
        """In a sentence or four."""
        unit = self.bad.unit
        told = {
            "harmful": f"The loss leaves at {unit} {self.loss_left}.",
            "harmless so far": "The loss stays: what follows is harmless so far.",
            "none": "Nothing is wrong with it that the record can tell.",
            "unknown": "There are no losses to tell harm by.",
        }
        sentences = [told[self.harm]]
        if self.culprit is not None:
            lead = "" if self.lead is None else f", {abs(self.lead)} {unit}s {'before' if self.lead >= 0 else 'after'} it"
            sentences.append(
                f"It begins in {self.culprit.operand} at {unit} {self.culprit.since}{lead}: "
                f"{CAUSES[self.cause]} ({self.confidence} confidence; {self.culprit.evidence})."
            )
        elif self.cause != "none":
            sentences.append(f"{CAUSES[self.cause].capitalize()} ({self.confidence} confidence).")
        if self.harm in ("none", "harmless so far"):
            sentences.append(
                "If downstream scores are bad all the same, look at what inference reads: `nemo-fp8-debug audit` shows the "
                "scales and weights of a checkpoint."
            )
        return " ".join(sentences)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "verdict": self.verdict(),
            "cause": self.cause,
            "confidence": self.confidence,
            "harm": self.harm,
            "loss_left": self.loss_left,
            "lead": self.lead,
            "culprit": None if self.culprit is None else asdict(self.culprit),
            "findings": [asdict(finding) for finding in self.findings],
        }


def diagnose(
    bad: str | os.PathLike[str],
    good: str | os.PathLike[str] | None = None,
    twin: str | os.PathLike[str] | None = None,
    by: str = "step",
) -> Diagnosis:
    """Say what is wrong with a run.

    Args:
        good: a run that went well; without it the run is compared with its own beginning.
        twin: a run that differs from `bad` in precision alone.
        by: see `compare`.

    Raises:
        RecordError: a record is missing or unreadable, or has nothing to go by.
        ConfigError: see `compare`.
    """
    if good is None:
        return _alone(Run.read(bad, by), Run.read(twin, by) if twin is not None else None)
    comparison = compare(good, bad, twin, by)
    return _added_up(comparison.bad, comparison.good, comparison.twin, comparison, comparison.left, comparison.loss_left)


def _alone(bad: Run, twin: Run | None) -> Diagnosis:
    if bad.figures.is_empty():
        raise RecordError(f"{bad.path} has no sampled step, so there is nothing to go by")
    reference = twin.loss if twin is not None else None
    left = bad.loss.diverged_at if reference is None else bad.loss.above(reference)
    return _added_up(bad, None, twin, None, onsets(_beginning(bad.figures), quantised(bad.figures)), left)


def _beginning(figures: pl.DataFrame) -> pl.DataFrame:
    """The first samples, spread over the whole run; none where they are too few to know what is usual."""
    steps = figures["step"].unique().sort()
    n = round(len(steps) * _BEGINNING)
    if n < _FEW:
        return figures.clear()
    stretch = (steps[-1] - steps[0]) / (steps[n - 1] - steps[0])
    spread = (pl.lit(steps[0]) + (pl.col("step") - steps[0]) * stretch).round().cast(pl.Int64)
    return figures.filter(pl.col("step") <= steps[n - 1]).with_columns(step=spread)


def _added_up(
    bad: Run, good: Run | None, twin: Run | None, comparison: Comparison | None, left: pl.DataFrame, loss_left: int | None
) -> Diagnosis:
    twin_since = twin.loss.above(good.loss) if twin is not None and good is not None else None
    operands = _operands(bad, good, left)
    start = left_at_the_start(bad.loss, loss_left)
    findings = [
        *departure(bad.loss, loss_left, twin_since),
        *settings(bad.fingerprint, good.fingerprint if good else None, start),
        *filter(None, [compared(bad.loss, good.loss if good else None)]),
        *multiplier(bad.steps, good.steps if good else None),
        *operands,
    ]
    latest = None if loss_left is None else loss_left + _interval(bad.figures)
    findings += filter(None, [reach(f, bad.outputs, good.outputs if good else None) for f in operands[:1]])
    culprit, cause, confidence = _cause(findings, operands, loss_left, latest, good is not None)
    return Diagnosis(bad, good, comparison, findings, culprit, cause, confidence, loss_left)


def _operands(bad: Run, good: Run | None, left: pl.DataFrame) -> list[Finding]:
    """Why each of the first operands to leave did."""
    firsts = left.unique(["layer", "role"], keep="first", maintain_order=True).head(_LOOKED_INTO)
    found = []
    for layer, role, since in firsts.select("layer", "role", "onset").rows():
        reference = Course.of(good.figures, layer, role) if good else None
        found.append(why(Course.of(bad.figures, layer, role), since, reference))
    return found


def _interval(figures: pl.DataFrame) -> int:
    """Steps between samples."""
    between = figures["step"].unique().sort().diff().median()
    return int(between) if isinstance(between, (int, float)) else 0


def _cause(
    findings: Sequence[Finding], operands: Sequence[Finding], loss_left: int | None, latest: int | None, paired: bool
) -> tuple[Finding | None, str, str]:
    """The culprit, the cause, and how sure that is.

    Args:
        latest: step at which an operand may have left that brought about the loss; None: the loss stays.
    """
    certain = [f for f in findings if f.cause == "multiplier" and f.confidence == "high"]
    if certain:
        return None, "multiplier", "high"
    if any(f.rule == "twin" for f in findings):
        return None, "software", "high"
    before = [f for f in operands if latest is None or _precedes(f, loss_left, latest)]
    first = next(iter(before), None)
    if first is None:
        if loss_left is None:
            return None, "none", "high" if paired else "low"
        return None, "software" if paired else "unknown", "medium" if paired else "low"
    return first, first.cause, first.confidence


def _precedes(found: Finding, loss_left: int | None, latest: int) -> bool:
    """Whether it can have brought the loss about: what the loss itself may have brought about must be there before it."""
    assert found.since is not None and loss_left is not None
    return found.since < loss_left if found.may_follow_the_loss else found.since <= latest
