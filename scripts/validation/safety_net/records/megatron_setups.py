"""Setups of Megatron-core with local layers, on one, two and four ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_on_cpu import megatron_on_cpu

from safety_net.records.setup import EVERYTHING, Setup, watch

SEQUENCE, VOCABULARY, HIDDEN, LAYERS, MICRO_BATCHES = 16, 64, 64, 2, 2
#: options of a mixture of experts
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "moe_ffn_hidden_size": 128,
    "add_bias_linear": False,
}
_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class _Norm(torch.nn.LayerNorm):
    """Stand in for Megatron's wrapper of torch's, which refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def build_megatron(**options: Any) -> GPTModel:
    """Return this rank's part of a GPT, the same each time.

    Args:
        options: of Megatron's configuration.
    """
    torch.manual_seed(1 + parallel_state.get_pipeline_model_parallel_rank())
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=4,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        **options,
    )
    config.finalize_model_grads_func = finalize_model_grads
    spec = get_gpt_layer_local_spec(num_experts=options.get("num_moe_experts"))
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _Norm
    layers = LAYERS // parallel_state.get_pipeline_model_parallel_world_size()
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=_Norm),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    ).bfloat16()


def _draw_batches() -> Iterator[dict[str, torch.Tensor]]:
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1) > 0
    seed = 1000 * parallel_state.get_data_parallel_rank()
    while True:
        tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(SEQUENCE).expand(2, SEQUENCE)
        yield {"input_ids": tokens, "position_ids": positions, "attention_mask": mask, "labels": tokens.roll(-1, 1)}
        seed += 1


def _sum_losses(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().sum()
    return loss, torch.tensor(output.numel(), dtype=torch.int), {"loss": loss.detach() / output.numel()}


def _forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    return model(**next(data)), _sum_losses


def megatron_stepper(model: DistributedDataParallel, **ddp: Any) -> Callable[[int], dict[str, Any]]:
    """Return a function that trains a step by Megatron's schedule and optimizer.

    Args:
        model: this rank's.
        ddp: options of its wrapper.
    """
    if ddp.get("overlap_grad_reduce"):
        model.config.no_sync_func = model.no_sync
    config = OptimizerConfig(
        "adam",
        1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=1.0,
        use_distributed_optimizer=ddp.get("use_distributed_optimizer", False),
    )
    optimizer, data = get_megatron_optimizer(config, [model]), _draw_batches()

    def train_step(step: int) -> dict[str, Any]:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=2,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        loss = torch.stack([f["loss"] for f in found]).mean() if found else None
        return {"loss": loss, "grad_norm": norm}

    return train_step


def wrap_megatron(model: GPTModel, **ddp: Any) -> DistributedDataParallel:
    """Return a model in Megatron's data parallelism.

    Args:
        model: this rank's part.
        ddp: options.
    """
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
    return DistributedDataParallel(model.config, config, model)


def _train(
    groups: dict[str, int], options: dict[str, Any], ddp: dict[str, Any], folder: Path, rank: int, world: int
) -> None:
    dist.init_process_group("gloo")
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel(**groups)
        model_parallel_cuda_manual_seed(0)
        model = wrap_megatron(build_megatron(**groups, **options), **ddp)
        dumped = {"dump": ["layers.0.*fc1", "experts.*1.linear_fc2"]}
        watch(model, folder, 3, megatron_stepper(model, **ddp), **(EVERYTHING | dumped))
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


def _setup(name: str, world: int, groups: str = "", ddp: dict[str, Any] | None = None, **options: Any) -> Setup:
    sizes = {f"{group}_model_parallel_size": 2 for group in groups.split()}
    return Setup(f"megatron-{name}", partial(_train, sizes, options, ddp or {}), world)


_SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
SETUPS = [
    _setup("dense", 1),
    _setup("recompute", 1, **_RECOMPUTED),
    _setup("experts", 1, **EXPERTS),
    _setup("tensor-parallel-2", 2, "tensor"),
    _setup("sequence-parallel-2", 2, "tensor", sequence_parallel=True),
    _setup("pipeline-parallel-2", 2, "pipeline"),
    _setup("data-parallel-2", 2, ddp=_SHARDED),
    _setup("expert-parallel-2", 2, "expert", **EXPERTS),
    _setup("tensor-and-data-parallel-4", 4, "tensor", _SHARDED, sequence_parallel=True),
]
