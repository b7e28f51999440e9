"""Master weights: what an optimizer keeps in float32 of a weight that is stored in fewer bits.

Megatron's optimizers leave it in the parameter's attribute `main_param`; its distributed one leaves each rank a part. That
of other optimizers is in their state: they are seen when they step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .backends.base import ScaleInUse, StoredCodes
from .scan import ScannedModule

#: under which optimizers keep it in their state, such as Transformer Engine's FusedAdam
_STATES = ("master_param", "master_params", "master_weight")


class Masters:
    """Finds master weights of a model's parameters."""

    def __init__(self) -> None:
        #: Megatron's buffers of gradients, as the sampled step finds them
        self.buffers: Sequence[Any] = ()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def note(self, optimizer: Any) -> None:
        """Notice an optimizer that steps."""
        self._optimizers.add(optimizer)

    def of(self, parameter: Any) -> tuple[torch.Tensor, int] | None:
        """The master weight, flat and in float32, and at which value of the parameter it begins; None: none is found.

        Raises:
            LookupError: ranks keep parts of it, and which one this rank has is not known.
        """
        if getattr(parameter, "main_param_sharded", False):
            return self._part(parameter)
        main: Any = getattr(parameter, "main_param", None)
        return (main.detach().reshape(-1), 0) if _is_whole(main, parameter) else self._of_optimizers(parameter)

    def _of_optimizers(self, parameter: Any) -> tuple[torch.Tensor, int] | None:
        for optimizer in self._optimizers:
            state = optimizer.state.get(parameter, {})
            for name in _STATES:
                if _is_whole(state.get(name), parameter):
                    return state[name].detach().reshape(-1), 0
        return None

    def _part(self, parameter: Any) -> tuple[torch.Tensor, int]:
        """What this rank has of it, which may be nothing."""
        main = parameter.main_param
        if main is None:
            return torch.empty(0, device=parameter.device), 0
        for buffer in self.buffers:
            if parameter in buffer.param_index_map:
                start = begin_of_part(buffer, parameter)
                if main.dtype == torch.float32 and start + main.numel() <= parameter.numel():
                    return main.detach().reshape(-1), start
        raise LookupError("ranks keep parts of its master weight, and which one this rank has is not known")


def find_buffers(scanned: Iterable[ScannedModule]) -> list[Any]:
    """Return Megatron's buffers of gradients, of which ranks may keep parts."""
    names = "buffers", "expert_parallel_buffers"
    lists = [vars(one.module).get(name) for one in scanned for name in names]
    return [buffer for found in lists if isinstance(found, list) for buffer in found]


def beside_master(stored: StoredCodes, masters: Masters | None) -> tuple[torch.Tensor, ScaleInUse, ScaleInUse]:
    """W in codes: what is measured, its master weight or, if none is found, what the codes stand for; and how that was cast.

    Returns:
        What is measured, which may be a rank's part; its cast; and the cast of all that the codes stand for.
    """
    codes, use, parameter = stored.decoded(), stored.cast(), stored.parameter
    as_stored = replace(use, source="stored", decoded=codes)
    if use.source == "not quantized":
        return codes.values, use, use
    found = masters.of(parameter) if masters else None
    if found is None:
        return codes.values, as_stored, as_stored
    x, start = found
    if x.numel() == codes.values.numel():
        use = replace(use, decoded=codes)
        return x.reshape(codes.values.shape), use, use
    return x, replace(use, decoded=codes.part(start, x.numel())), as_stored


def _is_whole(master: Any, parameter: Any) -> bool:
    return isinstance(master, torch.Tensor) and master.dtype == torch.float32 and master.numel() == parameter.numel()


def begin_of_part(buffer: Any, parameter: Any) -> int:
    """Ranks have equal parts of each bucket: of a parameter, where this rank's part of its bucket begins."""
    start, _, number = buffer.param_index_map[parameter]
    bucket, group = buffer.buckets[number], buffer.data_parallel_group
    mine = bucket.offset + group.rank() * (bucket.grad_data.numel() // group.size())
    return max(0, int(mine - start))
