"""Hooks that exist during one sampled step and hand each operand of each GEMM over exactly once.

Where each operand is seen, and why there:
X and W  in a forward pre-hook that runs before all others: an intervention that replaces operands has not yet done so.
         W is only found there, and its values are read in a forward hook that runs before all others: an optimizer that
         gathers what it has updated while the forward is under way (Megatron's overlap_param_gather) has done so by then.
         Where an engine keeps stats of W and gathers it for the forward only (ZeRO-3, FSDP2), or splits X and W
         among ranks (DTensor), both are found there too: the engine has not yet let go of them.
dY       in a tensor hook on the output, set before all others see that output: it gets the gradient before anyone changes
         it, and unlike a module's backward hook it works for inputs without gradient and outputs changed in place.
What exists inside of a module only is handed over by Transformer Engine, where that was asked for (`inspection`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .amax_reductions import AfterBackward, Forwards, Reduced, with_shared_amax
from .backends.base import Args, Kwargs, ScaleInUse, StoredCodes, UnknownCast, as_multiplied, is_prepared_later, unknown_cast
from .backends.transformer_engine import inspection
from .before_backward import BeforeBackward
from .gemms import Gemm
from .masters import Masters, beside_master
from .operand_guard import Fault, OperandGuard
from .output_samples import Products
from .overrides import emulated
from .passes import Pass, Passes
from .replicas import ReplicaChecks
from .tracing import Hook


class OperandSink(Protocol):
    """Gets an operand of one GEMM, a tensor for each call."""

    gemm: Gemm

    def add(self, x: torch.Tensor, order: int, use: ScaleInUse | None) -> None:
        """Take a tensor; nothing may be kept of it that could change.

        Args:
            order: place of the call in the step's order of execution.
            use: how it is cast in this call, if the backend can tell.
        """


class Capture:
    """The hooks of one sampled step."""

    def __init__(
        self,
        sinks: Mapping[tuple[str, str], OperandSink],
        on_fault: Fault,
        read_casts: bool = True,
        products: Mapping[str, Products] | None = None,
        order: Iterator[int] | None = None,
        masters: Masters | None = None,
        replicas: ReplicaChecks | None = None,
    ) -> None:
        """
        Args:
            sinks: by (GEMM name, role): what gets each operand that is to be looked at.
            on_fault: told of a fault in a hook, which costs that operand, or what it was cast with, and nothing else.
            read_casts: whether to ask backends how operands are cast.
            products: by GEMM name: what gets the same operands, and which forward call each belongs to.
            order: gives out places in the order of execution; what is captured together shares it.
            masters: finds master weights of those that are stored in codes.
            replicas: compares copies over ranks.
        """
        inside = {key for key, sink in sinks.items() if key[1] in sink.gemm.unseen}
        self._sinks = {key: sink for key, sink in sinks.items() if key not in inside}
        self._inside = {key: sinks[key] for key in inside}
        self._on_fault = on_fault
        self._read_casts = read_casts
        self._products = products or {}
        self._handles: list[RemovableHandle] = []
        self._passes = Passes(order)
        self._masters, self._replicas = masters, replicas
        self._sharded: set[nn.Module] = set()  # whose operands are ready only between the hooks of a sharding engine
        self._under_way: dict[nn.Module, Pass | None] = {}  # of modules whose forward runs; None: not counted
        self._weights: dict[nn.Module, dict[str, torch.Tensor | None]] = {}  # of the same, by GEMM
        self._weight_casts: dict[str, ScaleInUse] = {}  # by GEMM: that of its first call
        self._stored: set[tuple[str, str]] = set()  # weights in codes that were looked at
        self._reduced = Forwards()
        self._untold: dict[Callable[[], str], str] = {}  # by what tells it: why casts cannot be told in this step

    def attach(self) -> None:
        """Install the hooks."""
        gemms: dict[nn.Module, dict[str, Gemm]] = defaultdict(dict)
        for sink in (*self._sinks.values(), *self._inside.values()):
            gemms[sink.gemm.module][sink.gemm.name] = sink.gemm
        for module, by_name in gemms.items():
            own = list(by_name.values())
            before, after = (
                Hook(partial(self._run, hook, own), module) for hook in (self._before_forward, self._after_forward)
            )
            self._handles += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, prepend=True, with_kwargs=True),
            ]
            if self._masters and any(gemm.backend.stored(module, gemm.part) for gemm in own):
                self._handles.append(self._masters.watch())
            if self._read_casts and own[0].backend.shares_amax(module):
                self._handles += self._reduced.attach(module)
        for products in self._products.values():
            self._handles += products.attach()
        if self._inside:
            with self._guarded(*next(iter(self._inside))):
                inspection.watch([(sink.gemm, role) for (_, role), sink in self._inside.items()], self._take_inside)

    def _run(self, hook: Callable[..., None], gemms: Sequence[Gemm], *arguments: Any) -> None:
        with self._guarded(gemms[0].name, "input"):
            hook(gemms, *arguments)

    def detach(self) -> None:
        """Remove the hooks; gradients that arrive later are ignored."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._weights = [], {}
        if self._inside:
            inspection.unwatch()
        self._sinks, self._inside, self._products = {}, {}, {}

    def _guarded(self, name: str, role: str, lost: bool = True) -> OperandGuard:
        return OperandGuard(self._on_fault, name, role, lost)

    def _before_forward(self, gemms: Sequence[Gemm], module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        counted = self._passes.counted(module)
        self._under_way[module] = counted
        if noted := counted or self._passes.first.get(module):
            noted.arguments = gemms[0].backend.arguments(module, args, kwargs)
        if counted is None:
            return
        for gemm in gemms:
            if products := self._products.get(gemm.name):
                products.begin_call(args, kwargs)
        self._weights[module] = self._found_weights(gemms, module, args, kwargs)
        if any(is_prepared_later(module, weight) for weight in self._weights[module].values()):
            self._sharded.add(module)
        if not self._takes_inputs_later(gemms, module):
            self._take_inputs(gemms, module, args, kwargs, counted)

    def _takes_inputs_later(self, gemms: Sequence[Gemm], module: nn.Module) -> bool:
        """Whether X is looked at once the forward is over: X itself, or how its engine casts it, is not known before."""
        return module in self._sharded or (gemms[0].backend.cast is not None and not emulated(module))

    def _reads_casts(self, gemm: Gemm) -> bool:
        told = gemm.backend.cast is not None and not gemm.backend.foreign(gemm.module)
        return self._read_casts and told and not emulated(gemm.module)

    def _found_weights(
        self, gemms: Sequence[Gemm], module: nn.Module, args: Args, kwargs: Kwargs
    ) -> dict[str, torch.Tensor | None]:
        found: dict[str, torch.Tensor | None] = {}
        for gemm in gemms:
            with self._guarded(gemm.name, "weight"):
                found[gemm.name] = gemm.backend.weight(module, args, kwargs, gemm.part)
        return found

    def _take_inputs(self, gemms: Sequence[Gemm], module: nn.Module, args: Args, kwargs: Kwargs, counted: Pass) -> None:
        for gemm in gemms:
            if (gemm.name, "input") in self._sinks:
                with self._guarded(gemm.name, "input"):
                    self._take(gemm, "input", gemm.backend.input(module, args, kwargs, gemm.part), counted)

    def _take(self, gemm: Gemm, role: str, x: torch.Tensor | None, counted: Pass) -> None:
        key = gemm.name, role
        if (sink := self._sinks.get(key)) and x is not None:
            x = x if gemm.backend.has_own_fp8 else as_multiplied(x)
            use = (counted.casts or {}).get(key)
            sink.add(x, counted.order + (role == "weight"), use)
            if self._replicas:
                self._replicas.see(gemm.name, role, x)
            self._multiply(gemm, role, x, counted, use)

    def _multiply(self, gemm: Gemm, role: str, x: torch.Tensor, counted: Pass, use: ScaleInUse | None) -> None:
        if products := self._products.get(gemm.name):
            products.add(role, x, counted.order, use)

    def _note_casts(self, gemms: Sequence[Gemm], out: Any, to: Pass) -> None:
        """How a call that has just returned casts X and W: its engine's scales may move before a recompute.

        W is reported once a step, as its first call casts it; whether later ones cast it anew is not asked.
        """
        if to.casts is not None:
            return
        to.casts = {(gemm.name, "weight"): use for gemm in gemms if (use := self._weight_casts.get(gemm.name))}
        for gemm in gemms:
            for role in ("input", "weight"):
                if role == "weight" and gemm.backend.stored(gemm.module, gemm.part):
                    continue  # it is not cast in the call
                if (gemm.name, role) not in to.casts and (read := self._cast_reader(gemm, to.arguments, role, out)):
                    to.casts[gemm.name, role] = use = read(self._reduced.of(gemm.module))
                    if role == "weight":
                        self._weight_casts[gemm.name] = use

    def _cast_reader(self, gemm: Gemm, kwargs: Kwargs, role: str, out: Any) -> Callable[[Reduced], ScaleInUse] | None:
        """What tells how a role is cast in a call, or that it is unknown; None: the backend never quantizes."""
        cast = gemm.backend.cast
        if cast is None or not self._reads_casts(gemm) or (gemm.name, role) not in self._sinks:
            return None
        with self._guarded(gemm.name, role, lost=False):
            if gemm.backend.untold not in self._untold:
                self._untold[gemm.backend.untold] = gemm.backend.untold()
            if why := self._untold[gemm.backend.untold]:
                raise UnknownCast(why)
            read = cast(gemm.module, kwargs, gemm.part, role, gemm.backend.output(out))
            return partial(self._known_cast, gemm.name, role, read)
        return lambda reduced: unknown_cast(role)

    def _known_cast(self, name: str, role: str, read: Callable[[], ScaleInUse], reduced: Reduced = ()) -> ScaleInUse:
        with self._guarded(name, role, lost=False):
            return with_shared_amax(read(), reduced)
        return unknown_cast(role)

    def _take_inside(self, gemm: Gemm, role: str, x: torch.Tensor, cast: Callable[[], ScaleInUse]) -> None:
        """An operand from inside of a module, in its forward, in a recompute of that, or in its backward."""
        key = gemm.name, role
        with self._guarded(*key):
            counted = self._under_way.get(gemm.module)
            if (sink := self._inside.get(key)) and (counted or role == "grad_output"):
                use = self._known_cast(*key, cast) if self._reads_casts(gemm) else None
                sink.add(x, counted.order + 2 if counted else next(self._passes.order), use)
                if counted:  # which call a gradient from inside belongs to, nobody says
                    self._multiply(gemm, role, x, counted, use)

    def _after_forward(self, gemms: Sequence[Gemm], module: nn.Module, args: Args, kwargs: Kwargs, out: Any) -> None:
        counted, first = self._under_way.pop(module, None), self._passes.first.pop(module, None)
        weights = self._weights.pop(module, {})
        if noted := counted or first:
            self._note_casts(gemms, out, noted)
        if counted is None:
            return
        if self._takes_inputs_later(gemms, module):
            self._take_inputs(gemms, module, args, kwargs, counted)
        if module in self._sharded:
            weights = self._found_weights(gemms, module, args, kwargs)
        for gemm in gemms:
            with self._guarded(gemm.name, "weight"):
                if stored := gemm.backend.stored(gemm.module, gemm.part):
                    self._take_stored(gemm, stored, counted)
                else:
                    self._take(gemm, "weight", weights.get(gemm.name), counted)
            if (gemm.name, "grad_output") in self._sinks:
                with self._guarded(gemm.name, "grad_output"):
                    self._hook_gradient(gemm, module, args, kwargs, out, counted)
            if products := self._products.get(gemm.name):
                with self._guarded(gemm.name, "input"):
                    products.end_call(counted.order, (args, kwargs), weights.get(gemm.name), out)

    def _take_stored(self, gemm: Gemm, stored: StoredCodes, counted: Pass) -> None:
        key = gemm.name, "weight"
        if key in self._stored or not (sink := self._sinks.get(key)):
            return
        self._stored.add(key)
        x, use, multiplied = beside_master(stored, self._masters)
        sink.add(x, counted.order + 1, use)
        if self._replicas:
            self._replicas.see_stored(gemm.name, stored)
        self._multiply(gemm, "weight", x if multiplied is use else stored.decoded().values, counted, multiplied)

    def _hook_gradient(self, gemm: Gemm, module: nn.Module, args: Args, kwargs: Kwargs, out: Any, counted: Pass) -> None:
        y = gemm.backend.output(out)
        if not y.requires_grad:
            return
        # Of the arguments a hook that lives until backward keeps only those that are no activations.
        small = tuple(None if torch.is_tensor(a) and a.requires_grad else a for a in args)
        read = self._cast_reader(gemm, counted.arguments, "grad_output", out)
        node = gemm.backend.node(y) if read else None
        later = node and (AfterBackward if gemm.backend.shares_amax(module) else BeforeBackward)(node)

        def take(grad: torch.Tensor) -> None:
            with self._guarded(gemm.name, "grad_output"):
                if (gemm.name, "grad_output") not in self._sinks:
                    return
                if (dy := gemm.backend.grad(grad, module, small, kwargs, gemm.part)) is not None:
                    add = partial(self._take_gradient, gemm, dy, counted, read)
                    later.wait(add) if later else add(())

        y.register_hook(take)

    def _take_gradient(
        self,
        gemm: Gemm,
        dy: torch.Tensor,
        counted: Pass,
        read: Callable[[Reduced], ScaleInUse] | None,
        reduced: Reduced,
    ) -> None:
        """dY, when it is known how it is cast: at once, or after the backward in which ranks share its amax."""
        with self._guarded(gemm.name, "grad_output"):
            if sink := self._sinks.get((gemm.name, "grad_output")):
                use = read(reduced) if read else None
                sink.add(dy, next(self._passes.order), use)
                self._multiply(gemm, "grad_output", dy, counted, use)
