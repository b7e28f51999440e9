"""Two ranks of Megatron's distributed optimizer over weights that are stored in FP8: each has a part of the masters."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from emulated_te import te
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron_on_cpu import megatron_on_cpu
from torch import nn
from transformer_engine.common.recipe import Float8CurrentScaling

from nemo_fp8_debug import Monitor, read_record

RECIPE = Float8CurrentScaling()
WIDTHS = (64, 48, 80, 64)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config: Any = None
        with te.quantized_model_init(enabled=True, recipe=RECIPE, preserve_high_precision_init_val=True):
            self.layers = nn.ModuleList(
                te.Linear(i, o, bias=False, params_dtype=torch.bfloat16) for i, o in itertools.pairwise(WIDTHS)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(rank: int, world: int, folder: Path) -> None:
    with megatron_on_cpu():
        compare(rank, folder)


def compare(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    bare = Model()
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1, bf16=True, fp8="hybrid")
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, fp8_param_gather=True, bucket_size=4000)
    model = DistributedDataParallel(config, ddp, bare)
    options = OptimizerConfig("adam", 1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(options, [model])
    expected = {}
    for i, layer in enumerate(bare.layers):
        weight: Any = layer.weight
        part = own_part(optimizer, weight)
        split = 0 < part.stop - part.start < weight.numel()
        # As training does, but on: no kernel of that is emulated. Of a weight in two parts the first one keeps its codes.
        moved = weight.main_param is not None and not (split and rank == 0)
        if moved:
            weight.main_param.data += 1e-2 * torch.randn(weight.main_param.shape)
        codes = weight.dequantize(dtype=torch.float32).double().reshape(-1)[part]
        error = 0.0 if weight.main_param is None else (weight.main_param.double() - codes).square().sum().item()
        expected[f"layers.{i}"] = {
            "n": len(codes),
            "error2": error,
            "moved": weight.main_param is not None and not (split and rank == 0),
        }
    monitor = Monitor(model, str(folder / "record"), interval=1, table_rows=0, on_error="raise", replicas=True)
    with monitor.step(0), te.autocast(enabled=True, recipe=RECIPE):
        model(torch.randn(16, WIDTHS[0]).bfloat16()).float().square().sum().backward()
    monitor.close()
    (folder / f"{rank}.json").write_text(json.dumps(expected))
    torch.distributed.barrier()
    if rank == 0:
        rows = read_record(str(folder / "record"), "metrics").filter(role="weight")
        found = {row["layer"]: row for row in rows.iter_rows(named=True)}
        (folder / "found.json").write_text(json.dumps(found))
        (folder / "replicas.json").write_text(json.dumps(read_record(str(folder / "record"), "replicas").to_dicts()))
    torch.distributed.destroy_process_group()


def own_part(optimizer: Any, weight: Any) -> slice:
    """As Megatron's optimizer has it in its own maps."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if weight in one.model_param_gbuf_map:
            found = one._get_model_param_range_map(weight)["param"]
            return slice(found.start, found.end)
    return slice(0, 0)
