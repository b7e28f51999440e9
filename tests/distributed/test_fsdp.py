"""The same step under torch's sharding engines as in one process: metrics are those of the same whole tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from long import long_but
from processes import run_script
from text_windows import VOCABULARY

from nemo_fp8_debug.record.reader import find_record, read_table_rows

WORKER = Path(__file__).with_name("sharded.py")
RECIPE = Path(__file__).parents[2] / "recipes" / "fsdp2.py"
REPLICATED = ["ddp"]
FSDP2 = [f"fsdp2-{how}" for how in ("block", "block-kept", "linear", "linear-kept", "root", "block-bf16", "linear-bf16")]
FSDP1 = ["fsdp1", "fsdp1-orig", "fsdp1-linear", "fsdp1-grad-op"]
INSIDE = [f"inside-{how}" for how in ("ddp", "fsdp2", "fsdp2-bf16")]
TENSOR_PARALLEL = ["tp-exact", "tp-sequence-exact"]
OF_TWO = [*REPLICATED, *FSDP2, "early", *FSDP1, *INSIDE, *TENSOR_PARALLEL]
OF_FOUR = ["hsdp", *TENSOR_PARALLEL, "fsdp2-tp-exact", "fsdp2-tp-linear-exact"]
ALL = [(2, mode) for mode in OF_TWO] + [(4, mode) for mode in OF_FOUR]
#: what is trained whenever tests are run
LIVE = [(2, mode) for mode in ("ddp", "fsdp2-block", "fsdp1", "tp-exact")]
CASES = long_but(LIVE, ALL)

Rows = dict[tuple[str, str], dict[str, Any]]
Results = dict[int, list[dict[str, dict[str, Any]]]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By number of ranks: what each of them found in each mode."""
    folder = tmp_path_factory.mktemp("sharded")
    modes = {1: ["plain", "plain-exact"], 2: ["fsdp2-unsharded", "partial-exact"]}
    for world, mode in [(1, "inside-plain"), *ALL] if request.config.getoption("--long") else LIVE:
        modes.setdefault(world, []).append(mode)
    run_script(WORKER, folder, *(f"{world}:{','.join(names)}" for world, names in modes.items()))
    return {
        world: [torch.load(folder / f"rank-{r}-of-{world}.pt", weights_only=False) for r in range(world)] for world in modes
    }


def rows(result: dict[str, Any], step: int) -> Rows:
    return {(layer, role): row for s, layer, role, row in result["samples"] if s == step}


def plain(results: Results, mode: str) -> dict[str, Any]:
    inside = "inside-" if mode.startswith("inside") else ""
    return results[1][0]["plain-exact" if mode.endswith("exact") else f"{inside}plain"]


@pytest.mark.parametrize(("world", "mode"), CASES)
def test_operands_are_those_of_one_process(results: Results, world: int, mode: str) -> None:
    """The arithmetic is the same, or such that nothing is rounded: X, W and dY are identical, count by count."""
    expected, found = rows(plain(results, mode), 0), rows(results[world][0][mode], 0)
    assert len(expected) == (33 if mode in INSIDE else 15) and set(found) == set(expected)
    for key, row in expected.items():
        assert found[key]["histogram"] == row["histogram"], key
        assert {k: found[key][k] for k in ("n", "amax", "dtype", "ranks_missing")} == {
            "n": row["n"],
            "amax": row["amax"],
            "dtype": "bfloat16",
            "ranks_missing": 0,
        }


@pytest.mark.parametrize(("world", "mode"), [*CASES, (2, "fsdp2-unsharded")])
def test_weights_are_those_of_the_step(results: Results, world: int, mode: str) -> None:
    """And not what they were when the monitor was started, or the model wrapped."""
    mine = results[world][0][mode]
    first, last = rows(mine, 0), rows(mine, 2)
    assert len(mine["last"]) == (7 if mode in INSIDE else 5)
    for layer, counts in mine["last"].items():
        assert last[layer, "weight"]["histogram"] == counts
        assert last[layer, "weight"]["histogram"] != first[layer, "weight"]["histogram"]


@pytest.mark.parametrize(("world", "mode"), [*CASES, (2, "fsdp2-unsharded"), (2, "partial-exact")])
def test_losses_and_weights_are_bit_identical(results: Results, world: int, mode: str) -> None:
    for rank in results[world]:
        assert rank[mode]["losses"] and rank[mode]["losses"] == rank[mode]["unwatched"]["losses"]
        assert rank[mode]["weights"] == rank[mode]["unwatched"]["weights"]
        assert not rank[mode]["warnings"] or mode == "partial-exact"


@pytest.mark.parametrize(
    ("world", "mode", "layer", "x", "w", "dy"),
    [
        (2, "ddp", "blocks.0.up", 2, 1, 2),
        (2, "tp-exact", "blocks.0.up", 1, 2, 2),
        (2, "tp-exact", "blocks.0.down", 2, 2, 1),
        *long_but(
            (),
            [
                (2, "fsdp2-linear", "blocks.0.up", 2, 1, 2),
                (4, "hsdp", "blocks.0.up", 4, 1, 4),
                (2, "tp-sequence-exact", "blocks.0.up", 1, 2, 2),  # gathered before it is multiplied
                (4, "tp-exact", "head", 1, 3, 3),  # 5 outputs over 4 ranks: 2, 2, 1 and none
                (4, "fsdp2-tp-exact", "blocks.0.up", 2, 2, 4),
                (4, "fsdp2-tp-linear-exact", "blocks.0.down", 4, 2, 2),
            ],
        ),
    ],
)
def test_copies_are_counted_once(results: Results, world: int, mode: str, layer: str, x: int, w: int, dy: int) -> None:
    found = rows(results[world][0][mode], 0)
    stats = {role: found[layer, role]["ranks"] for role in ("input", "weight", "grad_output")}
    assert stats == {"input": x, "weight": w, "grad_output": dy}


def test_x_is_what_fsdp2_casts_it_to_even_if_w_was_gathered_before(results: Results) -> None:
    expected, found = rows(plain(results, "plain"), 0), rows(results[2][0]["fsdp2-unsharded"], 0)
    assert {row["dtype"] for row in found.values()} == {"bfloat16"}
    # Between layers there is float32, so that later operands differ; the first X and all W do not.
    assert found["blocks.0.up", "input"]["histogram"] == expected["blocks.0.up", "input"]["histogram"]
    assert all(found[key]["n"] == row["n"] for key, row in expected.items())


def test_a_sum_that_no_rank_knows_is_left_out_and_said(results: Results) -> None:
    expected, found = rows(plain(results, "partial-exact"), 0), rows(results[2][0]["partial-exact"], 0)
    assert ("head", "input") not in found
    for role in ("weight", "grad_output"):
        assert found["head", role]["histogram"] == expected["head", role]["histogram"]
    for rank in results[2]:
        said = "\n".join(rank["partial-exact"]["warnings"])
        assert "X of head" in said and "are missing from the sample of step 0" in said
        assert "ranks hold summands of it" in said


@pytest.mark.long
def test_the_recipe_runs_on_two_processes(tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    told = run_script(*launch, RECIPE, "--output", tmp_path, "--steps", "4", "--interval", "2")
    run = find_record(tmp_path)
    assert told.count(f"The record is in {run};") == 1
    metrics = read_table_rows(run, "metrics")
    assert metrics["step"].unique().to_list() == [0, 2]
    assert (metrics.filter(role="weight")["ranks"] == 1).all()
    of_x = metrics.filter(role="input")
    assert (of_x["ranks"] == 2).all() and (of_x["calls"] == 2 * 2).all()  # ranks, accumulated batches
    steps = read_table_rows(run, "steps")
    assert len(steps) == 4 and steps["loss"][3] < steps["loss"][0]
    assert steps["loss"][0] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert steps["grad_scale"].to_list() == [0.5, None] * 2  # of two accumulated batches


@pytest.mark.long
def test_lightnings_strategies(tmp_path: Path) -> None:
    run_script(Path(__file__).with_name("lightning_sharded.py"), tmp_path, MASTER_ADDR="127.0.0.1")
    told = {how: json.loads((tmp_path / f"{how}.json").read_text()) for how in ("plain", "fsdp2", "fsdp1")}
    for found in told.values():
        assert found["losses"] == found["unwatched"]
    assert len(told["plain"]["metrics"]) == 15
    assert told["fsdp2"]["metrics"] == told["fsdp1"]["metrics"] == told["plain"]["metrics"]
