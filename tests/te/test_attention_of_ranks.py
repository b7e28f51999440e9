"""Of FP8 attention on two ranks, metrics are those of what both have cast."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import found_in, run_script

WORKER = Path(__file__).with_name("attention_of_ranks.py")
ROOT = Path(__file__).parents[2]


def test_operands_add_up(tmp_path: Path) -> None:
    paths = found_in(Path(sys.prefix) / "te", ROOT / "scripts/validation", ROOT / "tests")
    run_script(WORKER, tmp_path, PYTHONPATH=paths, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for recipe, rows in json.loads((tmp_path / "found.json").read_text()).items():
        assert {row["role"] for row in rows} == set(ranks[0][recipe]) and len(rows) == 10
        for row in rows:
            n, error2 = (sum(rank[recipe][row["role"]][name] for rank in ranks) for name in ("n", "error2"))
            assert (row["scale_source"], row["n"], row["ranks"], row["ranks_missing"]) == ("engine", n, 2, 0)
            assert row["mse"] == pytest.approx(error2 / n, rel=1e-9) and row["gemm"] == "core"
