"""A process of a run of two ranks that nvdlfw_inspect logs: `nvdlfw_run.py RANK FOLDER reduced|apart`."""

from __future__ import annotations

import sys
from pathlib import Path

import nvdlfw_inspect.api as nvdlfw
import torch
import torch.distributed as dist

STEPS = (0, 2, 4)
LAYER = "model.module.decoder.layers.3.mlp.linear_fc1"


def tensor(rank: int, step: int) -> torch.Tensor:
    """What a rank holds."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))


if __name__ == "__main__":
    rank, folder, ranks = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
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
