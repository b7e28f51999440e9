"""Gradients of weights over ranks against figures of the whole ones, right behind the last backward pass of each step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gradients_of_ranks import KINDS, STEPS, WORLD
from processes import run_script

from nemo_fp8_debug import read_record


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradients")
    run_script(Path(__file__).with_name("gradients_of_ranks.py"), folder)
    return folder


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("by-hand", "unsynced")])
def test_they_are_those_of_the_whole_tensors(trained: Path, kind: str) -> None:
    oracle = json.loads((trained / kind / "oracle.json").read_text())
    rows = read_record(str(trained / kind), "gradients").rows(named=True)
    assert {f"{row['step']}/{row['layer']}" for row in rows} == set(oracle) and len(rows) == 2 * STEPS
    for row in rows:
        expected = oracle[f"{row['step']}/{row['layer']}"]
        assert {name: row[name] for name in ("zeros", "nonfinite", "elements")}.items() <= expected.items()
        assert row["norm"] is None if expected["nonfinite"] else row["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert row["ranks"] == (WORLD if kind.startswith("fsdp2") else 1)
    assert {row["step"] for row in rows if row["nonfinite"]} == {1}


@pytest.mark.parametrize("kind", ["by-hand", "unsynced"])
def test_of_what_no_framework_is_known_to_add_up_nothing_is_claimed(trained: Path, kind: str) -> None:
    assert read_record(str(trained / kind), "gradients").is_empty()
