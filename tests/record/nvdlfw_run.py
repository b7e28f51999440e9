"""Runs of two ranks that nvdlfw_inspect logs: `nvdlfw_run.py FOLDER`, in which each of `RANKS` gets one."""

from __future__ import annotations

import sys
from pathlib import Path

import nvdlfw_inspect.api as nvdlfw
import torch
import torch.distributed as dist
from processes import in_ranks

STEPS = (0, 2, 4)
#: whether ranks add up what they log
RANKS = ("reduced", "apart")
LAYER = "model.module.decoder.layers.3.mlp.linear_fc1"


def tensor(rank: int, step: int) -> torch.Tensor:
    """What a rank holds."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def main(rank: int, world: int, folder: Path, ranks: str) -> None:
    dist.init_process_group("gloo")
    statistics = {"enabled": True, "tensors": ["activation", "output"], "stats": ["min", "max", "mean"], "freq": 2}
    layers = {"layer_name_regex_pattern": ".*"}
    config = {"all": {"enabled": True, "layers": layers, "LogTensorStats": statistics}}
    nvdlfw.initialize(config_file=config, log_dir=str(folder), default_logging_enabled=True)
    for step in range(5):
        for name in ("activation", "output"):
            nvdlfw.log_tensor_stats(
                layer_name=LAYER,
                tensor_name=name,
                tensor=tensor(rank, step),
                reduction_group=dist.group.WORLD,
                skip_reduction=ranks == "apart",
            )
        nvdlfw.step()
    nvdlfw.end_debug()


if __name__ == "__main__":
    for how in RANKS:
        (Path(sys.argv[1]) / how).mkdir()
        in_ranks(2, main, Path(sys.argv[1]) / how, how)
