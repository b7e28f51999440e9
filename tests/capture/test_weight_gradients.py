"""Gradients of weights, as recorded by default, against those that a loop keeps right behind its backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_fp8_debug import Monitor, diagnose, read_record

IN, HIDDEN, OUT, STEPS = 24, 40, 16, 2
Kept = dict[tuple[int, str], torch.Tensor]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))


def watching(model: nn.Module, folder: Path, **options: Any) -> Monitor:
    return Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise", **options)


def batch(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, IN)


def equal_the_oracle(folder: Path, kept: Kept) -> pl.DataFrame:
    """Compare all rows with gradients that were cloned in the loop."""
    rows = read_record(str(folder), "gradients")
    assert {(row["step"], row["layer"]) for row in rows.iter_rows(named=True)} == set(kept)
    for row in rows.iter_rows(named=True):
        gradient = kept[row["step"], row["layer"]].double()
        counts = int((gradient == 0).sum()), int((~gradient.isfinite()).sum()), gradient.numel()
        assert (row["zeros"], row["nonfinite"], row["elements"]) == counts
        if counts[1]:
            assert row["norm"] is None
        else:
            assert row["norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    return rows


def trained(
    model: nn.Module,
    folder: Path,
    layers: dict[str, Any],
    around: Callable[[int], None] = lambda step: None,
    micro_batches: int = 1,
    **options: Any,
) -> Kept:
    """Train with clipping; returns gradients as the last backward pass leaves them."""
    monitor, kept = watching(model, folder, **options), Kept()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        with monitor.step(step) as report:
            for _ in range(micro_batches):
                loss = model(batch()).square().mean() / micro_batches
                loss.backward()
            around(step)
            kept |= {(step, name): layer.weight.grad.clone() for name, layer in layers.items()}
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            report(loss=loss)
        optimizer.zero_grad()
    monitor.close()
    return kept


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_complete_and_not_yet_clipped(tmp_path: Path, dtype: torch.dtype, micro_batches: int) -> None:
    model = mlp()
    layers = {"0": model[0], "2": model[2]}
    if dtype == torch.bfloat16:
        model = nn.Sequential(Cast(), *model.bfloat16())
        layers = {"1": model[1], "3": model[3]}
    rows = equal_the_oracle(tmp_path, trained(model, tmp_path, layers, micro_batches=micro_batches))
    assert (rows["zeros"] < rows["elements"]).all() and (rows["ranks"] == 1).all()


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()


def test_states_have_the_same_gradient(tmp_path: Path) -> None:
    model = mlp()
    kept = trained(model, tmp_path, {"0": model[0], "2": model[2]}, micro_batches=4, states=["weight_gradient"])
    rows = read_record(str(tmp_path), "states").filter(role="weight_gradient")
    assert len(rows) == len(kept)
    for row in rows.iter_rows(named=True):
        assert row["amax"] == kept[row["step"], row["layer"]].abs().max().item()


def test_a_nan_is_in_one_gradient_alone_though_clipping_spreads_it(tmp_path: Path) -> None:
    model = mlp()
    model[2].weight.register_hook(lambda grad: torch.where(torch.arange(grad.numel()).view_as(grad) == 5, torch.nan, grad))
    rows = equal_the_oracle(tmp_path, trained(model, tmp_path, {"0": model[0], "2": model[2]}))
    first = rows.filter(step=0)
    assert dict(first.select("layer", "nonfinite").rows()) == {"0": 0, "2": 1}


def test_a_step_that_the_loss_scaler_skips_has_them(tmp_path: Path) -> None:
    model, kept = mlp(), Kept()
    monitor, optimizer = watching(model, tmp_path), torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    for step in range(3):
        with monitor.step(step):
            loss = model(batch()).square().mean()
            scaler.scale(loss * (torch.inf if step == 1 else 1)).backward()
            kept |= {(step, name): model[int(name)].weight.grad.clone() for name in ("0", "2")}
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    monitor.close()
    rows = equal_the_oracle(tmp_path, kept)
    assert (rows.filter(step=1)["nonfinite"] > 0).all() and rows.filter(step=2)["nonfinite"].sum() == 0
    assert set(read_record(str(tmp_path)).filter(step=1)["role"]) == {"input", "weight", "grad_output"}


def test_all_zeros_are_counted(tmp_path: Path) -> None:
    model = mlp()
    model[0].weight.register_hook(torch.zeros_like)
    rows = equal_the_oracle(tmp_path, trained(model, tmp_path, {"0": model[0], "2": model[2]}))
    zero = rows.filter(layer="0")
    assert (zero["zeros"] == zero["elements"]).all() and (zero["norm"] == 0).all()


def test_negative_zero_and_subnormal_values() -> None:
    from nemo_fp8_debug.observations.gradients.observer import GradientSizes

    sizes = GradientSizes()
    sizes.measure_gradients(
        [("a", torch.tensor([0.0, -0.0, 1e-40])), ("b", torch.tensor([3e38, 3e38])), ("c", torch.zeros(0))]
    )
    found = sizes.read_sizes_by_name()
    assert (found["a"].zeros, found["a"].nonfinite) == (2, 0) and math.isnan(found["a"].squares)
    assert (found["b"].nonfinite, found["c"].elements) == (0, 0) and math.isnan(found["b"].squares)


def test_an_optimizer_inside_backward(tmp_path: Path) -> None:
    model, kept = mlp(), Kept()
    monitor = watching(model, tmp_path)
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}
    names = {id(model[0].weight): "0", id(model[2].weight): "2"}
    at = {"step": 0}

    def step_now(parameter: torch.Tensor) -> None:
        if id(parameter) in names:
            assert parameter.grad is not None
            kept[at["step"], names[id(parameter)]] = parameter.grad.clone()
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    for at["step"] in range(STEPS):
        with monitor.step(at["step"]):
            model(batch()).square().mean().backward()
    monitor.close()
    equal_the_oracle(tmp_path, kept)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.second = (nn.Linear(IN, IN, bias=False) for _ in range(3))
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.frozen(self.first(x)).relu())


def test_tied_weights_have_one_row_and_frozen_ones_none(tmp_path: Path) -> None:
    model = Tied()
    equal_the_oracle(tmp_path, trained(model, tmp_path, {"first": model.first}))


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(IN, OUT), nn.Linear(IN, 4, bias=False), nn.Linear(4, OUT, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def test_of_adapters_the_base_has_none(tmp_path: Path) -> None:
    model = Adapted()
    rows = equal_the_oracle(tmp_path, trained(model, tmp_path, {"a": model.a, "b": model.b}))
    assert rows.filter(step=0, layer="a")["norm"].item() == 0  # behind an adapter that begins with zeros


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_recompute(tmp_path: Path, reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = mlp(), nn.Linear(OUT, OUT)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant))

    model = Recomputed()
    layers = {"inner.0": model.inner[0], "inner.2": model.inner[2], "last": model.last}
    equal_the_oracle(tmp_path, trained(model, tmp_path, layers, micro_batches=2))


def test_gradients_that_torch_autograd_grad_returns_are_not_mistaken_for_kept_ones(tmp_path: Path) -> None:
    model = mlp()
    model(batch()).sum().backward()  # left from before
    monitor = watching(model, tmp_path)
    with monitor.step(0):
        torch.autograd.grad(model(batch()).sum(), list(model.parameters()))
    monitor.close()
    assert read_record(str(tmp_path), "gradients").is_empty()


def test_sparse_gradients_are_left_out(tmp_path: Path) -> None:
    class Lookup(nn.Module):
        """An embedding whose table is the weight of the last layer too."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(IN, OUT, sparse=True), nn.Linear(OUT, IN, bias=False)
            self.out.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.out(self.table(x))
            return self.table(x).sum()

    model = Lookup()
    monitor = watching(model, tmp_path)
    with monitor.step(0):
        model(torch.arange(4)).backward()
    monitor.close()
    assert read_record(str(tmp_path), "gradients").is_empty()


@pytest.mark.parametrize("eager", [False, True])
def test_what_is_compiled_has_rows_if_it_runs_eagerly(tmp_path: Path, eager: bool) -> None:
    model = mlp()
    model[2].compile(backend="eager")
    layers = {"0": model[0], "2": model[2]} if eager else {"0": model[0]}
    equal_the_oracle(tmp_path, trained(model, tmp_path, layers, eager=eager))


def test_main_grad_is_read_where_the_layer_adds_to_it(tmp_path: Path) -> None:
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.T

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            weight.main_grad += dy.T @ x
            return dy @ weight, torch.zeros_like(weight)  # what autograd gets means nothing

    class Layer(nn.Linear):
        gradient_accumulation_fusion = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Fused.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]

    model, kept = nn.Sequential(Layer(IN, OUT, bias=False)), Kept()
    model[0].weight.main_grad = torch.zeros(OUT, IN)
    monitor = watching(model, tmp_path)
    for step in range(STEPS):
        with monitor.step(step):
            for _ in range(3):
                model(batch().requires_grad_()).square().mean().backward()
            kept[step, "0"] = model[0].weight.main_grad.clone()
            model[0].weight.main_grad.mul_(1e-3)
        model[0].weight.main_grad.zero_()
        model.zero_grad()
    monitor.close()
    equal_the_oracle(tmp_path, kept)


def test_a_weight_that_never_moves_has_the_same_norm_to_the_last_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Cast(), nn.Linear(IN, IN), nn.ReLU(), nn.Linear(IN, OUT)).bfloat16()
    monitor = watching(model, tmp_path)
    optimizer = torch.optim.SGD([{"params": model[1].parameters(), "lr": 0.0}, {"params": model[3].parameters()}], lr=1e-2)
    for step in range(4):
        with monitor.step(step):
            model(batch()).float().square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
    norm = float(model[1].weight.double().norm())
    monitor.close()
    rows = read_record(str(tmp_path), "gradients")
    assert rows.filter(layer="1")["weight_norm"].n_unique() == 1 and rows.filter(layer="3")["weight_norm"].n_unique() == 4
    assert rows.filter(layer="1")["weight_norm"][0] == pytest.approx(norm, rel=1e-12)


def test_they_can_be_left_out(tmp_path: Path) -> None:
    model = mlp()
    trained(model, tmp_path, {}, gradients=False)
    assert read_record(str(tmp_path), "gradients").is_empty()


def test_diagnose_names_the_gradient_that_lost_its_values_and_not_those_that_clipping_spoils(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, IN), nn.ReLU(), nn.Linear(IN, IN), nn.ReLU(), nn.Linear(IN, OUT))
    optimizer, monitor = torch.optim.AdamW(model.parameters(), lr=1e-3), watching(model, tmp_path)
    for step in range(12):
        with monitor.step(step) as report:
            loss = model(batch()).square().mean()
            loss.backward()
            if step == 6:
                model[2].weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), torch.nan))
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            report(loss=loss, grad_norm=norm)
        optimizer.zero_grad()
    monitor.close()
    found = diagnose(str(tmp_path))
    assert (found.cause, found.culprit and found.culprit.tensor_name) == ("nonfinite", "dW of 2")
    assert found.culprit and found.culprit.since == 7
