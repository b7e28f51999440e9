"""Recommended files in megatron-core 0.17 and Megatron-Bridge: `recommended_run.py FILE OPERANDS FLAGS VALUES`, prints JSON.

FILE has the recipes of modules, OPERANDS the quantizers of operands with te_quantizers.py beside it, FLAGS are Megatron-LM's
and VALUES fields of MixedPrecisionConfig. Run by test_recommended_recipes.py in a process of its own, over emulated kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import emulated_te  # first, so that Megatron finds Transformer Engine as on a GPU
import torch
from bridge_on_cpu import importing_bridge

with importing_bridge():
    from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.quantization.utils import load_quantization_recipe
    from megatron.core.transformer import TransformerConfig
    from megatron.training.arguments import add_megatron_arguments
from megatron_on_cpu import megatron_on_cpu

from nemo_fp8_debug import name_modules


def gpt(quant_recipe: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        quant_recipe=quant_recipe,
        **({"fp8": "hybrid", "fp8_recipe": "delayed"} | options),
    )
    spec = get_gpt_layer_with_transformer_engine_spec()
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=16).bfloat16()


def casts(model: Any) -> list[tuple[str, str, str, str]]:
    """(layer, operand, format, recipe) of every cast in a step."""
    emulated_te.CASTS.clear()
    names = {id(module): name for name, module in model.named_modules()}
    tokens, positions = torch.arange(32).view(2, 16), torch.arange(16).expand(2, 16)
    model(tokens, positions, None, labels=tokens).float().mean().backward()
    return sorted({(names[id(c.module)], c.role, c.format, type(c.quantizer).__name__) for c in emulated_te.CASTS})


if __name__ == "__main__":
    file, operands, flags, values = *sys.argv[1:3], json.loads(sys.argv[3]), json.loads(sys.argv[4])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel()
        found: dict[str, Any] = {"casts": casts(gpt(load_quantization_recipe(file)))}
        sys.path.insert(0, str(Path(file).parent))
        for recipe in ("delayed", "tensorwise"):
            found[f"operands, {recipe}"] = casts(gpt(load_quantization_recipe(operands), fp8_recipe=recipe))
        custom = gpt(fp8_recipe="custom", fp8_quantizer_factory="te_quantizers.factory")
        name_modules(custom)
        found["factory"] = casts(custom)
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found["arguments"] = {name: value for name, value in vars(parser.parse_args(flags)).items() if name in values}
    found["bridge"] = {n: v for n, v in asdict(MixedPrecisionConfig(bf16=True, **values)).items() if n in values}
    json.dump(found, sys.stdout)
