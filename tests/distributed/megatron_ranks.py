"""Megatron in some layouts, each over as many processes as it takes: `megatron_ranks.py FOLDER LAYOUT...`.

Each layout trains unwatched, while hooks of our own keep the operands, and then once for each way to watch it.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import (
    BY_NAME,
    HIDDEN,
    MICRO_BATCH,
    MICRO_BATCHES,
    SEQUENCE,
    STEPS,
    TWICE,
    VOCABULARY,
    WATCHED,
    Layout,
    sequences,
)
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron_models import PLAIN, chunks_of, global_name, set_weights
from megatron_on_cpu import megatron_on_cpu
from processes import in_ranks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nemo_fp8_debug import Monitor


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """This rank's micro-batches of all steps."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1) > 0
    for seed in range(rank, STEPS * MICRO_BATCHES, size):
        tokens = torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE)
        yield {"input_ids": tokens, "position_ids": positions, "attention_mask": mask, "labels": tokens.roll(-1, 1)}


def summed(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().sum()
    return loss, torch.tensor(output.numel(), dtype=torch.int), {"loss": loss.detach() / output.numel()}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    return model(**next(data)), summed


class Kept:
    """The operands of each GEMM as this rank has them: (name, role) -> a tensor for each call of a step."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.steps: list[dict[tuple[str, str], list[torch.Tensor]]] = []
        for chunk in chunks:
            for path, module in chunk.named_modules():
                if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                    module.register_forward_hook(partial(self._keep, global_name(chunk, path)))

    def begin_step(self) -> None:
        self.steps.append(defaultdict(list))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"ranks": ranks(), "steps": [dict(step) for step in self.steps]}, folder / f"kept-{dist.get_rank()}.pt")

    def _keep(self, name: str, module: torch.nn.Module, args: Any, out: Any) -> None:
        kept = self.steps[-1]
        kept[name, "input"].append(args[0].detach().clone())
        kept[name, "weight"] = [module.weight.detach().clone()]
        out[0].register_hook(lambda grad: kept[name, "grad_output"].append(grad.clone()))


def train(layout: Layout, folder: Path, watch: dict[str, Any] | None, wrong: bool = False) -> dict[str, Any]:
    chunks = chunks_of(layout)
    kept = Kept(chunks) if watch is None else None
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **layout.ddp)
    model = [DistributedDataParallel(c.config, ddp, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]
    config = chunks[0].config
    if ddp.overlap_grad_reduce:
        config.no_sync_func = model[0].no_sync
    if ddp.overlap_param_gather:
        config.param_sync_func = model[0].start_param_sync
    optimizer_config = OptimizerConfig(
        "adam",
        1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=0.1 if wrong else 0.0,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(optimizer_config, model)
    monitor = watched_by(watch, model, folder)
    data, losses = [batches() for _ in model], []
    for step in range(STEPS):
        if kept:
            kept.begin_step()
        if monitor:
            monitor.begin_step(step)
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(model) > 1 else data[0],
            model=model if len(model) > 1 else model[0],
            num_microbatches=MICRO_BATCHES // parallel_state.get_data_parallel_world_size(),
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        if wrong and step == STEPS - 1:
            chunks[0].get_parameter(f"{TWICE}.weight").main_grad.div_(layout.world)
        optimizer.step()
        loss = torch.stack([f["loss"] for f in found]).mean() if found else None
        losses.append(None if loss is None else loss.item())
        if monitor:
            monitor.end_step(loss=loss)
        assert not _get_current_dispatch_mode_stack()  # none of ours is left behind
    if monitor:
        monitor.close()
    if kept:
        kept.save(folder)
    return {"losses": losses, "weights": digest(chunks)}


def digest(modules: Iterable[torch.nn.Module]) -> str:
    weights = b"".join(p.detach().view(torch.int16).numpy().tobytes() for m in modules for p in m.parameters())
    return hashlib.sha256(weights).hexdigest()


def train_linears(folder: Path, watch: dict[str, Any] | None) -> dict[str, Any]:
    """Two linear layers over parts of a sequence."""
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, ffn_hidden_size=2 * HIDDEN, num_attention_heads=4, context_parallel_size=2, **PLAIN
    )
    mlp = MLP(config, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)).bfloat16()
    set_weights(mlp)
    kept = Kept([mlp]) if watch is None else None
    monitor = watched_by(watch, mlp, folder)
    losses = []
    for step in range(STEPS):
        if kept:
            kept.begin_step()
        if monitor:
            monitor.begin_step(step)
        x = get_batch_on_this_cp_rank({"x": sequences(step)})["x"].transpose(0, 1)
        loss = mlp(x.requires_grad_())[0].float().square().mean()
        loss.backward()
        losses.append(loss.item())
        if monitor:
            monitor.end_step(loss=loss)
    if monitor:
        monitor.close()
    if kept:
        kept.save(folder)
    return {"losses": losses, "weights": digest([mlp])}


def watched_by(watch: dict[str, Any] | None, model: Any, folder: Path) -> Monitor | None:
    return None if watch is None else Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise", **watch)


def ranks() -> dict[str, int]:
    """Where this process is in Megatron's groups."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(with_context_parallel=True),
        "etp": parallel_state.get_expert_tensor_parallel_rank(),
        "edp": parallel_state.get_expert_data_parallel_rank(),
    }


def main(rank: int, world: int, folder: Path, layouts: Sequence[Layout]) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(200, exit=True)  # where a layout that hangs does
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    with megatron_on_cpu():
        for layout in (found for found in layouts if found.world == world):
            parallel_state.initialize_model_parallel(**layout.groups)
            model_parallel_cuda_manual_seed(0)
            for name, watch in ({"kept": None} | WATCHED).items():
                run = train_linears if layout.name == "cp" else partial(train, layout)
                results.setdefault(layout.name, {})[name] = run(folder / layout.name / name, watch)
            if layout.name in ("dp", "dp-sharded"):
                train(layout, folder / layout.name / "twice", {"verify_rows": 16}, wrong=True)
            parallel_state.destroy_model_parallel()
    (folder / f"results-{world}-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    layouts = [BY_NAME[name] for name in sys.argv[2:]]
    for world in sorted({layout.world for layout in layouts}):
        in_ranks(world, main, Path(sys.argv[1]), layouts, frees_memory=False)
