"""The framework-neutral monitor: what a training loop calls around its steps."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..capture.backends.base import raw_weight
from ..capture.backends.transformer_engine import inspection
from ..capture.device_to_host import Homecoming
from ..capture.dtensor import is_counted, is_dtensor
from ..capture.gemms import Gemm, find_gemms, matching, select, unknown_gemms
from ..capture.grad_scale import GradMultiplier
from ..capture.hooks import Capture, Taker
from ..capture.operands import Operand
from ..capture.output_samples import Products
from ..capture.scales import Scales
from ..core.arguments import checks_arguments, shown
from ..core.error_guard import Faults
from ..core.keys import ROLES, SHOWN_AS, Key
from ..core.layer_names import compile_patterns
from ..core.sample import Recorder, Sample
from ..distributed import Family, Ranks
from ..errors import ConfigError, run_failed
from ..numerics.metric_columns import in_true_units
from ..numerics.recipe import parse_recipe
from ..record.dump import TensorDump
from ..record.storage import Place
from ..record.writer import RunRecord
from .config import Config
from .control_file import Control
from .default_recorders import default_recorders
from .dump_tap import Dumping
from .fingerprint import fingerprint
from .live_control import Steering
from .pipeline import Measuring, Outcome, Sampled, Steps
from .recorder_queue import Recording
from .run_summary import Summary
from .schedule import Schedule
from .step_order import StepOrder
from .step_scalars import kept, read, read_all, usable
from .triggers import Triggers, parse_rule

#: steps whose scalars are kept on the device between samples, at the most
STEPS_HELD = 1000
#: options by which ranks come to meet at a step
SAME_ON_ALL_RANKS = ("interval", "first_step", "last_step", "triggers", "trigger_steps", "output_rows")
#: stands for a step whose number is not valid
_INVALID = -1
#: operands that a warning names, at the most
_NAMED = 4
#: the last one of each folder
_open_monitors: weakref.WeakValueDictionary[str, Monitor] = weakref.WeakValueDictionary()
_MULTIPLIER = "while measuring what dY is multiplied by"


@checks_arguments(options_of=Config)
class Monitor:
    """Looks at the GEMM operands of every N-th step of any training loop.

        monitor = Monitor(model, "runs/a", interval=100)
        for step, batch in enumerate(data):
            with monitor.step(step) as report:
                report(loss=train_step(batch))
        monitor.close()

    Between sampled steps no hook is installed. On several ranks each carries a monitor; the first one writes the record.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        output: str | os.PathLike[str] | None = None,
        *,
        recorders: Iterable[Recorder] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            model: the model, or its chunks where a virtual pipeline splits it.
            output: folder for the run record and TensorBoard events, or any fsspec address; required unless `recorders` are
                given.
            recorders: where samples go instead.
            options: fields of `Config`.

        Raises:
            ConfigError: an option cannot be used, no GEMM matches, or the folder cannot be written, on any rank.
        """
        self._ranks = Ranks()
        try:
            self.config = Config(output=os.fspath(output) if isinstance(output, os.PathLike) else output, **options)
            self._faults = Faults(self.config.on_error)
            self._ranks.agree("options", {name: getattr(self.config, name) for name in SAME_ON_ALL_RANKS})
            self._find_gemms(model)
            self._recording = Recording(self._chosen(recorders), self.fingerprint, self._faults.guard)
            records = [r for r in self._recording.recorders if isinstance(r, RunRecord)]
            # Other ranks may work in other folders, and this one may change its own.
            address = None if self.config.output is None else str(Place(self.config.output))
        except Exception as error:
            self._ranks.start(None, error)
            raise
        Family.told(self._ranks, {g.name: g.kind for g in self._known})
        told = self._ranks.start({"attempt": max((r.attempt for r in records), default=0), "output": address})
        self._attempt: int = told["attempt"]
        self._idle = self._ranks.world == 1 and not self._recording.recorders
        place = Place(told["output"]) if told["output"] is not None else None
        self._summary = Summary(self.config, self._recording.recorders, len(self.gemms))
        self._prepare(next((r.place for r in records if r.place == place), place))
        self._meet()
        self._capture: Capture | None = None
        self._multiplier: GradMultiplier | None = None
        self._due: int | None = None
        self._begun: int | None = None
        self._expected: set[Key] = set()
        self._operands: dict[tuple[str, str], Operand] = {}
        self._products: dict[str, Products] = {}
        self._steps: dict[int, dict[str, Any]] = {}
        self._order = StepOrder(self._faults.warn if self._ranks.writes else _ignore)
        self._lost: dict[str, list[tuple[str, str]]] = {}
        self._closed = False
        self._summary.open()
        if records:
            self._warn_of_another_monitor(str(records[0].place))
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def _warn_of_another_monitor(self, folder: str) -> None:
        earlier = _open_monitors.get(folder)
        if earlier is not None and not earlier._closed:
            self._faults.warn(f"another monitor of this process records to {folder} too, as another attempt; close that one")
        _open_monitors[folder] = self

    def _meet(self) -> None:
        """Find the ranks that hold parts of the same tensors."""
        kinds, over = {g.name: g.kind for g in self._known}, False
        try:
            family = Family.met(self._ranks, kinds)
        except Exception as error:
            if self._faults.raises:
                raise
            family, over = Family.alone(self._ranks.rank, kinds), True
            if self._ranks.first_to_say("over", -1):
                self._faults.warn(f"the ranks cannot be connected, and operands are not looked at: {error}")
        self._family = family
        self._scales.emulate([(name, role) for name in family.kinds for role in ROLES])
        self._measuring = Measuring(self._ranks, family, self._scales, self._faults, self.config.output_rows > 0)
        self._measuring.over = over

    def _find_gemms(self, model: nn.Module | Sequence[nn.Module]) -> None:
        roots = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Iterable) else []
        if not roots or not all(isinstance(root, nn.Module) for root in roots):
            raise ConfigError(f"model is {shown(model)}; Monitor takes a torch.nn.Module first, or the list of its chunks")
        self._roots = roots
        found = find_gemms(roots)
        self._known = [g for g in found if not g.compiled]
        self._compiled = [g for g in found if g.compiled]
        if self._ranks.world == 1:
            self.gemms: list[Gemm] = select(found, self.config.layers)
            for patterns in filter(None, (self.config.dump, self.config.trigger_dump)):
                select(found, patterns)
        else:  # a pipeline stage may have none that match
            self.gemms = matching(self._known, self.config.layers)
        if unknown := unknown_gemms(roots):
            first = next(iter(unknown))
            self._faults.warn(f"{len(unknown)} modules are not known here and left out, first {first}, a {unknown[first]}")
        if stored := [g.name for g in self.gemms if "weight" in g.unseen]:
            self._faults.warn(
                f"W of {len(stored)} layers is stored in FP8 (first {stored[0]}): "
                "there is nothing to compare it with, so it is left out"
            )
        inspection.check(self._known)
        if split := [g.name for g in self.gemms if inspection.leaves_out(g)]:
            self._faults.warn(
                f"the inside of {len(split)} layers (first {split[0]}) is not inspected: "
                "with tensor parallelism that would change how ranks communicate"
            )
        self._scales = Scales(self._known, self.config.recipe)
        self.fingerprint = fingerprint(roots, self.gemms, self.config, self._scales.description)

    def _chosen(self, recorders: Iterable[Recorder] | None) -> Iterable[Recorder]:
        if not self._ranks.writes:
            return ()
        return default_recorders(self.config) if recorders is None else recorders

    def _prepare(self, place: Place | None) -> None:
        """What samples at which step, and where tensors go."""
        config = self.config
        if place is None and (config.dump or config.trigger_dump):
            raise ConfigError("dump and trigger_dump need an output folder")
        limits = config.dump_max_bytes, config.dump_min_free_bytes
        self._dump = TensorDump(place, self._ranks.rank, *limits, self._recording.submit_job) if place else None
        self._schedule = Schedule(config)
        triggers = Triggers([parse_rule(rule) for rule in config.triggers], self._ranks)
        self._steering = Steering(self._schedule, triggers, self._ranks, place, self._check, self._summary.say)
        self._recording.submit_job(self._steering.read)
        self._report(None)

    def _check(self, control: Control) -> None:
        """Refuse a control file that names no layer of this model; on several ranks another one may have it."""
        if self._ranks.world == 1:
            for name in ("layers", "dump"):
                if control.changes.get(name):
                    select(self._known, control.changes[name])

    @property
    def sampling(self) -> bool:
        """Whether a sampled step is under way."""
        return self._due is not None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[Any]:
        """A training step; yields a function that takes its scalars: `report(loss=..., lr=...)`."""
        scalars: dict[str, Any] = {}

        def report(*unnamed: Any, **named: Any) -> None:
            self._warn_of_unnamed(unnamed, "report")
            scalars.update(named)

        self.begin_step(step)
        try:
            yield report
            self.end_step(**scalars)
        finally:
            self.abandon_step()

    def begin_step(self, step: int) -> None:
        """Before the forward pass: installs the hooks if `step` is sampled. On several ranks, called on all.

        Args:
            step: a whole number, at least 0 and greater than that of the step before. A step with another number is not
                sampled, and the first one is warned of.
        """
        if self._closed:
            self._faults.warn("the monitor is closed, and the steps after that are not recorded", kind="closed")
            return
        number = None
        with self._faults.guard("while beginning a step"):
            number = self._order.begin(step)
        self._drop_sample()
        if self._idle:
            return
        if self._begun not in (None, number):  # broken off here, and perhaps not on other ranks, which have told
            self._tell_triggers(None)
        self._begun = _INVALID if number is None else number
        if number is None:
            return
        self._faults.step = number
        with self._faults.guard("while starting to sample"):
            self._steering.start_step(number)
            if self._schedule.samples(number) and not self._steering.stopped:
                self._start_sample(number)
            return
        self._detach()

    def expect_steps(self, first: int, last: int) -> None:
        """Tell which steps the run will take, both inclusive: a warning says so if none of them is sampled."""
        if self._ranks.writes and not self.config.triggers and first <= last and not self.config.samples_any(first, last):
            self._faults.warn(
                f"no step of this run will be sampled: it takes steps {first} to {last}, and {self.config.turns()} is "
                "sampled; choose a smaller interval",
                kind="nothing sampled",
            )

    def _start_sample(self, step: int) -> None:
        self._order.sampled = True
        self._due, self._expected = step, set()  # whatever happens to this rank's part of the sample
        # Scales emulated from a history need the sample before.
        self._measuring.settle()
        self._recording.deliver(wait=True)
        self._steering.start_sample(step, self._measuring.over)
        if self._steering.stopped:
            self._due, self._measuring.over = None, True
        elif not self._recording.stuck:
            self._open(step)

    def _end_sample(self, step: int) -> None:
        if not self._steering.end_sample(step):
            self._measuring.end(step, TimeoutError("the first rank does not say how to sample"))

    def _open(self, step: int) -> None:
        plan, patterns = self._schedule.config, self._schedule.dumped(step)
        weighed = [parse_recipe(recipe) for recipe in plan.weigh]
        dumped = {g.name for g in matching(self._known, patterns)} if patterns and self._dump else set()
        sampled = {g.name for g in matching(self._known, plan.layers)}
        self._operands, takers, seen = {}, dict[Key, Taker](), defaultdict[str, dict[str, Operand]](dict)
        of_outputs = sampled if plan.output_rows else set()
        for role in plan.roles:
            for gemm in self._known:
                key = gemm.name, role
                if role in gemm.unseen and not inspection.sees(gemm, role):
                    continue
                copied = gemm.host.copied(gemm.module, role)
                counted = gemm.name in sampled | dumped and not copied
                # All ranks have the same, or those of a mesh have it between them, as its tensors will tell.
                first = self._family.first[gemm.name] if copied is None else None
                if counted and first in (None, self._ranks.rank):
                    self._expected.add(key)
                if not counted and gemm.name not in dumped | of_outputs:
                    continue
                counts = _never if copied else partial(is_counted, rank=self._ranks.rank, first=first)
                operand = seen[gemm.name][role] = Operand(gemm, role, self._scales.in_use(gemm, role), weighed, counts)
                if counted:
                    self._operands[key] = operand
                taker: Taker = operand
                if self._dump and gemm.name in dumped:
                    taker = Dumping(operand, self._dump, self._attempt, step, self._ranks.rank)
                takers[key] = taker
        self._products = {
            name: Products(name, operands, plan.output_rows, self._faults.guard)
            for name, operands in seen.items()
            if name in of_outputs
        }
        # What is compiled here and is seen on another rank lacks this one's part.
        self._expected |= {
            (gemm.name, role)
            for gemm in matching(self._compiled, plan.layers)
            for role in plan.roles
            if role != "weight" and gemm.name in self._family.kinds and not gemm.host.copied(gemm.module, role)
        }
        if not self._steering.heard:
            return
        self._multiplier = GradMultiplier(self._roots, partial(self._faults.guard, _MULTIPLIER))
        self._multiplier.attach()
        if takers:
            self._capture = Capture(takers, self._hook_fault, self._scales.auto, self._products)
            self._capture.attach()

    def abandon_step(self) -> None:
        """The step broke off: removes the hooks and forgets the sample."""
        self._order.give_up()
        self._drop_sample()

    def _drop_sample(self) -> None:
        self._detach()
        if (step := self._due) is not None:
            self._due, self._operands, self._products = None, {}, {}
            self._end_sample(step)
            with self._faults.guard("while giving a sample up"):
                self._measuring.take_part(self._sampled(step, dict))

    def _detach(self) -> None:
        for watching in (self._capture, self._multiplier):
            if watching is not None:
                watching.detach()
        self._capture = self._multiplier = None
        lost, self._lost = self._lost, {}
        for why, keys in lost.items():
            named = ", ".join(f"{SHOWN_AS[role]} of {layer}" for layer, role in keys[:_NAMED])
            more = f" and {len(keys) - _NAMED} more operands" if len(keys) > _NAMED else ""
            those = f"{named}{more} {'is' if len(keys) == 1 else 'are'}"
            message = f"{those} missing from the sample of step {self._faults.step}: {why}"
            self._faults.warn(message, kind=[f"{layer} {role} {why.partition(':')[0]}" for layer, role in keys])

    def watch_loss(self, loss: Any, tokens: torch.Tensor | float = 1) -> None:
        """Show the loss of a micro-batch before it is scaled, divided and backpropagated: dY is recorded in its units too.

        Needed where neither the model returns the loss nor a schedule of Megatron computes it. Nothing happens in steps that
        are not sampled.

        Args:
            loss: anything but a scalar tensor with gradient is passed over.
            tokens: where `loss` is a sum over so many, and their mean is the loss that is meant.
        """
        if self._multiplier is not None:
            self._multiplier.show(loss, tokens)

    def _measured_multiplier(self) -> dict[str, Any]:
        with self._faults.guard(_MULTIPLIER):
            if self._multiplier is not None and (found := self._multiplier.value()) is not None:
                return {"grad_multiplier": found}
        return {}

    def end_step(self, *unnamed: Any, **scalars: Any) -> None:
        """After the backward pass: removes the hooks, measures and records. On several ranks, called on all.

        Args:
            scalars: of the step, numbers or scalar tensors, which are read in the background: `loss`, `grad_norm`, `lr`,
                `loss_scale`, `skipped`, `consumed_samples`, as far as they are known; and `grad_multiplier`, what dY is
                multiplied by, where it is not to be measured. Others are not recorded, which a warning says.
        """
        if self._closed:
            return
        began, step, sampled = self._order.is_open, self._order.end(), self._due is not None
        if self._idle:
            return
        writes_steps = self._ranks.rank in self._family.heads
        if writes_steps:
            self._warn_of_unnamed(unnamed, "end_step")
        with self._faults.guard("while reading the scalars of a step"):
            scalars = usable(scalars, self._faults.warn if writes_steps else _ignore, self._dump is not None)
        if step is None:
            if began:  # other ranks may have begun it with a valid number
                self._begun = None
                self._tell_triggers(scalars.get("loss"))
            return
        # Other ranks may have looked at what this one has not.
        opened = self._capture is not None or (self._ranks.world > 1 and not self._recording.stuck)
        scalars = self._measured_multiplier() | scalars
        self._detach()
        self._due = self._begun = None
        self._tell_triggers(scalars.get("loss"))
        if writes_steps:
            with self._faults.guard("while noting the step"):
                self._steps[step] = {"time": time.time(), **kept(scalars)}
                self._recording.deliver(wait=False)
        if sampled:
            self._summary.due += 1
            self._end_sample(step)
            with self._faults.guard("while measuring"):
                self._submit(step, opened)
        elif len(self._steps) >= STEPS_HELD:
            self._flush_steps()
        self._operands, self._products = {}, {}
        if self._schedule.samples(step + 1):
            self._recording.submit_job(self._steering.read)
        if self._faults.raises:
            self.flush()

    def _warn_of_unnamed(self, unnamed: Sequence[Any], called: str) -> None:
        if unnamed:
            self._faults.warn(
                f"what {called} was given without a name is not recorded: use {called}(loss=...)", kind="unnamed"
            )

    def _tell_triggers(self, loss: Any) -> None:
        with self._faults.guard("while watching the loss"):
            try:
                self._steering.end_step(self._faults.step, loss)
            except TimeoutError as error:
                self._measuring.end(self._faults.step, error)

    def _submit(self, step: int, opened: bool) -> None:
        steps, self._steps = self._steps, {}
        sampled = self._sampled(step, lambda: read_all(steps))
        outcome = self._measuring.submit(sampled)
        if not self._ranks.writes:
            return
        why = self._schedule.why(step)
        steps[step] |= {"trigger": why} if why else {}
        if opened:
            self._recording.submit(lambda: self._sample(step, outcome, steps))
            self._report(step)
        self._recording.submit_steps(lambda: read_all(steps))

    def _report(self, step: int | None, ended: bool = False) -> None:
        progress = self._dump.progress if self._dump else dict
        self._recording.submit_job(lambda: self._steering.report(step, progress(), ended))

    def _sampled(self, step: int, steps: Callable[[], Steps]) -> Sampled:
        plan, patterns = self._schedule.config, self._schedule.dumped(step) if self._dump else []
        weighed = [parse_recipe(recipe).name for recipe in plan.weigh]
        sampled, dumped = compile_patterns(plan.layers), compile_patterns(patterns)
        operands = list(self._operands.values())
        expected = self._expected - {operand.key for operand in operands if operand.copies and not operand.calls}
        products = list(self._products.values())
        home = Homecoming([*operands, *products], {device for operand in operands if (device := operand.device)})
        return Sampled(step, operands, products, expected, weighed, lambda name: sampled(name) or dumped(name), steps, home)

    def _sample(self, step: int, outcome: Callable[[], Outcome | None], steps: dict[int, dict[str, Any]]) -> Sample | None:
        found = outcome()
        if found is None:
            return None
        for other, numbers in found.steps.items():
            if other in steps:
                steps[other] = {**numbers, **steps[other]}
        measured, scalars = found.measured, read(steps[step])
        figures, what_if = (
            columns | in_true_units(columns, scalars.get("grad_multiplier"))
            for columns in (measured.figures, measured.what_if)
        )
        why = steps[step].get("trigger")
        sample = Sample(step, figures, scalars, measured.sketches, what_if, why, measured.outputs)
        self._steering.see_sample(sample)
        if self._ranks.world > 1 and self.config.layers is not None and not len(sample):
            message = f"the sample of step {step} is empty: no layer on any rank matches {shown(self.config.layers)}"
            self._faults.warn(message, kind="empty sample")
        return sample

    def close(self) -> None:
        """The run is over: records what is left. To close a second time does nothing."""
        if self._closed:
            return
        self._closed, failed = True, run_failed()
        if not failed:
            self._order.warn_if_open()
        self.abandon_step()
        self._measuring.close()
        self._flush_steps()
        self._report(None, ended=True)
        self._idle = True
        atexit.unregister(self._at_exit)
        with self._faults.guard("while closing the record"):
            self._recording.close()
        if self._ranks.writes and not failed:
            self._warn_if_nothing_sampled()
        self._summary.close(self._measuring.over, self._recording.stuck)

    def _warn_if_nothing_sampled(self) -> None:
        order, turns = self._order, self._schedule.config.turns()
        if not order.used:
            self._faults.warn("the monitor was told of no step: call begin_step and end_step around each training step")
        elif order.ended and not order.sampled and not self._measuring.over:
            self._faults.warn(
                f"no step was sampled: the run took {order.ended} steps ({order.first} to {order.last}), and {turns} is "
                "sampled; choose a smaller interval",
                kind="nothing sampled",
            )

    def flush(self) -> None:
        """Wait until every sample so far is recorded."""
        with self._faults.guard("while recording"):
            self._measuring.settle()
            self._recording.deliver(wait=True)

    def _flush_steps(self) -> None:
        steps, self._steps = self._steps, {}
        if steps and self._ranks.writes:
            with self._faults.guard("while recording steps"):
                self._recording.submit_steps(lambda: read_all(steps))

    def _hook_fault(self, layer: str, role: str, error: Exception, lost: bool) -> None:
        if self._faults.raises:
            raise error
        if lost:
            counted = self._operands.pop((layer, role), None)
            if self._ranks.world == 1:
                self._expected.discard((layer, role))
            elif counted and is_dtensor(raw_weight(counted.gemm.module)):  # a part that no other rank has
                self._expected.add((layer, role))
            self._lost.setdefault(f"{type(error).__name__}: {error}", []).append((layer, role))
        else:
            message = f"what casts {SHOWN_AS[role]} of {layer} cannot be read, and its figures are under an emulated scale"
            self._faults.warn(f"{message}: {type(error).__name__}: {error}", kind=f"{layer} {role} {type(error)}")


def _never(x: torch.Tensor) -> bool:
    """Another rank counts it."""
    return False


def _ignore(*anything: Any) -> None:
    """The first rank says it."""


def _close(monitor: weakref.ref[Monitor]) -> None:
    """A process that ends without closing its monitor loses nothing."""
    if found := monitor():
        found.close()
