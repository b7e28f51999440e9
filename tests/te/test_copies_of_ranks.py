"""Of rows that ranks have apart, errors of column-wise copies and scales of blocks are those of all rows together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import found_in, run_script

WORKER = Path(__file__).with_name("copies_of_ranks.py")
ROOT = Path(__file__).parents[2]
#: by recipe: values that share a scale, of X and dY in their row-wise copies
BLOCK = {"mxfp8": 32, "blockwise": 128, "nvfp4": 16}


def test_copies_and_scales_add_up(tmp_path: Path) -> None:
    paths = found_in(Path(sys.prefix) / "te", ROOT / "scripts/validation", ROOT / "tests", ROOT / "recipes")
    run_script(WORKER, tmp_path, PYTHONPATH=paths, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    found = json.loads((tmp_path / "found.json").read_text())
    for recipe, tables in found.items():
        copies = {row["role"]: row for row in tables["copies"]}
        assert {"input", "grad_output"} <= set(copies)
        for role, row in copies.items():
            mine = ranks[:1] if role == "weight" else ranks  # the same weight on both
            n, error2 = (sum(rank[recipe][role][name] for rank in mine) for name in ("n", "error2"))
            assert (row["n"], row["ranks_missing"]) == (n, 0)
            assert row["mse"] == pytest.approx(error2 / n, rel=1e-5)
        scales = {row["role"]: row for row in tables["block_scales"]}
        assert set(scales) == {"input", "weight", "grad_output"}
        for role in ("input", "grad_output"):
            blocks = sum(rank[recipe][role]["blocks"] for rank in ranks)
            assert scales[role]["blocks"] == blocks == copies[role]["n"] // BLOCK[recipe]
            assert scales[role]["scale_min"] < scales[role]["scale_median"] < scales[role]["scale_max"]
