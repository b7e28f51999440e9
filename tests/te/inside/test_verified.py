"""What Transformer Engine's GEMMs return, over emulated kernels: right ones are within, wrong ones are named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from emulated_te import gemm, te
from nemo.collections.llm.peft.lora import TELinearAdapter
from torch import nn
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

from nemo_fp8_debug import FP8DebugWarning, Monitor, read_record

RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blockwise": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}
of_recipes = pytest.mark.parametrize("recipe", RECIPES)
BF16 = {"params_dtype": torch.bfloat16}


class Layers(nn.Module):
    """A plain layer, one behind a norm, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.normed = te.Linear(128, 256, **BF16), te.LayerNormLinear(256, 128, **BF16)
        self.experts = te.GroupedLinear(2, 128, 128, bias=False, **BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.normed(self.first(x)), [32, 64])


def rows_of(
    folder: Path,
    model: nn.Module,
    recipe: str,
    steps: int = 2,
    before: Callable[[int], Any] = lambda step: None,
    width: int = 128,
    **call: Any,
) -> pl.DataFrame:
    x = torch.randn(96, width, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    monitor = Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise", verify_rows=24)
    te_recipe = RECIPES[recipe]
    for step in range(steps):
        before(step)
        with monitor.step(step):
            with te.autocast(enabled=True, recipe=te_recipe) if te_recipe else nullcontext():
                y = model(x, **call)
            (y.float().square().mean() * 100).backward()
    monitor.close()
    return read_record(str(folder), "verification").filter(pl.col("product") != "reduction")


@of_recipes
def test_products_are_within(tmp_path: Path, recipe: str) -> None:
    torch.manual_seed(0)
    found = rows_of(tmp_path, Layers(), recipe)
    unknown = found.filter(pl.col("outcome") != "within").select("layer", "product", "reason").unique().rows()
    inside = "one of its operands, or its result, exists only inside its module"
    assert unknown == [("normed", "dgrad", inside)]
    assert len(found) == 2 * 4 * 3


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_products_of_stored_weights_are_within(tmp_path: Path, recipe: str) -> None:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=True, recipe=RECIPES[recipe]):
        model = te.Linear(128, 128, **BF16)
    found = rows_of(tmp_path, model, recipe)
    unknown = set(found.filter(pl.col("outcome") != "within")["product"])
    assert unknown <= ({"dgrad"} if recipe == "blockwise" else set())
    assert "beyond" not in found["outcome"]


@of_recipes
def test_a_gradient_that_is_added_to_the_main_one_is_its_difference(tmp_path: Path, recipe: str) -> None:
    torch.manual_seed(0)
    model = te.Linear(128, 128, fuse_wgrad_accumulation=True, **BF16)
    model.weight.main_grad = torch.randn(128, 128)
    found = rows_of(tmp_path, model, recipe)
    assert set(found["outcome"]) == {"within"} and set(found["product"]) == {"fprop", "dgrad", "wgrad"}


class WrongKernel:
    """The operand of one GEMM of a step is decoded wrongly."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, step: int, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._matrix, self._at, self._step, self._fault = gemm._matrix, at, step, fault
        self.calls, self.now = 0, -1
        patch.setattr(gemm, "_matrix", self)

    def __call__(self, tensor: Any, transposed: bool) -> torch.Tensor:
        matrix = self._matrix(tensor, transposed)
        self.calls += 1
        is_first_operand = self.calls == 2 * self._at + 1
        return self._fault(matrix) if self.now == self._step and is_first_operand else matrix

    def begin(self, step: int) -> None:
        self.calls, self.now = 0, step


def without_a_block(matrix: torch.Tensor) -> torch.Tensor:
    return torch.cat([matrix[:, :-16], torch.zeros_like(matrix[:, -16:])], 1)


@pytest.mark.parametrize("fault", [lambda m: 2 * m, lambda m: m * (1 + 2.0**-6), without_a_block, lambda m: m.flip(1)])
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_a_kernel_that_is_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, fault: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    for at, product in enumerate(("fprop", "dgrad", "wgrad")):
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            kernel = WrongKernel(patch, at, step=2, fault=fault)
            found = rows_of(tmp_path / product, te.Linear(128, 128, bias=False, **BF16), recipe, 4, kernel.begin)
        beyond = found.filter(pl.col("outcome") == "beyond")
        assert beyond.select("step", "layer", "product", "rank").rows() == [(2, "model", product, 0)]


def test_a_cached_weight_that_is_stale_is_named(tmp_path: Path) -> None:
    """The engine keeps what it has cast of W for later micro-batches; here it misses the update."""
    torch.manual_seed(0)
    model = te.Linear(128, 128, bias=False, **BF16)

    def miss_the_update(step: int) -> None:
        if step == 1:
            cached = model._fp8_workspaces["weight"]
            cached.update_quantized = lambda *args, **kwargs: cached
            cached.quantize_ = lambda *args, **kwargs: cached
            with torch.no_grad():
                model.weight.mul_(1.05)

    found = rows_of(tmp_path, model, "current", before=miss_the_update, is_first_microbatch=True)
    assert set(found.filter(step=0)["outcome"]) == {"within"}
    beyond = found.filter(pl.col("outcome") == "beyond").select("step", "product").rows()
    assert (1, "fprop") in beyond and (1, "wgrad") not in beyond


@of_recipes
def test_a_gradient_that_a_hook_changes_accuses_no_kernel(tmp_path: Path, recipe: str) -> None:
    torch.manual_seed(0)
    model = te.Linear(128, 128, bias=False, **BF16)
    model.register_forward_hook(lambda module, args, out: out.register_hook(lambda dy: 2 * dy) and None)
    found = rows_of(tmp_path, model, recipe)
    outcomes = {product: set(found.filter(product=product)["outcome"]) for product in ("fprop", "dgrad", "wgrad")}
    assert set.union(*outcomes.values()) == {"within"}


def lora_of_nemo() -> nn.Module:
    adapter = TELinearAdapter(te.Linear(64, 64, bias=False, device="cpu", **BF16), dim=8)
    nn.init.normal_(adapter.lora_b.weight, std=0.1)
    return adapter


class AddingLinear(te.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


def adding() -> nn.Module:
    return AddingLinear(64, 64, bias=False, device="cpu", **BF16)


def replaced() -> nn.Module:
    linear = te.Linear(64, 64, bias=False, device="cpu", **BF16)
    linear.forward = lambda x: te.Linear.forward(linear, x) + x
    return linear


class AddingGrouped(te.GroupedLinear):
    def forward(self, x: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        return super().forward(x, m_splits) + x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = AddingGrouped(2, 64, 64, bias=False, device="cpu", **BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, [32, 64])


class AddingMLP(te.LayerNormMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


def adding_mlp() -> nn.Module:
    return AddingMLP(64, 64, bias=False, device="cpu", **BF16)


@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("make", [lora_of_nemo, adding, replaced, Experts, adding_mlp])
def test_nothing_is_said_of_a_layer_with_a_forward_of_its_own(
    tmp_path: Path, recipe: str, make: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    with pytest.warns(FP8DebugWarning, match=r"how \d layers cast their operands is unknown \(first"):
        found = rows_of(tmp_path, nn.Sequential(make()), recipe, width=64)
    found = found.filter(~pl.col("layer").str.contains("lora"))
    assert set(found["product"]) >= {"fprop"} and set(found["outcome"]) == {"unknown"}
    metrics = read_record(str(tmp_path), "metrics", ["layer", "scale_source"])
    sources = metrics.filter(~pl.col("layer").str.contains("lora"))["scale_source"]
    assert len(sources) >= 4 and set(sources) == {"unknown"}
