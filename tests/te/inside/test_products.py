"""The error of outputs, against what Transformer Engine's GEMMs over emulated kernels really put out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_te import te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.record.reader import read_table_rows

RECIPES = {"delayed": DelayedScaling(amax_history_len=4, margin=1), "current": Float8CurrentScaling()}
of_recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
#: outputs and gradients are rounded to BF16, which the metrics know nothing of
ROUNDED = 0.01


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def products(folder: Path, step: int) -> dict[tuple[str, str], dict[str, Any]]:
    table = read_table_rows(folder, "outputs", where={"step": step})
    return {(row["layer"], row["product"]): row for row in table.to_dicts()}


def random(*shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()


def watching(model: torch.nn.Module, folder: Path) -> Monitor:
    return Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise", output_rows=1000)


@of_recipes
def test_linear(tmp_path: Path, recipe: Any) -> None:
    torch.manual_seed(0)
    linear = te.Linear(64, 32, params_dtype=torch.bfloat16, bias=False)
    monitor = watching(linear, tmp_path)
    for step in range(3):
        x, dy = random(48, 64, seed=step, size=1 + step).requires_grad_(), random(48, 32, seed=9 + step, size=1e-3)
        linear.zero_grad()
        with monitor.step(step), te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            y = linear(x)
            y.backward(dy)
    monitor.close()
    w, found = linear.weight.detach().double(), products(tmp_path, 2)
    right = {"fprop": x.detach().double() @ w.T, "dgrad": dy.double() @ w, "wgrad": dy.double().T @ x.detach().double()}
    put_out = {"fprop": y.detach(), "dgrad": x.grad, "wgrad": linear.weight.grad}
    for product, expected in right.items():
        row = found["model", product]
        assert row["relative_error"] == pytest.approx(relative_error(put_out[product], expected), rel=ROUNDED)
        assert row["scale_source"] == "engine"


@of_recipes
def test_a_fused_norm(tmp_path: Path, recipe: Any) -> None:
    torch.manual_seed(0)
    linear = te.LayerNormLinear(64, 32, params_dtype=torch.bfloat16, bias=False, normalization="RMSNorm")
    monitor, x = watching(linear, tmp_path), random(48, 64, seed=1)
    with monitor.step(0), te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        y = linear(x)
        y.backward(random(48, 32, seed=2))
    monitor.close()
    normed = torch.nn.functional.rms_norm(x.double(), (64,), eps=linear.eps)
    right = normed @ linear.weight.detach().double().T
    row = products(tmp_path, 0)["model", "fprop"]
    assert row["relative_error"] == pytest.approx(relative_error(y.detach(), right), rel=ROUNDED)


def test_grouped(tmp_path: Path) -> None:
    """Each expert's product is that of its own rows; one without rows has none."""
    torch.manual_seed(0)
    grouped = te.GroupedLinear(3, 64, 32, params_dtype=torch.bfloat16, bias=False)
    monitor, splits, x = watching(grouped, tmp_path), [40, 0, 24], random(64, 64, seed=1)
    with monitor.step(0), te.fp8_autocast(enabled=True, fp8_recipe=RECIPES["current"]):
        y = grouped(x, splits)
        y.backward(random(64, 32, seed=2))
    monitor.close()
    found = products(tmp_path, 0)
    experts = {layer.rpartition(".")[2] for layer, _ in found}
    assert experts == {"0", "2"}
    for number, rows in ((0, slice(0, 40)), (2, slice(40, 64))):
        row = next(row for (layer, product), row in found.items() if layer.endswith(str(number)) and product == "fprop")
        right = x[rows].double() @ getattr(grouped, f"weight{number}").detach().double().T
        assert row["relative_error"] == pytest.approx(relative_error(y.detach()[rows], right), rel=ROUNDED)


def test_of_a_layernorm_mlp_what_is_in_sight(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mlp = te.LayerNormMLP(32, 64, params_dtype=torch.bfloat16, bias=False)
    monitor = watching(mlp, tmp_path)
    with monitor.step(0), te.fp8_autocast(enabled=True, fp8_recipe=RECIPES["current"]):
        mlp(random(16, 32, seed=1)).backward(random(16, 32, seed=2))
    monitor.close()
    assert {(layer.rpartition(".")[2], product) for layer, product in products(tmp_path, 0)} == {("fc1", "fprop")}
