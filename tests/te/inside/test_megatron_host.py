"""A megatron-core GPT on Transformer Engine's layers: what is reported of every GEMM against what the kernels did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from host_runs import checked, run
from test_megatron import FULL_RECOMPUTE, gpt, train

from nemo_fp8_debug.record.reader import find_record, read_fingerprint, read_table_rows

pytestmark = pytest.mark.usefixtures("megatron")


def gemms_of(model: Any) -> dict[str, tuple[str, int]]:
    """Layer name -> (module's name, number of the GEMM in it)."""
    found = {}
    for name, module in model.named_modules():
        for part in range(getattr(module, "num_gemms", 0)):
            found[f"{name}.{part}"] = (name, part)
        found[name] = (name, 0)
    return found


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("options", [{}, FULL_RECOMPUTE], ids=["plain", "full recompute"])
def test_every_scale_and_code_of_a_gpt(tmp_path: Path, recipe: str, options: dict[str, Any]) -> None:
    model = gpt(fp8_recipe=recipe, **options)
    casts = run(tmp_path, model, lambda step: train(model, steps=1), dump=["layers.*"])
    # Two micro-batches of X and dY, and W, of four GEMMs in each of two layers.
    assert checked(tmp_path, model, casts, gemms_of(model)) == 3 * 2 * 4 * 5
    metrics = read_table_rows(tmp_path, "metrics").filter(layer="output_layer")
    assert set(metrics["scale_source"]) <= {"emulated", "current"}  # Megatron leaves the output layer in BF16
    assert read_fingerprint(find_record(tmp_path))["recipe"]["fp8_engine"] == "Transformer Engine"


def test_first_and_last_layers_in_bf16(tmp_path: Path) -> None:
    model = gpt(
        fp8_recipe="tensorwise", first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0
    )
    casts = run(tmp_path, model, lambda step: train(model, steps=1), dump=["layers.1"])
    assert checked(tmp_path, model, casts, gemms_of(model)) == 3 * 4 * 5
    sources = read_table_rows(tmp_path, "metrics").group_by("layer").agg("scale_source").rows()
    assert all(set(found) == {"not quantized"} for layer, found in sources if "layers.0" in layer)


def test_experts(tmp_path: Path) -> None:
    model = gpt(experts=4)
    casts = run(tmp_path, model, lambda step: train(model, steps=1), dump=["experts"], on_error="warn")
    assert checked(tmp_path, model, casts, gemms_of(model)) > 3 * 2 * 2 * 4
    metrics = read_table_rows(tmp_path, "metrics")
    assert {"linear_fc1", "linear_fc2"} <= set(metrics["gemm"])
    for (step, role, layer), rows in metrics.filter(pl.col("experts").is_not_null()).group_by(
        "step", "role", pl.col("layer").str.replace(r"\.\w+$|\.\*$", "")
    ):
        aggregated = pl.col("layer") == f"{layer}.*"
        (whole,) = rows.filter(aggregated).to_dicts()
        single = rows.filter(~aggregated)
        assert (whole["experts"], set(single["experts"])) == (4, {1}), (step, role, layer)
        assert whole["n"] == single["n"].sum()
        assert whole["mse"] * whole["n"] == pytest.approx(float((single["mse"] * single["n"]).sum()), rel=1e-12)
        assert whole["scale"] == single["scale"].min()
        assert whole["scale_source"] == "engine"


@pytest.mark.parametrize("experts", [None, 4])
def test_megatrons_own_subclasses_are_verified(tmp_path: Path, experts: int | None) -> None:
    model = gpt(experts=experts, fp8_recipe="tensorwise")
    run(
        tmp_path,
        model,
        lambda step: train(model, steps=1, micro_batches=1),
        steps=1,
        dump=(),
        verify_rows=16,
        on_error="warn",
    )
    layers = pl.col("layer").str.contains("linear_")
    outcomes = read_table_rows(tmp_path, "verification").filter(layers, pl.col("outcome") != "unknown")
    assert set(outcomes["outcome"]) == {"within"}
    assert set(outcomes["gemm"]) == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert set(read_table_rows(tmp_path, "metrics").filter(layers)["scale_source"]) == {"engine"}
