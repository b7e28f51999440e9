"""Two ranks of data parallelism whose attention runs in emulated FP8, each with its batch: operands of both together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from emulated_te import ATTENTION_CASTS, CASTS, te
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from nemo_fp8_debug import Monitor, read_record

RECIPES = {"delayed": DelayedScaling(fp8_dpa=True), "current": Float8CurrentScaling(fp8_dpa=True)}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = te.Linear(32, 96, bias=False, params_dtype=torch.bfloat16)
        self.core = te.DotProductAttention(4, 8, attention_dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.qkv(x)
        q, k, v = (part.reshape(*y.shape[:-1], -1, 8).contiguous() for part in y.chunk(3, dim=-1))
        out: torch.Tensor = self.core(q, k, v)
        return out


def train(rank: int, world: int, folder: Path) -> None:
    os.environ |= {"NVTE_UnfusedDPA_Emulate_FP8": "1", "NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}
    torch.distributed.init_process_group("gloo")
    found = {name: of_recipe(name, rank, folder / name) for name in RECIPES}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    if rank == 0:
        tables = {name: read_record(str(folder / name), "metrics").filter(layer="core").to_dicts() for name in RECIPES}
        (folder / "found.json").write_text(json.dumps(tables))
    torch.distributed.destroy_process_group()


def of_recipe(name: str, rank: int, folder: Path) -> dict[str, dict[str, float]]:
    """By role: values, and the squared error of this rank's codes."""
    torch.manual_seed(0)
    model = Attention()
    monitor = Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise")
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(rank)).mul(2.0**rank).bfloat16()
    CASTS.clear()
    with monitor.step(0), te.autocast(enabled=True, recipe=RECIPES[name]):
        model(x).float().square().mean().backward()
    monitor.close()
    found = {}
    casts = [cast for cast in CASTS if cast.module is not model.qkv]
    for cast, roles in zip(casts, ATTENTION_CASTS, strict=True):
        for role, source, codes in zip(roles, *(t.reshape(len(roles), -1) for t in (cast.source, cast.codes)), strict=True):
            found[role] = {"n": source.numel(), "error2": error2(cast, source, codes)}
    return found


def error2(cast: Any, source: torch.Tensor, codes: torch.Tensor) -> float:
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[cast.format]
    stands_for = codes.view(kind).double() / float(cast.scale)
    return (source.double() - stands_for).square().sum().item()
