"""Observe GEMM modules during one sampled step, and pass on each operand of each GEMM exactly once.

Where we observe each operand, and why:
X and W  At the start of a forward, before all other hooks, so that no intervention has replaced operands yet. At this point
         we only find the tensor W. We read its values after the forward, before all other forward hooks. By then, an
         optimizer has gathered updated weights, if it does so during the forward (Megatron's overlap_param_gather).
         If an engine gathers W only for the forward (ZeRO-3, FSDP2), or splits X and W among ranks (DTensor), we find X and
         W after the forward, before the engine releases them.
dY       In a tensor hook on the output, set before other code receives the output. So no other code has changed the
         gradient yet. Unlike a module's backward hook, a tensor hook also works if inputs have no gradient, or if the
         output is changed in place.
Operands that exist only inside a module, as in Transformer Engine's LayerNormMLP, are not observed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..core.error_guard import Fault, OperandGuard
from .backends.base import (
    Args,
    CastInUse,
    FrameworkBackend,
    Kwargs,
    StoredCodes,
    UnknownCastError,
    make_unknown_cast,
    may_be_gathered_later,
)
from .dispatcher import EventDispatcher, ForwardPass, Guard, TorchMode, find_gradient_node
from .gemms import Gemm
from .operator_mode import AmaxReductionMode, Reduced, apply_shared_amax, defer_until_backward, defer_until_node
from .optimizer_weights import MasterWeights, choose_measured_weight
from .patching import explain_function_modes, find_emulation
from .tensors import cast_like_autocast

_NOTHING: Mapping[str, Any] = {}


class OperandSink(Protocol):
    """A receiver of one operand of one GEMM: one tensor per call."""

    gemm: Gemm

    def add_tensor(self, x: torch.Tensor, order: int, use: CastInUse | None) -> None:
        """Take a tensor. Keep no reference to it, because it may change.

        Args:
            order: place of the call in the step's order of execution.
            use: cast in this call, if the backend can determine it.
        """


class ProductSink(Protocol):
    """A receiver of all operands of one GEMM, together with the forward call of each operand."""

    #: some rows of the call's dW, computed twice: from exact operands, and from quantized operands
    weight_gradient: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def has_checked_sums(self) -> bool:
        """Return True if the module sums its output over ranks, and we check this sum's terms."""

    def make_unreduced_result_mode(self) -> TorchMode | None:
        """Return a mode that observes sums over ranks in the next call, or None if we do not check them."""

    def begin_call(self, args: Args, kwargs: Kwargs) -> None:
        """Prepare for a forward call that counts."""

    def add_operand(self, role: str, x: torch.Tensor, call: int, use: CastInUse | None) -> None:
        """Take an operand. Copy what is needed, because the tensor may change later.

        Args:
            call: forward call of the operand.
            use: cast in this call, if known.
        """

    def end_call(self, call: int, given: tuple[Args, Kwargs], weight: torch.Tensor | None, out: Any) -> None:
        """Take the result of a call.

        Args:
            given: arguments of the module.
            weight: weight that the module multiplied.
            out: output of the module.
        """


class ReplicaSink(Protocol):
    """A receiver of this rank's X and W of all GEMMs."""

    def add_tensor(self, name: str, role: str, x: torch.Tensor) -> None:
        """Take a tensor. Copy what is needed, because the tensor may change later."""

    def add_stored_weight(self, name: str, stored: StoredCodes) -> None:
        """Take a weight that is stored as codes."""


#: takes a callback, and calls it with the reductions of amaxes when the cast of dY is known
_Wait = Callable[[Callable[[Reduced], None]], None]


@dataclass(eq=False, slots=True)
class _WatchedGemm:
    """How we observe one GEMM in this step."""

    gemm: Gemm
    #: sinks of the operands that hooks see, by role
    sinks: dict[str, OperandSink]
    products: ProductSink | None
    #: determines how the engine casts, if reading casts is enabled and supported
    cast: Callable[..., Callable[[], CastInUse]] | None
    #: guards the work on dY
    guard: Guard
    #: cast of W in the first call of the step
    weight_cast: CastInUse | None = None
    #: whether a weight stored as codes was observed
    stored_seen: bool = False

    @property
    def name(self) -> str:
        """Return the name of the GEMM."""
        return self.gemm.name


@dataclass(eq=False, slots=True)
class _WatchedModule:
    """How we observe one module in this step. This is decided when the step begins."""

    module: nn.Module
    backend: FrameworkBackend
    gemms: list[_WatchedGemm]
    #: whether we observe X only after the forward, when all hooks have changed it and its cast is known. Emulation changes X
    #: in a hook too, so under emulation we observe X before the forward
    takes_inputs_later: bool
    #: whether ranks may share the amax of the module's casts
    shares_amax: bool
    #: whether operands are ready only between the hooks of a sharding engine
    is_sharded: bool = False
    #: the call that is running
    running: ForwardPass | None = None


@dataclass(eq=False, slots=True)
class _KeptOfCall:
    """Values from the start of a call, for use at its end and in its recompute."""

    #: facts from before the call
    arguments: Kwargs
    #: weights by GEMM, while the forward runs
    weights: Mapping[str, torch.Tensor | None]
    #: casts of X and W by GEMM and role, if the backend can determine them; None before the call has returned
    casts: dict[tuple[str, str], CastInUse] | None = None
    #: watches amaxes that ranks share
    reductions: AmaxReductionMode | None = None


class OperandCapture:
    """An observer of the operands of GEMMs whose modules receive X as an argument."""

    def __init__(
        self,
        sinks: Mapping[tuple[str, str], OperandSink],
        on_fault: Fault,
        dispatcher: EventDispatcher,
        read_casts: bool = True,
        products: Mapping[str, ProductSink] | None = None,
        masters: MasterWeights | None = None,
        copies: ReplicaSink | None = None,
    ) -> None:
        """
        Args:
            sinks: receive the operands, by (GEMM name, role).
            on_fault: called after an error. Only one operand, or the record of its cast, is lost.
            dispatcher: dispatcher of the step.
            read_casts: whether backends determine how operands are cast.
            products: receive the operands together with their forward calls, by GEMM name.
            masters: finds master weights of weights that are stored as codes.
            copies: receives tensors of which other ranks may have copies.
        """
        self._on_fault, self._dispatcher, self._read_casts = on_fault, dispatcher, read_casts
        self._products, self._masters, self._copies = products or {}, masters, copies
        self._untold: dict[Callable[[], str], str] = {}  # reasons why casts cannot be determined in this step
        self._watched: list[_WatchedGemm] = []
        self._modules = {module: self._watch(module, of) for module, of in _by_module(sinks).items()}

    def _watch(self, module: nn.Module, sinks: Mapping[str, Mapping[str, OperandSink]]) -> _WatchedModule:
        """Decide what the hooks of a module will do at each call.

        Args:
            sinks: sinks by GEMM and role.
        """
        gemms, acted_on = list[_WatchedGemm](), find_emulation(module) is not None
        for name, of_roles in sinks.items():
            gemm = next(iter(of_roles.values())).gemm
            seen = {role: sink for role, sink in of_roles.items() if role not in gemm.unobserved_roles}
            told = self._read_casts and not acted_on and gemm.backend.cast is not None and not gemm.backend.foreign(module)
            cast = gemm.backend.cast if told else None
            guard = partial(OperandGuard, self._on_fault, name, "grad_output", True)
            gemms.append(_WatchedGemm(gemm, seen, self._products.get(name), cast, guard))
        self._watched += gemms
        backend = gemms[0].gemm.backend
        later = not acted_on
        shared = self._read_casts and backend.shares_amax(module)
        return _WatchedModule(module, backend, gemms, later, shared)

    def subscribe(self) -> None:
        """Observe calls from now on."""
        dispatcher = self._dispatcher
        for watched in self._modules.values():
            guard = partial(OperandGuard, self._on_fault, watched.gemms[0].name, "input", True)
            dispatcher.watch_calls(watched.module, guard, partial(self._enter, watched), partial(self._leave, watched))
            for one in watched.gemms:
                if one.products and one.products.has_checked_sums:
                    dispatcher.watch_before_forward(watched.module, guard, partial(self._watch_sums, watched, one.products))
        if self._masters and any(p.gemm.backend.stored(p.gemm.module, p.gemm.part) for p in self._watched):
            dispatcher.watch_optimizer(partial(self._guarded, "", "weight"), self._masters.add_optimizer)

    def _guarded(self, name: str, role: str, lost: bool = True) -> OperandGuard:
        return OperandGuard(self._on_fault, name, role, lost)

    def _enter(self, watched: _WatchedModule, call: ForwardPass, args: Args, kwargs: Kwargs) -> None:
        watched.running = call if call.counts else None
        kept = call.kept = call.kept or _KeptOfCall(_NOTHING, _NOTHING)
        kept.arguments = watched.backend.arguments(watched.module, args, kwargs)
        if watched.shares_amax:
            kept.reductions = AmaxReductionMode()
            call.enter_mode(kept.reductions)
        if not call.counts:
            return
        for one in watched.gemms:
            if one.products:
                one.products.begin_call(args, kwargs)
        kept.weights = self._find_weights(watched, args, kwargs)
        if not watched.is_sharded and any(may_be_gathered_later(watched.module, weight) for weight in kept.weights.values()):
            watched.is_sharded = watched.takes_inputs_later = True
        if not watched.takes_inputs_later:
            self._take_inputs(watched, call, args, kwargs)

    def _watch_sums(self, watched: _WatchedModule, products: ProductSink, args: Args, kwargs: Kwargs) -> None:
        mode = products.make_unreduced_result_mode()
        if mode is not None and watched.running is not None:
            watched.running.enter_mode(mode)

    def _find_weights(self, watched: _WatchedModule, args: Args, kwargs: Kwargs) -> dict[str, torch.Tensor | None]:
        found: dict[str, torch.Tensor | None] = {}
        for one in watched.gemms:
            with self._guarded(one.name, "weight"):
                found[one.name] = one.gemm.backend.weight(watched.module, args, kwargs, one.gemm.part)
        return found

    def _take_inputs(self, watched: _WatchedModule, call: ForwardPass, args: Args, kwargs: Kwargs) -> None:
        for one in watched.gemms:
            if "input" in one.sinks:
                with self._guarded(one.name, "input"):
                    self._take(one, "input", one.gemm.backend.input(watched.module, args, kwargs, one.gemm.part), call)

    def _take(self, watched: _WatchedGemm, role: str, x: torch.Tensor | None, call: ForwardPass) -> None:
        if (sink := watched.sinks.get(role)) and x is not None:
            x = x if watched.gemm.backend.has_own_fp8 else cast_like_autocast(x)
            use = (call.kept.casts or {}).get((watched.name, role))
            sink.add_tensor(x, call.order + (role == "weight"), use)
            if self._copies:
                self._copies.add_tensor(watched.name, role, x)
            _multiply(watched, role, x, call, use)

    def _note_casts(self, watched: _WatchedModule, out: Any, kept: _KeptOfCall) -> None:
        """Note how X and W were cast in the call that has just returned. Before a recompute, the engine may update scales.

        W is reported once per step with the cast of its first call, even if later calls cast W again.
        """
        if kept.casts is not None:
            return
        kept.casts = {(one.name, "weight"): one.weight_cast for one in watched.gemms if one.weight_cast}
        reduced = kept.reductions.seen if kept.reductions else ()
        mode = explain_function_modes() if self._read_casts else ""
        for one in watched.gemms if mode or any(one.cast for one in watched.gemms) else ():
            for role in ("input", "weight"):
                if role == "weight" and one.gemm.backend.stored(watched.module, one.gemm.part):
                    continue  # the call does not cast this operand
                if (one.name, role) not in kept.casts and (read := self._cast_reader(one, kept.arguments, role, out)):
                    kept.casts[one.name, role] = use = read(reduced)
                    if role == "weight":
                        one.weight_cast = use

    def _cast_reader(
        self, watched: _WatchedGemm, kwargs: Kwargs, role: str, out: Any
    ) -> Callable[[Reduced], CastInUse] | None:
        """Return a function that determines the cast of a role in a call, or None if the backend never quantizes."""
        mode = explain_function_modes() if self._read_casts else ""
        if (watched.cast is None and not mode) or role not in watched.sinks:
            return None
        gemm = watched.gemm
        with self._guarded(gemm.name, role, lost=False):
            if mode or watched.cast is None:
                raise UnknownCastError(mode)
            if gemm.backend.untold not in self._untold:
                self._untold[gemm.backend.untold] = gemm.backend.untold()
            if why := self._untold[gemm.backend.untold]:
                raise UnknownCastError(why)
            read = watched.cast(gemm.module, kwargs, gemm.part, role, gemm.backend.output(out))
            return partial(self._known_cast, gemm.name, role, read)
        return lambda reduced: make_unknown_cast(role)

    def _known_cast(self, name: str, role: str, read: Callable[[], CastInUse], reduced: Reduced = ()) -> CastInUse:
        with self._guarded(name, role, lost=False):
            return apply_shared_amax(read(), reduced)
        return make_unknown_cast(role)

    def _leave(self, watched: _WatchedModule, call: ForwardPass, args: Args, kwargs: Kwargs, out: Any) -> None:
        watched.running, kept = None, call.kept
        weights, kept.weights = kept.weights, _NOTHING
        self._note_casts(watched, out, kept)
        if not call.counts:
            return
        if watched.takes_inputs_later:
            self._take_inputs(watched, call, args, kwargs)
        if watched.is_sharded or None in weights.values():  # the forward may have given a lazy weight its shape
            weights = self._find_weights(watched, args, kwargs)
        for one in watched.gemms:
            with self._guarded(one.name, "weight"):
                if stored := one.gemm.backend.stored(watched.module, one.gemm.part):
                    self._take_stored(one, stored, call)
                else:
                    self._take(one, "weight", weights.get(one.name), call)
            if "grad_output" in one.sinks:
                with self._guarded(one.name, "grad_output"):
                    self._watch_gradient(watched, one, call, args, kwargs, out)
            if one.products:
                with self._guarded(one.name, "input"):
                    one.products.end_call(call.order, (args, kwargs), weights.get(one.name), out)

    def _take_stored(self, watched: _WatchedGemm, stored: StoredCodes, call: ForwardPass) -> None:
        if watched.stored_seen or not (sink := watched.sinks.get("weight")):
            return
        watched.stored_seen = True
        x, use, multiplied = choose_measured_weight(stored, self._masters)
        sink.add_tensor(x, call.order + 1, use)
        if self._copies:
            self._copies.add_stored_weight(watched.name, stored)
        _multiply(watched, "weight", x if multiplied is use else stored.decode_values().values, call, multiplied)

    def _watch_gradient(
        self, watched: _WatchedModule, one: _WatchedGemm, call: ForwardPass, args: Args, kwargs: Kwargs, out: Any
    ) -> None:
        backend = watched.backend
        y = backend.output(out)
        if not y.requires_grad:
            return
        # A hook lives until backward, so we keep only arguments that are not activations.
        small = tuple(None if torch.is_tensor(a) and a.requires_grad else a for a in args)
        read = self._cast_reader(one, call.kept.arguments, "grad_output", out)
        waits = list[_Wait]()
        see = partial(self._see_gradient, one, call, small, kwargs, read, waits)
        arrival = find_gradient_node(y)
        if find_emulation(watched.module) is not None:  # emulation quantizes dY in a hook on Y
            self._dispatcher.watch_gradient(y, one.guard, see)
        else:
            self._dispatcher.watch_changed_gradient(arrival, one.guard, see, not backend.shares_amax(watched.module))
        # Hooks of a node run in the order of their registration, so the hooks that wait come after ours.
        node = backend.node(y) if read else None
        if node and backend.shares_amax(watched.module):
            waits.append(defer_until_backward(self._dispatcher, node))
        elif node and node is not arrival.node:
            waits.append(defer_until_node(self._dispatcher, node))

    def _see_gradient(
        self,
        watched: _WatchedGemm,
        call: ForwardPass,
        args: Args,
        kwargs: Kwargs,
        read: Callable[[Reduced], CastInUse] | None,
        waits: Sequence[_Wait],
        grad: torch.Tensor,
    ) -> None:
        dy = watched.gemm.backend.grad(grad, watched.gemm.module, args, kwargs, watched.gemm.part)
        if dy is not None and waits:
            waits[0](partial(self._take_gradient, watched, dy, call, read))
        elif dy is not None:
            self._take_gradient(watched, dy, call, read, ())

    def _take_gradient(
        self,
        watched: _WatchedGemm,
        dy: torch.Tensor,
        call: ForwardPass,
        read: Callable[[Reduced], CastInUse] | None,
        reduced: Reduced,
    ) -> None:
        """Observe dY as soon as its cast is known: immediately or, if ranks share its amax, after the node's backward."""
        with self._guarded(watched.name, "grad_output"):
            use = read(reduced) if read else None
            watched.sinks["grad_output"].add_tensor(dy, next(self._dispatcher.order), use)
            _multiply(watched, "grad_output", dy, call, use)


def _multiply(watched: _WatchedGemm, role: str, x: torch.Tensor, call: ForwardPass, use: CastInUse | None) -> None:
    if watched.products:
        watched.products.add_operand(role, x, call.order, use)


def _by_module(
    sinks: Mapping[tuple[str, str], OperandSink],
) -> Mapping[nn.Module, Mapping[str, Mapping[str, OperandSink]]]:
    """Return the sinks by module, name of the GEMM, and role."""
    found: dict[nn.Module, dict[str, dict[str, OperandSink]]] = defaultdict(lambda: defaultdict(dict))
    for (name, role), sink in sinks.items():
        found[sink.gemm.module][name][role] = sink
    return found
