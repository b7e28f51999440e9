"""Megatron's models in every layout, each rank's part with the weights of the whole."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from layouts import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    SEQUENCE,
    VOCABULARY,
    Layout,
)
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

#: what does without CUDA and chance
PLAIN = {
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


class Norm(torch.nn.LayerNorm):
    """Megatron's wrapper of torch's refuses sequence parallelism, which asks for this mark only."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def chunks_of(layout: Layout) -> list[GPTModel]:
    """This rank's part of the model."""
    options: dict[str, Any] = {}
    if layout.experts:
        options = {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_ffn_hidden_size": 2 * HIDDEN,
            "moe_shared_expert_intermediate_size": 2 * HIDDEN,
            "moe_shared_expert_overlap": True,
            "add_bias_linear": False,
        }
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=4,
        pipeline_dtype=torch.bfloat16,
        # The loss of a token tries the same on however many ranks its batch is.
        calculate_per_token_loss=True,
        **layout.groups,
        **PLAIN,
        **(options | layout.options),
    )
    config.finalize_model_grads_func = finalize_model_grads
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS if layout.experts else None)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    virtual = layout.groups.get("virtual_pipeline_model_parallel_size")
    made = []
    for stage in range(virtual or 1):
        which = {"ignore_virtual": False, "vp_stage": stage} if virtual else {}
        made.append(
            GPTModel(
                config,
                TransformerBlockSubmodules(layer_specs=[spec] * (LAYERS // virtual_stages(layout)), layer_norm=Norm),
                vocab_size=VOCABULARY,
                max_sequence_length=SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(**which),
                post_process=parallel_state.is_pipeline_last_stage(**which),
                share_embeddings_and_output_weights=False,
                vp_stage=stage if virtual else None,
            ).bfloat16()
        )
    for chunk in made:
        set_weights(chunk)
    return made


def virtual_stages(layout: Layout) -> int:
    sizes = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    return layout.groups.get(sizes[0], 1) * layout.groups.get(sizes[1], 1)


def global_name(chunk: torch.nn.Module, name: str) -> str:
    """The same in all layouts."""

    def expert(found: re.Match[str]) -> str:
        here = EXPERTS // parallel_state.get_expert_model_parallel_world_size()
        return f"local_experts.{int(found[1]) + here * parallel_state.get_expert_model_parallel_rank()}"

    def layer(found: re.Match[str]) -> str:
        return f"layers.{chunk.decoder.layers[int(found[1])].layer_number - 1}"

    return re.sub(r"local_experts\.(\d+)", expert, re.sub(r"layers\.(\d+)", layer, name))


def set_weights(chunk: torch.nn.Module) -> None:
    """Each parameter its part of a tensor that its name tells."""
    for local, parameter in chunk.named_parameters():
        name = global_name(chunk, local)
        expert = "local_experts" in name
        state = "expert_tensor_parallel" if expert else "tensor_model_parallel"
        rank, size = (getattr(parallel_state, f"get_{state}_{what}")() for what in ("rank", "world_size"))
        split = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        shape = [n * size if dim == split else n for dim, n in enumerate(parameter.shape)]
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
        if "norm" in name and name.endswith("weight"):
            whole += 1
        with torch.no_grad():
            parameter.copy_(whole if split is None else whole.chunk(size, split)[rank])
