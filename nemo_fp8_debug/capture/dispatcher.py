"""Dispatch the events of a sampled step. Only the dispatcher installs hooks on the run, and it removes all of them.

Observers subscribe to events, and install no hooks themselves:

watch_calls      a module is entered and has returned, in both cases before all other hooks
watch_ready      a module's forward is about to run: other hooks have gathered or replaced its operands
watch_output   a module has returned, after all other hooks
watch_gradient   the gradient of an output or of a parameter arrives
watch_node       a node of the autograd graph is about to run, and has run
watch_optimizer  any optimizer is about to step, and has stepped
after_backward   the current backward pass is over
at_close         the step is over

Each subscriber provides a guard, which decides what is lost after an error in the subscriber. Hooks do nothing while
torch.compile traces them.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .backends.base import Args, Kwargs
from .tracing import CopySafeHook

#: returns a context that keeps a subscriber's exceptions out of the run
Guard = Callable[[], AbstractContextManager[Any]]

#: number of rounds after which we assume that all callbacks have run. Engines queue callbacks in a backward pass, and
#: callbacks may queue further callbacks
_LAST_CALLBACK = 4
_SKIPPED, _COUNTED, _FIRST, _AGAIN, _TRANSFORMED = range(5)


class TransformedForwardError(Exception):
    """An error for a forward under a transform of torch.func (vmap, grad, jvp).

    We do not count such a forward, because its tensors only wrap other tensors.
    """


class TorchMode(Protocol):
    """A mode of torch that observes the operations inside a forward."""

    def begin(self) -> None:
        """Observe from now on."""

    def end(self) -> None:
        """Stop observing."""


@dataclass(eq=False, slots=True)
class ForwardPass:
    """A call of a module's forward as seen by one observer. A recompute shares the pass of the first forward."""

    #: place in the order of execution
    order: int
    #: whether the observer counts this pass. It does not count a first forward under `no_grad`, but counts the recompute
    counts: bool
    #: the observer's own data
    kept: Any = None
    #: modes that have not begun yet
    modes: Sequence[TorchMode] = ()

    def enter_mode(self, mode: TorchMode) -> None:
        """Begin a mode after all subscribers have run. End the mode when the module returns."""
        self.modes = [*self.modes, mode]


@dataclass(eq=False, slots=True)
class _Observer:
    """A subscriber to the calls of a module."""

    guard: Guard
    entered: Callable[[ForwardPass, Args, Kwargs], None]
    left: Callable[[ForwardPass, Args, Kwargs, Any], None]
    applies: Callable[[Kwargs], bool] | None


class _Call:
    """A running call of a module's forward."""

    __slots__ = ("kind", "modes", "passes")

    def __init__(self) -> None:
        self.kind: int | None = None
        #: passes by observer
        self.passes: dict[_Observer, ForwardPass] = {}
        self.modes: Sequence[tuple[_Observer, TorchMode]] = ()

    def begin_modes(self) -> None:
        """Begin the modes that observers have passed to `ForwardPass.enter_mode`.

        Call this outside of guards, because guards leave all modes and enter them again.
        """
        for observer, seen in self.passes.items():
            modes, seen.modes = seen.modes, ()
            for mode in modes:
                self.modes = [*self.modes, (observer, mode)]
                _run(observer.guard, mode.begin)

    def end_modes(self) -> None:
        """End all modes, the last one first."""
        modes, self.modes = self.modes, ()
        for observer, mode in reversed(modes):
            _run(observer.guard, mode.end)


class _Module:
    """A module with hooks, and the subscribers to its events.

    It consists of few objects, because each additional object makes garbage collection slower.
    """

    __slots__ = ("calls", "has_counted", "observers", "ready", "returned", "skipped", "waiting")

    def __init__(self) -> None:
        self.observers: Sequence[_Observer] = ()
        self.ready: Sequence[tuple[Guard, Callable[..., None]]] = ()
        self.returned: Sequence[tuple[Guard, Callable[..., None]]] = ()
        self.calls: list[_Call] = []
        #: passes under `no_grad` whose recompute may still come, in order
        self.waiting: Sequence[dict[_Observer, ForwardPass]] = ()
        #: number of passes under `no_grad` in `eval()` whose recompute may still come
        self.skipped = 0
        #: whether a pass outside of backward has counted, so that a recompute must not count
        self.has_counted = False

    def decide(self, module: nn.Module, call: _Call) -> int:
        """Decide for all observers whether a forward that begins counts.

        Activation recomputation runs a forward twice, the second time inside backward. The second forward counts only if the
        first one ran under `no_grad`, and so had no output on which a gradient hook is possible. The second forward takes
        over the first one's places in the order of execution and its observers' data. The engine casts with the same scales
        in both forwards, even if it has updated these scales in between.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return _TRANSFORMED
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return _SKIPPED  # each replay of the CUDA graph would count again, in reused memory
        if torch._C._current_graph_task_id() != -1:  # inside backward, so this is a recompute
            # Within the recompute of a reentrant checkpoint, a nested one runs its first forward again, under `no_grad`.
            if self.has_counted or not torch.is_grad_enabled():
                return _SKIPPED
            if not self.waiting:
                self.skipped -= 1
                return _COUNTED if self.skipped >= 0 else _SKIPPED
            call.passes, *self.waiting = self.waiting
            return _AGAIN
        if not torch.is_grad_enabled():
            if not module.training:
                self.skipped = max(self.skipped, 0) + 1
                return _SKIPPED
            self.waiting = [*self.waiting, call.passes]
            return _FIRST
        self.has_counted = True
        return _COUNTED


class GraphHook:
    """A hook on a tensor or an autograd node, which keeps neither of them alive."""

    __slots__ = ("__weakref__", "_call", "_guard", "is_inside")

    def __init__(self, guard: Guard, call: Callable[..., None], is_inside: bool = False) -> None:
        self._guard = guard
        self._call: Callable[..., None] | None = call
        #: whether the hook is on a product inside a module's forward
        self.is_inside = is_inside

    def __call__(self, *arguments: Any) -> None:
        """Pass the event to the subscriber. Autograd calls this."""
        if (call := self._call) is not None:
            with self._guard():
                call(*arguments)

    def release_references(self) -> None:
        """Do nothing from now on, and release all references, because the graph may outlive the step."""
        self._call, self._guard = None, contextlib.nullcontext


class EventDispatcher:
    """The events of one sampled step."""

    def __init__(self) -> None:
        #: yields places in the order of execution
        self.order: Iterator[int] = itertools.count(step=3)
        self._modules: dict[nn.Module, _Module] = {}
        self._optimizer: dict[str, list[tuple[Guard, Callable[[Any], None]]]] = {}
        # Hooks on tensors and nodes disappear with these objects after a micro-batch, so a weak set is enough.
        self._on_graph: weakref.WeakSet[GraphHook] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._forget)

    def watch_calls(
        self,
        module: nn.Module,
        guard: Guard,
        entered: Callable[[ForwardPass, Args, Kwargs], None],
        left: Callable[[ForwardPass, Args, Kwargs, Any], None],
        applies: Callable[[Kwargs], bool] | None = None,
    ) -> None:
        """Observe each forward of a module that counts, and each first forward whose recompute will count.

        The last subscriber receives each event first, and gets the earliest place in the order of execution.

        Args:
            entered: called before all existing hooks.
            left: called with the module's output, before all other forward hooks, but not if the forward raised.
            applies: whether to observe a call; None for all calls.
        """
        watched, hold = self._watched(module), self._handles.append
        if not watched.observers:
            enter, leave = (CopySafeHook(partial(f, watched), module) for f in (self._enter, self._leave))
            hold(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            hold(module.register_forward_hook(leave, prepend=True, with_kwargs=True, always_call=True))
        watched.observers = [_Observer(guard, entered, left, applies), *watched.observers]

    def watch_before_forward(self, module: nn.Module, guard: Guard, call: Callable[[Args, Kwargs], None]) -> None:
        """Call `call` before each forward of a module, after all existing pre-hooks."""
        watched = self._watched(module)
        if not watched.ready:
            hook = CopySafeHook(partial(self._prepare, watched), module)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        watched.ready = [*watched.ready, (guard, call)]

    def watch_output(self, module: nn.Module, guard: Guard, call: Callable[[Any], None]) -> None:
        """Call `call` with the output of each forward of a module, after all existing forward hooks."""
        watched = self._watched(module)
        if not watched.returned:
            hook = CopySafeHook(partial(self._return, watched), module)
            self._handles.append(module.register_forward_hook(hook))
        watched.returned = [*watched.returned, (guard, call)]

    def watch_gradient(
        self, x: torch.Tensor, guard: Guard, call: Callable[[torch.Tensor], None], is_inside: bool = False
    ) -> None:
        """Call `call` with the gradient of a tensor whenever it arrives.

        Args:
            is_inside: whether the tensor is a product inside a module's forward, observed for that module.
        """
        hook = self._on_graph_hook(guard, call, is_inside)
        if x.is_leaf:  # a parameter, which outlives the step
            self._handles.append(x.register_hook(hook))
        else:
            x.register_hook(hook)

    def watch_changed_gradient(
        self, arrival: GradientNode, guard: Guard, call: Callable[[torch.Tensor], None], is_last: bool = True
    ) -> None:
        """Call `call` with the gradient of a tensor as its autograd node gets it, after all hooks on the tensor.

        Args:
            is_last: whether to call it also after other hooks on the node, if the node is written in Python.
        """
        see = partial(_call_with_gradient, arrival.number, arrival.shape, call)
        try:
            node = weakref.ref(arrival.node)
        except TypeError:
            is_last = False  # a node written in C++
        if not is_last:
            self.watch_autograd_node(arrival.node, guard, see)
            return

        def watch_node(*_: Any) -> None:
            if waiting and (found := node()) is not None:
                waiting.clear()
                self.watch_autograd_node(found, guard, see)

        # Hooks of a node run in the order of their registration, so we add ours when the gradient arrives.
        waiting = [True]
        self.watch_gradient(arrival.tensor, guard, watch_node)

    def watch_autograd_node(
        self, node: Any, guard: Guard, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
    ) -> None:
        """Call `before` right before an autograd node runs, and `after` when it has run. Do not keep the node alive."""
        if before is not None:
            node.register_prehook(self._on_graph_hook(guard, before))
        if after is not None:
            node.register_hook(self._on_graph_hook(guard, after))

    def watch_optimizer(
        self, guard: Guard, before: Callable[[Any], None] | None = None, after: Callable[[Any], None] | None = None
    ) -> None:
        """Call `before` with any optimizer that is about to step, and `after` with any optimizer that has stepped."""
        for name, register, call in (
            ("before", register_optimizer_step_pre_hook, before),
            ("after", register_optimizer_step_post_hook, after),
        ):
            if call is not None and name not in self._optimizer:
                self._optimizer[name] = []
                self._handles.append(register(partial(self._step, self._optimizer[name])))
            if call is not None:
                self._optimizer[name].append((guard, call))

    def call_after_backward(self, guard: Guard, call: Callable[[], None]) -> None:
        """Call `call` after the current backward pass and the engine's own callbacks."""
        _queue(self._on_graph_hook(guard, call), _LAST_CALLBACK)

    def call_after_step(self, call: Callable[[], object]) -> None:
        """Call `call` at the end of the step, even if other calls raise exceptions."""
        self._undo.callback(call)

    def close(self) -> None:
        """End the step: remove all hooks, even if removing one raises an exception. Later gradients are ignored."""
        for handle in self._handles:
            self._undo.callback(handle.remove)
        self._undo.close()

    def _watched(self, module: nn.Module) -> _Module:
        if module not in self._modules:
            self._modules[module] = _Module()
        return self._modules[module]

    def _on_graph_hook(self, guard: Guard, call: Callable[..., None], is_inside: bool = False) -> GraphHook:
        hook = GraphHook(guard, call, is_inside)
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

    def _see(
        self, watched: _Module, module: nn.Module, call: _Call, observer: _Observer, kwargs: Kwargs
    ) -> ForwardPass | None:
        if observer.applies is not None and not observer.applies(kwargs):
            return None
        if call.kind is None:
            call.kind = watched.decide(module, call)
        if call.kind == _TRANSFORMED:
            raise TransformedForwardError
        if call.kind in (_COUNTED, _FIRST):
            seen = call.passes[observer] = ForwardPass(next(self.order), call.kind == _COUNTED)
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
            hook.release_references()
        for watched in self._modules.values():
            for call in watched.calls:  # an interrupt skips forward hooks
                call.end_modes()
        self._modules, self._optimizer, self._handles = {}, {}, []


def _run(guard: Guard, call: Callable[[], None]) -> None:
    """Call a function outside of the guard. If the function raises an exception, raise it again inside the guard."""
    try:
        call()
    except Exception as error:
        with guard():
            raise error


def _call_with_gradient(
    number: int, shape: torch.Size, call: Callable[[torch.Tensor], None], gradients: Sequence[Any]
) -> None:
    """Call a function with the gradient of one output of a node, if the gradient is defined."""
    if (gradient := gradients[number]) is not None:
        call(gradient if gradient.shape == shape else gradient.reshape(shape))


class GradientNode(NamedTuple):
    """The autograd node that gets the gradient of a tensor."""

    node: Any
    #: a tensor whose hooks see the gradient before the node does
    tensor: torch.Tensor
    #: number of the tensor among the node's outputs
    number: int
    shape: torch.Size


def find_gradient_node(x: torch.Tensor) -> GradientNode:
    """Return the node that gets the gradient of a tensor, which is not a leaf."""
    base, shape = x._base, x.shape
    if base is not None and base.grad_fn and base.numel() == x.numel() and base.shape[-1:] == shape[-1:]:
        x = base  # an operation in place on `x` takes the node of this view out of the graph
    return GradientNode(x.grad_fn, x, x.output_nr, shape)


def _queue(call: Callable[[], None], times: int) -> None:
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    queue(call if times == 0 else partial(_queue, call, times - 1))
