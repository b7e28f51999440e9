"""Which scale each cast uses, and which casts are made at all, against Transformer Engine's documented rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from emulated_te import CASTS, casts_of, scales_of, te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format, QParams

FORWARD_MAX = np.float32(448)
DELAYED = DelayedScaling(amax_history_len=4)


def backward_max(recipe: Any) -> np.float32:
    return FORWARD_MAX if recipe.fp8_format == Format.E4M3 else np.float32(57344)


def amax(source: torch.Tensor) -> np.float32:
    return np.float32(source.float().abs().max().item())


def make(kind: str, **options: Any) -> Any:
    if kind == "LayerNormMLP":
        return te.LayerNormMLP(32, 64, params_dtype=torch.bfloat16, **options)
    return getattr(te, kind)(32, 48, params_dtype=torch.bfloat16, **options)


def tokens(scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(16, 32) * scale).bfloat16().requires_grad_()


def step(module: Any, x: torch.Tensor, recipe: Any, loss_scale: float = 1.0) -> None:
    with te.autocast(enabled=True, recipe=recipe):
        y = module(x)
    (y.float().square().sum() * loss_scale).backward()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
def test_delayed_scales_move_as_the_formula_says(algorithm: str, length: int, margin: int, fp8_format: Any) -> None:
    recipe = DelayedScaling(
        amax_compute_algo=algorithm, amax_history_len=length, margin=margin, fp8_format=fp8_format, reduce_amax=False
    )
    module = make("LayerNormMLP")
    sizes = [1.0, 3.0, 0.5, 0.0, 0.7, 2.0, 0.1]  # at 0 the gradients vanish, which leaves their scale alone
    for size in sizes:
        step(module, tokens(), recipe, loss_scale=size)
        with torch.no_grad():
            for weight in (module.fc1_weight, module.fc2_weight):
                weight.mul_(1.3 - 0.3 * size)
    for role, gemm in (("X", 0), ("W", 0), ("dY", 0), ("X", 1), ("W", 1), ("dY", 1)):
        casts = casts_of(module, role, gemm)
        assert len(casts) == len(sizes)
        limit = (backward_max(recipe) if role == "dY" else FORWARD_MAX) * np.float32(2.0**-margin)
        expected, seen = np.float32(1), []
        for cast in casts:
            assert cast.scale.dtype == torch.float32 and cast.scale.item() == expected
            if last := amax(cast.source):
                seen.append(last)
                expected = limit / (last if algorithm == "most_recent" else max(seen[-length:]))
        assert len(set(scales_of(module, role, gemm))) > 2


def test_calls_within_an_autocast_share_an_amax() -> None:
    linear = make("Linear")
    with te.autocast(enabled=True, recipe=DELAYED):
        linear(tokens(4.0)), linear(tokens(1.0))
    first, second = casts_of(linear, "X")
    assert amax(first.source) > amax(second.source)
    with te.autocast(enabled=True, recipe=DELAYED):
        linear(tokens())
    assert scales_of(linear, "X") == [1.0, 1.0, FORWARD_MAX / amax(first.source)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("recipe", [DELAYED, Float8CurrentScaling()], ids=["delayed", "current"])
def test_nan_has_no_say_in_the_scale_and_infinity_leaves_it(value: float, recipe: Any) -> None:
    linear, x = make("Linear"), tokens().detach()
    finite = FORWARD_MAX / amax(x[1:])
    x[0] = value
    for _ in range(2):
        with te.autocast(enabled=True, recipe=recipe):
            linear(x)
    told = 1.0 if math.isinf(value) else finite
    assert scales_of(linear, "X") == [1.0 if recipe is DELAYED else told, told]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_current_scales_are_those_of_their_own_tensor(power_of_two: bool, kind: str) -> None:
    recipe = Float8CurrentScaling()
    # The constructor takes these names and ignores them.
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, QParams(power_2_scale=power_of_two, amax_epsilon=0.0))
    module = make(kind)
    for size in (1.0, 5.0):
        step(module, tokens(size), recipe)
    assert len(CASTS) == 2 * (6 if kind == "LayerNormMLP" else 3)
    for cast in CASTS:
        assert cast.module is module and not cast.fused
        scale = (backward_max(recipe) if cast.role == "dY" else FORWARD_MAX) / amax(cast.source)
        assert cast.scale.item() == (2.0 ** math.floor(math.log2(scale)) if power_of_two else scale)


@pytest.mark.parametrize(("size", "epsilon", "expected"), [(1e-3, 2.0, 224.0), (0.0, 2.0, 224.0), (0.0, 0.0, 1.0)])
def test_current_scale_of_small_tensors(size: float, epsilon: float, expected: float) -> None:
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = QParams(amax_epsilon=epsilon)
    linear = make("Linear")
    step(linear, tokens(size), recipe)
    assert scales_of(linear, "X") == [expected]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_recompute_casts_with_the_scale_of_the_first_pass(reentrant: bool, kind: str) -> None:
    module, recipe = make(kind), DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")
    step(module, tokens(), recipe)
    CASTS.clear()
    x = tokens(3.0)
    with te.autocast(enabled=True, recipe=recipe):
        y = te.checkpoint(module, x, use_reentrant=reentrant)
    moved = module.quantizers["scaling_fwd"][0].scale.item()
    y.float().sum().backward()
    for gemm in range(1 + (kind == "LayerNormMLP")):
        for role in ("X", "W"):
            first, second = casts_of(module, role, gemm)
            assert (first.recompute, second.recompute) == (False, True)
            assert first.scale == second.scale != 1
            assert torch.equal(first.codes, second.codes)
        assert len(casts_of(module, "dY", gemm)) == 1
    assert moved != scales_of(module, "X")[1]
    assert module.quantizers["scaling_fwd"][0].scale.item() == moved


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
@pytest.mark.parametrize("recipe", [DELAYED, Float8CurrentScaling()], ids=["delayed", "current"])
def test_cached_weights_are_not_cast_again(kind: str, recipe: Any) -> None:
    """Two steps of three micro-batches, all forward passes before the backward passes."""
    module = te.GroupedLinear(2, 32, 48, params_dtype=torch.bfloat16) if kind == "GroupedLinear" else make(kind)
    splits = ([4, 12],) if kind == "GroupedLinear" else ()
    weight_scales = []
    for _ in range(2):
        CASTS.clear()
        outputs = []
        for number in range(3):
            with te.autocast(enabled=True, recipe=recipe):
                outputs.append(module(tokens(2.0**number), *splits, is_first_microbatch=number == 0))
        for y in outputs:
            y.float().square().sum().backward()
        for gemm in range(2 if kind in ("LayerNormMLP", "GroupedLinear") else 1):
            assert [len(casts_of(module, role, gemm)) for role in ("X", "W", "dY")] == [3, 1, 3]
        weight_scales += scales_of(module, "W")
    assert len(CASTS) == sum(cast.module is module for cast in CASTS)
    own = FORWARD_MAX / amax(casts_of(module, "W")[0].source)
    assert weight_scales == [1.0 if recipe is DELAYED else own, own]


def test_torchs_own_checkpoint_casts_again_with_the_scale_of_that_time() -> None:
    """Transformer Engine does not know of it, so the scales have moved between the passes."""
    linear = make("Linear")

    def run(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=DELAYED):
            return linear(x)

    step(linear, tokens(), DELAYED)
    CASTS.clear()
    torch.utils.checkpoint.checkpoint(run, tokens(3.0), use_reentrant=False).float().sum().backward()
    first, second = casts_of(linear, "X")
    assert torch.equal(first.source, second.source) and not second.recompute
    assert (first.in_backward, second.in_backward) == (False, True)
    assert second.scale.item() == FORWARD_MAX / amax(first.source) != first.scale.item()


def test_only_modules_under_autocast_are_cast() -> None:
    outer, inner = make("Linear"), te.Linear(48, 32, params_dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=DELAYED):
        hidden = outer(tokens())
        with te.autocast(enabled=False):
            y = inner(hidden)
    y.float().sum().backward()
    assert {id(cast.module) for cast in CASTS} == {id(outer)}
    assert [cast.role for cast in CASTS] == ["X", "W", "dY"]


@pytest.mark.parametrize("recipe", [DELAYED, Float8CurrentScaling()], ids=["delayed", "current"])
def test_fp8_parameters_are_cast_when_they_change(recipe: Any) -> None:
    with te.quantized_model_init(enabled=True, recipe=recipe):
        linear = make("Linear")
    (first,) = casts_of(linear, "W")
    CASTS.clear()
    step(linear, tokens(), recipe)
    assert [cast.role for cast in CASTS] == ["X", "dY"]
    CASTS.clear()
    with torch.no_grad():
        linear.weight.copy_(first.source * 2)
    (second,) = casts_of(linear, "W")
    assert torch.equal(second.source, first.source * 2)
    if recipe is not DELAYED:
        assert second.scale.item() == FORWARD_MAX / amax(second.source)
    else:
        assert (first.scale.item(), second.scale.item()) == (1.0, FORWARD_MAX / amax(first.source))


def test_scales_go_through_a_state_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    module, copy = make("LayerNormMLP"), make("LayerNormMLP")
    for size in (1.0, 4.0):
        step(module, tokens(size), DELAYED)
    copy.load_state_dict(module.state_dict())
    x = tokens()
    CASTS.clear()
    step(module, x, DELAYED)
    step(copy, x, DELAYED)
    for gemm in (0, 1):
        for role in ("X", "W", "dY"):
            assert scales_of(module, role, gemm) == scales_of(copy, role, gemm) != [1.0]


@pytest.mark.parametrize("transform", [lambda layer, x: layer(x), te.checkpoint], ids=["plain", "checkpoint"])
def test_transformer_layer(transform: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    layer = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16)
    for _ in range(2):
        CASTS.clear()
        with te.autocast(enabled=True, recipe=DELAYED):
            y = transform(layer, torch.randn(8, 4, 32).bfloat16().requires_grad_())
        y.float().square().sum().backward()
    found = {(type(cast.module).__name__, cast.role, cast.gemm) for cast in CASTS}
    expected = {(kind, role, 0) for kind in ("LayerNormLinear", "Linear", "LayerNormMLP") for role in ("X", "W", "dY")}
    assert found == expected | {("LayerNormMLP", role, 1) for role in ("X", "W", "dY")}
    assert all(cast.scale != 1 for cast in CASTS)
