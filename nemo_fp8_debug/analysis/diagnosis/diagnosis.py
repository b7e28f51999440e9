"""What was found of a run, and what it adds up to, in words and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import polars as pl

from ...core.keys import SHOWN_AS
from ...core.scale_sources import QUANTIZED, notice
from ..comparison.comparison import Comparison
from ..comparison.onset import IN_A_ROW
from ..formatting import jsonable
from ..loss.outcome import LossOutcome
from ..runs.grid import interval_of
from ..runs.run import Run
from ..runs.settings import coverage_notes
from .consequences import consequences
from .culprit import Blame
from .early_warning import early_warning
from .events import Event, events
from .harm import is_likely
from .rules.finding import CAUSES, NO_RECIPE, NOT_FP8, Finding


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and what it adds up to."""

    run: Run
    baseline: Run | None
    #: with a baseline only
    comparison: Comparison | None
    #: all that rules found, those of operands by onset
    findings: Sequence[Finding]
    blame: Blame
    #: against the baseline's, or else the reference run's, or else its own minimum
    loss: LossOutcome
    #: step from which the optimizer takes none any longer; None: it does, or is not known to skip
    stopped_at: int | None = None
    #: what stands for a baseline, in a sentence; empty with one
    judged_by: str = ""
    #: what is wrong with the run by itself and with its baseline too, if nothing sets the two apart
    shared: Sequence[Finding] = ()
    #: what of the run the baseline does not show, in clauses
    not_compared: Sequence[str] = ()

    @property
    def culprit(self) -> Finding | None:
        """The operand that it began in; None: none, or it cannot be told."""
        return self.blame.culprit

    @property
    def cause(self) -> str:
        """One of CAUSES."""
        return self.blame.cause

    @property
    def confidence(self) -> str | None:
        """How sure the cause is, one of CONFIDENCE; None: we found no cause, but cannot rule one out."""
        return self.blame.confidence

    @property
    def about_fp8(self) -> bool | None:
        """Whether the cause is how FP8 represents operands; None: a reference run is given, and nobody can tell.

        With a reference run, FP8 is the cause only if the run ends above the reference run.
        """
        if self.cause in NOT_FP8:
            return False
        return True if self.loss.reference is None else self.loss.differs_from_reference

    @property
    def divergence_step(self) -> int | None:
        """Step from which the run is harmed: its loss stays above, or no step is taken; None: none that is known."""
        known = [step for step in (self.loss.harmful_since, self.stopped_at) if step is not None]
        return min(known, default=None)

    @property
    def harm(self) -> str:
        """`harmful`: the loss has diverged, or no step is taken; `likely`: without a baseline it goes up to another level,
        or it cannot tell and what is found harms most runs; `gap`: it is above the baseline's by less than counts as harm;
        `harmless so far`: something is out of order and the loss follows the baseline's; `none`; `unknown`."""
        if self.loss.harm == "harmful" or self.stopped_at is not None:
            return "harmful"
        if self.loss.harm == "likely" or is_likely(self.loss, self.blame.finding, self.run.metrics.steps):
            return "likely"
        if self.loss.harm != "none":
            return self.loss.harm
        return "none" if self.cause in ("none", "unknown") else "harmless so far"

    @property
    def notes(self) -> Sequence[str]:
        """What to bear in mind: of the comparison with the baseline, and of operands that the divergence has changed."""
        of_run = [*filter(None, [notice(self.run.quantization)]), *coverage_notes(self.run.fingerprint)]
        later = consequences(self.findings, self.divergence_step, self.run.unit) if self.cause in NOT_FP8 else []
        alone = [*of_run, *([self.judged_by] if self.judged_by and self.run.quantization == QUANTIZED else [])]
        return [*(alone if self.comparison is None else self.comparison.notes), *self._between_samples(), *later]

    def _between_samples(self) -> list[str]:
        """What samples cannot show, where no operand is named."""
        apart = interval_of(self.run.metrics.steps)
        if self.culprit is not None or apart <= 1:
            return []
        unit = self.run.unit
        return [
            f"Operands are sampled every {apart:g} {unit}s: what lasted for less may lie between two samples, and what "
            f"lasted for less than {IN_A_ROW * apart:g} {unit}s is seen only if it was far out."
        ]

    @property
    def events(self) -> Sequence[Event]:
        """What happened, in order."""
        return events(self.findings, self.warning)

    @cached_property
    def warning(self) -> tuple[int, float, str, str] | None:
        """The first sample at which an operand was beyond what any healthy one does: step, how many times its limit, layer
        and role; None: none was."""
        return next(iter(early_warning(self.run).filter(pl.col("score") > 1).head(1).rows()), None)

    @property
    def lead(self) -> int | None:
        """Steps from the culprit's onset to the loss's; None where either is missing."""
        if self.culprit is None or self.culprit.since is None or self.divergence_step is None:
            return None
        return self.divergence_step - self.culprit.since

    @property
    def advice(self) -> Sequence[str]:
        """What to do, a sentence each; nothing about FP8 if that is not the cause."""
        if self.cause in NO_RECIPE and self.blame.finding is not None:
            return [self.blame.finding.advice]
        fits = [f for f in self.findings if f.cause in NOT_FP8] if self.cause in NOT_FP8 else self.findings
        # NaN and zeros follow from a scale that went wrong, too.
        fits = [f for f in fits if f.cause not in NO_RECIPE] if self.culprit is not None else fits
        return list(dict.fromkeys(finding.advice for finding in fits if finding.advice))

    def _warning_told(self) -> dict[str, Any] | None:
        if self.warning is None:
            return None
        step, score, layer, role = self.warning
        return {"step": step, "score": score, "operand": f"{SHOWN_AS[role]} of {layer}"}

    def verdict(self) -> str:
        """In a sentence or four."""
        reference = self.loss.describe_reference(self.run.unit)
        sentences = [self._harm_told(), *([reference] if reference else []), self._cause_told(), *self.describe_rest()]
        if self.harm in ("none", "gap", "harmless so far"):
            sentences.append(
                "If downstream scores are run all the same, look at what inference reads: `nemo-fp8-debug audit` shows the "
                "scales and weights of a checkpoint."
            )
        return " ".join(sentences)

    def _harm_told(self) -> str:
        told = self.loss.told(self.run.unit)
        if self.harm == "likely" and self.loss.harm != "likely":
            told += " But what follows harms most runs, so harm is likely."
        if self.stopped_at is None:
            return told
        stopped = f"The optimizer takes no step from {self.run.unit} {self.stopped_at} on."
        return stopped if self.loss.harmful_since is None else f"{told} {stopped}"

    def _cause_told(self) -> str:
        sure = f"{self.confidence} confidence"
        found, means = self.blame.finding, self.describe_cause()
        if self.culprit is not None:
            where = f"{self.culprit.operand} {self._since_told(self.culprit)}"
            return f"It begins with {where}: {means} ({sure}; {self.culprit.evidence}).{self._besides_told()}"
        if found is not None and found.cause == self.cause:
            return f"{means[0].upper()}{means[1:]} ({sure}): {found.evidence}."
        if self.cause == "none":
            return self.describe_nothing()
        if self.cause == "unknown":
            return (
                "The record cannot tell why."
                if self.harm in ("harmful", "likely")
                else "The record cannot tell whether anything is wrong."
            )
        return f"{means[0].upper()}{means[1:]} ({sure})."

    def describe_cause(self) -> str:
        """Return what the cause means; a learning rate that did no harm is the cause of nothing."""
        harmless = self.cause == "learning_rate" and self.harm not in ("harmful", "likely")
        return "the learning rate differs" if harmless else CAUSES[self.cause]

    def describe_nothing(self) -> str:
        """Return that we found no cause, and what we could have missed."""
        if self.confidence is not None:
            return f"The record shows nothing wrong ({self.confidence} confidence)."
        out = [f for f in self.findings if f.rule == "operand"]
        if out:
            told = "; ".join(f"{f.operand} since {self.run.unit} {f.since} ({CAUSES[f.cause]})" for f in out[:3])
            seen = f"Out of band without a visible effect on the loss: {told}."
        else:
            seen = "We saw no operand out of band."
        return " ".join([seen, *self._list_missed()])

    def _list_missed(self) -> list[str]:
        """Return what we could have missed, a sentence each."""
        missed = [f"We could have missed {part}." for part in self.not_compared]
        if self.baseline is None:
            missed.append("We could have missed a loss that is too high, and a fault that was there from the first step on.")
        elif self.loss.harm != "none":
            both = all("lr" in each.steps.columns and each.steps["lr"].count() for each in (self.run, self.baseline))
            missed.append(
                f"We could have missed a fault in {'' if both else 'learning rate, '}data, kernels or communication."
            )
        tables = {"verified products": self.run.table("verification"), "optimizer states": self.run.table("states")}
        absent = [name for name, rows in tables.items() if rows.is_empty()]
        if absent:
            missed.append(f"The record has no {' and no '.join(absent)}, so we could not see wrong ones.")
        return missed

    def describe_rest(self) -> list[str]:
        """Return what else a reader must know: settings that left the baseline's, and what both runs share."""
        told = []
        for f in self.findings:
            follows = self.divergence_step is not None and f.since is not None and f.since > self.divergence_step
            if f is self.blame.finding or (follows and f.rule == "gradient norm"):
                continue  # gradients follow a loss that diverges
            if f.rule in ("learning rate", "gradient norm"):
                rate = f"The learning rate {'changes' if self.baseline is None else 'differs'}: "
                told.append(f"{rate if f.rule == 'learning rate' else 'Also, '}{f.evidence}.")
        if self.shared:
            each = [f.evidence if f.operand is None else self._shared_told(f) for f in self.shared[:3]]
            told.append(f"The baseline has the same trouble, so a comparison cannot show it: {'; '.join(each)}.")
        return told

    def _shared_told(self, found: Finding) -> str:
        return f"{found.operand} since {self.run.unit} {found.since} ({CAUSES[found.cause]})"

    def _besides_told(self) -> str:
        others = [f"{f.operand} from {self.run.unit} {f.since} on ({CAUSES[f.cause]})" for f in self.blame.besides]
        return f" Also wrong by then: {'; '.join(others)}." if others else ""

    def _since_told(self, culprit: Finding) -> str:
        unit = self.run.unit
        if culprit.since == self.run.metrics.steps[0]:
            return "from the start or before"
        lead = "" if self.lead is None else f", {_counted(self.lead, unit)} {'before' if self.lead >= 0 else 'after'} it"
        return f"at {unit} {culprit.since}{lead}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        plain: dict[str, Any] = jsonable(
            {
                "verdict": self.verdict(),
                "notes": list(self.notes),
                "cause": self.cause,
                "about_fp8": self.about_fp8,
                "confidence": self.confidence,
                "harm": self.harm,
                "gap": None if self.loss.gap is None else self.loss.gap.to_json(),
                "reference": self._reference_json(),
                "seeds": None if self.loss.seeds is None else self.loss.seeds.to_json(),
                "divergence_step": self.divergence_step,
                "lead": self.lead,
                "culprit": None if self.culprit is None else asdict(self.culprit),
                "early_warning": self._warning_told(),
                "also_wrong": [asdict(finding) for finding in self.blame.besides],
                "events": [asdict(event) for event in self.events],
                "findings": [asdict(finding) for finding in self.findings],
                "shared": [asdict(finding) for finding in self.shared],
            }
        )
        return plain

    def _reference_json(self) -> dict[str, Any] | None:
        """The reference run's gap to the baseline, the run's gap to the reference run, and whether they differ."""
        other, apart = self.loss.reference_outcome, self.loss.gap_to_reference
        if other is None:
            return None
        return {
            "gap": None if other.gap is None else other.gap.to_json(),
            "run_above": None if apart is None else apart.to_json(),
            "differs": self.loss.differs_from_reference,
        }


def _counted(lead: int, unit: str) -> str:
    """So many steps, as words."""
    return f"{abs(lead)} {unit}{'' if abs(lead) == 1 else 's'}"
