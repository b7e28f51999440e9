"""What torchtitan asks of a CUDA device, answered for a CPU. Import it before torchtitan; for validation only."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _device_module() -> Any:
    of_cpu = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")}
    answers = {
        "set_device": _nothing,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 30),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": _nothing,
        "empty_cache": _nothing,
    }
    return SimpleNamespace(**of_cpu | answers)


def install() -> None:
    """One rank, gloo, and a device module for the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    module = _device_module()
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: module
    if not hasattr(torch.distributed, "set_timeout"):  # of torch 2.14, of which torchtitan 0.3 was a nightly's
        torch.distributed.set_timeout = _nothing
    import torchtitan.components.quantization.mx as mx
    import torchtitan.components.quantization.nvfp4 as nvfp4

    for converter in (mx, nvfp4):
        converter.has_cuda_capability = lambda *_: True
