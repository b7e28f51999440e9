"""A plan in a run that Transformer Engine quantizes: what its kernels were asked to cast, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_te import CASTS, te
from host_runs import BLOCK, Block, checked, run, tokens
from test_megatron import DENSE, FULL_RECOMPUTE, casts_by_name, gpt, train
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

from nemo_fp8_debug import ConfigError, FP8DebugWarning
from nemo_fp8_debug.capture.gemms import find_gemms
from nemo_fp8_debug.interventions.transformer_engine import EngineChanges, make_te_recipe
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.plan.plan import Change, Plan
from nemo_fp8_debug.record.reader import read_table_rows

DELAYED = DelayedScaling(amax_history_len=4)
RECIPES = {"delayed": DELAYED, "current": Float8CurrentScaling()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def changed(model: nn.Module, *changes: Change) -> EngineChanges:
    applied = EngineChanges(find_gemms([model]), Plan(changes))
    applied.attach()
    return applied


def stepper(model: nn.Module, recipe: Any, how: Callable[..., Any] = lambda model, x: model(x)) -> Callable[[int], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> float:
        optimizer.zero_grad()
        with te.autocast(enabled=True, recipe=recipe):
            y = how(model, tokens(number, size=1 + number))
        loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def log(model: nn.Module, step: Callable[[int], float], steps: int = 4) -> tuple[list[float], dict[str, list[Any]]]:
    """The losses, and of each module its casts as (role, format, scale), in order."""
    CASTS.clear()
    losses = [step(number) for number in range(steps)]
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, list[Any]] = {}
    for cast in CASTS:
        found.setdefault(names[id(cast.module)], []).append((cast.role, cast.format.lower(), float(cast.scale), cast))
    return losses, found


def without_casts(found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: [cast[:3] for cast in casts] for name, casts in found.items()}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_empty_plan_changes_nothing(recipe: Any) -> None:
    plain, model = Model(), Model()
    expected = log(plain, stepper(plain, recipe))
    applied = changed(model)
    found = log(model, stepper(model, recipe))
    assert applied.count == 0
    assert found[0] == expected[0] and without_casts(found[1]) == without_casts(expected[1])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
class TestChosenModules:
    @pytest.fixture
    def forward(self, how: str) -> Callable[..., Any]:
        if how == "plain":
            return lambda model, x: model(x)
        return lambda model, x: te.checkpoint(model, x, use_reentrant=how == "reentrant")

    def test_bf16_casts_nothing(self, recipe: Any, forward: Callable[..., Any]) -> None:
        model = Model()
        applied = changed(model, Change("first", "bf16"))
        _, found = log(model, stepper(model, recipe, forward))
        assert found.keys() == {"second.qkv", "second.proj"}
        assert {cast[0] for cast in found["second.proj"]} == {"X", "W", "dY"}
        if recipe is DELAYED:  # though the first module of the model is in BF16
            assert all(scale != 1 for _, _, scale, cast in found["second.proj"][-3:])
        applied.detach()
        assert log(model, stepper(model, recipe, forward))[1].keys() > {"first.qkv", "first.proj"}

    def test_another_recipe_casts_as_if_it_were_the_only_one(self, recipe: Any, forward: Callable[..., Any]) -> None:
        """Against a model in which the contexts are written out by hand."""
        other, name = (
            (Float8CurrentScaling(fp8_format=Format.E4M3), "current-e4m3")
            if recipe is DELAYED
            else (DelayedScaling(margin=3, amax_history_len=2), "delayed(margin=3,amax_history_len=2)")
        )

        class ByHand(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with te.autocast(enabled=True, recipe=other):
                    x = self.first.qkv(x)
                x = self.first.proj(x)
                with te.autocast(enabled=True, recipe=other):
                    x = self.second.qkv(x)
                return self.second.proj(x)

        by_hand, model = ByHand(), Model()
        expected = log(by_hand, stepper(by_hand, recipe, forward), 6)
        changed(model, Change("qkv", name))
        found = log(model, stepper(model, recipe, forward), 6)
        assert found[0] == expected[0] and without_casts(found[1]) == without_casts(expected[1])
        formats = {cast[1] for cast in found[1]["second.qkv"] if cast[0] == "dY"}
        assert formats == {"e4m3" if recipe is DELAYED else "e5m2"}
        if recipe is not DELAYED:  # the scales of the nested context move, by its own margin
            first = [cast[2:] for cast in found[1]["second.qkv"] if cast[0] == "X" and not cast[3].recompute]
            amax = [float(cast.source.abs().max()) for _, cast in first]
            scales = [1.0] + [448 / 8 / max(amax[max(0, i - 1) : i + 1]) for i in range(5)]
            assert [scale for scale, _ in first] == pytest.approx(scales, rel=1e-6)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_monitor_reports_what_the_kernels_did(tmp_path: Path, recipe: Any) -> None:
    model = Model()
    changed(
        model,
        Change("first.proj", "bf16"),
        Change("second.qkv", "delayed-e4m3(amax_history_len=2)"),
        Change("second.proj", "current-hybrid"),
    )
    casts = run(tmp_path, model, stepper(model, recipe), steps=4)
    gemms = {f"{block}.{name}": (f"{block}.{name}", 0) for block in ("first", "second") for name in BLOCK}
    dark = {("first.proj", role) for role in ("input", "weight", "grad_output")}
    assert checked(tmp_path, model, casts, gemms, dark) == 4 * 9
    rows = read_table_rows(tmp_path, "metrics").filter(step=3)
    found = {layer: (source, name) for layer, source, name in rows.select("layer", "scale_source", "recipe").rows()}
    assert found["first.proj"] == ("not quantized", "current-hybrid")
    assert found["second.qkv"] == ("engine", "delayed-e4m3(amax_history_len=2)")
    assert found["second.proj"] == ("engine", "current-hybrid")


def quantized(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = torch.tensor(torch.finfo(dtype).max) / x.detach().abs().max().float()
    return ((x.detach().float() * scale).to(dtype).float() * (1 / scale)).to(x.dtype)


def test_fp8_inputs_with_bf16_multiplication(tmp_path: Path) -> None:
    model = Model()
    applied = changed(model, Change("second.proj", "current", multiply_in_bf16=True))
    proj, seen = model.second.proj, {}
    proj.register_forward_pre_hook(lambda module, args: seen.update(x=args[0].detach().clone()))
    proj.register_forward_hook(lambda module, args, out: seen.update(y=out.detach().clone()))
    weight = proj.weight.detach().clone()
    step = stepper(model, DELAYED)
    casts = run(tmp_path, model, lambda number: step(0), steps=1)
    applied.end_step()
    assert not [cast for cast in casts[0] if cast.module is proj]
    x = seen["x"]
    assert torch.equal(x, quantized(x, torch.float8_e4m3fn))  # what came in had been replaced
    expected = x.float() @ quantized(weight, torch.float8_e4m3fn).float().T
    assert torch.allclose(seen["y"].float(), expected, rtol=2**-7)
    assert not torch.allclose(seen["y"].float(), x.float() @ weight.float().T, rtol=2**-7)
    rows = read_table_rows(tmp_path, "metrics").filter(layer="second.proj")
    assert set(rows["scale_source"]) == {"engine"} and set(rows["recipe"]) == {"current-hybrid"}


def test_what_a_fused_norm_makes_stays_and_is_said() -> None:
    model = Model()
    with pytest.warns(FP8DebugWarning, match="X of 2 layers .first first.qkv. is computed inside a fused norm"):
        changed(model, Change("qkv", "delayed", multiply_in_bf16=True))
    losses, found = log(model, stepper(model, DELAYED))
    assert found.keys() == {"first.proj", "second.proj"} and all(loss == loss for loss in losses)


def test_some_operands_of_a_module_are_widened_to_all_and_said() -> None:
    model = Model()
    with pytest.warns(FP8DebugWarning, match="of 1 GEMMs .first first.proj. apply to all their operands"):
        changed(model, Change("first.proj", "bf16", ("grad_output",)), Change("second.proj", "bf16"))
    assert log(model, stepper(model, DELAYED))[1].keys() == {"first.qkv", "second.qkv"}


def test_a_module_that_the_run_leaves_in_bf16_stays_there() -> None:
    class Two(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=False):
                x = self.first(x)
            return self.second(x)

    model = Two()
    changed(model, Change("*", "current"))
    assert log(model, stepper(model, DELAYED))[1].keys() == {"second.qkv", "second.proj"}


def test_a_forward_that_fails_leaves_the_context() -> None:
    model = Model()
    changed(model, Change("first", "bf16"))
    with pytest.raises(Exception, match="GEMM not possible"), te.autocast(enabled=True, recipe=DELAYED):
        model(torch.randn(16, 31).bfloat16())
    assert log(model, stepper(model, DELAYED))[1].keys() == {"second.qkv", "second.proj"}


class TestRefused:
    def test_weights_in_fp8(self) -> None:
        with te.quantized_model_init(enabled=True, recipe=DELAYED):
            model = nn.ModuleDict({"proj": te.Linear(32, 48, bias=False, params_dtype=torch.bfloat16)})
        with pytest.raises(ConfigError, match="W of proj is stored in FP8, which a plan cannot change"):
            changed(model, Change("proj", "bf16"))

    @pytest.mark.parametrize(
        "recipe",
        ["rowwise", "mxfp8(by_logarithm=True)", "current-e4m3(by_logarithm=True)", "nvfp4(stochastic=True)"],
    )
    def test_recipes_that_it_does_not_have(self, recipe: str) -> None:
        with pytest.raises(ConfigError, match="Transformer Engine has no recipe that casts as"):
            changed(Model(), Change("qkv", recipe))

    def test_formats_that_transformer_engine_does_not_train_in(self) -> None:
        with pytest.raises(ConfigError, match="cannot cast all operands to E5M2, as 'current-e5m2' requires"):
            changed(Model(), Change("qkv", "current-e5m2"))

    def test_multiplication_in_bf16_of_what_exists_inside_only(self) -> None:
        model = nn.ModuleDict({"mlp": te.LayerNormMLP(32, 64, params_dtype=torch.bfloat16)})
        with pytest.raises(ConfigError, match=r"multiply_in_bf16 cannot reach the operands of .*mlp\.fc1, a LayerNormMLP"):
            changed(model, Change("mlp", "current", multiply_in_bf16=True))


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("options", [{}, FULL_RECOMPUTE], ids=["plain", "recompute"])
def test_megatron(options: dict[str, Any]) -> None:
    model = gpt(**options)
    changed(model, Change("layers.1.mlp", "bf16"), Change("linear_proj", "current"))
    losses = train(model)
    found = casts_by_name(model)
    layers = {f"decoder.layers.{i}.{name}" for i in range(2) for name in DENSE}
    assert {name for name, *_ in found} == {name for name in layers if not name.startswith("decoder.layers.1.mlp")}
    for (name, role, _), casts in found.items():
        limit = 57344 if role == "dY" else 448
        follows = [float(c.scale) == pytest.approx(limit / float(c.source.float().abs().max()), rel=1e-5) for c in casts]
        assert all(follows) or not name.endswith("linear_proj"), (name, role)
    assert losses == pytest.approx(train(gpt(fp8=None)), rel=0.02)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mxfp8(square_weights=True)", {"enable_2d_quantization": True}),
        ("mxfp8", {"enable_2d_quantization": False}),
        ("nvfp4(square_weights=False)", {"disable_2d_quantization": True}),
        (
            "blockwise(dimensions=1)",
            dict.fromkeys(("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"), 1),
        ),
        ("blockwise", {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}),
    ],
)
def test_options_of_block_recipes_reach_transformer_engine(name: str, fields: dict[str, Any]) -> None:
    made = make_te_recipe(parse_recipe(name))
    assert {field: getattr(made, field) for field in fields} == fields


def test_block_dimensions_that_transformer_engine_does_not_multiply_are_refused() -> None:
    with pytest.raises(ConfigError, match="2D by 2D"):
        make_te_recipe(parse_recipe("blockwise(dimensions=2)"))
    with pytest.raises(ConfigError, match="dimensions of blockwise are 3"):
        parse_recipe("blockwise(dimensions=3)")
