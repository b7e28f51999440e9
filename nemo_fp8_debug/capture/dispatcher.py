"""One dispatcher of events for each sampled step: it alone installs hooks on the run, and it removes all of them.

Observers subscribe to events and hold no hooks:

watch_calls      a module is entered (before all other hooks), and has returned (before all other hooks)
watch_ready      a module's forward is about to run: all other hooks have gathered or replaced what it multiplies
watch_returned   a module has returned, after all other hooks
watch_gradient   the gradient of a tensor arrives: of an output, or of a parameter
watch_node       a node of the autograd graph is about to run, and has run
watch_optimizer  any optimizer is about to step, and has stepped
after_backward   the backward pass that runs now is over
at_close         the step is over

Each subscriber brings the guard that decides what a fault in it costs. What torch.compile traces does nothing (`tracing`).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .backends.base import Args, Kwargs
from .tracing import Hook

#: makes a context that keeps a subscriber's exceptions out of the run
Guard = Callable[[], AbstractContextManager[Any]]

#: Engines queue callbacks in a backward pass, some of which queue another: so many later than ours all have run.
_LAST_CALLBACK = 4
_SKIPPED, _COUNTED, _FIRST, _AGAIN, _TRANSFORMED = range(5)


class Transformed(Exception):
    """A forward under a transform of torch.func (vmap, grad, jvp), whose tensors stand for others: it is not counted."""


class Mode(Protocol):
    """A mode of torch that looks at what runs inside a forward."""

    def begin(self) -> None:
        """Look from now on."""

    def end(self) -> None:
        """Look no longer."""


@dataclass(eq=False, slots=True)
class Pass:
    """A call of a module's forward as one observer sees it. A recompute has the pass of the first forward."""

    #: place in the order of execution
    order: int
    #: whether it counts; a first forward under `no_grad` does not, and its recompute does
    counts: bool
    #: what the observer keeps of it
    kept: Any = None
    #: modes that are still to begin
    modes: Sequence[Mode] = ()

    def watch(self, mode: Mode) -> None:
        """Have a mode begin once all subscribers to this event are done, and end as soon as the module has returned."""
        self.modes = [*self.modes, mode]


@dataclass(eq=False, slots=True)
class _Observer:
    """A subscriber to the calls of a module."""

    guard: Guard
    entered: Callable[[Pass, Args, Kwargs], None]
    left: Callable[[Pass, Args, Kwargs, Any], None]
    applies: Callable[[Kwargs], bool] | None


class _Call:
    """A call of a module's forward that is under way."""

    __slots__ = ("kind", "modes", "passes")

    def __init__(self) -> None:
        self.kind: int | None = None
        #: by observer
        self.passes: dict[_Observer, Pass] = {}
        self.modes: Sequence[tuple[_Observer, Mode]] = ()

    def begin_modes(self) -> None:
        """Begin the modes that observers have asked for. Outside of guards, which hide other modes and restore them."""
        for observer, seen in self.passes.items():
            modes, seen.modes = seen.modes, ()
            for mode in modes:
                self.modes = [*self.modes, (observer, mode)]
                _run(observer.guard, mode.begin)

    def end_modes(self) -> None:
        """End all of them, the last one first."""
        modes, self.modes = self.modes, ()
        for observer, mode in reversed(modes):
            _run(observer.guard, mode.end)


class _Module:
    """A module with hooks, and who gets its events. Few objects: each one is work for Python's garbage collector."""

    __slots__ = ("calls", "has_counted", "observers", "ready", "returned", "waiting")

    def __init__(self) -> None:
        self.observers: Sequence[_Observer] = ()
        self.ready: Sequence[tuple[Guard, Callable[..., None]]] = ()
        self.returned: Sequence[tuple[Guard, Callable[..., None]]] = ()
        self.calls: list[_Call] = []
        #: passes under `no_grad` that a recompute may still come for, from first to last
        self.waiting: Sequence[dict[_Observer, Pass]] = ()
        #: counted outside of backward: a recompute adds nothing
        self.has_counted = False

    def decide(self, module: nn.Module, call: _Call) -> int:
        """Decide whether a forward that begins counts, once for all observers.

        Activation recompute runs a forward twice, once of them inside backward. A forward inside backward counts only if the
        first one could not: under `no_grad`, where it left no output to hook. It has the places of the first one, and what
        observers kept of it: an engine that recomputes casts as it did then, and its scales have moved on.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return _TRANSFORMED
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return _SKIPPED  # counting would be recorded with it, and be done again in every replay, in memory of others
        if torch._C._current_graph_task_id() != -1:  # inside backward: a recompute
            if self.has_counted or not self.waiting:
                return _SKIPPED
            call.passes, *self.waiting = self.waiting
            return _AGAIN
        if not torch.is_grad_enabled():
            if not module.training:
                return _SKIPPED
            self.waiting = [*self.waiting, call.passes]
            return _FIRST
        self.has_counted = True
        return _COUNTED


class EventHook:
    """A hook on a tensor or a node of the autograd graph, which holds neither."""

    __slots__ = ("__weakref__", "_call", "_guard", "is_inside")

    def __init__(self, guard: Guard, call: Callable[..., None], is_inside: bool = False) -> None:
        self._guard = guard
        self._call: Callable[..., None] | None = call
        #: on a product inside a module's forward
        self.is_inside = is_inside

    def __call__(self, *arguments: Any) -> None:
        """Hand the event to the subscriber; autograd calls this."""
        if (call := self._call) is not None:
            with self._guard():
                call(*arguments)

    def forget(self) -> None:
        """Do nothing from now on, and hold nothing: the graph may outlive the step."""
        self._call, self._guard = None, contextlib.nullcontext


class Dispatcher:
    """The events of one sampled step."""

    def __init__(self) -> None:
        #: gives out places in the order of execution
        self.order: Iterator[int] = itertools.count(step=3)
        self._modules: dict[nn.Module, _Module] = {}
        self._optimizer: dict[str, list[tuple[Guard, Callable[[Any], None]]]] = {}
        # Tensors and nodes come and go with each micro-batch, and their hooks with them.
        self._on_graph: weakref.WeakSet[EventHook] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._forget)

    def watch_calls(
        self,
        module: nn.Module,
        guard: Guard,
        entered: Callable[[Pass, Args, Kwargs], None],
        left: Callable[[Pass, Args, Kwargs, Any], None],
        applies: Callable[[Kwargs], bool] | None = None,
    ) -> None:
        """Look at the calls of a module's forward that count, and at first passes whose recompute will.

        Whoever subscribes later gets each event earlier, and takes its place in the order of execution earlier.

        Args:
            entered: called before all hooks that were there.
            left: called with what the module returned, before all other forward hooks; not if the forward raised.
            applies: whether a call is looked at at all; None: all are.
        """
        watched, hold = self._watched(module), self._handles.append
        if not watched.observers:
            enter, leave = (Hook(partial(f, watched), module) for f in (self._enter, self._leave))
            hold(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            hold(module.register_forward_hook(leave, prepend=True, with_kwargs=True, always_call=True))
        watched.observers = [_Observer(guard, entered, left, applies), *watched.observers]

    def watch_ready(self, module: nn.Module, guard: Guard, call: Callable[[Args, Kwargs], None]) -> None:
        """Have `call` called before each forward of a module, after all pre-hooks that were there."""
        watched = self._watched(module)
        if not watched.ready:
            hook = Hook(partial(self._prepare, watched), module)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        watched.ready = [*watched.ready, (guard, call)]

    def watch_returned(self, module: nn.Module, guard: Guard, call: Callable[[Any], None]) -> None:
        """Have `call` called with what each forward of a module returns, after all forward hooks that were there."""
        watched = self._watched(module)
        if not watched.returned:
            hook = Hook(partial(self._return, watched), module)
            self._handles.append(module.register_forward_hook(hook))
        watched.returned = [*watched.returned, (guard, call)]

    def watch_gradient(
        self, x: torch.Tensor, guard: Guard, call: Callable[[torch.Tensor], None], is_inside: bool = False
    ) -> None:
        """Have `call` called with the gradient of a tensor whenever it arrives.

        Args:
            is_inside: it is a product inside a module's forward, which is looked at for that module.
        """
        hook = self._on_graph_hook(guard, call, is_inside)
        if x.is_leaf:  # a parameter, which stays
            self._handles.append(x.register_hook(hook))
        else:
            x.register_hook(hook)

    def watch_node(
        self, node: Any, guard: Guard, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
    ) -> None:
        """Have these called right before a node of the autograd graph runs, and after it. Does not hold the node."""
        if before is not None:
            node.register_prehook(self._on_graph_hook(guard, before))
        if after is not None:
            node.register_hook(self._on_graph_hook(guard, after))

    def watch_optimizer(
        self, guard: Guard, before: Callable[[Any], None] | None = None, after: Callable[[Any], None] | None = None
    ) -> None:
        """Have these called with any optimizer that is about to step, or has stepped."""
        for name, register, call in (
            ("before", register_optimizer_step_pre_hook, before),
            ("after", register_optimizer_step_post_hook, after),
        ):
            if call is not None and name not in self._optimizer:
                self._optimizer[name] = []
                self._handles.append(register(partial(self._step, self._optimizer[name])))
            if call is not None:
                self._optimizer[name].append((guard, call))

    def after_backward(self, guard: Guard, call: Callable[[], None]) -> None:
        """Have `call` called when the backward pass that runs is over, and the engine's own callbacks have run."""
        _queue(self._on_graph_hook(guard, call), _LAST_CALLBACK)

    def at_close(self, call: Callable[[], object]) -> None:
        """Have `call` called at the end of the step, whatever else is raised then."""
        self._undo.callback(call)

    def close(self) -> None:
        """End the step: remove all hooks, whatever one of them raises. Gradients that arrive later are ignored."""
        for handle in self._handles:
            self._undo.callback(handle.remove)
        self._undo.close()

    def _watched(self, module: nn.Module) -> _Module:
        if module not in self._modules:
            self._modules[module] = _Module()
        return self._modules[module]

    def _on_graph_hook(self, guard: Guard, call: Callable[..., None], is_inside: bool = False) -> EventHook:
        hook = EventHook(guard, call, is_inside)
        self._on_graph.add(hook)
        return hook

    def _enter(self, watched: _Module, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        call = _Call()
        watched.calls.append(call)
        for observer in watched.observers:
            with observer.guard():
                if (seen := self._see(watched, module, call, observer, kwargs)) is not None:
                    observer.entered(seen, args, kwargs)
        call.begin_modes()

    def _see(self, watched: _Module, module: nn.Module, call: _Call, observer: _Observer, kwargs: Kwargs) -> Pass | None:
        if observer.applies is not None and not observer.applies(kwargs):
            return None
        if call.kind is None:
            call.kind = watched.decide(module, call)
        if call.kind == _TRANSFORMED:
            raise Transformed
        if call.kind in (_COUNTED, _FIRST):
            seen = call.passes[observer] = Pass(next(self.order), call.kind == _COUNTED)
            return seen
        if (earlier := call.passes.get(observer)) is not None:
            earlier.counts = True
        return earlier

    def _prepare(self, watched: _Module, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        for guard, call in watched.ready:
            with guard():
                call(args, kwargs)
        if watched.calls:
            watched.calls[-1].begin_modes()

    def _leave(self, watched: _Module, module: nn.Module, args: Args, kwargs: Kwargs, out: Any) -> None:
        if not watched.calls:
            return
        call = watched.calls.pop()
        call.end_modes()
        if out is None:
            return  # the forward raised
        for observer in watched.observers:
            if (seen := call.passes.get(observer)) is not None:
                with observer.guard():
                    observer.left(seen, args, kwargs, out)

    def _return(self, watched: _Module, module: nn.Module, args: Args, out: Any) -> None:
        for guard, call in watched.returned:
            with guard():
                call(out)

    def _step(self, subscribed: list[tuple[Guard, Callable[[Any], None]]], optimizer: Any, *_: Any) -> None:
        for guard, call in subscribed:
            with guard():
                call(optimizer)

    def _forget(self) -> None:
        for hook in list(self._on_graph):
            hook.forget()
        for watched in self._modules.values():
            for call in watched.calls:  # an interrupt skips forward hooks
                call.end_modes()
        self._modules, self._optimizer, self._handles = {}, {}, []


def _run(guard: Guard, call: Callable[[], None]) -> None:
    """Call what must not run inside the guard, and leave its exception to that."""
    try:
        call()
    except Exception as error:
        with guard():
            raise error


def _queue(call: Callable[[], None], times: int) -> None:
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    queue(call if times == 0 else partial(_queue, call, times - 1))
