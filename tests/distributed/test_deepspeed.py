"""Under DeepSpeed metrics of W are those of the full weight, of X and dY those of all ranks; nothing is gathered."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from long import long_but
from processes import run_script
from text_windows import VOCABULARY

from nemo_fp8_debug.record.reader import find_record, read_table_rows

HERE = Path(__file__).parent
STAGE_3 = [
    *("zero-3", "zero-3 engine.module", "zero-3 before", "zero-3 init", "zero-3 offload", "zero-3 recompute"),
    *("zero-3 reentrant", "zero-3 float32", "zero-3 own linear"),
]
ZERO = ["zero-0", "zero-0 one-bit", "zero-1", "zero-2", "zero-2 offload", *STAGE_3]
ALL = [*ZERO, "pipeline", "lightning"]
#: what is trained whenever tests are run
LIVE = ["zero-2", "zero-3", "pipeline"]
#: how the plain run is called that computes the same, where it is not "plain"
TWINS = {"zero-0 one-bit": "plain float32", "zero-3 float32": "plain float32", "zero-3 own linear": "plain own linear"}
TWINS |= {"pipeline": "plain pipeline", "lightning": "plain lightning"}
Run = dict[str, Any]


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of modes, and of float16."""
    modes, float16 = (tmp_path_factory.mktemp(name) for name in ("modes", "float16"))
    chosen = ALL if request.config.getoption("--long") else LIVE
    run_script(HERE / "deepspeed_modes.py", modes, float16, *chosen, DS_ACCELERATOR="cpu")
    return modes, float16


def found_by_ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(folders: tuple[Path, Path]) -> list[dict[str, Run]]:
    """What each rank has seen in each mode."""
    return found_by_ranks(folders[0])


def of_step(run: Run, step: str, what: str) -> dict[str, Any]:
    """By layer and role; the names of Lightning's module begin with that of its member."""
    return {key.removeprefix("layers."): value for key, value in run["samples"][step][what].items()}


@pytest.mark.parametrize("mode", long_but(LIVE, ALL))
def test_losses_and_weights_are_bit_identical(ranks: list[dict[str, Run]], mode: str) -> None:
    for rank in ranks:
        bare, watched = rank[mode]["bare"], rank[mode]["watched"]
        assert watched["losses"] == bare["losses"] and len(bare["losses"]) >= 3
        assert watched["digest"] == bare["digest"]


@pytest.mark.parametrize("mode", long_but(LIVE, [*ZERO, "pipeline"]))
def test_no_collective_is_caused(ranks: list[dict[str, Run]], mode: str) -> None:
    for rank in ranks:
        bare, watched = rank[mode]["bare"], rank[mode]["watched"]
        assert watched["calls"] == bare["calls"] and sum(bare["calls"].values()) > 0
        assert not watched.get("external")


@pytest.mark.parametrize("mode", long_but(LIVE, STAGE_3))
def test_weights_are_really_split_between_forwards(ranks: list[dict[str, Run]], mode: str) -> None:
    for rank in ranks:
        assert rank[mode]["watched"]["sizes"] == [0]


@pytest.mark.parametrize("mode", long_but(LIVE, ALL))
def test_first_step_is_that_of_one_process(ranks: list[dict[str, Run]], mode: str) -> None:
    """Until the first update the arithmetic is the same: every count of every histogram, and every metric."""
    run, twin = ranks[0][mode]["watched"], ranks[0][TWINS.get(mode, "plain")]
    assert of_step(run, "0", "histograms") == of_step(twin, "0", "histograms")
    rows, expected = of_step(run, "0", "rows"), of_step(twin, "0", "rows")
    assert rows.keys() == expected.keys() and len(rows) == 27
    for key, row in rows.items():
        holders = 1 if key.endswith("/weight") or mode == "pipeline" else 2
        assert (row["ranks"], row["ranks_missing"]) == (holders, 0)
        # Lightning shows what it returns as the loss; the others return none.
        own = (
            "ranks",
            "layer",
            "step",
            "attempt",
            *(("unscaled_amax", "unscaled_amin", "unscaled_mse") if mode == "lightning" else ()),
        )
        others = {name: value for name, value in expected[key].items() if name not in own}
        for name, value in others.items():
            direct = "float32" in TWINS.get(mode, "") and isinstance(value, float)  # summed up by each rank
            assert row[name] == (pytest.approx(value, rel=1e-12) if direct else value), name


@pytest.mark.parametrize("mode", long_but(LIVE, ZERO))
@pytest.mark.parametrize("step", ["0", "2"])
def test_w_is_the_full_weight_of_its_step(ranks: list[dict[str, Run]], mode: str, step: str) -> None:
    """As DeepSpeed itself gathered it at that moment in the run without a monitor."""
    histograms = of_step(ranks[0][mode]["watched"], step, "histograms")
    truth = ranks[0][mode]["bare"]["weights"][step]
    assert len(truth) == 9 and {key: histograms[key] for key in truth} == truth


@pytest.mark.parametrize("mode", long_but(LIVE, [mode for mode in STAGE_3[1:] if mode not in TWINS]))
def test_it_is_all_one_when_and_with_what_the_monitor_starts(ranks: list[dict[str, Run]], mode: str) -> None:
    assert ranks[0][mode]["watched"]["samples"] == ranks[0]["zero-3"]["watched"]["samples"]


def test_a_pipeline_is_exact_in_every_step(ranks: list[dict[str, Run]]) -> None:
    samples, twin = ranks[0]["pipeline"]["watched"]["samples"], ranks[0]["plain pipeline"]["samples"]
    assert samples == twin and len(twin) == 2


@pytest.mark.parametrize("mode", long_but(LIVE, [mode for mode in ZERO if mode != "zero-0 one-bit"]))
def test_later_steps_differ_by_the_rounding_of_gradients_only(ranks: list[dict[str, Run]], mode: str) -> None:
    """DeepSpeed adds gradients of micro-batches and ranks up in another order, and in BF16."""
    rows = of_step(ranks[0][mode]["watched"], "2", "rows")
    expected = of_step(ranks[0][TWINS.get(mode, "plain")], "2", "rows")
    rel = 1e-5 if mode == "zero-3 float32" else 0.05
    for key, row in rows.items():
        for metric in ("amax", "scale", "relative_error"):
            assert row[metric] == pytest.approx(expected[key][metric], rel=rel)


@pytest.mark.long
def test_recipe(tmp_path: Path) -> None:
    recipe = HERE.parents[1] / "recipes" / "deepspeed_zero.py"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", recipe)
    options = ("--output", tmp_path, "--steps", "4", "--interval", "2")
    told = run_script(*launch, *options, DS_ACCELERATOR="cpu", PYTHONWARNINGS="ignore")
    run = find_record(tmp_path)
    assert f"The record is in {run};" in told
    metrics = read_table_rows(run, "metrics")
    assert metrics["step"].unique().to_list() == [0, 2] and set(metrics["role"]) == {"input", "weight", "grad_output"}
    assert set(metrics["layer"]) == {
        "output_layer",
        *(f"layers.{layer}.{gemm}" for layer in range(2) for gemm in ("qkv", "proj", "fc1", "fc2")),
    }
    assert set(metrics.filter(role="input")["calls"]) == {4}  # two micro-batches on each of two ranks
    steps = read_table_rows(run, "steps")
    assert len(steps) == 4 and steps["loss"][3] < steps["loss"][0]
    assert steps["loss"][0] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert steps["grad_scale"].to_list() == [0.5, None] * 2  # of two micro-batches
    assert steps["skipped"].to_list() == [0] * 4 and steps["loss_scale"].to_list() == [1] * 4


def test_float16_whose_loss_scale_is_too_large_at_first(folders: tuple[Path, Path]) -> None:
    """What dY is multiplied by is measured: without ZeRO DeepSpeed reports a loss scale that it does not apply."""
    for rank in found_by_ranks(folders[1]):
        for found in rank.values():
            assert found["watched"] == found["plain"]
    scaled, not_scaled = (read_table_rows(find_record(folders[1] / stage), "steps") for stage in ("1", "0"))
    assert scaled["grad_scale"].to_list() == [scale / 2 for scale in scaled["loss_scale"]]
    assert scaled["skipped"].to_list() == [1, 1, 1, 1, 1, 0] and scaled["loss_scale"][0] == 2.0**24
    assert not_scaled["grad_scale"].to_list() == [0.5] * 6 and not_scaled["loss_scale"].min() == 2.0**24
    one, other = (
        read_table_rows(find_record(folders[1] / stage), "metrics", where={"role": "grad_output"}) for stage in ("1", "0")
    )
    assert 0 in one.filter(pl.col("inf") > 0)["step"] and 5 not in one.filter(pl.col("inf") > 0)["step"]
    # The first steps have hardly moved the weights, and the factors are 2^19 apart.
    last = one.filter(step=5), other.filter(step=5)
    assert (last[0]["amax"] / last[1]["amax"] > 2**18).all()
    assert last[0]["unscaled_amax"].to_list() == pytest.approx(last[1]["unscaled_amax"].to_list(), rel=0.05)
