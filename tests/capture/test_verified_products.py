"""What GEMMs return against their operands: right ones are within, and a kernel that multiplies wrongly is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from product_faults.faults import FAULTS, FaultyKernel, Product
from product_faults.models import Verified
from small_models.megatron import gpt, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_fp8_debug import Emulation, Monitor, read_record
from nemo_fp8_debug.observations.products.results import find_product_node

PRODUCTS = {"fprop", "dgrad", "wgrad"}


def verified(
    model: nn.Module, loss: Callable[[], torch.Tensor], around: Any = None, reductions: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """Rows of products, or of the sums of gradients."""
    rows = Verified()
    monitor = Monitor(model, recorders=[rows], interval=1, table_rows=0, on_error="raise", verify_rows=24, **options)
    with monitor.step(0) as report:
        with around or nullcontext():
            found = loss()
            found.backward()
        report(loss=found)
    monitor.close()
    model.zero_grad()
    return [row for row in rows.rows if (row["product"] == "reduction") == reductions]


def outcomes(rows: list[dict[str, Any]]) -> set[str]:
    return {row["outcome"] for row in rows}


def mlp(dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 96, bias=bias), nn.GELU(), nn.Linear(96, 48, bias=bias)
    return nn.Sequential(*layers).to(dtype)


def squares(model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: model(x).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(160, 64), (5, 32, 64)])
def test_products_of_linear_layers_are_within(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    model, x = mlp(dtype, bias), torch.randn(shape).to(dtype)
    rows = verified(model, squares(model, x))
    assert [(row["layer"], row["product"]) for row in rows] == [
        ("0", "fprop"),
        ("0", "wgrad"),  # X needs no gradient
        *(("2", product) for product in ("fprop", "dgrad", "wgrad")),
    ]
    assert outcomes(rows) == {"within"} and {row["values"] for row in rows} == {24 * 24}
    assert all(0 < row["error_over_bound"] <= 1 and abs(row["factor"] - 1) < 2e-3 for row in rows)


def test_autocast_rounds_operands_and_bias() -> None:
    model, x = mlp(torch.float32), torch.randn(160, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = verified(model, squares(model, x))
    assert outcomes(rows) == {"within"}


@pytest.mark.parametrize("recipe", ["delayed", "current", "current-e5m2", "blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_operands_are_those_that_the_engine_multiplies(recipe: str, dtype: torch.dtype) -> None:
    """Against what was before the cast, every product would be beyond."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 128)).to(dtype)
    x = torch.randn(96, 256).to(dtype)
    emulation = Emulation(model, recipe)
    emulation.attach()
    assert outcomes(verified(model, squares(model, x))) == {"within"}
    emulation.detach()


@pytest.mark.parametrize("reentrant", [True, False])
def test_products_of_what_is_recomputed_are_within(reentrant: bool) -> None:
    model, x = mlp(), torch.randn(160, 64).bfloat16().requires_grad_()
    rows = verified(model, lambda: checkpoint(model, x, use_reentrant=reentrant).float().square().mean())
    assert outcomes(rows) == {"within"} and len(rows) == 6


@pytest.mark.usefixtures("megatron")
def test_products_of_megatron_are_within() -> None:
    model = gpt()
    rows = verified(model, lambda: loss_of(model, 0))
    assert outcomes(rows) == {"within"}
    assert {row["product"] for row in rows if row["gemm"] == "linear_fc1"} == PRODUCTS


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wrong_product_is_named_and_no_other(fault: str, dtype: torch.dtype) -> None:
    model, x = mlp(dtype), torch.randn(160, 64).to(dtype)
    order = [("0", "fprop"), ("2", "fprop"), ("2", "dgrad"), ("2", "wgrad"), ("0", "wgrad")]
    for at, expected in enumerate(order):
        kernel = FaultyKernel(FAULTS[fault], at)
        rows = verified(model, squares(model, x), kernel)
        assert len(kernel.log) == 1 and kernel.log[0][2] > 0
        beyond = [row for row in rows if row["outcome"] == "beyond"]
        assert [(row["layer"], row["product"]) for row in beyond] == [expected]
        assert (beyond[0]["rank"], beyond[0]["ranks"], beyond[0]["ranks_beyond"]) == (0, 1, 1)


def test_what_is_wrong_is_told_with_its_size_and_shape() -> None:
    model, x = mlp(), torch.randn(160, 64).bfloat16()

    def of(fault: str, at: int = 0) -> dict[str, Any]:
        rows = verified(model, squares(model, x), FaultyKernel(FAULTS[fault], at))
        return next(row for row in rows if row["outcome"] == "beyond")

    doubled, some_rows = of("power_of_two"), of("wrong_rows")
    assert doubled["shape"] == "all" and doubled["factor"] == pytest.approx(2, rel=1e-3)
    assert some_rows["shape"] == "rows" and some_rows["row"] is not None
    assert of("factor", 1)["factor"] == pytest.approx(1 + 2.0**-6, rel=1e-3)


@pytest.mark.parametrize(("column", "interval"), [(255, 1), (0, 10), (132, 100)])
def test_a_wrong_column_is_found_within_60_samples(column: int, interval: int) -> None:
    torch.manual_seed(0)
    model, x, rows = nn.Linear(32, 256), torch.randn(48, 32), Verified()
    model.requires_grad_(False)

    def fault(product: Product) -> torch.Tensor:
        return torch.where(torch.arange(256) == column, 1.5 * product.out, product.out)

    monitor = Monitor(model, recorders=[rows], interval=interval, table_rows=0, on_error="raise", verify_rows=16)
    for step in range(0, 60 * interval, interval):
        with monitor.step(step), FaultyKernel(fault, 0):
            model(x)
    monitor.close()
    beyond = [row for row in rows.rows if row["outcome"] == "beyond"]
    assert len(rows.rows) == 60 and len(beyond) >= 2
    assert {(row["product"], row["shape"], row["column"]) for row in beyond} == {("fprop", "columns", column)}


def test_a_frozen_weight_has_no_product_to_verify() -> None:
    model, x = mlp(), torch.randn(160, 64).bfloat16()
    model.get_submodule("2").requires_grad_(False)
    assert {(row["layer"], row["product"]) for row in verified(model, squares(model, x))} == {
        ("0", "fprop"),
        ("0", "wgrad"),
        ("2", "fprop"),
        ("2", "dgrad"),
    }


def test_both_options_share_their_rows() -> None:
    """The greater serves both, and neither changes what the other finds."""
    model, x = mlp(), torch.randn(160, 64).bfloat16()
    alone, both = (verified(model, squares(model, x), **options) for options in ({}, {"output_rows": 24}))
    for mine, its in zip(alone, both, strict=True):  # float64 sums in another order
        assert mine == {
            name: pytest.approx(value, rel=1e-9) if type(value) is float else value for name, value in its.items()
        }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_is_the_sum_of_its_backward_passes(dtype: torch.dtype) -> None:
    """With what was there before the step, of a weight that is used twice and has a penalty of its own."""
    model, x = mlp(dtype), torch.randn(160, 64).to(dtype)
    model(x).sum().backward()

    def loss() -> torch.Tensor:
        model(x).float().square().mean().backward()
        penalty = model.get_submodule("0").weight.float().square().sum()
        return model(x + 1).float().mean() + model(x - 1).float().mean() + penalty

    rows = verified(model, loss, reductions=True)
    assert [(row["layer"], row["outcome"], row["ranks"]) for row in rows] == [("0", "within", 1), ("2", "within", 1)]


def test_a_gradient_that_is_lost_between_passes_is_named() -> None:
    """Each pass is right, and its sum is not what an optimizer would step by."""
    model, x = mlp(), torch.randn(160, 64).bfloat16()

    def lose() -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: model.get_submodule("2").weight.grad.mul_(0.5))

    model.get_submodule("2").weight.register_hook(lambda grad: lose())
    rows = {row["layer"]: row for row in verified(model, squares(model, x), reductions=True)}
    assert (rows["0"]["outcome"], rows["2"]["outcome"]) == ("within", "beyond")
    assert rows["2"]["factor"] == pytest.approx(0.5, rel=1e-2) and rows["2"]["shape"] == "all"


def test_a_linear_of_others_is_not_believed() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model, x = nn.Sequential(Doubled(64, 32)), torch.randn(40, 64)
    assert "beyond" not in outcomes(verified(model, squares(model, x)))


def test_hooks_of_others_that_change_operands_are_no_fault_of_a_kernel() -> None:
    """A pre-hook may change X and W, so nothing is told. A hook on Y changes dY before we read it, so all is checked."""
    model, x = mlp(), torch.randn(160, 64).bfloat16()
    handle = model.get_submodule("2").register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    found = {(row["layer"], row["product"]): row for row in verified(model, squares(model, x))}
    assert {found["2", product]["outcome"] for product in PRODUCTS} == {"unknown"}
    assert "foreign hook may change X" in found["2", "fprop"]["reason"]
    assert found["0", "fprop"]["outcome"] == found["0", "wgrad"]["outcome"] == "within"
    handle.remove()
    model.get_submodule("2").register_forward_hook(lambda module, args, out: out.register_hook(lambda dy: 2 * dy) and None)
    found = {(row["layer"], row["product"]): row for row in verified(model, squares(model, x))}
    assert {found["2", product]["outcome"] for product in PRODUCTS} == {"within"}


class Halved(torch.autograd.Function):
    """A function that nobody here knows, as a later release of an engine may have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return dy / 2


def test_the_node_of_the_layer_before_is_never_taken_for_ones_own() -> None:
    first, x = nn.Linear(32, 32), torch.randn(8, 32, requires_grad=True)
    y = first(x)
    assert find_product_node(y, x, first.weight) is not None
    assert find_product_node(Halved.apply(y), y, None) is None
    assert find_product_node(y.view(2, 4, 32), y, None) is None


def test_few_rows_cost_no_sample(tmp_path: Path) -> None:
    """Gradients are compared at 8 rows and columns, however few of a product are."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, tmp_path, interval=1, table_rows=0, on_error="raise", verify_rows=2)
    for step in range(8):
        with monitor.step(step):
            optimizer.zero_grad()
            for _ in range(3):
                squares(model, torch.randn(160, 64).bfloat16())().backward()
            optimizer.step()
    monitor.close()
    rows = read_record(tmp_path, table="verification").filter(product="reduction")
    assert rows["step"].n_unique() == 8 and set(rows["outcome"]) == {"within"}
    assert set(rows["row"]) <= set(range(8)) and max(rows["row"]) > 1
