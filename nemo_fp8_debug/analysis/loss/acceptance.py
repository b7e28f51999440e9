"""Whether a run may be accepted by its training loss and by the losses of its evaluations, all together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .curve import LossCurve
from .gap import FEWEST, PART
from .gate import CANNOT_TELL, FAIL, PASS, Gate, gate

TRAINING = "training"


class Recorded(Protocol):
    """What is read of a run."""

    @property
    def loss(self) -> LossCurve:
        """Of training."""

    @property
    def validation(self) -> Mapping[str, LossCurve]:
        """Losses of evaluations by name."""


@dataclass(frozen=True)
class Acceptance:
    """The answer, with what it rests on."""

    #: by training
    loss: Gate
    #: by each loss of the evaluations
    validation: Mapping[str, Gate]
    #: losses of evaluations that are not judged, and why
    not_judged: Mapping[str, str]

    @property
    def gates(self) -> Mapping[str, Gate]:
        """All by name, that of training first."""
        return {TRAINING: self.loss} | {f"validation, {name}": each for name, each in self.validation.items()}

    @property
    def outcome(self) -> str:
        """`pass`: all gaps are below the limit; `fail`: one is above it, or a loss is far below; `cannot tell`."""
        found = [each.outcome for each in self.gates.values()]
        return FAIL if FAIL in found else CANNOT_TELL if CANNOT_TELL in found else PASS

    @property
    def decisive(self) -> str:
        """The name of the first loss that has this outcome."""
        return next(name for name, each in self.gates.items() if each.outcome == self.outcome)

    def to_json(self) -> dict[str, Any]:
        """Plain values: those of the training loss, and by name those of evaluations."""
        validation = {name: each.to_json() for name, each in self.validation.items()}
        whole = {"outcome": self.outcome, "validation": validation, "not_judged": dict(self.not_judged)}
        return self.loss.to_json() | whole


def accept(
    runs: Sequence[Recorded],
    baselines: Sequence[Recorded],
    max_gap: float,
    part: float = PART,
    after: int | None = None,
) -> Acceptance | None:
    """Judge runs by all losses that they and their baselines record; arguments as those of `gate`.

    A gap of an evaluation is one of the same data, so its noise is that of the weights alone, which move slowly: fewer than
    20 evaluations give no interval that holds what it says.

    Returns:
        None if a run and its baseline share fewer than 10 training losses, or the baseline's are all zero.

    Raises:
        ConfigError: as `gate`.
    """
    trained = gate([run.loss for run in runs], [run.loss for run in baselines], max_gap, part, after)
    if trained is None:
        return None
    validation, not_judged = dict[str, Gate](), dict[str, str]()
    for name in dict.fromkeys(name for run in (*runs, *baselines) for name in run.validation):
        if not all(name in run.validation for run in (*runs, *baselines)):
            not_judged[name] = "not all runs have it"
            continue
        mine, theirs = ([run.validation[name] for run in each] for each in (runs, baselines))
        found = gate(mine, theirs, max_gap, part, after, fewest=0)
        fewest = 0 if found is None else min(each.n for each in found.gaps)
        if found is None or fewest < FEWEST:
            few = str(fewest) if found is not None else "fewer than 10"
            not_judged[name] = f"{few} evaluations are in the steps that count, and {FEWEST} are needed"
        else:
            validation[name] = found
    together = 1 + len(validation)
    judged = {name: replace(each, together=together) for name, each in validation.items()}
    return Acceptance(replace(trained, together=together), judged, not_judged)
