"""The callback under real NeMo: MegatronStrategy, megatron-core layers, BF16, FP8 by emulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import assert_audited
from page_blocks import check_text, cut, find_block
from processes import run_script
from recommendations import CURRENT, recommendation, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_fp8_debug.analysis.checkpoint.audit import audit
from nemo_fp8_debug.analysis.recommendation.recommend import BF16EndBlocks
from nemo_fp8_debug.analysis.recommendation.snippets.megatron import make_global_options_snippet
from nemo_fp8_debug.analysis.replay.replay import replay
from nemo_fp8_debug.record.reader import find_record, read_fingerprint, read_table_rows

FIX = recommendation(run(), {("decoder.layers.4.mlp.linear_fc2", "input"): CURRENT}, BF16EndBlocks(1, 0, 8, None))
SNIPPET = make_global_options_snippet(FIX)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemo")
    assert SNIPPET
    (folder / SNIPPET.name).write_text(SNIPPET.text)
    # Not as a script: the process that Megatron starts to save a checkpoint would import all of it again.
    run_script("-c", "import nemo_runs; nemo_runs.main()", folder)
    return folder


@pytest.fixture(scope="module")
def results(output: Path) -> dict[str, Any]:
    return json.loads((output / "results.json").read_text())


@pytest.mark.parametrize("case", ["plain", "recompute"])
@pytest.mark.parametrize("watched", ["1", "10", "everything"])
def test_losses_and_weights_are_bit_identical(results: dict[str, Any], case: str, watched: str) -> None:
    assert len(results[case]["None"]["losses"]) == 5
    assert results[case][watched] == results[case]["None"]


@pytest.mark.parametrize("case", ["plain", "recompute"])
def test_dumped_tensors_give_what_was_recorded(output: Path, case: str) -> None:
    run = find_record(output / f"{case}-everything")
    replayed, recorded = replay(run, None, "dumps"), read_table_rows(run, "metrics")
    triggered = read_table_rows(run, "steps", ["step", "trigger"]).drop_nulls()["step"].to_list()
    assert len(triggered) == 1 and "amax of X of" in read_table_rows(run, "steps", ["trigger"])["trigger"].drop_nulls()[0]
    dumped = {step: set(replayed.filter(step=step)["layer"]) for step in replayed["step"].unique()}
    in_turn = {f"decoder.layers.1.{name}" for name in LINEAR} | {"output_layer"}
    assert dumped[0] == in_turn
    assert {"decoder.layers.2.mlp.linear_fc1", "decoder.layers.2.mlp.linear_fc2"} <= dumped[triggered[0]]
    keys = ["step", "layer", "role", "calls", "n", "underflow_pct", "overflow_pct", "scale", "scale_source"]
    expected = recorded.join(replayed.select(keys[:3]), on=keys[:3], how="semi")
    assert replayed.select(keys).sort(keys).equals(expected.select(keys).sort(keys))


def test_blocks_of_pages_run_and_print_what_is_shown(output: Path, results: dict[str, Any]) -> None:
    pages = results["pages"]
    assert pages["interval"] == 100 and pages["options"] == ["stuck_scale", "rescued"]
    printed = pages["printed"].replace(str(output / "pages"), "/runs").splitlines()
    told = [cut(line) for line in printed if line.startswith("nemo_fp8_debug: ")]
    block = find_block("text", "attach.md#nemo-2x-and-any-lightning-trainer")
    check_text(block, "\n".join(told), r"recorded \d+ samples")  # the page's run is longer


LINEAR = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def test_recompute_trains_the_same(results: dict[str, Any]) -> None:
    assert results["recompute"]["1"] == results["plain"]["1"]


def test_metrics_and_loss_share_their_steps(output: Path, results: dict[str, Any]) -> None:
    events = EventAccumulator(str(output / "plain-1" / "run"), size_guidance={"scalars": 0})
    events.Reload()
    losses = events.Scalars("reduced_train_loss")
    assert [e.value for e in losses] == pytest.approx(results["plain"]["1"]["losses"])
    metrics = events.Scalars("fp8_underflow_pct/input/decoder.layers.3.mlp.linear_fc2")
    assert [e.step for e in metrics] == [e.step for e in losses] == list(range(5))
    record = read_table_rows(find_record(output / "plain-1"), "steps")
    assert record["loss"].to_list() == pytest.approx(results["plain"]["1"]["losses"])


def test_gradients_are_recorded_in_units_of_the_loss_too(output: Path) -> None:
    for case in ("plain", "recompute"):
        run = find_record(output / f"{case}-1")
        assert read_table_rows(run, "steps")["grad_scale"].to_list() == pytest.approx(
            [0.5] * 5, rel=1e-6
        )  # two micro-batches
        metrics = read_table_rows(run, "metrics").filter(role="grad_output")
        assert metrics["unscaled_amax"].to_list() == pytest.approx([2 * amax for amax in metrics["amax"]], rel=1e-6)


def test_every_gemm_is_recorded_under_the_engine_that_quantized_it(output: Path) -> None:
    metrics = read_table_rows(find_record(output / "plain-1"), "metrics").filter(step=4)
    assert len(metrics) == 3 * (4 * 4 + 1)
    engine = metrics.filter(scale_source="engine")
    assert set(engine["gemm"]) == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert set(metrics["dtype"]) == {"bfloat16"}
    assert set(engine.filter(role="grad_output")["format"]) == {"e5m2"}
    assert (engine.filter(role="input")["calls"] == 2).all()


def test_recompute_records_the_same_metrics(output: Path) -> None:
    plain, recomputed = (read_table_rows(find_record(output / f"{case}-1"), "metrics") for case in ("plain", "recompute"))
    assert plain.equals(recomputed)


def test_fingerprint(output: Path) -> None:
    found = read_fingerprint(find_record(output / "plain-1"))
    assert {"torch", "lightning", "nemo-toolkit", "megatron-core", "nemo-fp8-debug"} <= set(found["versions"])
    assert found["recipe"]["fp8_engine"] == "emulation"
    assert found["backend_options"]["num_layers"] == 4
    assert found["sampled"]["gemm_kinds"]["linear_fc2"] == 4


def test_launcher_can_serialize_the_callbacks(results: dict[str, Any]) -> None:
    classes = ["FP8DebugCallback", "FP8EmulationCallback", "FP8PlanCallback"]
    assert results["round_trip"] == {"classes": classes, "interval": 50}


def test_a_run_that_fails_goes_on_from_a_checkpoint_as_a_plan_says(results: dict[str, Any]) -> None:
    rescued = results["rescued"]
    run, resumed, current = (rescued[name]["losses"] for name in ("run", "resumed", "current"))
    assert len(run) == 5 and resumed == run[2:]
    assert rescued["resumed"]["weights"] == rescued["run"]["weights"]
    assert rescued["rescue"] == rescued["current"]
    assert current[0] != resumed[0] and current[-1] < resumed[-1]


def test_a_recommended_snippet_is_what_nemo_takes(results: dict[str, Any]) -> None:
    expected = {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 0,
    }
    assert expected.items() <= results["precision"].items()


def test_audit_of_a_checkpoint_that_nemo_saved(output: Path) -> None:
    folder = output / "saved"
    assert (folder / "context" / "model.yaml").is_file()
    found = audit(folder)
    saved = torch.load(folder.with_suffix(".pt"), weights_only=True)
    kinds = ("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight", "output_layer.weight")
    want = {n.removeprefix("module.").removesuffix(".weight"): w for n, w in saved.items() if n.endswith(kinds)}
    assert_audited(found, want)
    assert len(want) == 2 * 4 + 1 and "decoder.layers.1.mlp.linear_fc2" in want
    assert found.left_out["of the optimizer"] > 0
