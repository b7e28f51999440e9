"""Tests that take many seconds of a core and are one of many like them, or rest on little that changes.

`scripts/test.sh` leaves them out unless it is given `--long`; what they found is kept.

`scripts/validation/long_tests.py` runs them and writes `long_tests.json`. Every run of the tests compares that file with the
tests as they are: each long test is there, has passed, and has not been changed since, nor what its module says that it
rests on.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
from long_tests import RESULTS, file_of, version_of

#: by file, names of the long tests that were collected
COLLECTED = pytest.StashKey[dict[str, list[str]]]()


def long_but(live: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values for `parametrize`, of which the tests are long but for some. A tuple is several values."""
    marked = []
    for value in values:
        of_test = value if isinstance(value, tuple) else (value,)
        marked.append(value if value in live else pytest.param(*of_test, marks=pytest.mark.long))
    return marked


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take long tests out of those that are to be run, unless they were asked for, and keep their names."""
    long = [item for item in items if item.get_closest_marker("long")]
    collected = config.stash.setdefault(COLLECTED, defaultdict(list))
    for item in long:
        collected[file_of(item.path)].append(item.name)
    if long and not config.getoption("--long"):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def wrong_with(collected: Mapping[str, Sequence[str]], results: Mapping[str, Any] | None = None) -> list[str]:
    """What is to be done about the results of these long tests.

    Args:
        results: as the script writes them; None: those that it wrote.
    """
    known = (results or json.loads(RESULTS.read_text()))["files"]
    again = "run scripts/validation/long_tests.py"
    wrong = []
    for file, names in collected.items():
        found = known.get(file, {"passed": [], "version": ""})
        if missing := sorted(set(names) - set(found["passed"])):
            wrong.append(f"{again} {file}: no result of {', '.join(missing)}")
        elif found["version"] != version_of(file):
            wrong.append(f"{again} {file}: it was changed since, or what lies beside it")
    return wrong
