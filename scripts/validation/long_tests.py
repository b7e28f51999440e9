"""Runs the tests that take long, which `scripts/test.sh` leaves out, and writes which passed: long_tests.json.

    .venv/bin/python scripts/validation/long_tests.py [FILE ...]

Without files all that have such tests are run: 10 minutes on two cores. Every run of the tests compares long_tests.json with
the tests as they are (`tests/long.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_suffix(".json")
#: what the results of a module rest on beside it
_RESTS_ON = re.compile(r"^# Long tests rest on (\S+)\.$", re.MULTILINE)


def file_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def version_of(file: str) -> str:
    """Of a test module and what it rests on: scripts and helpers beside it, and files that it names in a comment."""
    path = ROOT / file
    rests_on = {path, *(other for other in path.parent.glob("*.py") if not other.name.startswith("test_"))}
    rests_on |= {other for name in _RESTS_ON.findall(path.read_text()) for other in ROOT.glob(name)}
    digest = hashlib.blake2b(digest_size=8)
    for other in sorted(rests_on):
        digest.update(f"{file_of(other)}\n".encode() + other.read_bytes())
    return digest.hexdigest()


def files() -> list[str]:
    """Those that have long tests."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file_of(path) for path in found if any(mark in path.read_text() for mark in ("long_but(", "mark.long"))]


def passed(file: str) -> tuple[list[str], bool]:
    """Names of the long tests of a file that passed, and whether all did."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--long", "-m", "long", f"--junitxml={report}", file]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        cases = ET.parse(report).getroot().iter("testcase")
        return sorted({case.attrib["name"] for case in cases if len(case) == 0}), done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="*", help="a file with long tests; all by default")
    chosen = parser.parse_args().file
    commit = subprocess.run(("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, capture_output=True, text=True).stdout.strip()
    known: dict[str, Any] = json.loads(RESULTS.read_text())["files"] if chosen and RESULTS.exists() else {}
    failed = []
    for file in chosen or files():
        began = time.perf_counter()
        names, whole = passed(file)
        seconds = round(time.perf_counter() - began)
        known[file] = {"version": version_of(file), "after": commit, "seconds": seconds, "passed": names}
        failed += [] if whole else [file]
        RESULTS.write_text(json.dumps({"files": dict(sorted(known.items()))}, indent=1) + "\n")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
