"""What a long training left in soak.json, judged again."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import soak
from soak import LIMITS, MOST_FILES, growth

FOUND = json.loads((Path(__file__).parents[2] / "scripts" / "validation" / "soak.json").read_text())


def test_the_example() -> None:
    assert doctest.testmod(soak) == (0, 2)


def test_it_was_as_long_and_as_bad_as_promised() -> None:
    assert FOUND["steps"] >= 200_000 and len(FOUND["points"]) == 100
    assert len(FOUND["faults"]) == 5 and min(FOUND["faults"].values()) >= 19


def test_nothing_grew_beyond_noise() -> None:
    found = growth(FOUND["points"])
    assert found == FOUND["growth"]
    assert found["rss_mib"][1] <= LIMITS["rss_mib"]
    assert all(found[name] == [0.0, 0.0, 0.0] for name in ("threads", "open_files"))
    assert found["cpu_ms_a_step"][0] <= LIMITS["cpu_ms_a_step"]
    assert max(point["files"] for point in FOUND["points"]) < MOST_FILES


def test_a_leak_is_found() -> None:
    leaking = [{**point, "rss_mib": point["rss_mib"] + point["step"] / 10_000} for point in FOUND["points"]]
    assert growth(leaking)["rss_mib"][0] > LIMITS["rss_mib"]
