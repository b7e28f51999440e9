"""What is said of each recorded run, beside what is true of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.diagnosis import Diagnosis
from nemo_fp8_debug.analysis.recommendation.recommend import recommend
from nemo_fp8_debug.plan.plan import Plan

#: part of the reference run's loss by which a run's is above it, in the mean over the last steps, when a fault has done
#: harm. Runs without a fault are apart by a fifth of that (a standard deviation of 0.6%).
HARM, LAST = 0.03, 60
#: steps up to each step that its loss is averaged over, to say since when it has left
_BACK = 20


@dataclass(frozen=True)
class Judged:
    """A run, what is true of it, and what is said of it."""

    folder: Path
    #: cause, culprit, onset
    truth: dict[str, Any]
    #: of the losses, over the reference run's
    gap: float
    #: step from which the loss is above the reference run's by HARM, in the mean up to there and from there on; None:
    #: it is not
    left: int | None
    said: Diagnosis

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def is_clean(self) -> bool:
        return self.truth["cause"] == "none"

    @property
    def is_harmful(self) -> bool:
        return self.gap > HARM and not self.is_clean  # which may have seen other data

    @property
    def is_numeric(self) -> bool:
        return self.truth["culprit"] is not None

    @property
    def located(self) -> bool:
        """Whether the operand that it sits in is named; where it sits in none, whether none is."""
        found = self.said.culprit
        return (None if found is None else [found.layer, found.role]) == self.truth["culprit"]

    @property
    def lead(self) -> int | None:
        """Steps between the onset that is named and the step in which the loss diverges; None where either is missing."""
        found = self.said.culprit
        return None if found is None or found.since is None or self.left is None else self.left - found.since

    def plan(self) -> Plan:
        """What is recommended for the culprit."""
        found = self.said.culprit
        assert found and found.layer and found.role
        return recommend(self.said.run, [(found.layer, found.role)]).plan


def gap_of(losses: dict[int, float], reference: dict[int, float]) -> tuple[float, int | None]:
    """Gap at the end, and since when, of losses that need not begin where the reference run's do."""
    steps = np.array(sorted(losses))
    mine, other = (np.array([of[s] for s in steps]) for of in (losses, reference))
    mine = np.where(np.isfinite(mine), mine, 1e9)
    gap = float((mine[-LAST:].mean() - other[-LAST:].mean()) / other[-LAST:].mean())
    apart = mine - other - HARM * other
    until = np.convolve(apart, np.ones(_BACK))[: len(steps)]
    since = np.cumsum(apart[::-1])[::-1]
    left = np.flatnonzero((until > 0) & (since > 0)) if gap > HARM else ()
    return gap, int(steps[left[0]]) if len(left) else None


def twin_of(folder: Path) -> dict[int, float]:
    """Losses of the run without a fault."""
    return {int(step): loss for step, loss in json.loads((folder / "reference.json").read_text()).items()}


def judged(folder: Path) -> Iterator[Judged]:
    """All runs of a seed."""
    reference = twin_of(folder)
    for described in sorted(folder.glob("*/truth.json")):
        if described.parent.name == "baseline":
            continue
        said = diagnose(described.parent, folder / "baseline")
        losses = dict(zip(said.run.loss.steps.tolist(), said.run.loss.losses.tolist(), strict=True))
        yield Judged(described.parent, json.loads(described.read_text()), *gap_of(losses, reference), said)
