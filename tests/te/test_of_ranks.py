"""Two ranks over emulated kernels: what is recorded is of both together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import found_in, run_script

# Long tests rest on nemo_fp8_debug/distributed/*.py.
# Long tests rest on nemo_fp8_debug/capture/backends/transformer_engine/*.py.
pytestmark = pytest.mark.long
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: by recipe: values that share a scale, of X and dY in their row-wise copies
BLOCK = {"mxfp8": 32, "blockwise": 128, "nvfp4": 16}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each run."""
    folder = tmp_path_factory.mktemp("of_ranks")
    paths = found_in(Path(sys.prefix) / "te", ROOT / "scripts/validation", ROOT / "tests", ROOT / "recipes")
    run_script(HERE / "of_ranks.py", folder, PYTHONPATH=paths, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    return folder


def test_operands_add_up(ran: Path) -> None:
    """Of FP8 attention on two ranks, metrics are those of what both have cast."""
    folder = ran / "attention_of_ranks"
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    for recipe, rows in json.loads((folder / "found.json").read_text()).items():
        assert {row["role"] for row in rows} == set(ranks[0][recipe]) and len(rows) == 10
        for row in rows:
            n, error2 = (sum(rank[recipe][row["role"]][name] for rank in ranks) for name in ("n", "error2"))
            assert (row["scale_source"], row["n"], row["ranks"], row["ranks_missing"]) == ("engine", n, 2, 0)
            assert row["mse"] == pytest.approx(error2 / n, rel=1e-9) and row["gemm"] == "core"


def test_copies_and_scales_add_up(ran: Path) -> None:
    """Of rows that ranks have apart, errors of column-wise copies and scales of blocks are those of all rows together."""
    folder = ran / "copies_of_ranks"
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    found = json.loads((folder / "found.json").read_text())
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


def test_scales_are_those_that_ranks_share(ran: Path) -> None:
    """Under sequence parallelism ranks cast with one amax: what is reported is the scale of all, and not that of a shard."""
    folder = ran / "sequence_parallel"
    for rank in (0, 1):
        found = json.loads((folder / f"{rank}.json").read_text())
        for case, result in found.items():
            assert result["wrong"] == [], (rank, case)
            expected = {"X engine", "W engine", "dY not quantized" if "override" in case else "dY engine"}
            assert result["sources"].keys() == expected, (rank, case)
        # Of one rank at least the shard's amax is not the largest.
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    for case in ranks[0]:
        others = {role: sum(rank[case]["of_others"].get(role, 0) for rank in ranks) for role in ("X", "W", "dY")}
        shared = {"X"} if "column" in case or "MLP" in case else set()
        shared |= {"dY"} if ("row" in case or "MLP" in case) and "override" not in case else set()
        assert {role for role, count in others.items() if count} == shared, case


def test_parts_add_up_to_the_whole(ran: Path) -> None:
    """Of a weight in FP8 whose master weight ranks have in parts, metrics are those of the whole."""
    folder = ran / "stored_shards"
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    found = json.loads((folder / "found.json").read_text())
    assert set(found) == set(ranks[0])
    split = 0
    for layer, row in found.items():
        parts = [rank[layer] for rank in ranks]
        split += all(part["n"] for part in parts)
        n, error2 = (sum(part[name] for part in parts) for name in ("n", "error2"))
        assert (row["scale_source"], row["n"], row["ranks_missing"]) == ("engine", n, 0)
        assert row["mse"] == pytest.approx(error2 / n, rel=1e-9) and row["mse"] > 1e-5
    assert split  # a layer of which both ranks have a part
    assert_masters(ranks, json.loads((folder / "replicas.json").read_text()))


def assert_masters(ranks: list[dict[str, dict[str, Any]]], rows: list[dict[str, Any]]) -> None:
    """Codes of a part whose master weight has moved on are stale there, and copies of codes are equal all the same."""
    outcomes = {(row["layer"], row["what"]): (row["outcome"], row["ranks"], row["rank"]) for row in rows}
    for layer in ranks[0]:
        have = [bool(rank[layer]["n"]) for rank in ranks]
        moved = [number for number, rank in enumerate(ranks) if rank[layer]["moved"]]
        assert outcomes[layer, "master"] == ("apart", sum(have), moved[0]) and len(moved) == 1
        assert outcomes[layer, "weight"] == ("equal", 2, None)
