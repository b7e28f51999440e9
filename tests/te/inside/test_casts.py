"""What a call casts with is read from the call: overrides, custom recipes, and quantizers that nobody here has seen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_te import CASTS, casts_of, te
from host_runs import BLOCK, Block, checked, run, tokens
from torch import nn
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization import DelayedScalingRequest
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from nemo_fp8_debug import FP8DebugWarning
from nemo_fp8_debug.capture.backends.base import UnknownCastError
from nemo_fp8_debug.capture.backends.transformer_engine.quantizers import make_quantizer_cast
from nemo_fp8_debug.capture.operator_mode import apply_shared_amax
from nemo_fp8_debug.record.reader import read_table_rows

OPTIONS = {"params_dtype": torch.bfloat16, "bias": False}
MODULES: dict[str, Any] = {
    "Linear": lambda: te.Linear(32, 48, **OPTIONS),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 48, **OPTIONS),
    "GroupedLinear": lambda: te.GroupedLinear(2, 32, 48, **OPTIONS),
}


def current(fmt: DType = DType.kFloat8E4M3, **options: Any) -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(fmt, device="cpu", **options)


def stepping(model: nn.Module, recipe: Any, *splits: Any) -> Any:
    def step(number: int) -> None:
        with te.autocast(enabled=True, recipe=recipe):
            y = model(tokens(number, size=1 + number), *splits)
        y.float().square().sum().backward()

    return step


def sources(folder: Path) -> dict[str, set[str]]:
    rows = read_table_rows(folder, "metrics").select("role", "scale_source").unique().rows()
    found: dict[str, set[str]] = {}
    for role, source in rows:
        found.setdefault(role, set()).add(source)
    return found


def dy_casts() -> int:
    """How often a kernel was given a gradient to cast."""
    return sum(cast.in_backward and cast.format == "e5m2" for cast in CASTS)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear"])  # LayerNormMLP refuses it
def test_a_backward_in_high_precision_has_no_cast_of_dy(tmp_path: Path, kind: str, override: str) -> None:
    model = nn.Sequential()
    model.add_module("layer", MODULES[kind]())
    splits = ([8, 8],) if kind == "GroupedLinear" else ()
    step = stepping(model.layer, Float8CurrentScaling(backward_override=override), *splits)
    casts = run(tmp_path, model, step)
    CASTS[:] = [cast for of_step in casts.values() for cast in of_step]
    assert CASTS and not dy_casts()
    assert sources(tmp_path) == {"input": {"engine"}, "weight": {"engine"}, "grad_output": {"not quantized"}}


def test_an_override_that_changes_between_calls(tmp_path: Path) -> None:
    model = Block()
    plain, overridden = (Float8CurrentScaling(backward_override=override) for override in (None, "high_precision"))

    def step(number: int) -> None:
        with te.autocast(enabled=True, recipe=plain if number % 2 else overridden):
            y = model(tokens(number))
        y.float().square().sum().backward()

    casts = run(tmp_path, model, step, steps=4)
    quantized = {number for number, of_step in casts.items() if any(c.format == "e5m2" for c in of_step)}
    rows = read_table_rows(tmp_path, "metrics").filter(role="grad_output").select("step", "scale_source").unique().rows()
    assert dict(rows) == {number: "engine" if number in quantized else "not quantized" for number in range(4)}
    assert quantized == {1, 3}


def test_a_custom_recipe_is_measured_by_the_quantizer_that_each_operand_got(tmp_path: Path) -> None:
    """E5M2 for X, E4M3 with powers of two for W, high precision for dY of qkv and delayed scaling for that of proj."""
    found: list[str] = []

    def factory(role: Any) -> Any:
        found.append(f"{role.name} {role.tensor_type}" if role else "")
        if role is None or role.tensor_type not in ("input", "weight", "grad_output"):
            return current()
        if role.tensor_type == "grad_output":
            return IdentityQuantizer() if role.name == "qkv" else current(DType.kFloat8E5M2, amax_epsilon=0.5)
        if role.tensor_type == "input":
            return current(DType.kFloat8E5M2)
        return HybridQuantizer(rowwise_quantizer=current(force_pow_2_scales=True), columnwise_quantizer=current())

    model = nn.Sequential()
    model.add_module("qkv", te.Linear(32, 32, name="qkv", **OPTIONS))
    model.add_module("proj", te.Linear(32, 32, name="proj", **OPTIONS))
    casts = run(tmp_path, model, stepping(model, CustomRecipe(qfactory=factory)))
    assert "qkv grad_output" in found
    metrics = read_table_rows(tmp_path, "metrics")
    rows = metrics.select("layer", "role", "recipe", "format", "scale_source").unique().sort("layer", "role")
    assert rows.rows() == [
        ("proj", "grad_output", "current-hybrid(epsilon=0.5)", "e5m2", "engine"),
        ("proj", "input", "current-e5m2", "e5m2", "engine"),
        ("proj", "weight", "current-hybrid(power_of_two=True)", "e4m3", "engine"),
        ("qkv", "grad_output", "current-hybrid", "e5m2", "not quantized"),
        ("qkv", "input", "current-e5m2", "e5m2", "engine"),
        ("qkv", "weight", "current-hybrid(power_of_two=True)", "e4m3", "engine"),
    ]
    row_wise, column_wise = (cast.scale for cast in casts[2] if torch.equal(cast.source, model.proj.weight))
    weights = metrics.filter(layer="proj", role="weight", step=2)
    assert weights["scale"].to_list() == [float(row_wise)] != [float(column_wise)]


def test_delayed_scaling_that_a_custom_recipe_asks_for(tmp_path: Path) -> None:
    model = Block()
    casts = run(tmp_path, model, stepping(model, CustomRecipe(qfactory=lambda role: DelayedScalingRequest())), steps=4)
    assert checked(tmp_path, model, casts, BLOCK) == 4 * 6


class Strange(Float8CurrentScalingQuantizer):
    """Of a user, or of a later release."""


def test_a_quantizer_that_is_not_known_makes_its_operand_unknown(tmp_path: Path) -> None:
    def factory(role: Any) -> Any:
        return Strange(DType.kFloat8E4M3, device="cpu") if role and role.tensor_type == "weight" else current()

    with pytest.warns(FP8DebugWarning, match="W of qkv is unknown: its quantizer is a .*Strange") as caught:
        run(tmp_path, model := Block(), stepping(model, CustomRecipe(qfactory=factory)), dump=[])
    assert sum("unknown" in str(warning.message) for warning in caught) == 1
    assert sources(tmp_path) == {"input": {"engine"}, "weight": {"unknown"}, "grad_output": {"engine"}}


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), Float8CurrentScaling()])
def test_an_attribute_that_is_not_known_makes_its_operand_unknown(tmp_path: Path, recipe: Any) -> None:
    """Whatever its value: a later release may give it a meaning."""
    model = Block()
    stepping(model, recipe)(0)
    model.proj.quantizers["scaling_bwd"][0].new_rounding = None
    with pytest.warns(FP8DebugWarning, match="dY of proj is unknown: .* an unsupported attribute 'new_rounding'"):
        run(tmp_path, model, stepping(model, recipe), dump=[])
    rows = read_table_rows(tmp_path, "metrics").filter(role="grad_output").select("layer", "scale_source").unique().rows()
    assert dict(rows) == {"qkv": "engine", "proj": "unknown"}


def test_a_recipe_of_a_user_does_not_change_what_quantizers_do(tmp_path: Path) -> None:
    """The field says powers of two, and the kernels are given none."""
    model = Block()
    recipe = Float8CurrentScaling(use_power_2_scales=True)
    casts = run(tmp_path, model, stepping(model, recipe))
    assert checked(tmp_path, model, casts, BLOCK) == 3 * 6


@pytest.mark.parametrize("name", ["NVTE_USE_FAST_MATH", "NVTE_OF_A_LATER_RELEASE"])
def test_a_variable_that_is_not_known_makes_casts_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.warns(FP8DebugWarning, match=f"variable {name} is set"):
        run(tmp_path, model := Block(), stepping(model, Float8CurrentScaling()), dump=[])
    assert sources(tmp_path) == {role: {"unknown"} for role in ("input", "weight", "grad_output")}


def test_a_norm_that_is_not_made_again_makes_x_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE", "1")
    model = nn.Sequential()
    model.add_module("qkv", te.LayerNormLinear(32, 32, zero_centered_gamma=True, **OPTIONS))
    model.add_module("proj", te.Linear(32, 32, **OPTIONS))
    with pytest.warns(FP8DebugWarning, match="X of qkv is unknown: .*ZERO_CENTERED"):
        run(tmp_path, model, stepping(model, Float8CurrentScaling()), dump=[])
    rows = read_table_rows(tmp_path, "metrics").filter(scale_source="unknown").select("layer", "role").unique().rows()
    assert rows == [("qkv", "input")]


E4M3 = DType.kFloat8E4M3


@pytest.mark.parametrize(
    ("quantizer", "role", "recipe"),
    [
        (MXFP8Quantizer(E4M3), "weight", "mxfp8-e4m3"),
        (MXFP8Quantizer(E4M3, with_2d_quantization=True), "weight", "mxfp8-e4m3(square_weights=True)"),
        (Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True), "weight", "blockwise-e4m3"),
        (
            Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1, force_pow_2_scales=False),
            "input",
            "blockwise-e4m3(power_of_two=False)",
        ),
        (
            Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
            "weight",
            "blockwise-e4m3(dimensions=1)",
        ),
        (MXFP8Quantizer(E4M3, with_2d_quantization=True), "input", "with_2d_quantization=True"),
        (
            NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=SimpleNamespace(size=lambda: 2)),
            "input",
            "with_amax_reduction=True",
        ),
        (MXFP8Quantizer(DType.kFloat4E2M1), "input", "casts to e2m1"),
        (object(), "input", "quantizer is a builtins.object"),
    ],
)
def test_quantizers_are_read_or_refused(quantizer: Any, role: str, recipe: str) -> None:
    if "=" in recipe.partition("(")[0] or " " in recipe:
        with pytest.raises(UnknownCastError, match=recipe):
            make_quantizer_cast(quantizer, None, role)
    else:
        use = make_quantizer_cast(quantizer, None, role)
        assert (use.recipe.name, use.source) == (recipe, "engine")


def test_an_amax_that_ranks_share_is_unknown_unless_their_reduction_was_seen() -> None:
    group, other = SimpleNamespace(size=lambda: 2), SimpleNamespace(size=lambda: 3)
    use = make_quantizer_cast(current(with_amax_reduction=True, amax_reduction_group=group), None, "input")
    seen = apply_shared_amax(use, [(other, torch.tensor([1.0])), (group, torch.tensor([7.0])), (group, torch.tensor([2.0]))])
    assert (seen.source, float(seen.scale), seen.amax_group) == ("engine", 64.0, None)
    for reduced in ([], [(other, torch.tensor([1.0]))]):
        with pytest.raises(UnknownCastError, match="ranks share its amax"):
            apply_shared_amax(use, reduced)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_infinity_is_the_amax_of_what_the_engine_casts(tmp_path: Path, dtype: torch.dtype) -> None:
    """Its scale is 1 then, whatever the other values are."""
    model = nn.Sequential()
    model.add_module("proj", te.Linear(32, 32, params_dtype=dtype, bias=False))

    def step(number: int) -> None:
        x = tokens(number).detach().to(dtype)
        x[0, 0] = torch.inf
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            model(x.requires_grad_()).nan_to_num(0, 0, 0).float().square().sum().backward()

    casts = run(tmp_path, model, step, roles=["input"])
    assert {float(cast.scale) for cast in casts_of(model.proj, "X", 0)} == {1.0}
    assert checked(tmp_path, model, casts, {"proj": ("proj", 0)}) == 3
    rows = read_table_rows(tmp_path, "metrics").filter(role="input")
    assert rows["scale"].to_list() == [1.0] * 3 and rows["inf"].to_list() == [1] * 3
