"""Two ranks of data parallelism over emulated kernels, each with its rows: copies and scales of blocks of both together."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from emulated_te import CASTS, casts_of, te
from te_table.compare import _copy_error
from torch import nn
from transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling

from nemo_fp8_debug import Monitor, read_record

RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    "blockwise": Float8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
SHOWN = {"input": "X", "weight": "W", "grad_output": "dY"}


def train(rank: int, world: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    found = {name: of_recipe(name, rank, folder / name) for name in RECIPES}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    if rank == 0:
        tables = {
            name: {table: read_record(str(folder / name), table).to_dicts() for table in ("copies", "block_scales")}
            for name in RECIPES
        }
        (folder / "found.json").write_text(json.dumps(tables))
    torch.distributed.destroy_process_group()


def of_recipe(name: str, rank: int, folder: Path) -> dict[str, dict[str, float]]:
    """What this rank's kernels did: squared errors of column-wise copies, and how many row-wise blocks there were."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"proj": te.Linear(128, 256, bias=False, params_dtype=torch.bfloat16)})
    options = {"interval": 1, "table_rows": 0, "on_error": "raise", "copies": True, "block_scales": True}
    monitor = Monitor(model, str(folder), **options)  # type: ignore[arg-type]
    CASTS.clear()
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(rank)).mul(4.0**rank).bfloat16().requires_grad_()
    with monitor.step(0), te.autocast(enabled=True, recipe=RECIPES[name]):
        model["proj"](x).float().square().sum().backward()
    monitor.close()
    found: dict[str, dict[str, float]] = {}
    for role, shown in SHOWN.items():
        casts = {cast.usage: cast for cast in casts_of(model["proj"], shown, 0)}
        row_wise = casts["rowwise"]
        found[role] = {"blocks": row_wise.scale.numel()}
        if "columnwise" in casts:
            found[role] |= {"error2": _copy_error(casts["columnwise"]), "n": row_wise.source.numel()}
    return found
