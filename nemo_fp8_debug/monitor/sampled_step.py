"""Capture the operands of one sampled step with hooks, and report lost operands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..capture.backends.base import UnknownCastError, read_raw_weight
from ..capture.device_to_host import DeviceToHostCopy, TensorHolder
from ..capture.dispatcher import EventDispatcher, TransformedForwardError
from ..capture.gemms import match_gemms_by_name
from ..capture.grad_scale import GradientMultiplier
from ..capture.operands import OperandAccumulator
from ..capture.optimizer_weights import find_gradient_buffers
from ..capture.scan import ScannedModule, scan_modules
from ..capture.tensors import is_dtensor
from ..capture.tracing import find_compiled_modules
from ..capture.weight_gradients import WeightGradientCapture
from ..core.error_guard import ErrorGuard
from ..core.keys import SHOWN_AS, Key
from ..core.layer_names import compile_layer_patterns
from ..core.observation import AgreedSampleSettings
from ..kernels.memory import forget_empty_histograms
from ..options.config import Config
from .open_step import (
    OpenStep,
    RunContext,
    StepObserver,
    list_measured_operands,
    list_operands_lost_to_compile,
    make_weight_filter,
)
from .pipeline import CapturedStep, Steps
from .schedule import SamplingSchedule

_MULTIPLIER = "while measuring the factor of dY"
#: largest number of operands that a warning names
_NAMED = 4


class SampledStep:
    """A sampled step. Its operands are captured from `start_capture` to `remove_hooks`."""

    def __init__(self, step: int, watched: RunContext, schedule: SamplingSchedule) -> None:
        """
        Args:
            schedule: the run's schedule. We read its options once all ranks have agreed on them.
        """
        self.step = step
        self._watched = watched
        self._schedule = schedule
        #: operands that this rank should observe
        self._expected: set[Key] = set()
        self._operands: dict[Key, OperandAccumulator] = {}
        self._observers: dict[str, StepObserver] = {}
        self._dispatcher = EventDispatcher()
        self._multiplier: GradientMultiplier | None = None
        self._lost: dict[str, list[Key]] = {}
        self._known = watched.model.known
        self._compiled = watched.model.compiled
        #: whether operands are measured
        self.is_looked_at = False

    @property
    def _config(self) -> Config:
        return self._schedule.config

    @property
    def _dumped(self) -> list[str]:
        """Return patterns of the layers whose tensors are dumped."""
        return self._schedule.list_dumped_layers(self.step) if self._watched.dump else []

    def start_capture(self, heard: bool) -> None:
        """Choose operands. Measure them if this rank has received the first rank's order."""
        own, guard = self._watched.shard_group, self._watched.errors.guard
        # After this line, any failure is reported as a missing part of this rank.
        self._expected = list_measured_operands(self._known, self._config, self._dumped, own, self._watched.rank)
        scanned = scan_modules(self._watched.model.roots)
        compiled = self._leave_out_compiled(scanned)
        names = {gemm.name for gemm in self._known}
        self._expected = {key for key in self._expected if key[0] in names}
        self._expected |= list_operands_lost_to_compile(self._compiled, self._config, self._watched.shard_group)
        known, patterns = self._known, self._dumped
        dumped = {gemm.name for gemm in match_gemms_by_name(known, patterns)} if patterns else set()
        chosen = {gemm.name for gemm in match_gemms_by_name(known, self._config.layers)}
        counts = partial(make_weight_filter, own, self._watched.rank)
        weighed = [gemm for gemm in known if gemm.name in chosen]
        gradients = WeightGradientCapture(weighed, scanned, len(own.ranks), counts, guard, self._dispatcher)
        step = OpenStep(
            *(self.step, self._config, self._watched, known, chosen, dumped, scanned, compiled),
            *(self._dispatcher, self._lose, gradients),
        )
        self._operands, self._observers = step.operands, step.observers
        for observation in self._watched.observations:
            step.observers[observation.name] = observation.start_observer(step)
        if heard:
            self._subscribe(step)

    def _leave_out_compiled(self, scanned: Sequence[ScannedModule]) -> Collection[int]:
        """Leave out layers that were compiled after the monitor was attached. Return the ids of all modules inside
        torch.compile.
        """
        ids = find_compiled_modules(scanned)
        if self._config.eager:
            return ids
        known = self._watched.model.known
        late = [gemm for gemm in known if id(gemm.module) in ids]
        self._known = [gemm for gemm in known if id(gemm.module) not in ids]
        self._compiled = [*self._watched.model.compiled, *late]
        if late:
            _warn_of_late_compiling(self._watched.errors, [gemm.name for gemm in late])
        return ids

    def _subscribe(self, step: OpenStep) -> None:
        model, dispatcher = self._watched.model, self._dispatcher
        model.masters.buffers = [buffer for _, buffer in find_gradient_buffers(step.scanned)]
        if self._config.eager:
            dispatcher.call_after_step(partial(torch.compiler.set_stance("force_eager").__exit__, None, None, None))
        self._multiplier = GradientMultiplier(model.roots, step.compiled, partial(step.guard, _MULTIPLIER), dispatcher)
        self._multiplier.subscribe()
        self.is_looked_at = bool(step.sinks or step.operands)
        for observer in step.observers.values():
            observer.subscribe(step)
        step.gradients.subscribe()

    def add_microbatch_loss(self, loss: Any, tokens: torch.Tensor | float) -> None:
        """See `Monitor.watch_loss`."""
        if self._multiplier is not None:
            self._multiplier.add_loss(loss, tokens)

    def read_gradient_multiplier(self) -> dict[str, Any]:
        """Return the measured factor of dY as a scalar of the step, if the factor is known."""
        with self._watched.errors.guard(_MULTIPLIER):
            if self._multiplier is not None and (found := self._multiplier.compute_multiplier()) is not None:
                return {"grad_scale": found}
        return {}

    def remove_hooks(self) -> None:
        """Remove the hooks, and warn about lost operands."""
        self._dispatcher.close()
        forget_empty_histograms()
        for observer in self._observers.values():
            self._expected -= set(observer.stop_observing())
        self._multiplier, self.is_looked_at = None, False
        with self._watched.errors.guard("while looking for compiled layers"):
            self._leave_out_compiled(scan_modules(self._watched.model.roots))
        if self._watched.world == 1:  # with several ranks, another rank may observe them
            self._expected -= {(gemm.name, role) for gemm in self._compiled for role in self._config.roles}
        lost, self._lost = self._lost, {}
        _warn_of_lost(self._watched.errors, self.step, lost)

    def _lose(self, layer: str, role: str, error: Exception, lost: bool) -> None:
        """Note a failed hook, because of which an operand or its cast is missing."""
        errors = self._watched.errors
        if isinstance(error, UnknownCastError):
            _warn_of_unknown_cast(errors, layer, role, error)
        elif isinstance(error, TransformedForwardError):
            _warn_of_transformed(errors, layer)
        elif errors.raises:
            raise error
        elif not lost:
            _warn_of_unread_cast(errors, layer, role, error)
        else:
            counted = self._operands.pop((layer, role), None)
            if self._watched.world == 1:
                self._expected.discard((layer, role))
            elif counted and is_dtensor(read_raw_weight(counted.gemm.module)):  # no other rank has this part
                self._expected.add((layer, role))
            self._lost.setdefault(f"{type(error).__name__}: {error}", []).append((layer, role))

    def release_data(self) -> None:
        """Release all data, because the step was interrupted or passed on."""
        self._operands, self._observers = {}, {}

    def make_captured_step(self, steps: Callable[[], Steps]) -> CapturedStep:
        """Return the captured step.

        Args:
            steps: function that reads the scalars of this and earlier steps.
        """
        sampled, dumped = compile_layer_patterns(self._config.layers), compile_layer_patterns(self._dumped)
        operands, observers, what_if = list(self._operands.values()), dict(self._observers), self._config.what_if_recipes
        expected = self._expected - {operand.key for operand in operands if operand.copies and not operand.calls}
        holders: list[TensorHolder] = [*operands, *observers.values()]
        home = DeviceToHostCopy(holders, {device for operand in operands if (device := operand.device)})
        of_sample: Callable[[str], bool] = lambda name: sampled(name) or dumped(name)  # noqa: E731
        plan = AgreedSampleSettings(
            self.step, [recipe.name for recipe in what_if], self._config.copies, self._config.block_scales
        )
        return CapturedStep(plan, operands, observers, expected, what_if, of_sample, steps, home)


def _warn_of_lost(errors: ErrorGuard, step: int, lost: Mapping[str, Sequence[Key]]) -> None:
    """Warn about operands that are missing because their hooks failed.

    Args:
        lost: lost operands by reason.
    """
    for why, keys in lost.items():
        named = ", ".join(f"{SHOWN_AS[role]} of {layer}" for layer, role in keys[:_NAMED])
        more = f" and {len(keys) - _NAMED} more operands" if len(keys) > _NAMED else ""
        those = f"{named}{more} {'is' if len(keys) == 1 else 'are'}"
        message = f"{those} missing from the sample of step {step}: {why}"
        kinds = [f"{layer} {role} {why.partition(':')[0]}" for layer, role in keys]
        errors.warn(message, kind=kinds)


def _warn_of_late_compiling(errors: ErrorGuard, names: Sequence[str]) -> None:
    """Warn about layers that were compiled by torch.compile after the monitor was attached."""
    errors.warn(
        f"torch.compile was called after the monitor was attached: {len(names)} layers (first {names[0]}) "
        "run inside it, where a hook would change the graph, and are left out; to have them measured, run with "
        "nemo_fp8_debug without compiling them, or compile other parts of the model only",
        kind="compiled",
    )


def _warn_of_transformed(errors: ErrorGuard, layer: str) -> None:
    """Warn about a layer that was called under a transform of torch.func."""
    errors.warn(
        f"{layer} is called under a transform of torch.func (vmap, grad, jvp); its calls there are not measured, "
        "and this also applies to other layers",
        kind="torch.func",
    )


def _warn_of_unknown_cast(errors: ErrorGuard, layer: str, role: str, error: Exception) -> None:
    """Warn about an operand if the engine's cast is unknown."""
    reason = f"{error}. It is measured as if it were not quantized, with scale_source 'unknown'"
    what = f"{SHOWN_AS[role]} of {layer}"
    errors.warn(f"how the engine casts {what} is unknown: {reason}, and so are similar operands", kind=str(error))


def _warn_of_unread_cast(errors: ErrorGuard, layer: str, role: str, error: Exception) -> None:
    """Warn about an operand if the engine's cast could not be read."""
    message = f"could not read how the engine casts {SHOWN_AS[role]} of {layer}; its scale_source is 'unknown'"
    errors.warn(f"{message}: {type(error).__name__}: {error}", kind=f"{layer} {role} {type(error)}")
