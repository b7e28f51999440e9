"""Long tests have passed as they are now: scripts/validation/long_tests.json."""

from __future__ import annotations

import json
from typing import Any

import pytest
from long import COLLECTED, wrong_with
from long_tests import RESULTS, ROOT, version_of

FOUND: dict[str, Any] = json.loads(RESULTS.read_text())["files"]


def test_each_has_passed_and_was_not_changed_since(request: pytest.FixtureRequest) -> None:
    assert wrong_with(request.config.stash[COLLECTED]) == []


def test_results_are_of_files_that_are_there() -> None:
    assert [file for file in FOUND if not (ROOT / file).is_file()] == []


def test_one_that_has_no_result_or_was_changed_is_told() -> None:
    file, found = next(iter(FOUND.items()))
    again = f"run scripts/validation/long_tests.py {file}"
    assert wrong_with({file: [*found["passed"], "test_new"]}) == [f"{again}: no result of test_new"]
    changed = {"files": {file: found | {"version": "of another day"}}}
    assert wrong_with({file: found["passed"]}, changed) == [f"{again}: it was changed since, or what lies beside it"]
    assert version_of(file) == found["version"] != version_of("tests/scripts/test_long_results.py")
