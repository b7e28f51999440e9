"""Train a small GPT in a loop over Megatron-core, like Megatron-LM's run_simple_mcore_train_loop.py.

Run `python recipes/megatron_lm_loop.py` in one process. Without a GPU, replacements for CUDA let Megatron train on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron compiles small fusions, which takes longer than this run

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_on_cpu import megatron_on_cpu
from text_windows import VOCABULARY, TextWindows
from torch.utils.data import DataLoader

from nemo_fp8_debug import Monitor

SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 64, 2, 2


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Create Megatron's process groups for a single process."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    with contextlib.nullcontext() if torch.cuda.is_available() else megatron_on_cpu():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        yield
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE).cuda().bfloat16()
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)


def mean_loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (output.float() * mask).sum() / mask.sum()
    return loss, {"lm loss": loss.detach().clone()}  # Megatron later divides `loss` in place by the number of micro-batches


def forward_step(data: Iterator[dict[str, torch.Tensor]], gpt: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = {name: value.cuda() for name, value in next(data).items()}
    output = gpt(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(mean_loss, batch["loss_mask"])


def train(output: str, steps: int, interval: int) -> None:
    gpt = model()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3)
    data = iter(DataLoader(TextWindows(steps * MICRO_BATCHES * MICRO_BATCH, SEQUENCE), batch_size=MICRO_BATCH))
    forward_backward = get_forward_backward_func()

    with closing(Monitor(gpt, output, interval=interval)) as monitor:
        for step in range(steps):
            with monitor.step(step) as report:
                gpt.zero_grad_buffer()
                losses = forward_backward(
                    forward_step_func=forward_step,
                    data_iterator=data,
                    model=gpt,
                    num_microbatches=MICRO_BATCHES,
                    seq_length=SEQUENCE,
                    micro_batch_size=MICRO_BATCH,
                    forward_only=False,
                )
                finalize_model_grads([gpt])
                for parameter in gpt.parameters():
                    parameter.grad = parameter.main_grad.to(parameter.dtype)
                optimizer.step()
                report(loss=torch.stack([loss["lm loss"] for loss in losses]).mean())
    print(f"The record is in {output}; look at it with: tensorboard --logdir {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/megatron_lm_loop")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=10)
    options = parser.parse_args()
    with one_process():
        train(options.output, options.steps, options.interval)
