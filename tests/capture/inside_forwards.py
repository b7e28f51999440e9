"""Operands that are handed over of modules that multiply inside their forward, kept as they come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from nemo_fp8_debug.capture.backends.base import CastInUse, UnknownCastError
from nemo_fp8_debug.capture.dispatcher import EventDispatcher
from nemo_fp8_debug.capture.gemms import Gemm, find_gemms, is_observed_in_forward
from nemo_fp8_debug.capture.matmul_capture import InForwardMatmulCapture

Key = tuple[str, str]
ROLES = ("input", "weight", "grad_output")


@dataclass
class Seen:
    """What a step handed over."""

    #: by (GEMM, role): each tensor, in order
    tensors: dict[Key, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    #: by the same: whether nothing may have quantized it
    told: dict[Key, list[bool]] = field(default_factory=lambda: defaultdict(list))
    faults: list[Exception] = field(default_factory=list)
    not_multiplied: list[str] = field(default_factory=list)

    def all_told(self, role: str) -> bool:
        return all(all(told) for (_, of), told in self.told.items() if of == role)

    def together(self, name: str, role: str) -> torch.Tensor:
        """All rows of an operand, sorted, so that the order of experts and calls does not matter."""
        rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in self.tensors[name, role]])
        return sorted_rows(rows)


def sorted_rows(rows: torch.Tensor) -> torch.Tensor:
    return torch.tensor(sorted(rows.reshape(-1, rows.shape[-1]).tolist()))


@dataclass
class _Sink:
    gemm: Gemm
    key: Key
    seen: Seen

    def add_tensor(self, x: torch.Tensor, order: int, use: CastInUse | None) -> None:
        if self.key[1] == "weight" and self.key in self.seen.tensors:
            return
        self.seen.tensors[self.key].append(x.detach().clone())
        self.seen.told[self.key].append(use is None)


def look_at(model: nn.Module, step: Callable[[], None]) -> Seen:
    """What is handed over of all modules that multiply inside their forward, or may."""
    seen = Seen()
    gemms = [g for g in find_gemms([model], in_forward=True) if is_observed_in_forward(g)]
    sinks = {(g.name, role): _Sink(g, (g.name.removeprefix("model."), role), seen) for g in gemms for role in ROLES}

    def fault(name: str, role: str, error: Exception, lost: bool) -> None:
        if not isinstance(error, UnknownCastError):
            seen.faults.append(error)

    dispatcher = EventDispatcher()
    capture = InForwardMatmulCapture(sinks, fault, dispatcher)
    capture.subscribe()
    try:
        step()
    finally:
        dispatcher.close()
        seen.not_multiplied = list(capture.not_multiplied)
    return seen
