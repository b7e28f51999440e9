"""Examples of a target: so many, or for so long, and what the first of them that broke a promise did."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from .limits import Finding, limited
from .targets import TARGETS


@dataclass
class Course:
    """What has become of a target."""

    examples: int = 0
    seconds: float = 0.0
    #: what was found, each once, with the example
    findings: dict[str, str] = field(default_factory=dict)


def fuzz(name: str, examples: int, seed: int, shrink: bool = True) -> Course:
    """Run examples of a target that a seed gives; ends with the first finding, which is made small.

    Args:
        shrink: whether to look for a smaller example; False: report the first one.
    """
    target, course, began = TARGETS[name], Course(), time.monotonic()
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    found: list[tuple[str, str]] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(target.examples)
    def tried(example: Any) -> None:
        course.examples += 1
        try:
            with tempfile.TemporaryDirectory() as folder, limited(Path(folder)):
                target.run(example, Path(folder))
        except Exception as error:
            said = str(error) if isinstance(error, Finding) else f"{type(error).__name__}: {error}"
            found[:] = [(said[:400], repr(example)[:4000])]
            raise

    with contextlib.suppress(Exception):  # of the example, or of hypothesis, if it does not fail again
        tried()
    course.findings.update(found)
    course.seconds = time.monotonic() - began
    return course
