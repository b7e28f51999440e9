"""X, W and dY are recorded as the GEMM gets them, whatever a user's hooks do to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import Samples
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from nemo_fp8_debug import Monitor

FACTOR = 1024.0


def tripled(module: nn.Module, args: Any) -> Any:
    return (args[0] * 3,)


def loud(grad: torch.Tensor) -> torch.Tensor:
    return grad * FACTOR


class Model(nn.Module):
    """Two layers. `change` gets the first layer's output."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda y: y) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(8, 8), nn.Linear(8, 8), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.change(self.first(x)))
        return found


def amaxes(
    model: nn.Module, x: torch.Tensor, run: Callable[..., torch.Tensor] | None = None
) -> dict[tuple[str, str], float]:
    """The amax of each operand in a sampled step."""
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, table_rows=0, on_error="raise")
    with monitor.step(0) as report:
        loss = (run or model)(x).sum()
        loss.backward()
        report(loss=loss)
    monitor.close()
    metrics = samples.samples[0].get_table("metrics")
    assert set(metrics["n"]) == {8, 64}, "each value is counted once"
    return dict(zip(zip(metrics["layer"], metrics["role"], strict=True), metrics["amax"], strict=True))


@pytest.mark.parametrize("after_attaching", [False, True])
def test_x_after_a_users_pre_hook(after_attaching: bool) -> None:
    model, x = Model(), torch.full((1, 8), 2.0)
    model.first.register_forward_pre_hook(tripled, prepend=after_attaching)
    assert amaxes(model, x)["first", "input"] == 6.0


def hooked(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(loud)
    return y


def in_place(y: torch.Tensor) -> torch.Tensor:
    return y.mul_(FACTOR)


@pytest.mark.parametrize("change", [hooked, in_place, lambda y: y * FACTOR])
@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8)])
def test_dy_after_a_users_hook_on_y(change: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> None:
    model = Model(change)
    seen = amaxes(model, torch.randn(shape))
    # With a single row, the gradient of the bias is dY.
    for name in ("first", "last"):
        bias = getattr(model, name).bias
        assert seen[name, "grad_output"] == pytest.approx(float(bias.grad.abs().max()), rel=1e-6)


def test_dy_after_a_full_backward_pre_hook() -> None:
    model = Model()
    model.first.register_full_backward_pre_hook(lambda module, grads: (grads[0] * FACTOR,))
    seen = amaxes(model, torch.randn(1, 8))
    assert model.first.bias.grad is not None
    assert seen["first", "grad_output"] == pytest.approx(float(model.first.bias.grad.abs().max()), rel=1e-6)


def test_dy_under_a_checkpoint_that_recomputes() -> None:
    model = Model(hooked)
    seen = amaxes(model, torch.randn(1, 8), lambda x: checkpoint(model, x, use_reentrant=False))
    assert model.first.bias.grad is not None
    assert seen["first", "grad_output"] == pytest.approx(float(model.first.bias.grad.abs().max()), rel=1e-6)


def in_fp8(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """A product as a user's own FP8 engine would compute it."""
    return torch._C._nn.linear(x.to(torch.float8_e4m3fn).to(x.dtype), w, b)


class Halved(torch.autograd.Function):
    """A product in a function of autograd, inside which operators show no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t() / 2

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return dy @ w / 2, dy.flatten(0, -2).t() @ x.flatten(0, -2) / 2


class Uncoded:
    """A replacement of a method without code of its own."""

    def __get__(self, module: Any, kind: Any = None) -> Any:
        return lambda x: in_fp8(x, module.weight, module.bias)


class InFP8(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (in_fp8 if func is F.linear else func)(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["F.linear", "function", "nn.Linear.forward", "descriptor", "mode"])
def test_a_replaced_product_has_an_unknown_cast_and_one_warning(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "F.linear":
        monkeypatch.setattr(F, "linear", in_fp8)
    elif how == "function":
        monkeypatch.setattr(F, "linear", lambda x, w, b=None: Halved.apply(x, w) + b)
    elif how == "descriptor":
        monkeypatch.setattr(nn.Linear, "forward", Uncoded())
    elif how == "nn.Linear.forward":
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: in_fp8(x, self.weight, self.bias))
    samples, model = Samples(), Model()
    with InFP8() if how == "mode" else nullcontext(), pytest.warns(UserWarning, match="unknown") as said:
        monitor = Monitor(model, recorders=[samples], interval=1, table_rows=0)
        with monitor.step(0) as report:
            loss = model(torch.randn(2, 4, 8)).sum()
            loss.backward()
            report(loss=loss)
        monitor.close()
    metrics = samples.samples[0].get_table("metrics")
    assert set(metrics["scale_source"]) == {"unknown"} and sorted(metrics["role"])[:2] == ["grad_output"] * 2
    (told,) = [str(each.message) for each in said if "unknown" in str(each.message)]
    names = {"nn.Linear.forward": "Linear.forward", "descriptor": "Linear.forward", "mode": "InFP8"}
    assert names.get(how, "functional.linear") in told


def test_the_default_device_is_no_foreign_mode() -> None:
    samples = Samples()
    with torch.device("cpu"):
        model = Model()
        monitor = Monitor(model, recorders=[samples], interval=1, table_rows=0, on_error="raise")
        with monitor.step(0) as report:
            loss = model(torch.randn(4, 8)).sum()
            loss.backward()
            report(loss=loss)
        monitor.close()
    assert set(samples.samples[0].get_table("metrics")["scale_source"]) == {"current"}


class Checkpointed(nn.Module):
    """A layer in two checkpoints, one in the other, and a layer in the outer one."""

    def __init__(self, inner: bool, outer: bool) -> None:
        super().__init__()
        self.first, self.last, self.kinds = nn.Linear(8, 8), nn.Linear(8, 8), (inner, outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=self.kinds[0]))  # type: ignore[no-any-return]

        found: torch.Tensor = checkpoint(inside, x, use_reentrant=self.kinds[1])
        return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_all_operands_in_nested_checkpoints(inner: bool, outer: bool, training: bool) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(inner, outer).train(training), torch.randn(1, 8, requires_grad=True)
    plain = model.last(model.first(x))
    seen = amaxes(model, x)
    for name, given in (("first", x), ("last", model.first(x))):
        layer = getattr(model, name)
        assert seen[name, "input"] == float(given.abs().max())
        assert seen[name, "weight"] == float(layer.weight.abs().max())
        assert seen[name, "grad_output"] == pytest.approx(float(layer.bias.grad.abs().max()), rel=1e-6)
    assert torch.equal(plain, model(x))


class NoOutput(nn.Module):
    """A layer without outputs next to a usual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.some = nn.Linear(8, 0), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.some(x), self.none(x)], -1)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(8, 8)))  # type: ignore[no-any-return]


def traced() -> nn.Module:
    return torch.jit.trace(nn.Linear(8, 8), torch.randn(4, 8))  # type: ignore[no-any-return, no-untyped-call]


def exported() -> nn.Module:
    return torch.export.export(nn.Sequential(nn.Linear(8, 8)), (torch.randn(4, 8),)).module()


@pytest.mark.parametrize("make", [scripted, traced, exported, lambda: nn.LazyLinear(8), NoOutput])
@pytest.mark.filterwarnings("ignore:.*activations includes:UserWarning", "ignore::DeprecationWarning")
def test_every_kind_of_module_leaves_the_other_layers_observed(make: Callable[[], nn.Module]) -> None:
    model, samples = nn.Sequential(make(), nn.Linear(8, 8)), Samples()
    options = {"activations": ["norm", "router", "attention"], "verify_rows": 2, "output_rows": 2}
    monitor = Monitor(model, recorders=[samples], interval=1, table_rows=0, on_error="raise", **options)
    for step in range(2):
        with monitor.step(step) as report:
            loss = model(torch.randn(4, 8)).sum()
            loss.backward()
            report(loss=loss)
    monitor.close()
    for step in range(2):
        metrics = samples.samples[step].get_table("metrics")
        last = {r for name, r in zip(metrics["layer"], metrics["role"], strict=True) if name == "1"}
        assert last == {"input", "weight", "grad_output"}
