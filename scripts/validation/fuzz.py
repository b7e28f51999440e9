"""Fuzz every parser of what comes from outside for a while, with new seeds, and note what was tried and found.

    .venv/bin/python scripts/validation/fuzz.py --minutes 30

Adds up in `fuzz.json` beside this file: examples, seconds and findings of each target over all sessions. A finding is
fixed with a test, and then taken out of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import secrets
import time
import warnings
from pathlib import Path
from typing import Any

from fuzzing import record_targets
from fuzzing.run import fuzz
from fuzzing.targets import TARGETS

RESULTS = Path(__file__).with_name("fuzz.json")
#: seconds of each target at a time
_TURN = 20


def main() -> None:
    """Go through all targets in turn until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS), help="default: all")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file to add the results to")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    record_targets.record()
    until = time.monotonic() + 60 * given.minutes
    rate: dict[str, float] = {}
    while time.monotonic() < until:
        for name in given.targets:
            examples = max(4, int(rate.get(name, 1.0) * _TURN))
            with contextlib.redirect_stdout(io.StringIO()):
                course = fuzz(name, examples, secrets.randbits(64), shrink=False)
            rate[name] = course.examples / max(course.seconds, 0.1)
            _add(given.output, name, course.examples, course.seconds, course.findings)
            for what, example in course.findings.items():
                print(f"{name}: {what}\n    {example[:400]}", flush=True)
            if time.monotonic() > until:
                break
    record_targets.forget()


def _add(path: Path, name: str, examples: int, seconds: float, findings: dict[str, str]) -> None:
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    before = results.setdefault(name, {"examples": 0, "seconds": 0, "findings": {}})
    before["examples"] += examples
    before["seconds"] = round(before["seconds"] + seconds, 1)
    before["findings"] |= findings
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
