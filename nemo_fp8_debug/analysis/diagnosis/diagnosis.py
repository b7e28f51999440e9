"""A diagnosis: the answer in words and as plain values, and the advised change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...core.keys import Key
from ...errors import ConfigError, RecordError
from ..formatting import make_jsonable
from ..runs.run import Run
from .answer import DiagnosisResult
from .finding import NO_RECIPE
from .flags import find_blamed_tensor, flag_operands_to_change
from .narrator import tell_advice, tell_headline, tell_verdict

if TYPE_CHECKING:  # recommendation imports torch
    from ..recommendation.options import Budget
    from ..recommendation.recommend import Recommendation, TensorFix


@dataclass(frozen=True)
class Diagnosis(DiagnosisResult):
    """The answer about a run, with methods that describe it in words and recommend a change."""

    #: whether to include advice that needs a replay. A replay imports torch and takes seconds
    replays: bool = True

    def recommend(self, budget: Budget | None = None, operands: Sequence[Key] | None = None) -> Recommendation:
        """For each operand that the diagnosis flags, return the first change on the ladder that helps.

        Args:
            budget: the largest errors allowed for an operand; None: `Budget()`.
            operands: operands to fix instead, (layer, role) each.

        Raises:
            RecordError: the record has no such operand, or no sampled step.

        Example:
            >>> found = diagnose("runs/bad", "runs/baseline").recommend(operands=[("layers.0.fc2", "input")])
            >>> [(change.layer, change.recipe) for change in found.plan.changes]
            [('layers.0.fc2', 'current-e5m2')]
        """
        from ..recommendation.options import Budget  # imports torch
        from ..recommendation.recommend import find_operands_over_budget, recommend

        budget, flags, run = budget or Budget(), flag_operands_to_change(self), self.run
        if run.axis is not None:  # flags count consumed samples, but plans count steps
            run = Run.read(run.path).rename_layers(run.renamed_to)
            flags = {key: replace(flag, out=None) for key, flag in flags.items()}
        if not operands:
            alone = self.baseline is None and self.is_fp8_the_cause is not False and self.cause not in NO_RECIPE
            operands = list(dict.fromkeys([*flags, *(find_operands_over_budget(run, budget) if alone else ())]))
        return recommend(run, operands, budget, flags)

    def find_fix_of_blamed_tensor(self, recommended: Recommendation) -> TensorFix | None:
        """Return the recommended change of the blamed tensor, or None if no cast is to blame."""
        blamed, own = find_blamed_tensor(self), self.run.recorded_names
        if blamed is None or blamed.layer is None:
            return None
        key = (own.get(blamed.layer, blamed.layer), blamed.role)
        return next((each for each in recommended.findings if (each.layer, each.role) == key), None)

    @cached_property
    def fix(self) -> TensorFix | None:
        """Return the first change on the ladder that helps the blamed tensor, or None if no change helps."""
        blamed = find_blamed_tensor(self)
        if not self.replays or blamed is None or blamed.layer is None or blamed.role is None:
            return None
        try:
            return self.find_fix_of_blamed_tensor(self.recommend(operands=[(blamed.layer, blamed.role)]))
        except (ConfigError, RecordError):
            return None

    @cached_property
    def advice(self) -> Sequence[str]:
        """Return sentences with the next steps. Headline, verdict, plan and command print only the first sentence."""
        return tell_advice(self, self.fix) if self.replays or find_blamed_tensor(self) is None else []

    def verdict(self) -> str:
        """Return the verdict in a few sentences."""
        return tell_verdict(self, self.advice)

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain values."""
        other = self.loss.reference_outcome
        plain: dict[str, Any] = make_jsonable(
            {
                "headline": tell_headline(self),
                "verdict": self.verdict(),
                "next": self.advice,
                "fix": self.fix,
                "notes": self.notes,
                "cause": self.cause,
                "about_fp8": self.is_fp8_the_cause,
                "confidence": self.confidence,
                "harm": self.harm,
                "gap": self.loss.gap,
                "reference": other
                and {
                    "gap": other.gap,
                    "run_above": self.loss.gap_to_reference,
                    "differs": self.loss.differs_from_reference,
                },
                "seeds": self.loss.seeds,
                "divergence_step": self.divergence_step,
                "diverges": self.loss.diverges,
                "lead": self.steps_before_divergence,
                "culprit": self.culprit,
                "cause_finding": self.decision.finding,
                "likeliest": self.decision.likeliest,
                "details": self.culprit_details,
                "early_warning": self.first_early_warning
                and dict(zip(("step", "score", "layer", "role"), self.first_early_warning, strict=True)),
                "also_wrong": self.decision.also,
                "events": self.events,
                "findings": self.findings,
                "shared": self.shared,
                "not_compared": self.not_compared,
            }
        )
        return plain
