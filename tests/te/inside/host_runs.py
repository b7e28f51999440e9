"""Modules of Transformer Engine that train with everything dumped, and the check of each dump against its cast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from emulated_te import CASTS, casts_of, te
from torch import nn
from transformer_engine.common.recipe import DelayedScaling

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.record.dump import dumped_files, read_dump
from nemo_fp8_debug.record.storage import FolderStorage

SHOWN = {"input": "X", "weight": "W", "grad_output": "dY"}
DELAYED = DelayedScaling(amax_history_len=4, margin=1)


class Block(nn.Module):
    """A transformer block's linear modules, without its attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        options = {"params_dtype": torch.bfloat16, "bias": False} | options
        self.qkv = te.LayerNormLinear(32, 96, **options)
        self.proj = te.Linear(96, 32, **options)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out = self.qkv(x, **kwargs)
        return self.proj(out[0] if isinstance(out, tuple) else out, **kwargs)


def tokens(seed: int, rows: int = 16, size: float = 1.0) -> torch.Tensor:
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)) * size
    return x.bfloat16().requires_grad_()


def run(folder: Path, model: nn.Module, step: Callable[[int], Any], steps: int = 3, **options: Any) -> dict[int, list[Any]]:
    """Train with everything dumped; returns the casts of each step."""
    casts = {}
    options = {"interval": 1, "dump": ["*"], "dump_min_free_bytes": 0, "table_rows": 0, "on_error": "raise"} | options
    monitor = Monitor(model, str(folder), **options)
    for number in range(steps):
        CASTS.clear()
        with monitor.step(number):
            step(number)
        casts[number] = list(CASTS)
    monitor.close()
    return casts


def checked(
    folder: Path, model: nn.Module, casts: dict[int, list[Any]], gemms: dict[str, tuple[str, int]], but: Any = ()
) -> int:
    """Compare every dumped operand with the cast of the same call; returns how many there were.

    Args:
        gemms: layer name -> (module's name, number of the GEMM in it).
        but: (layer, role) to leave out.
    """
    seen = 0
    place = FolderStorage(folder)
    for _, step, _, name in dumped_files(place):
        about, tensors = read_dump(place, name)
        if (about.layer, about.role) in but:
            continue
        module, gemm = gemms[about.layer]
        CASTS[:] = casts[step]
        mine = casts_of(model.get_submodule(module), SHOWN[about.role], gemm)
        # Not those made again: by recompute, or in the backward of a module that saved its operand in BF16.
        first = [c for c in mine if not c.recompute and c.in_backward == (about.role == "grad_output")]
        cast = first[about.call]
        where = f"step {step}, {SHOWN[about.role]} of {about.layer}, call {about.call}"
        assert about.scale_source == "engine", where
        assert about.format.name == cast.format.lower(), where
        assert float(tensors["scale"]) == float(cast.scale), where
        codes = tensors["codes"].view(torch.uint8).reshape(-1)
        assert torch.equal(codes, cast.codes.reshape(-1)), where
        seen += 1
    return seen


BLOCK = {"qkv": ("qkv", 0), "proj": ("proj", 0)}
