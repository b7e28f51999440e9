"""The callback under real NeMo: MegatronStrategy, megatron-core layers, BF16, FP8 by emulation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_fp8_debug.record.reader import find_run, read_fingerprint, read_table


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemo")
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": str(here.parents[1] / "recipes"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(here / "nemo_runs.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def results(output: Path) -> dict[str, Any]:
    return json.loads((output / "results.json").read_text())


@pytest.mark.parametrize("case", ["plain", "recompute"])
@pytest.mark.parametrize("interval", ["1", "10"])
def test_losses_and_weights_are_bit_identical(results: dict[str, Any], case: str, interval: str) -> None:
    assert len(results[case]["None"]["losses"]) == 5
    assert results[case][interval] == results[case]["None"]


def test_recompute_trains_the_same(results: dict[str, Any]) -> None:
    assert results["recompute"]["1"] == results["plain"]["1"]


def test_figures_and_loss_share_their_steps(output: Path, results: dict[str, Any]) -> None:
    events = EventAccumulator(str(output / "plain-1" / "run"), size_guidance={"scalars": 0})
    events.Reload()
    losses = events.Scalars("reduced_train_loss")
    assert [e.value for e in losses] == pytest.approx(results["plain"]["1"]["losses"])
    figures = events.Scalars("fp8_underflow_pct/input/decoder.layers.3.mlp.linear_fc2")
    assert [e.step for e in figures] == [e.step for e in losses] == list(range(5))
    record = read_table(find_run(output / "plain-1"), "steps")
    assert record["loss"].to_list() == pytest.approx(results["plain"]["1"]["losses"])


def test_every_gemm_is_recorded_under_the_engine_that_quantised_it(output: Path) -> None:
    figures = read_table(find_run(output / "plain-1"), "figures").filter(step=4)
    assert len(figures) == 3 * (4 * 4 + 1)
    engine = figures.filter(scale_source="engine")
    assert set(engine["gemm"]) == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert set(figures["dtype"]) == {"bfloat16"}
    assert set(engine.filter(role="grad_output")["format"]) == {"e5m2"}
    assert (engine.filter(role="input")["calls"] == 2).all()


def test_recompute_records_the_same_figures(output: Path) -> None:
    plain, recomputed = (read_table(find_run(output / f"{case}-1"), "figures") for case in ("plain", "recompute"))
    assert plain.equals(recomputed)


def test_fingerprint(output: Path) -> None:
    found = read_fingerprint(find_run(output / "plain-1"))
    assert {"torch", "lightning", "nemo-toolkit", "megatron-core", "nemo-fp8-debug"} <= set(found["versions"])
    assert found["recipe"]["fp8_engine"] == "emulation"
    assert found["host_options"]["num_layers"] == 4
    assert found["sampled"]["gemm_kinds"]["linear_fc2"] == 4


def test_launcher_can_serialise_the_callbacks(results: dict[str, Any]) -> None:
    assert results["round_trip"] == {"classes": ["FP8DebugCallback", "FP8EmulationCallback"], "interval": 50}
