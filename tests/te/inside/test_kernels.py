"""The emulated kernels against formulas that share no code with them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from emulated_te import CASTS, Cast, casts_of, te
from emulated_te.quantize import encode
from emulated_te.stubs import extension
from torch.nn import functional
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
TE_FP8 = {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2}
MAX = {"e4m3": 448.0, "e5m2": 57344.0}
RECIPES = [DelayedScaling(amax_history_len=1), Float8CurrentScaling()]


def every_bfloat16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("scale", [1.0, 2.0**-126, 0.0123, 3.4e38, 152.53])
@pytest.mark.parametrize("source", [every_bfloat16(), torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 30])
def test_casts_are_bit_equal_to_ml_dtypes(name: str, scale: float, source: torch.Tensor) -> None:
    with np.errstate(all="ignore"):
        scaled = source.float().numpy() * np.float32(scale)
        expected = np.clip(scaled, -MAX[name], MAX[name]).astype(FP8[name]).view(np.uint8)
    expected[np.isnan(scaled)] = 0x7F
    assert np.array_equal(encode(source, torch.tensor([scale]), TE_FP8[name]).numpy(), expected)


def dequantized(cast: Cast) -> np.ndarray[Any, Any]:
    codes = cast.codes.numpy().view(FP8[cast.format]).astype(np.float64)
    return codes * float(np.float32(1) / np.float32(cast.scale.item()))


def close_in_bfloat16(actual: torch.Tensor, expected: np.ndarray[Any, Any]) -> bool:
    return bool(np.allclose(actual.detach().double().numpy(), expected, rtol=2.0**-8, atol=1e-5 * np.abs(expected).max()))


def train(module: Any, x: torch.Tensor, recipe: Any, *args: Any) -> torch.Tensor:
    """Twice, for delayed scaling to know its amaxes; keeps gradients and casts of the second time."""
    for _ in range(2):
        CASTS.clear()
        x.grad = None
        module.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = module(x, *args)
        out.float().square().mean().backward()
    return out


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_computes_with_the_codes_of_its_casts(recipe: Any, dtype: torch.dtype) -> None:
    linear = te.Linear(32, 48, params_dtype=dtype)
    x = torch.randn(64, 32, dtype=dtype, requires_grad=True)
    y = train(linear, x, recipe)
    (cast_x,), (cast_w,), (cast_dy,) = (casts_of(linear, role) for role in ("X", "W", "dY"))
    assert [cast.format for cast in CASTS] == ["e4m3", "e4m3", "e5m2"]
    assert torch.equal(cast_x.source, x) and torch.equal(cast_w.source, linear.weight)
    assert cast_x.source.dtype == cast_dy.source.dtype == dtype and not cast_x.fused
    qx, qw, qdy = dequantized(cast_x), dequantized(cast_w), dequantized(cast_dy)
    assert close_in_bfloat16(y, qx @ qw.T + linear.bias.detach().double().numpy())
    assert x.grad is not None and close_in_bfloat16(x.grad, qdy @ qw)
    assert close_in_bfloat16(linear.weight.grad, qdy.T @ qx)
    assert close_in_bfloat16(linear.bias.grad, cast_dy.source.double().numpy().sum(0))
    assert not close_in_bfloat16(y, functional.linear(x, linear.weight, linear.bias).detach().double().numpy())


def test_grouped_linear_computes_with_the_codes_of_its_casts() -> None:
    grouped, splits = te.GroupedLinear(3, 32, 48, bias=False), [24, 0, 40]
    x = torch.randn(64, 32, requires_grad=True)
    y = train(grouped, x, RECIPES[0], splits)
    assert not casts_of(grouped, "X", gemm=1) and not casts_of(grouped, "dY", gemm=1)
    (cast_w,) = casts_of(grouped, "W", gemm=1)
    assert torch.equal(cast_w.source, grouped.weight1)
    assert torch.equal(grouped.weight1.grad, torch.zeros_like(grouped.weight1))
    for expert, rows in ((0, slice(0, 24)), (2, slice(24, 64))):
        (cast_x,), (cast_w,), (cast_dy,) = (casts_of(grouped, role, gemm=expert) for role in ("X", "W", "dY"))
        assert torch.equal(cast_x.source, x[rows])
        qx, qw, qdy = dequantized(cast_x), dequantized(cast_w), dequantized(cast_dy)
        assert close_in_bfloat16(y[rows], qx @ qw.T)
        assert x.grad is not None and close_in_bfloat16(x.grad[rows], qdy @ qw)
        assert close_in_bfloat16(getattr(grouped, f"weight{expert}").grad, qdy.T @ qx)


@pytest.mark.parametrize("bias", [True, False])
def test_grouped_linear_in_high_precision(bias: bool) -> None:
    grouped, x = te.GroupedLinear(3, 32, 48, bias=bias), torch.randn(64, 32, requires_grad=True)
    parameters = list(grouped.parameters())
    y = grouped(x, [24, 0, 40])
    grads = torch.autograd.grad(y.square().sum(), [x, *parameters])
    parts = zip(x.split([24, 0, 40]), range(3), strict=True)
    expected = torch.cat(
        [
            functional.linear(p, getattr(grouped, f"weight{e}"), getattr(grouped, f"bias{e}") if bias else None)
            for p, e in parts
        ]
    )
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), [x, *parameters]))
    assert not CASTS


Reference = Callable[[Any, torch.Tensor], torch.Tensor]


def norm(kind: str, zero_centered: bool) -> Reference:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        gain = m.layer_norm_weight + (1.0 if zero_centered else 0.0)
        if kind == "RMSNorm":
            return functional.rms_norm(x, x.shape[-1:], gain, m.eps)
        return functional.layer_norm(x, x.shape[-1:], gain, m.layer_norm_bias, m.eps)

    return function


def norm_linear(kind: str, zero_centered: bool) -> tuple[Any, Reference]:
    module = te.LayerNormLinear(32, 48, normalization=kind, zero_centered_gamma=zero_centered)
    return module, lambda m, x: functional.linear(norm(kind, zero_centered)(m, x), m.weight, m.bias)


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "srelu": lambda x: functional.relu(x).square(),
    "swiglu": lambda x: functional.silu(x[..., :64]) * x[..., 64:],
    "geglu": lambda x: functional.gelu(x[..., :64], approximate="tanh") * x[..., 64:],
}


def mlp(activation: str, bias: bool) -> tuple[Any, Reference]:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        bias1, bias2 = (m.fc1_bias, m.fc2_bias) if bias else (None, None)
        hidden = functional.linear(norm("LayerNorm", False)(m, x), m.fc1_weight, bias1)
        return functional.linear(GATES[activation](hidden), m.fc2_weight, bias2)

    module = te.LayerNormMLP(32, 64, activation=activation, bias=bias)
    with torch.no_grad():
        module.fc1_weight.mul_(20), module.fc2_weight.mul_(20)
    return module, function


MODULES: dict[str, Callable[[], tuple[Any, Reference]]] = {
    **{
        f"{kind}{' zero-centered' * zero}": lambda kind=kind, zero=zero: norm_linear(kind, zero)  # type: ignore[misc]
        for kind in ("LayerNorm", "RMSNorm")
        for zero in (False, True)
    },
    **{name: lambda name=name: mlp(name, bias=True) for name in GATES},  # type: ignore[misc]
    "gelu without bias": lambda: mlp("gelu", bias=False),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("recipe", "error"), [(None, 1e-5), (RECIPES[0], 0.15), (RECIPES[1], 0.15)], ids=["none", "delayed", "current"]
)
def test_outputs_and_gradients_against_torch(name: str, recipe: Any, error: float) -> None:
    """Exact without FP8; with it off by what FP8 costs, which is more than nothing."""
    module, reference = MODULES[name]()
    with torch.no_grad():
        module.layer_norm_weight.add_(torch.randn(32) * 0.1)
    x = torch.randn(64, 32, requires_grad=True)
    y = train(module, x, recipe)
    grads = {"x": x.grad} | {key: p.grad for key, p in module.named_parameters()}
    x.grad = None
    module.zero_grad()
    expected = reference(module, x)
    expected.float().square().mean().backward()
    expected_grads = {"x": x.grad} | {key: p.grad for key, p in module.named_parameters()}
    errors = {key: ((grads[key] - e).norm() / e.norm()).item() for key, e in expected_grads.items()}  # type: ignore[operator,union-attr]
    errors["y"] = ((y - expected).norm() / expected.norm()).item()
    assert max(errors.values()) < error, errors
    assert recipe is None or min(errors.values()) > 1e-4, errors


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norm_alone(kind: str) -> None:
    module = getattr(te, kind)(32, eps=1e-5)
    x = torch.randn(16, 32, requires_grad=True)
    y = module(x)
    y.square().mean().backward()
    grads = [x.grad, module.weight.grad]
    x.grad = module.weight.grad = None
    if kind == "LayerNorm":
        expected = functional.layer_norm(x, (32,), module.weight, module.bias, 1e-5)
    else:
        expected = functional.rms_norm(x, (32,), module.weight, 1e-5)
    expected.square().mean().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grads, [x.grad, module.weight.grad])


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("returns_norm", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_delayed_scaling_casts_what_a_norm_has_not_rounded(kind: str, returns_norm: bool, recipe: Any) -> None:
    """Unless the norm's output is asked for: then it is rounded to BF16 first, as under current scaling."""
    module = te.LayerNormLinear(
        32, 48, normalization=kind, return_layernorm_output=returns_norm, params_dtype=torch.bfloat16
    )
    with te.autocast(enabled=True, recipe=recipe):
        module(torch.randn(16, 32, dtype=torch.bfloat16))
    (cast,) = casts_of(module, "X")
    assert cast.fused == (recipe is RECIPES[0] and not returns_norm)
    assert cast.source.dtype == (torch.float32 if cast.fused else torch.bfloat16)
    assert torch.equal(cast.source, cast.source.bfloat16()) != cast.fused


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_delayed_scaling_casts_what_an_activation_has_not_rounded(activation: str, recipe: Any) -> None:
    module = te.LayerNormMLP(32, 64, activation=activation, params_dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=recipe):
        y = module(torch.randn(16, 32, dtype=torch.bfloat16))
    y.float().sum().backward()
    (cast,) = casts_of(module, "X", gemm=1)
    assert cast.source.shape == (16, 64)
    assert cast.fused == (recipe is RECIPES[0])
    assert torch.equal(cast.source, cast.source.bfloat16()) != cast.fused
    (gradient,) = casts_of(module, "dY", gemm=0)
    assert gradient.fused == (recipe is RECIPES[0] and activation == "gelu")


def test_a_quantizers_usages_are_the_copies_of_its_tensors() -> None:
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cuda"), columnwise=False)
    x, other = torch.randn(8, 4, 16).bfloat16(), torch.randn(8, 4, 16).bfloat16()
    tensor = quantizer(x)
    assert tensor._transpose is None and tensor.shape == x.shape and tensor.dtype == x.dtype
    assert close_in_bfloat16(tensor.dequantize(), dequantized(CASTS[-1]))
    quantizer.set_usage(columnwise=True)
    quantizer.update_quantized(other, tensor)
    assert torch.equal(tensor._data, CASTS[-1].codes)
    assert torch.equal(tensor._transpose, CASTS[-1].codes.movedim(-1, 0)) and not tensor._transpose_invalid
    assert close_in_bfloat16(tensor.dequantize(), dequantized(CASTS[-1]))
    tensor.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert tensor._data is None and close_in_bfloat16(tensor.dequantize(), dequantized(CASTS[-1]))
    quantizer.set_usage(columnwise=False)
    quantizer.update_quantized(x, tensor)
    assert torch.equal(tensor._data, CASTS[-1].codes) and tensor._transpose is None
    assert CASTS[-1].module is None
    quantizer.set_usage(rowwise=False, columnwise=True)
    column_wise = quantizer(x)
    assert column_wise._data is None and torch.equal(column_wise._transpose, CASTS[-1].codes.movedim(-1, 0))
    assert quantizer.make_empty((4, 16), dtype=torch.bfloat16, device="cuda").shape == (4, 16)


def test_fused_accumulation_of_weight_gradients() -> None:
    plain, fused = te.Linear(32, 48), te.Linear(32, 48, fuse_wgrad_accumulation=True)
    fused.load_state_dict(plain.state_dict())
    fused.weight.main_grad = torch.zeros(48, 32)
    for _ in range(3):
        x = torch.randn(16, 32)
        for module in (plain, fused):
            with te.autocast(enabled=True, recipe=RECIPES[1]):
                y = module(x)
            y.square().sum().backward()
    torch.testing.assert_close(fused.weight.main_grad, plain.weight.grad)


def test_what_is_not_emulated_says_so() -> None:
    with pytest.raises(NotImplementedError, match="fused_rope_forward is not emulated"):
        extension.fused_rope_forward()


def test_others_in_the_process_see_no_gpu() -> None:
    assert not torch.cuda.is_available() and not torch.ones(1).is_cuda
    assert importlib.util.find_spec("triton") is None
