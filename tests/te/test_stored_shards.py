"""Of a weight in FP8 whose master weight ranks have in parts, metrics are those of the whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import found_in, run_script

WORKER = Path(__file__).with_name("stored_shards.py")
ROOT = Path(__file__).parents[2]


def test_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    paths = found_in(Path(sys.prefix) / "te", ROOT / "scripts/validation", ROOT / "tests", ROOT / "recipes")
    run_script(WORKER, tmp_path, PYTHONPATH=paths, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == set(ranks[0])
    split = 0
    for layer, row in found.items():
        parts = [rank[layer] for rank in ranks]
        split += all(part["n"] for part in parts)
        n, error2 = (sum(part[name] for part in parts) for name in ("n", "error2"))
        assert (row["scale_source"], row["n"], row["ranks_missing"]) == ("engine", n, 0)
        assert row["mse"] == pytest.approx(error2 / n, rel=1e-9) and row["mse"] > 1e-5
    assert split  # a layer of which both ranks have a part
    assert_masters(ranks, json.loads((tmp_path / "replicas.json").read_text()))


def assert_masters(ranks: list[dict[str, dict[str, Any]]], rows: list[dict[str, Any]]) -> None:
    """Codes of a part whose master weight has moved on are stale there, and copies of codes are equal all the same."""
    outcomes = {(row["layer"], row["what"]): (row["outcome"], row["ranks"], row["rank"]) for row in rows}
    for layer in ranks[0]:
        have = [bool(rank[layer]["n"]) for rank in ranks]
        moved = [number for number, rank in enumerate(ranks) if rank[layer]["moved"]]
        assert outcomes[layer, "master"] == ("apart", sum(have), moved[0]) and len(moved) == 1
        assert outcomes[layer, "weight"] == ("equal", 2, None)
