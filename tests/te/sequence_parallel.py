"""Two ranks of sequence parallelism over the emulated kernels: each compares what it reports with what it cast."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from emulated_te import CASTS, casts_of, te
from torch import nn
from transformer_engine.common.recipe import CustomRecipe, Float8CurrentScaling
from transformer_engine.pytorch.custom_recipes.quantizer_factories import current_scaling_factory

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.record.dump import dumped_files, read_dump
from nemo_fp8_debug.record.storage import FolderStorage

SHOWN = {"input": "X", "weight": "W", "grad_output": "dY"}
RECIPES = {
    "current": Float8CurrentScaling(),
    "custom": CustomRecipe(qfactory=current_scaling_factory),
    "override": Float8CurrentScaling(backward_override="high_precision"),
}
#: recipe; layer, its mode, and what is done with it
CASES = [
    ("current", "Linear column"),
    ("current", "Linear row"),
    ("current", "LayerNormMLP"),
    ("current", "Linear column recomputed frozen"),
    ("custom", "LayerNormLinear column"),
    ("override", "Linear row"),
]
STEPS = 2


class OneLayer(nn.Module):
    def __init__(self, kind: str, ranks: int, **options: Any) -> None:
        super().__init__()
        name, *how = kind.split()
        options |= {"bias": False, "params_dtype": torch.bfloat16, "sequence_parallel": True, "tp_size": ranks}
        options |= {"parallel_mode": how[0]} if how else {"set_parallel_mode": True}
        self.proj = getattr(te, name)(32, 64, tp_group=torch.distributed.group.WORLD, **options)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = te.checkpoint(self.proj, x) if "recomputed" in self.how else self.proj(x)
        return out


def train(rank: int, world: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    found = {f"{recipe}, {kind}": reported(rank, world, recipe, kind, folder / recipe / kind) for recipe, kind in CASES}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def reported(rank: int, world: int, recipe: str, kind: str, folder: Path) -> dict[str, Any]:
    """Sources of what is reported by role, how many scales are not those of the shard alone, and what is wrong."""
    torch.manual_seed(0)
    model = OneLayer(kind, world)
    model.proj.requires_grad_("frozen" not in kind)
    alone = [tensor for step in range(STEPS) for tensor in run(model, recipe, kind, step, rank, world)]
    monitor = Monitor(model, str(folder), interval=1, dump=["*"], dump_min_free_bytes=0, table_rows=0, on_error="raise")
    casts: list[Any] = []
    watched: list[torch.Tensor] = []
    for step in range(STEPS):
        CASTS.clear()
        with monitor.step(step):
            watched.extend(run(model, recipe, kind, step, rank, world))
        casts.append(list(CASTS))
    monitor.close()
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True)), "the run was disturbed"
    torch.distributed.barrier()  # the other rank's tensors are written
    return compared(rank, model, casts, FolderStorage(folder))


def run(model: Any, recipe: str, kind: str, step: int, rank: int, world: int) -> list[torch.Tensor]:
    """A forward and backward; the output and all gradients."""
    dice = torch.Generator().manual_seed(2 * step + rank)
    features = 32 // (world if "row" in kind else 1)
    x = (torch.randn(8, features, generator=dice) * 10.0 ** (rank - step)).bfloat16().requires_grad_()
    model.zero_grad()
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        y = model(x)
    y.backward((torch.randn(*y.shape, generator=dice) * 0.1**rank).bfloat16())
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]


def compared(rank: int, model: Any, casts: list[Any], place: FolderStorage) -> dict[str, Any]:
    sources, of_others, wrong = Counter[str](), Counter[str](), []
    for _, step, of_rank, name in dumped_files(place):
        if of_rank != rank:
            continue
        about, tensors = read_dump(place, name)
        role = SHOWN[about.role]
        sources[f"{role} {about.scale_source}"] += 1
        CASTS[:] = casts[step]
        mine = casts_of(model.proj, role, int(about.layer.endswith("fc2")))
        if about.scale_source != "engine":
            wrong += [f"step {step}: {role} is cast"] if mine and about.scale_source == "not quantized" else []
            continue
        codes, value = tensors["codes"].view(torch.uint8), tensors["value"]
        own = torch.tensor(about.format.max) / value.float().abs().max()
        of_others[role] += float(own) != float(tensors["scale"])
        shard = next(cast for cast in mine if not cast.recompute)
        scale, rows = float(shard.scale), cast_rows(shard, value, rank)
        if float(tensors["scale"]) != scale or not torch.equal(codes.reshape(-1, codes.shape[-1]), rows):
            wrong.append(f"step {step}: {role}, scale {float(tensors['scale'])}, cast with {scale}")
    return {"sources": sources, "of_others": of_others, "wrong": wrong}


def cast_rows(cast: Any, value: torch.Tensor, rank: int) -> torch.Tensor:
    """Codes of this rank's rows: a custom recipe casts what has been gathered."""
    rows, codes = value.reshape(-1, value.shape[-1]).shape[0], cast.codes.reshape(-1, cast.codes.shape[-1])
    return codes if len(codes) == rows else codes[rank * rows : (rank + 1) * rows]
