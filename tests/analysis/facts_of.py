"""Facts of runs, for tests of rules, and what a rule finds in them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy.typing as npt

from nemo_fp8_debug.analysis.diagnosis.diagnosis import Diagnosis
from nemo_fp8_debug.analysis.diagnosis.facts import DiagnosedRecords, Facts
from nemo_fp8_debug.analysis.diagnosis.finding import CAUSES, STRENGTHS, Finding
from nemo_fp8_debug.analysis.diagnosis.rule import Find, load_rules
from nemo_fp8_debug.analysis.loss.outcome import MAX_GAP, LossOutcome
from nemo_fp8_debug.analysis.runs.run import Run

Values = npt.ArrayLike


def facts_of(run: Run | Path, baseline: Run | Path | None = None, loss: LossOutcome | None = None) -> Facts:
    """Facts of a run next to a baseline, without a comparison of operands.

    Args:
        loss: what the losses came to; None: as the runs have it.
    """
    mine, theirs = (Run.read(each) if isinstance(each, Path) else each for each in (run, baseline))
    assert mine is not None
    own = LossOutcome.judge_loss(mine.loss, None if theirs is None else theirs.loss, MAX_GAP)
    return Facts.from_records(DiagnosedRecords(mine, theirs), loss or own)


def found_by(rule: Find, run: Run | Path, baseline: Run | Path | None = None) -> list[Finding]:
    """What one rule finds, none of which it does not declare."""
    found = list(rule(facts_of(run, baseline)))
    (declared,) = (each.causes for each in load_rules() if each.find is rule)
    assert {each.cause for each in found} <= {*declared, "unknown"}
    return found


def said(found: Finding) -> tuple[str, str]:
    """The cause and the strength of a finding, which is checked."""
    assert found.cause in CAUSES and found.strength in STRENGTHS
    assert not re.search(r"\bnan\b", found.evidence) and not found.evidence.endswith(".")
    return found.cause, found.strength


def findings_of(found: Diagnosis, rule: str) -> list[Finding]:
    """The findings of one rule."""
    return [each for each in found.findings if each.rule == rule]
