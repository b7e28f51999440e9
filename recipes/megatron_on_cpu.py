"""Let Megatron-core and NeMo, which assume CUDA, train on a CPU. Use this for demos and tests only.

The context manager replaces torch's CUDA device functions until it exits. It changes no file of a framework. Enter it after
all imports.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

CPU = torch.device("cpu")
FACTORIES = (
    "tensor zeros ones empty full arange rand randn zeros_like ones_like empty_like full_like as_tensor randint tril triu"
)


class _Stream:
    """A replacement for CUDA streams and events. On a CPU, operations always run in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...
    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: _Stream()


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it uses the CPU instead of CUDA, and no pinned memory."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(CPU if _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return run


def _split_by_numbers(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    """Convert the numbers of tokens for each expert to Python numbers. On a GPU, Megatron has already converted them."""

    @functools.wraps(all_to_all)
    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs |= {n: kwargs[n].tolist() for n in kwargs if n.endswith("_split_sizes") and torch.is_tensor(kwargs[n])}
        return all_to_all(*args, **kwargs)

    return run


def _type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the CUDA name of a tensor's type, because Megatron's optimizers compare types by this name."""
    found = torch._C.TensorBase.type(tensor, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let `cuda` mean `cpu` inside the context."""
    from megatron.core.tensor_parallel import random as megatron_random

    def same(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    stands_in: dict[tuple[Any, str], Any] = {
        (torch.cuda, "current_device"): lambda: CPU,
        (torch.cuda, "Stream"): _Stream,
        (torch.cuda, "Event"): _Stream,
        (torch.cuda, "stream"): lambda stream=None: contextlib.nullcontext(),
        (torch.cuda, "current_stream"): lambda *args, **kwargs: _Stream(),
        (torch.cuda, "default_stream"): lambda *args, **kwargs: _Stream(),
        (torch.cuda, "synchronize"): nothing,
        (torch.cuda, "empty_cache"): nothing,
        (torch.cuda, "set_device"): nothing,
        (torch.cuda, "get_rng_state"): lambda device=None: torch.get_rng_state(),
        (torch.cuda, "default_generators"): {CPU: torch.default_generator},
        (torch.cuda.random, "get_rng_state"): lambda device=None: torch.get_rng_state(),
        (torch.distributed, "all_to_all_single"): _split_by_numbers(torch.distributed.all_to_all_single),
        (torch.Tensor, "cuda"): same,
        (torch.Tensor, "pin_memory"): same,
        (torch.Tensor, "to"): _on_cpu(torch.Tensor.to),
        (torch.Tensor, "type"): _type_name,
        (torch.nn.Module, "cuda"): same,
        (megatron_random, "_set_cuda_rng_state"): nothing,
        **{(torch, name): _on_cpu(getattr(torch, name)) for name in FACTORIES.split()},
    }
    if moe := sys.modules.get("megatron.core.transformer.moe.moe_utils"):
        stands_in.setdefault((moe, "te_general_gemm"), None)  # used, but imported only with Transformer Engine
    if nemo_io := sys.modules.get("nemo.lightning.io.pl"):
        stands_in[nemo_io, "_fix_tensors_device"] = lambda checkpoint: checkpoint
    with contextlib.ExitStack() as stack:
        for (owner, name), replacement in stands_in.items():
            stack.enter_context(patch.object(owner, name, replacement, create=not hasattr(owner, name)))
        _do_without_cuda_rng(megatron_random, stack)
        yield


def _do_without_cuda_rng(megatron_random: Any, stack: contextlib.ExitStack) -> None:
    """Avoid CUDA's random state: use Megatron's inference tracker (0.13 and later), or disable forks of the random state."""
    initialize = megatron_random.initialize_rng_tracker
    if "force_reset" in inspect.signature(initialize).parameters:
        initialize(inference_rng_tracker=True, force_reset=True)
    else:
        tracker = megatron_random.CudaRNGStatesTracker
        stack.enter_context(patch.object(tracker, "fork", lambda self, *args: contextlib.nullcontext()))
