"""The matrix products inside a module's forward that multiply one of its parameters, seen at the operators of torch.

A mode calls every operator unchanged while the forward runs. Of `mm`, `addmm`, `bmm`, `baddbmm` and `_grouped_mm` it tells
which operand comes from a parameter and which from the inputs; their values are what is multiplied, however they were made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from .backends.in_forward import parameter_of
from .dataflow import COMPUTED, MOVED, UNTOLD, Dataflow, Origin
from .dispatcher import EventHook
from .dtensor import is_dtensor
from .operand_guard import enter_again, leave_modes
from .operator_mode import over_dtensors
from .scan import scan_modules

#: where each product has its two operands
_OPERANDS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1}
_INPUTS = ""


@dataclass(frozen=True)
class Matmul:
    """A product of inputs and a parameter, each as a matrix whose rows run along what is summed over."""

    #: name of the parameter
    parameter: str
    x: torch.Tensor
    #: finds W, if it is asked for; it gives None if parts of the parameter are multiplied that were computed
    weight: Callable[[], torch.Tensor | None]
    #: whether nothing may have quantized X, and W, on the way
    x_is_told: bool
    weight_is_told: bool
    #: the outputs are the rows of the product, and not its columns
    turned: bool


class Matmuls(TorchDispatchMode):
    """Finds the products of one forward call."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Any],
        inputs: Any,
        found: Callable[[Matmul], Callable[[torch.Tensor, bool], None] | None],
    ) -> None:
        """
        Args:
            module: whose forward runs.
            parameters: names of those that are looked for.
            inputs: what it is called with.
            found: gets each product; what it returns gets the output, once that has its place in the graph of autograd, and
                whether somebody had put a hook on that.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._module, self._watched, self._found = module, set(parameters), found
        self._inputs = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)]
        self._input_memory = {x.untyped_storage()._cdata for x in self._inputs if not is_dtensor(x)}
        self._scanned = scan_modules([module])
        self._flow = Dataflow()
        self._waiting: list[tuple[torch.Tensor, Callable[[torch.Tensor, bool], None]]] = []
        self._on = True
        #: whether tensors of this forward have hooks, which may change gradients
        self.hooked = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled."""
        return True

    def begin(self) -> None:
        """Look from now on."""
        self._flow.begin(self._inputs, _INPUTS)
        self._inputs = []
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Look no longer."""
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._on = False
        self._give_out()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func` as it is."""
        kwargs = kwargs or {}
        if self._on and over_dtensors(types):
            return NotImplemented
        if not self._on or any(isinstance(x, FakeTensor) for x in args):
            return func(*args, **kwargs)
        modes = leave_modes()
        try:
            self._before(func, args)
        finally:
            enter_again(modes)
        out = func(*args, **kwargs)
        with contextlib.suppress(Exception):  # what was not followed is unknown
            self._flow.follow(func, args, kwargs, out)
            self._remember(func, out)
        return out

    def _before(self, func: Any, args: Any) -> None:
        self._take: Callable[[torch.Tensor, bool], None] | None = None
        self._give_out()
        product = None
        with contextlib.suppress(Exception):  # a product that cannot be made out is none that is seen
            given = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            if any(self._flow.of(x) is None for x in given):
                self._begin_parameters()
            self.hooked |= any(x._backward_hooks and self._is_of_this_forward(x) for x in given)
            at = _OPERANDS.get(func.overloadpacket.__name__) if func.namespace == "aten" else None
            product = None if at is None else self._product(*args[at : at + 2])
        if product is not None:
            self._take = self._found(product)

    def _remember(self, func: Any, out: Any) -> None:
        if self._take is not None and isinstance(out, torch.Tensor):
            self._waiting.append((out, self._take))
            self._take = None

    def _give_out(self) -> None:
        """Outputs have their place in the graph only after the operator that makes them has returned."""
        waiting, self._waiting = self._waiting, []
        for out, take in waiting:
            take(out, bool(out._backward_hooks))

    def _is_of_this_forward(self, x: torch.Tensor) -> bool:
        hooks = (x._backward_hooks or {}).values()
        mine = all(isinstance(hook, EventHook) and hook.is_inside for hook in hooks)
        return not mine and x.grad_fn is not None and x.untyped_storage()._cdata not in self._input_memory

    def _begin_parameters(self) -> None:
        """As the module holds them now: a sharding engine may have gathered them since its forward began."""
        for one in self._scanned:
            for key, value in (*one.module._parameters.items(), *one.module._buffers.items()):
                if value is not None and type(local_of(value)) in (torch.Tensor, nn.Parameter):
                    self._flow.begin_parameter(local_of(value), f"{one.path}.{key}" if one.path else key)

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> Matmul | None:
        of_a, of_b = (self._flow.of(x) or Origin(UNTOLD) for x in (a, b))
        for x, w, of_x, of_w, turned in ((a, b, of_a, of_b, False), (b, a, of_b, of_a, True)):
            mine = of_w.sources & self._watched
            if mine and _INPUTS not in of_w.sources and not (of_x.sources and _INPUTS not in of_x.sources):
                of_rows = w if turned else w.transpose(-1, -2)
                if (key := self._which(mine, of_rows)) is None:
                    return None
                return Matmul(
                    key,
                    x.transpose(-1, -2) if turned else x,
                    partial(self._weight, key, of_rows, of_w),
                    of_x.made >= COMPUTED and _INPUTS in of_x.sources,
                    of_w.made >= COMPUTED,
                    turned,
                )
        return None

    def _which(self, names: frozenset[str], weight: torch.Tensor) -> str | None:
        """Of several parameters that make up what is multiplied, the one with as many values."""
        if len(names) == 1:
            return next(iter(names))
        fitting = [name for name in names if local_of(parameter_of(self._module, name)).numel() == weight.numel()]
        return fitting[0] if len(fitting) == 1 else None

    def _weight(self, key: str, multiplied: torch.Tensor, origin: Origin) -> torch.Tensor | None:
        """The whole parameter where it was but moved, and what is multiplied if it was computed of all of it."""
        parameter: Any = parameter_of(self._module, key)
        if origin.made == MOVED and origin.sources == {key}:
            out, k = parameter.shape[-2:]
            along = multiplied.stride(-1) <= multiplied.stride(-2) if out == k else k == multiplied.shape[-1]
            whole = parameter.detach() if along else parameter.detach().transpose(-1, -2)
            return whole.to(multiplied.dtype)  # type: ignore[no-any-return]
        return multiplied if multiplied.numel() == local_of(parameter).numel() else None


def local_of(x: Any) -> torch.Tensor:
    """What this rank holds of a parameter."""
    part: torch.Tensor = x._local_tensor if is_dtensor(x) and hasattr(x, "_local_tensor") else x
    return part
