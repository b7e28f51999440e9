"""torchao's layers under FSDP2, with an all-gather in FP8 too, and under tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_script
from torchao.float8.float8_training_tensor import LinearMMConfig, hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import tensor_to_scale

# Long tests rest on nemo_fp8_debug/capture/backends/torchao/*.py.
pytestmark = pytest.mark.long
WORKER = Path(__file__).with_name("torchao_sharded.py")
GATHERED = ("block", "linear", "precomputed")
MODES = (*GATHERED, "high precision", "tp", "float8 tp")
LAYERS = ("0.0", "0.2", "1.0")

Results = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of each rank, by mode."""
    folder = tmp_path_factory.mktemp("torchao")
    run_script(WORKER, folder, ",".join(MODES))
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_weights_are_bit_identical(results: Results, mode: str) -> None:
    for rank in results:
        watched, alone = rank[mode], rank[mode]["unwatched"]
        assert watched["losses"] and watched["losses"] == alone["losses"]
        for mine, other in zip(watched["weights"], alone["weights"], strict=True):
            assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("mode", GATHERED)
def test_a_weight_gathered_in_fp8_is_measured_in_high_precision_under_the_scale_of_the_gathering(
    results: Results, mode: str
) -> None:
    """All of it, each rank's part once, of the step that is sampled."""
    found = results[0][mode]
    assert not found["warnings"] and set(found["rows"]) == {0, 2}
    for step, rows in found["rows"].items():
        assert {row["scale_source"] for row in rows.values()} == {"engine"} and len(rows) == 9
        for layer in LAYERS:
            weight, row = found["weights"][step][f"{layer}.weight"], rows[layer, "weight"]
            scale = tensor_to_scale(weight, torch.float8_e4m3fn)
            codes = hp_tensor_and_scale_to_float8(weight, scale, torch.float8_e4m3fn, LinearMMConfig())._data
            q = codes.double() / scale.double()
            assert (row["n"], row["ranks"], row["dtype"]) == (weight.numel(), 2, "float32")
            assert (row["scale"], row["recipe"]) == (float(scale), "current-hybrid(epsilon=1e-12)")
            assert row["mse"] == pytest.approx(float((weight.double() - q).square().mean()), rel=1e-12)
            assert row["underflow_pct"] == 100 * float(((weight != 0) & (q == 0)).double().mean())


def test_under_fsdp_without_it_every_cast_is_read(results: Results) -> None:
    found = results[0]["high precision"]
    assert not found["warnings"]
    for rows in found["rows"].values():
        assert {(row["scale_source"], row["recipe"]) for row in rows.values()} == {("engine", "rowwise-e4m3")}
        assert len(rows) == 9


@pytest.mark.parametrize("mode", ["tp", "float8 tp"])
def test_what_tensor_parallelism_hides_is_unknown_or_left_out_and_said(results: Results, mode: str) -> None:
    found = results[0][mode]
    rows, (first, *more) = found["rows"][0], found["warnings"]
    assert "its weight is split by tensor parallelism, and torchao reduces its amax over ranks" in first
    assert {row["scale_source"] for (layer, _), row in rows.items() if layer != "1.0"} == {"unknown"}
    assert {row["scale_source"] for (layer, _), row in rows.items() if layer == "1.0"} == {"engine"}
    if mode == "tp":
        assert len(rows) == 9 and not more
    else:
        assert {key for key in rows if key[0] != "1.0"} == {("0.0", "weight"), ("0.2", "weight")}
        [lost] = more
        assert "X of 0.0, X of 0.2, dY of 0.2, dY of 0.0 are missing" in lost and "Float8TrainingTensor" in lost
