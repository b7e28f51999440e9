"""Which forward calls of a sampled step count: of a forward that activation recompute does again, one."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from .backends.base import Kwargs, ScaleInUse


class Transformed(Exception):
    """A forward under a transform of torch.func (vmap, grad, jvp), whose tensors stand for others: it is not counted."""


@dataclass
class Pass:
    """A forward pass of a module that counts, itself or in its recompute."""

    #: place in the order of execution
    order: int
    #: how X and W are cast in it, by GEMM and role, if the backend can tell; None: it has not returned yet
    casts: dict[tuple[str, str], ScaleInUse] | None = None
    #: what is known of the call before it runs
    arguments: Kwargs = field(default_factory=dict)


class Passes:
    """The forward calls of modules in one sampled step.

    Activation recompute runs a module's forward twice, once of them inside backward. A forward inside backward counts only
    where the first one could not: under `no_grad`, where it left no output to hook. It has the place, and the casts of X
    and W, of the first one, since an engine that recomputes casts as it did then, and its scales have moved on.
    """

    def __init__(self, order: Iterator[int] | None = None) -> None:
        """
        Args:
            order: gives out places in the order of execution; what is captured together shares it.
        """
        self.order = itertools.count(step=3) if order is None else order
        #: of modules whose forward runs: the first pass of one that a recompute will count
        self.first: dict[nn.Module, Pass] = {}
        self._without_grad: dict[nn.Module, deque[Pass]] = defaultdict(deque)  # those that a recompute may still come for
        self._with_grad: set[nn.Module] = set()  # counted outside backward: a recompute of these adds nothing

    def counted(self, module: nn.Module) -> Pass | None:
        """A forward that begins and counts, a recompute as its first pass was; None: not counted.

        Raises:
            Transformed: it is not counted, which whoever looks at the module should know.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise Transformed
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return None  # counting would be recorded with it, and be done again in every replay, in memory of others by then
        if torch._C._current_graph_task_id() != -1:  # inside backward: a recompute
            first_passes = self._without_grad[module]
            return first_passes.popleft() if first_passes and module not in self._with_grad else None
        if not torch.is_grad_enabled():
            if module.training:
                self.first[module] = Pass(next(self.order))
                self._without_grad[module].append(self.first[module])
            return None
        self._with_grad.add(module)
        return Pass(next(self.order))
