"""What is captured in one sampled step: which operands, by which hooks, and what was lost of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..capture.activations.capture import ActivationCapture
from ..capture.attention import AttentionCapture
from ..capture.backends.base import UnknownCast, raw_weight
from ..capture.device_to_host import DeviceToHostCopy, Holder
from ..capture.dispatcher import Dispatcher, Transformed
from ..capture.dtensor import is_counted, is_dtensor
from ..capture.gemms import matching, seen_in_forward
from ..capture.grad_scale import GradScale
from ..capture.hooks import Capture, OperandSink
from ..capture.masters import find_buffers
from ..capture.matmul_capture import MatmulCapture
from ..capture.operands import Operand
from ..capture.optimizer_states import StateCapture
from ..capture.output_samples import Chosen, Products
from ..capture.product_checks import CheckQueue
from ..capture.reduced_gradients import ReducedGradients
from ..capture.replicas import ReplicaChecks
from ..capture.scan import ScannedModule, scan_modules
from ..capture.tracing import compiled_by_now
from ..core.error_guard import ErrorGuard
from ..core.keys import Key
from ..core.layer_names import compile_patterns
from ..core.observation import Plan
from ..distributed import ShardGroup
from ..kernels.empty_histograms import forget_empty_histograms
from ..options.config import Config
from ..record.dump import TensorDump
from .activations import activation_capture
from .attention import attention_capture, warn_of_unseen
from .dump_tap import Dumping
from .model_scan import ModelScan
from .pipeline import Sampled, Steps
from .rank_parts import compiled_parts, copied_elsewhere, counted_parts, is_shown
from .sample_warnings import (
    warn_of_late_compiling,
    warn_of_lost,
    warn_of_transformed,
    warn_of_unknown_cast,
    warn_of_unmultiplied,
    warn_of_unread_cast,
)
from .schedule import Schedule
from .states import counts_weight, state_capture, warn_of_unseen_states

_MULTIPLIER = "while measuring what dY is multiplied by"


@dataclass(frozen=True)
class Watched:
    """What the sampled steps of a run have in common."""

    model: ModelScan
    shard_group: ShardGroup
    rank: int
    world: int
    #: of this run's record
    attempt: int
    dump: TensorDump | None
    errors: ErrorGuard


class SampledStep:
    """A step whose operands are looked at, from `open` to `detach`."""

    def __init__(self, step: int, watched: Watched, schedule: Schedule) -> None:
        """
        Args:
            schedule: whose options are in force, as ranks agree on them before it opens.
        """
        self.step = step
        self._watched = watched
        self._schedule = schedule
        #: what this rank is to see of the model
        self._expected: set[Key] = set()
        self._operands: dict[Key, Operand] = {}
        self._products: dict[str, Products] = {}
        self._queue = CheckQueue()
        self._dispatcher = Dispatcher()
        self._captures: list[Capture | MatmulCapture | ActivationCapture] = []
        self._attention: AttentionCapture | None = None
        self._replicas: ReplicaChecks | None = None
        self._gradients: ReducedGradients | None = None
        self._states: StateCapture | None = None
        self._multiplier: GradScale | None = None
        self._lost: dict[str, list[Key]] = {}
        self._known = watched.model.known
        self._compiled = watched.model.compiled

    @property
    def _plan(self) -> Config:
        return self._schedule.config

    @property
    def _dumped(self) -> list[str]:
        """Patterns of the layers whose tensors are kept."""
        return self._schedule.dumped(self.step) if self._watched.dump else []

    def open(self, heard: bool) -> None:
        """Find what to look at, and look at it if the first rank has said so."""
        self._expected = self._counted_here()  # whatever fails from here on, the part of this rank is missed
        scanned = scan_modules(self._watched.model.roots)
        compiled = self._leave_out_compiled(scanned)
        names = {gemm.name for gemm in self._known}
        self._expected = {key for key in self._expected if key[0] in names}
        self._expected |= compiled_parts(self._compiled, self._plan, self._watched.shard_group)
        known, plan, dump, rank = self._known, self._plan, self._watched.dump, self._watched.rank
        dumped = {g.name for g in matching(known, patterns)} if (patterns := self._dumped) else set()
        sampled = {g.name for g in matching(known, plan.layers)}
        chosen = Chosen(plan.output_rows, plan.verify_rows, states=plan.states)
        of_outputs = {g.name: g for g in known if g.name in sampled and not g.backend.in_forward} if chosen.rows else {}
        sinks, seen = dict[Key, OperandSink](), defaultdict[str, dict[str, Operand]](dict)
        beside, all_counted = dumped | set(of_outputs), sampled | dumped
        for role in plan.roles:
            for gemm in known:
                if not is_shown(gemm, role):
                    continue
                key, copied = (gemm.name, role), copied_elsewhere(gemm, role)
                counted = gemm.name in all_counted and not copied
                # All ranks have the same, or those of a mesh have it between them, as its tensors will tell.
                first = self._watched.shard_group.first[gemm.name] if copied is None else None
                if not counted and gemm.name not in beside:
                    continue
                counts = _never if copied else partial(is_counted, rank=rank, first=first)
                in_use = self._watched.model.scales.in_use(gemm, role)
                operand = seen[gemm.name][role] = Operand(gemm, role, in_use, plan.what_if_recipes, counts)
                operand.measures_copies, operand.counts_block_scales = plan.copies, plan.block_scales
                if counted:
                    self._operands[key] = operand
                sinks[key] = operand
                if dump and gemm.name in dumped:
                    sinks[key] = Dumping(operand, dump, self._watched.attempt, self.step, rank)
        guard = self._watched.errors.guard
        self._products = {
            name: Products(of_outputs[name], operands, chosen, self.step, guard, self._queue, self._dispatcher)
            for name, operands in seen.items()
            if name in of_outputs
        }
        if heard:
            self._subscribe(sinks, compiled, scanned)

    def _counted_here(self) -> set[Key]:
        return counted_parts(self._known, self._plan, self._dumped, self._watched.shard_group, self._watched.rank)

    def _leave_out_compiled(self, scanned: Sequence[ScannedModule]) -> Collection[int]:
        """Layers that torch.compile has been called on since the monitor was attached; all modules that run inside of it."""
        ids = compiled_by_now(scanned)
        if self._plan.eager:
            return ids
        known = self._watched.model.known
        late = [gemm for gemm in known if id(gemm.module) in ids]
        self._known = [gemm for gemm in known if id(gemm.module) not in ids]
        self._compiled = [*self._watched.model.compiled, *late]
        if late:
            warn_of_late_compiling(self._watched.errors, [gemm.name for gemm in late])
        return ids

    def _subscribe(self, sinks: dict[Key, OperandSink], compiled: Collection[int], scanned: Sequence[ScannedModule]) -> None:
        model, guard, dispatcher = self._watched.model, self._watched.errors.guard, self._dispatcher
        model.masters.buffers = find_buffers(scanned)
        if self._plan.eager:
            dispatcher.at_close(partial(torch.compiler.set_stance("force_eager").__exit__, None, None, None))
        self._multiplier = GradScale(model.roots, compiled, partial(guard, _MULTIPLIER), dispatcher)
        self._multiplier.subscribe()
        inside = {key: sink for key, sink in sinks.items() if seen_in_forward(sink.gemm)}
        outside = {key: sink for key, sink in sinks.items() if key not in inside}
        options = self._lose, dispatcher, model.scales.auto, self._products
        if self._plan.replicas:
            gemms = list({sink.gemm.name: sink.gemm for sink in outside.values()}.values())
            self._replicas = ReplicaChecks(gemms, model.masters, guard, self._watched.world == 1)
        if outside:
            self._captures.append(Capture(outside, *options, model.masters, self._replicas))
        if inside:
            self._captures.append(MatmulCapture(inside, *options))
        shard_group, rank = self._watched.shard_group, self._watched.rank
        if activations := activation_capture(model.sites, self._plan, self._operands, self._lose, dispatcher, rank):
            self._captures.append(activations)
        beside = shard_group, rank, guard, self._products, self.step
        self._states = state_capture(self._known, self._plan, self._operands, *beside)
        if self._plan.verify_rows and self._products:
            verified, keeps = [g for g in self._known if g.name in self._products], partial(counts_weight, shard_group, rank)
            self._gradients = ReducedGradients(verified, scanned, self.step, keeps, guard, dispatcher)
        for capture in self._captures:
            capture.subscribe()
        if self._replicas is not None:
            self._replicas.subscribe(dispatcher)
        if self._gradients is not None:
            self._gradients.subscribe()
        if self._states is not None:
            self._states.subscribe(dispatcher)
        self._attention = attention_capture(model, compiled, self._plan, self._operands, self._lose, dispatcher)

    @property
    def captures(self) -> bool:
        """Whether operands are seen."""
        return bool(self._captures)

    def show_loss(self, loss: Any, tokens: torch.Tensor | float) -> None:
        """See `Monitor.watch_loss`."""
        if self._multiplier is not None:
            self._multiplier.show(loss, tokens)

    def measured_multiplier(self) -> dict[str, Any]:
        """What dY was multiplied by, as a scalar of the step, if that is known."""
        with self._watched.errors.guard(_MULTIPLIER):
            if self._multiplier is not None and (found := self._multiplier.value()) is not None:
                return {"grad_scale": found}
        return {}

    def detach(self) -> None:
        """Remove the hooks, and warn of what was lost."""
        self._dispatcher.close()
        forget_empty_histograms()
        warn_of_unseen(self._attention, self._watched.errors)
        warn_of_unseen_states(self._states, self._watched.errors)
        self._warn_of_what_is_not_multiplied()
        self._captures, self._multiplier, self._attention, self._states = [], None, None, None
        with self._watched.errors.guard("while looking for compiled layers"):
            self._leave_out_compiled(scan_modules(self._watched.model.roots))
        if self._watched.world == 1:  # else another rank may see them
            self._expected -= {(gemm.name, role) for gemm in self._compiled for role in self._plan.roles}
        lost, self._lost = self._lost, {}
        warn_of_lost(self._watched.errors, self.step, lost)

    def _warn_of_what_is_not_multiplied(self) -> None:
        """Of modules that ran, parameters that no operator of torch multiplied."""
        names = [name for capture in self._captures if isinstance(capture, MatmulCapture) for name in capture.not_multiplied]
        if not names:
            return
        self._expected -= {(name, role) for name in names for role in self._plan.roles}
        warn_of_unmultiplied(self._watched.errors, names)

    def _lose(self, layer: str, role: str, error: Exception, lost: bool) -> None:
        """A hook has failed, which costs an operand, or what it is cast with."""
        errors = self._watched.errors
        if isinstance(error, UnknownCast):
            warn_of_unknown_cast(errors, layer, role, error)
        elif isinstance(error, Transformed):
            warn_of_transformed(errors, layer)
        elif errors.raises:
            raise error
        elif not lost:
            warn_of_unread_cast(errors, layer, role, error)
        else:
            counted = self._operands.pop((layer, role), None)
            if self._watched.world == 1:
                self._expected.discard((layer, role))
            elif counted and is_dtensor(raw_weight(counted.gemm.module)):  # a part that no other rank has
                self._expected.add((layer, role))
            self._lost.setdefault(f"{type(error).__name__}: {error}", []).append((layer, role))

    def forget(self) -> None:
        """Nothing of it is measured: it broke off, or was handed over."""
        self._operands, self._products = {}, {}

    def captured(self, steps: Callable[[], Steps]) -> Sampled:
        """What was seen of it.

        Args:
            steps: reads the scalars of this and earlier steps.
        """
        sampled, dumped = compile_patterns(self._plan.layers), compile_patterns(self._dumped)
        operands, products = list(self._operands.values()), list(self._products.values())
        expected = self._expected - {operand.key for operand in operands if operand.copies and not operand.calls}
        copies, gradients, what_if = self._replicas, self._gradients, self._plan.what_if_recipes
        of_ranks: list[Holder] = [holder for holder in (copies, gradients) if holder is not None]
        holders: list[Holder] = [*operands, *products, self._queue, *of_ranks]
        home = DeviceToHostCopy(holders, {device for operand in operands if (device := operand.device)})
        of_sample: Callable[[str], bool] = lambda name: sampled(name) or dumped(name)  # noqa: E731
        plan = Plan(self.step, [recipe.name for recipe in what_if], self._plan.copies, self._plan.block_scales)
        return Sampled(plan, operands, products, copies, gradients, expected, what_if, of_sample, steps, home)


def _never(x: torch.Tensor) -> bool:
    """Another rank counts it."""
    return False
