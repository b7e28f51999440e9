"""The layer, the recipe and the training step that a row describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from emulated_te import te
from pairs import Row
from torch import nn
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.custom_recipes import quantizer_factories, quantizer_factory_zoo
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

from .factors import MEGATRON

TOKENS, FEATURES, WIDTH = 96, 160, 192
#: of each of two experts
SPLITS = [32, 64]
STEPS = 2


def recipe_of(name: str, row: Row) -> Any:
    """Transformer Engine's recipe, with the row's options."""
    kind = getattr(te_recipe, name)
    fields = {key: _OPTIONS[key](row[key]) for key in row if key in _OPTIONS and key in kind.__dataclass_fields__}
    made = kind(**fields)
    parts = {"powers of two": {"power_2_scale": True}, "amax_epsilon": {"amax_epsilon": 0.125}}.get(row.get("qparams", ""))
    for part in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad") if parts else ():
        setattr(made, part, te_recipe.QParams(**parts))
    return made


def _hybrid(role: Any) -> Any:
    """Each copy in a format of its own, those of dY too."""
    return HybridQuantizer(
        rowwise_quantizer=quantizer_factories.mxfp8_factory(role),
        columnwise_quantizer=quantizer_factories.float8_block_scaling_factory(role),
    )


def _factory(name: str) -> Any:
    if name == "hybrid":
        return _hybrid
    home = quantizer_factories if hasattr(quantizer_factories, f"{name}_factory") else quantizer_factory_zoo
    return getattr(home, f"{name}_factory")


def _largest(history: torch.Tensor) -> torch.Tensor:
    return history[:2].amax(0)


def _scale(amax: torch.Tensor, scale: torch.Tensor, fp8_max: Any, recipe: Any) -> torch.Tensor:
    return torch.where(amax > 0, fp8_max / amax * 0.75, scale)


_OPTIONS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("margin", "amax_history_len"), int),
    **dict.fromkeys(("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"), int),
    **dict.fromkeys(("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"), str),
    **dict.fromkeys(("use_f32_scales", "enable_2d_quantization", "use_power_2_scales"), "True".__eq__),
    **dict.fromkeys(("fp8_dpa", "fp8_mha", "reduce_amax", "row_scaled_activation"), "True".__eq__),
    **dict.fromkeys(("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"), "True".__eq__),
    "backward_override": lambda value: None if value == "None" else value,
    "fp8_format": te_recipe.Format.__getitem__,
    "amax_compute_algo": lambda value: _largest if value == "callable" else value,
    "scaling_factor_compute_algo": lambda value: _scale if value == "callable" else None,
    "qfactory": _factory,
}


def layer_of(row: Row, recipe: Any) -> nn.Module:
    """A model of the row's layer, named `layer`."""
    with te.quantized_model_init(enabled=row["weights_stored"] == "yes", recipe=recipe):
        layer = _megatron(row) if row["layer"] in MEGATRON else _te(row)
    weights = [p for name, p in layer.named_parameters() if "layer_norm" not in name and p.dim() > 1]
    for number, weight in enumerate(weights):
        with torch.no_grad():
            weight.copy_(tensor(*weight.shape, seed=number, size=0.02).to(row_dtype(row)))
        weight.requires_grad_(row["weights_frozen"] == "no")
    model = nn.Sequential()
    model.add_module("layer", layer)
    return model


def row_dtype(row: Row) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, row["dtype"])
    return dtype


def tensor(*shape: int, seed: int, size: float) -> torch.Tensor:
    """Values whose blocks differ in size by orders of magnitude."""
    dice = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=dice) * torch.randn(*shape, generator=dice).mul(1.5).exp()
    return values.clamp(-60, 60).mul(size).bfloat16()


def _te(row: Row) -> nn.Module:
    kind, _, norm = row["layer"].partition(" ")
    options: dict[str, Any] = {"params_dtype": row_dtype(row), "bias": row["bias"] == "yes"}
    if row["save_original_input"] == "yes":
        options["save_original_input"] = True
    if norm:
        options |= {"normalization": norm, "zero_centered_gamma": True}
    made: nn.Module = getattr(te, kind)(*([len(SPLITS)] if kind == "GroupedLinear" else []), FEATURES, WIDTH, **options)
    return made


def _megatron(row: Row) -> nn.Module:
    from megatron.core.extensions import transformer_engine as wrappers
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=FEATURES,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=row_dtype(row),
        bf16=row["dtype"] == "bfloat16",
        fp16=row["dtype"] == "float16",
        normalization="RMSNorm",
        gradient_accumulation_fusion=False,
        disable_parameter_transpose_cache=row["cached_weights"] == "no",
        moe_router_dtype=None,
    )
    options: dict[str, Any] = {"config": config, "init_method": nn.init.normal_, "bias": row["bias"] == "yes"}
    options |= {"skip_bias_add": False, "is_expert": False}
    if "Grouped" in row["layer"]:
        made = getattr(wrappers, row["layer"])(len(SPLITS), FEATURES, WIDTH, **options)
    elif "Row" in row["layer"]:
        made = wrappers.TERowParallelLinear(FEATURES, WIDTH, input_is_parallel=True, **options)
    else:
        made = getattr(wrappers, row["layer"])(FEATURES, WIDTH, gather_output=False, **options)
    layer: nn.Module = made.to(row_dtype(row))
    return layer


def step_of(row: Row, recipe: Any, model: nn.Module) -> Callable[[int], None]:
    """Runs a training step, by number."""
    layer: Any = model.layer
    number_of_calls = int(row["micro_batches"])

    def call(number: int, i: int) -> torch.Tensor:
        x = tensor(TOKENS, FEATURES, seed=10 * number + i, size=0.5 + i).to(row_dtype(row))
        x.requires_grad_(row["input_needs_grad"] == "yes")
        options: dict[str, Any] = {}
        if row["cached_weights"] != "no":
            first = i == 0 and (number == 0 or row["cached_weights"] == "from first micro-batch")
            if row["layer"] in MEGATRON:
                layer.is_first_microbatch = layer.is_first_microbatch or first
            else:
                options["is_first_microbatch"] = first
        return _forward(row, recipe, layer, x, [SPLITS] if "Grouped" in row["layer"] else [], options)

    def backward(y: torch.Tensor, number: int, i: int) -> None:
        y.backward(tensor(*y.shape, seed=100 + 10 * number + i, size=1e-3).to(y.dtype))

    def step(number: int) -> None:
        waiting = []
        for i in range(number_of_calls):
            y = call(number, i)
            if row["order"] == "all forward first":
                waiting.append(y)
            else:
                backward(y, number, i)
        for i, y in enumerate(waiting):
            backward(y, number, i)
        if row["weights_frozen"] == "no" and row["weights_stored"] == "no":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.25)

    return step


def _forward(row: Row, recipe: Any, layer: Any, x: torch.Tensor, splits: list[Any], options: dict[str, Any]) -> torch.Tensor:
    def run(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=recipe):
            return _first(layer(x, *splits, **options))

    kind, _, reentrant = row["recompute"].partition(" ")
    if kind == "none":
        return run(x)
    if kind == "torch":
        again: Any = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=bool(reentrant))
        return _first(again)
    with te.autocast(enabled=True, recipe=recipe):
        return _first(te.checkpoint(layer, x, *splits, use_reentrant=bool(reentrant), **options))


def _first(out: Any) -> torch.Tensor:
    first: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return first
