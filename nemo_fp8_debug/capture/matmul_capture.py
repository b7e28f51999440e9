"""Observe the operands of products inside a module's forward, in one sampled step.

We use this for modules whose arguments are not operands (`backends.in_forward`), and for subclasses of `nn.Linear` whose own
forward may change operands. If we cannot follow how such a Linear computes its operands, we measure its arguments and its
parameter instead, with the source `unknown`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..core.error_guard import Fault, OperandGuard
from .backends.base import Args, CastInUse, Kwargs, UnknownCastError, make_unknown_cast, read_raw_weight
from .backends.in_forward import find_parameter_name, is_weight_computed, list_parameter_names, read_parameter
from .dispatcher import EventDispatcher, ForwardPass
from .gemms import Gemm
from .hooks import OperandSink, ProductSink
from .matmuls import Matmul, MatmulMode
from .tensors import cast_like_autocast, is_dtensor

_COMPUTED = "its module computes it with operators that may quantize"


@dataclass
class _SeenCall:
    """A forward call that counts."""

    counted: ForwardPass
    mode: MatmulMode | None = None
    #: names of GEMMs whose products were observed
    seen: set[str] = field(default_factory=set)
    #: whether we know that nothing in this forward has quantized the gradients of its products
    gradients_are_told: bool = False


class InForwardMatmulCapture:
    """An observer of modules that multiply inside their forward, in one sampled step."""

    def __init__(
        self,
        sinks: Mapping[tuple[str, str], OperandSink],
        on_fault: Fault,
        dispatcher: EventDispatcher,
        read_casts: bool = True,
        products: Mapping[str, ProductSink] | None = None,
    ) -> None:
        """Create an observer from the same arguments as `hooks.OperandCapture`."""
        self._sinks, self._on_fault, self._read_casts = sinks, on_fault, read_casts
        self._products, self._dispatcher = products or {}, dispatcher
        self._weights: set[str] = set()
        #: names of GEMMs whose module ran, but whose parameter was not multiplied by any torch operator
        self.not_multiplied: dict[str, None] = {}

    def subscribe(self) -> None:
        """Observe calls from now on."""
        by_module: dict[nn.Module, dict[str, Gemm]] = defaultdict(dict)
        for sink in self._sinks.values():
            for name in list_parameter_names(sink.gemm.module, sink.gemm.part):
                by_module[sink.gemm.module][name] = sink.gemm
        for module, gemms in by_module.items():
            guard = partial(self._guarded, next(iter(gemms.values())), "input")
            enter, leave = (partial(f, module, gemms) for f in (self._enter, self._leave))
            self._dispatcher.watch_calls(module, guard, enter, leave)

    def _guarded(self, gemm: Gemm, role: str) -> OperandGuard:
        return OperandGuard(self._on_fault, gemm.name, role, True)

    def _enter(self, module: nn.Module, gemms: Mapping[str, Gemm], counted: ForwardPass, args: Args, kwargs: Kwargs) -> None:
        if counted.counts:
            call = counted.kept = _SeenCall(counted)
            call.mode = MatmulMode(module, gemms, (args, kwargs), partial(self._take_product, gemms, call))
            counted.enter_mode(call.mode)

    def _leave(
        self, module: nn.Module, gemms: Mapping[str, Gemm], counted: ForwardPass, args: Args, kwargs: Kwargs, out: Any
    ) -> None:
        call, counted.kept = counted.kept, None
        if call is None or call.mode is None:
            return
        mode, call.mode = call.mode, None
        with self._guarded(next(iter(gemms.values())), "grad_output"):
            call.gradients_are_told = not mode.hooked and not _has_functions_of_others(out, (args, kwargs))
        for gemm in {gemm.name: gemm for gemm in gemms.values()}.values():
            if gemm.name not in call.seen:
                if gemm.backend.in_forward:
                    self.not_multiplied[gemm.name] = None
                else:
                    self._take_arguments(gemm, call, args, kwargs, out)

    def _take_product(
        self, gemms: Mapping[str, Gemm], call: _SeenCall, found: Matmul
    ) -> Callable[[torch.Tensor, bool], None] | None:
        gemm = gemms[found.parameter]
        has_arguments = not gemm.backend.in_forward and not is_weight_computed(gemm.module)
        if has_arguments and not (found.x_is_told and found.weight_is_told):
            return None
        place = self._place(call)
        call.seen.add(gemm.name)
        with self._guarded(gemm, "input"):
            _check_rows(gemm)
            self._add(gemm, "input", found.x, place, "" if found.x_is_told else _COMPUTED)
        if gemm.name not in self._weights:
            self._weights.add(gemm.name)
            with self._guarded(gemm, "weight"):
                if (weight := found.weight()) is None:
                    raise LookupError("the GEMMs use tensors computed from parts of the parameter, not the parameter itself")
                self._add(gemm, "weight", weight, place, "" if found.weight_is_told else _COMPUTED)
        return partial(self._hook_gradient, gemm, call, place, found.turned)

    def _place(self, call: _SeenCall) -> int:
        """Return the next place in the order of execution. In a recompute, return the places of the first forward again."""
        again = torch._C._current_graph_task_id() != -1
        return call.counted.order if again or not call.seen else next(self._dispatcher.order)

    def _add(self, gemm: Gemm, role: str, x: torch.Tensor, place: int, untold: str) -> None:
        """
        Args:
            untold: why the operand may have been quantized, or "" if it was not quantized.
        """
        if sink := self._sinks.get((gemm.name, role)):
            use = self._use(gemm, role, untold)
            sink.add_tensor(x, place + (role == "weight"), use)
            self._multiply(gemm, role, x, place, use)

    def _use(self, gemm: Gemm, role: str, untold: str) -> CastInUse | None:
        if not untold or not self._read_casts:
            return None
        self._on_fault(gemm.name, role, UnknownCastError(untold), False)
        return make_unknown_cast(role)

    def _multiply(self, gemm: Gemm, role: str, x: torch.Tensor, place: int, use: CastInUse | None) -> None:
        if products := self._products.get(gemm.name):
            products.add_operand(role, x, place, use)

    def _hook_gradient(self, gemm: Gemm, call: _SeenCall, place: int, turned: bool, out: torch.Tensor, hooked: bool) -> None:
        sink = self._sinks.get((gemm.name, "grad_output"))

        def take(grad: torch.Tensor) -> None:
            assert sink is not None
            _check_rows(gemm)
            told = call.gradients_are_told and not hooked
            use = self._use(gemm, "grad_output", "" if told else gemm.backend.foreign(gemm.module) or _COMPUTED)
            dy = grad.transpose(-1, -2) if turned else grad
            sink.add_tensor(dy, next(self._dispatcher.order), use)
            self._multiply(gemm, "grad_output", dy, place, use)

        if sink is not None and out.requires_grad:
            self._dispatcher.watch_gradient(out, partial(self._guarded, gemm, "grad_output"), take, is_inside=True)

    def _take_arguments(self, gemm: Gemm, call: _SeenCall, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Observe the arguments of a Linear, because the operands of its product are unknown."""
        why = gemm.backend.foreign(gemm.module) or _COMPUTED
        with self._guarded(gemm, "input"):
            x = gemm.backend.input(gemm.module, args, kwargs, gemm.part)
            if x is not None:
                self._add(gemm, "input", cast_like_autocast(x), call.counted.order, why)
        with self._guarded(gemm, "weight"):
            if (weight := read_raw_weight(gemm.module)) is not None:
                self._add(gemm, "weight", cast_like_autocast(weight), call.counted.order, why)
        with self._guarded(gemm, "grad_output"):
            self._hook_gradient(gemm, call, call.counted.order, False, gemm.backend.output(out), True)


def _check_rows(gemm: Gemm) -> None:
    """Check that each rank has its own rows, as ranks with different experts do.

    Raises:
        TypeError: ranks split the parameter in another way, and it is unknown which rank counts X and dY.
    """
    parameter: Any = read_parameter(gemm.module, find_parameter_name(gemm.module, gemm.part))
    if is_dtensor(parameter):
        apart = all(p.is_replicate() or (p.is_shard(0) and parameter.dim() == 3) for p in parameter.placements)
        if not apart or all(p.is_replicate() for p in parameter.placements):
            split = parameter.placements
            raise TypeError(f"ranks hold parts of its parameter ({split}), and it is unknown which rank counts X and dY")


def _has_functions_of_others(out: Any, inputs: Any) -> bool:
    """Return True if a forward has added functions from outside torch to the graph. They may change gradients."""
    ends = set(_nodes(inputs))
    waiting = [node for node in _nodes(out) if node not in ends]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction) or type(node).__name__ == "CppFunction":
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following not in ends:
                seen.add(following)
                waiting.append(following)
    return False


def _nodes(values: Any) -> Sequence[Any]:
    return [x.grad_fn for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.grad_fn is not None]
