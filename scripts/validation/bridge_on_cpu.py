"""Lets Megatron-Bridge train on a CPU, over the emulated kernels, with its own training loop and Megatron's optimizer.

    import emulated_te
    from bridge_on_cpu import bridge_on_cpu, importing_bridge, on_cpu

    with importing_bridge():
        from megatron.bridge.training.pretrain import pretrain
    with bridge_on_cpu():
        pretrain(on_cpu(config), forward_step, callbacks=[...])

No file of Bridge is touched. Like `emulated_te`, it belongs into a process of its own.
"""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import typing_extensions
from emulated_te.stubs import UNUSED, unused_packages

#: imported by Bridge for its other models and their data
OTHER_MODELS = ("megatron.energon", "megatron.bridge.diffusion", "qwen_vl_utils")
#: asynchronous checkpoints: megatron-core refuses from 0.17 on what there is of them for Python 3.11, unless it finds none
ASYNC_CHECKPOINTS = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"


@contextmanager
def importing_bridge() -> Iterator[None]:
    """Around the first import of Bridge."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]  # what Bridge 0.4 uses of Python 3.12
    sys.modules[ASYNC_CHECKPOINTS] = None  # type: ignore[assignment]
    with unused_packages(*UNUSED, *OTHER_MODELS):
        yield


@contextmanager
def bridge_on_cpu() -> Iterator[None]:
    """Within it Bridge finds a GPU."""
    from megatron.bridge.training import initialize
    from megatron_on_cpu import megatron_on_cpu

    with (
        # Transformer Engine's softmax in torch, where it would call a kernel that is not emulated.
        patch.dict(os.environ, {"NVTE_MASKED_SOFTMAX_FUSION": "0"}),
        # A wheel of megatron-core has these helpers compiled, and no Makefile to compile them with.
        patch.object(initialize, "compile_helpers", return_value=None),
        megatron_on_cpu(),
        patch.object(torch.cuda, "is_available", return_value=True),
    ):
        yield


def on_cpu(config: Any) -> Any:
    """The same configuration, changed where a CPU needs it."""
    config.dist.distributed_backend = "gloo"
    config.model.use_cpu_initialization = True
    config.model.gradient_accumulation_fusion = False  # a CUDA kernel
    config.dataset.num_workers = 0
    return config
