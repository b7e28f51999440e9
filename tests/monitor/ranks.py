"""Runs of several ranks, each a process: `ranks.py FOLDER`, in which each of `RUNS` gets one."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from processes import in_ranks
from torch import nn

from nemo_fp8_debug import ConfigError, Monitor

STEPS = 40
#: ranks, and what they go through
RUNS = {
    **{scenario: (2, scenario) for scenario in ("control", "triggers", "refused", "units")},
    "control of 3": (3, "control"),
}


def main(rank: int, world: int, folder: Path, scenario: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Each rank a pipeline stage: its layers are its own.
    torch.manual_seed(rank)
    model = nn.ModuleDict({f"stage{rank}": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))}).bfloat16()
    options = {"interval": 10, "table_rows": 0, "dump_min_free_bytes": 0, "on_error": "warn"}
    if scenario == "triggers":
        options |= {
            "triggers": ["loss_spike", "nonfinite", "outlier_log2/input > 9"],
            "trigger_steps": 3,
            "trigger_dump": ["*"],
        }
    if scenario == "refused" and rank == 1:
        options |= {"layers": 7}
    result: dict[str, object] = {"rank": rank}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result |= train(model, folder, rank, scenario, options)
        except ConfigError as error:
            result["refused"] = str(error)
    result["warnings"] = [str(w.message) for w in caught if "nemo_fp8_debug:" in str(w.message)]
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def train(model: nn.Module, folder: Path, rank: int, scenario: str, options: dict[str, object]) -> dict[str, object]:
    # Only the first rank's word on where to write counts.
    monitor = Monitor(model, str(folder / ("run" if rank == 0 else "elsewhere")), **options)
    stage, sampled, losses = model[f"stage{rank}"], [], []
    data = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        if scenario == "control" and rank == 0 and step == 5:
            (folder / "run" / "control.yaml").write_text("dump: [stage1]\nsteps: 3\n")
        monitor.begin_step(step)
        if monitor.sampling:
            sampled.append(step)
        x = torch.randn(8, 16, generator=data).bfloat16()
        if scenario == "triggers" and step == 30 and rank == 0:
            x[0, 0] = 1e4  # at a step that is sampled anyway
        loss = stage(x).float().square().mean()
        model.zero_grad()
        if scenario == "units":
            if rank > 0:
                monitor.watch_loss(loss)
            loss = loss / 4
        loss.backward()
        losses.append(loss.item())
        # As pipeline stages do: the last one has the loss.
        reported = None if rank == 0 else torch.tensor(2.0 + 0.001 * step + 50.0 * (scenario == "triggers" and step == 23))
        if scenario == "triggers" and step > 30:
            monitor.flush()  # a step of a real run takes longer than measuring
        dist.barrier()
        monitor.end_step(loss=reported)
    monitor.close()
    return {"sampled": sampled, "losses": losses}


if __name__ == "__main__":
    for name, (world, scenario) in RUNS.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        in_ranks(world, main, folder, scenario)
