"""Names that nvdlfw_inspect gives to the layers of a model, and statistics of some: `nvdlfw_names.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import nvdlfw_inspect.api as nvdlfw
import torch
from torch import nn


class Block(nn.Module):
    """As of Llama over Transformer Engine, whose `layer_number` is its index and 1."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.self_attention = nn.ModuleDict({"qkv": nn.Linear(4, 4)})


def model() -> nn.Module:
    """Three lists: numbered by themselves, by index with statistics of the last alone, and by index with all of them."""
    lists = {"layers": nn.ModuleList(map(Block, (1, 2, 3)))}
    for name in ("by_index", "whole"):
        lists[name] = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(4, 4)}) for _ in range(3))
    return nn.ModuleDict(lists)


def main(folder: Path) -> None:
    folder.mkdir()
    statistics = {"enabled": True, "tensors": ["activation"], "stats": ["min", "max"], "freq": 1}
    layers = {"layer_name_regex_pattern": ".*"}
    config = {"all": {"enabled": True, "layers": layers, "LogTensorStats": statistics}}
    nvdlfw.initialize(config_file=config, log_dir=str(folder), default_logging_enabled=True)
    nvdlfw.infer_and_assign_layer_names(made := model())
    logged = [
        *(block.self_attention["qkv"] for block in made["layers"]),
        made["by_index"][2]["fc"],
        *(block["fc"] for block in made["whole"]),
    ]
    for module in logged:
        nvdlfw.log_tensor_stats(
            layer_name=module.name, tensor_name="activation", tensor=torch.randn(4, 4), skip_reduction=True
        )
    nvdlfw.step()
    nvdlfw.end_debug()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
