"""What a finding of a rule says, checked, for tests of the rules."""

from __future__ import annotations

import re

import numpy.typing as npt

from nemo_fp8_debug.analysis.diagnosis.rules.finding import CAUSES, CONFIDENCE, Finding

Values = npt.ArrayLike


def said(found: Finding) -> tuple[str, str]:
    assert found.cause in CAUSES and found.confidence in CONFIDENCE and not re.search(r"\bnan\b", found.evidence)
    return found.cause, found.confidence
