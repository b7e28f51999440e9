"""The monitor for any framework: the methods that a training loop calls around its steps, and the order of these calls."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..capture.gemms import Gemm
from ..core.arguments import check_whole_number, format_value, reject_unknown_arguments
from ..core.error_guard import ErrorGuard, guard_entry_point, run_all_guarded
from ..core.sample import Recorder
from ..core.waits import WaitTimes
from ..distributed import MonitoredRanks, ShardGroup
from ..errors import is_exception_underway
from ..options.config import SAME_ON_ALL_RANKS, Config
from .assembly import RecordLocation, assemble_monitor, make_chosen_recorders
from .delivery import select_recordable_scalars
from .model_scan import scan_model
from .recorder_queue import RecorderQueue
from .run_summary import RunSummaryPrinter
from .sampled_step import SampledStep

#: the record's file names have room for 18 digits
_LARGEST = 10**18 - 1


class StepOrder:
    """Checks the order of a loop's calls.

    After a mistake, we drop the step's sample, and warn once for each kind of mistake. We never raise an error.
    """

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        """
        Args:
            warn: function that takes a message and its kind, and prints one message of each kind.
        """
        self._warn = warn
        self._begun: int | None = None
        #: the last step that began with a valid number, or -1
        self.current = -1
        #: whether a step has begun, and was neither ended nor abandoned
        self.is_open = False
        #: whether the loop has called anything
        self.used = False
        #: whether a step was sampled
        self.sampled = False
        #: number of ended steps that began with a valid number, and the first and the last of these steps
        self.ended, self.first, self.last = 0, -1, -1

    def warn_if_never_sampled(self, first: int, last: int, config: Config) -> None:
        """Warn before the run if none of its steps (`first` to `last`, both included) will be sampled."""
        if not config.triggers and first <= last and not config.samples_any(first, last):
            self._warn(
                f"no step of this run will be sampled: it takes steps {first} to {last}, and {config.describe_schedule()} "
                "is sampled; choose a smaller interval",
                "nothing sampled",
            )

    def warn_of_unnamed(self, unnamed: Sequence[Any], called: str) -> None:
        """Warn if values without a name were given."""
        if unnamed:
            self._warn(f"{called} does not record a value without a name: use {called}(loss=...)", "unnamed")

    def begin(self, given: Any) -> int | None:
        """Begin a step. Return its number, or None if the number is invalid."""
        self.warn_if_open()
        self.is_open, self._begun, self.used = True, None, True
        step = check_whole_number(given)
        if step is None or not 0 <= step <= _LARGEST:
            needed = "the number of a step is a whole number, at least 0 and below 10**18"
            self._warn(f"step {format_value(given)} is not sampled: {needed}", "invalid step")
        elif self.ended and step <= self.last:
            self._warn(
                f"step {step} is not sampled, because it follows step {self.last}: step numbers must grow. "
                "After a return to an earlier checkpoint, close this monitor and start another one in the same folder",
                "step goes back",
            )
        else:
            self._begun = self.current = step
        return self._begun

    def end(self) -> int | None:
        """End a step. Return its number, or None if the step never began or had an invalid number."""
        step, self._begun, self.used = self._begun, None, True
        if not self.is_open:
            self._warn(
                "end_step was called without begin_step, and does nothing: call begin_step before the forward", "no begin"
            )
        self.is_open = False
        if step is not None:
            self.first = self.first if self.ended else step
            self.ended, self.last = self.ended + 1, step
        return step

    def give_up(self) -> None:
        """Note that the step was interrupted."""
        self.is_open, self._begun = False, None

    def warn_if_open(self) -> None:
        """Warn if the last step was not ended."""
        if self.is_open:
            which = "a step" if self._begun is None else f"step {self._begun}"
            self._warn(
                f"{which} was begun and not ended, and its sample is dropped: call end_step after the backward pass",
                "no end",
            )

    def warn_if_nothing_sampled(self, turns: str, over: bool) -> None:
        """Warn at the end of a run if no step was sampled.

        Args:
            turns: describes which steps are sampled.
            over: whether sampling ended early for a reason that was already printed.
        """
        if not self.used:
            message = "no step was reported: call begin_step and end_step around each training step"
            self._warn(message, "no step")
        elif self.ended and not self.sampled and not over:
            self._warn(
                f"no step was sampled: the run took {self.ended} steps ({self.first} to {self.last}), and {turns} is "
                "sampled; choose a smaller interval",
                "nothing sampled",
            )


_INVALID = -1  # the number that we use for a step with an invalid number
#: the last monitor of this process for each folder of a record
_of_folder: weakref.WeakValueDictionary[str, Monitor] = weakref.WeakValueDictionary()


@reject_unknown_arguments(options_of=Config)
class Monitor:
    """Measures the GEMM operands of every N-th step of any training loop.

    No hook is installed between sampled steps. On several ranks, each rank has a monitor, and the first rank writes the
    record.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> monitor = Monitor(model, "runs/small", interval=2, table_rows=0)
        >>> for step in range(4):
        ...     with monitor.step(step) as report:
        ...         (loss := model(torch.ones(8, 32)).square().mean()).backward()
        ...         report(loss=loss)
        >>> monitor.close()
        >>> read_record("runs/small", columns=["step", "role"]).rows()[:3]
        [(0, 'input'), (0, 'weight'), (0, 'grad_output')]
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
            model: the model, or a list of its chunks under a virtual pipeline.
            output: folder of the run record and TensorBoard events, a path or any fsspec address. None requires `recorders`.
            recorders: objects that receive the samples. By default, a run record, TensorBoard events and a table.
            options: fields of `Config`, such as `interval=100`.

        Raises:
            ConfigError: an option cannot be used, no GEMM matches, or the folder cannot be written, on any rank.
        """
        self._waits = WaitTimes()
        self._ranks = MonitoredRanks(self._waits)
        try:
            self.config = Config(output=os.fspath(output) if isinstance(output, os.PathLike) else output, **options)
            self._errors = ErrorGuard(self.config.on_error)
            self._ranks.require_same_value("options", {name: getattr(self.config, name) for name in SAME_ON_ALL_RANKS})
            self._model = scan_model(model, self.config, self._ranks.world, self._errors)
            chosen = make_chosen_recorders(recorders, self.config) if self._ranks.writes_record else ()
            self._recording = RecorderQueue(chosen, self.fingerprint, self._errors.guard, self._waits)
            place = RecordLocation.choose_location(self.config, self._recording)
        except Exception as error:
            self._ranks.await_all_monitors(None, error)
            raise
        ShardGroup.publish_gemm_names(self._ranks, self._model.kinds_by_name)
        self._idle = self._ranks.world == 1 and not self._recording.recorders
        self._summary = RunSummaryPrinter(
            self.config, self._recording.recorders, len(self.gemms), self.fingerprint.get("coverage")
        )
        shared = self._summary, place, self._errors, self._waits
        parts = assemble_monitor(self.config, self._model, self._ranks, self._recording, *shared)
        self._shard_group, self._schedule, self._live_control = parts.shard_group, parts.schedule, parts.live_control
        self._pipeline, self._delivery, self._watched = parts.pipeline, parts.delivery, parts.watched
        self._sampled: SampledStep | None = None
        self._begun: int | None = None
        self._order = StepOrder(self._errors.warn if self._ranks.writes_record else lambda *anything: None)
        order = self._order
        self._errors.step = lambda: order.current
        self._closed, self._process = False, os.getpid()
        self._summary.print_first_line()
        with self._errors.guard("while recording that the run goes on"):
            if self._live_control.earlier_attempt_ended:  # do not wait for the first sample, which may be late
                self._delivery.write_status(None)
        _note_folder(place.record, self, self._errors.warn)
        self._closed_by_hand = _close_at_exit(self, self._ranks.world > 1)

    @property
    def gemms(self) -> Sequence[Gemm]:
        """The GEMMs of this rank that are measured."""
        return self._model.gemms

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """The run's settings."""
        return self._model.fingerprint

    @property
    def closed(self) -> bool:
        """True if the monitor records nothing, because it was closed or belongs to the parent of a forked process."""
        return self._closed or os.getpid() != self._process  # a forked process has no recording threads

    @property
    def sampling(self) -> bool:
        """True while a sampled step is open."""
        return self._sampled is not None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[Any]:
        """Run a training step in a `with` block. Yield a function that takes scalars like `end_step`: `report(loss=loss)`.

        Args:
            step: the step's number, as for `begin_step`.
        """
        scalars: dict[str, Any] = {}

        def report(*unnamed: Any, **named: Any) -> None:
            scalars.update(named)
            with self._errors.guard("while reading the scalars of a step"):
                self._order.warn_of_unnamed(unnamed, "report")

        try:
            self.begin_step(step)
            yield report
            self.end_step(**scalars)
        finally:
            self.abandon_step()

    @guard_entry_point("while beginning a step")
    def begin_step(self, step: int) -> None:
        """Call before the forward pass, on all ranks. If `step` is sampled, hooks are installed.

        Args:
            step: a whole number, at least 0 and greater than the previous step's number. If the number is invalid, the step
                is not sampled, and the first such step gets a warning.
        """
        if self.closed:
            self._errors.warn("the monitor is closed, so later steps are not recorded", kind="closed")
            return
        number = self._order.begin(step)
        self._drop_sample()
        if self._idle:
            return
        if self._begun not in (None, number):  # interrupted here but perhaps not on other ranks, which wait for this rank
            self._tell_triggers({})
        self._begun = _INVALID if number is None else number
        if number is None:
            return
        self._waits.start_step(number)
        self._live_control.start_step(number)
        if self._schedule.is_sampled(number) and not self._live_control.stopped:
            self._start_sample(number)

    @guard_entry_point("while looking ahead")
    def expect_steps(self, first: int, last: int) -> None:
        """Announce the steps of the run. Warn if none of these steps will be sampled.

        Args:
            first: the first step.
            last: the last step (included).
        """
        self._order.warn_if_never_sampled(first, last, self.config)

    def _start_sample(self, step: int) -> None:
        self._order.sampled = True
        # Set this first, in case this rank's part of the sample fails.
        self._sampled = SampledStep(step, self._watched, self._schedule)
        # Emulated delayed scales depend on the previous sample, so wait for it.
        self._pipeline.await_previous_sample()
        self._recording.deliver(wait=True)
        self._live_control.start_sample(step, self._pipeline.over)
        if self._live_control.stopped:
            self._sampled, self._pipeline.over = None, True
        elif not self._recording.stuck:
            self._sampled.start_capture(self._live_control.heard)

    def _end_sample(self, step: int) -> None:
        if not self._live_control.end_sample(step):
            self._pipeline.stop_sampling(step, TimeoutError("the first rank does not say how to sample"))

    @guard_entry_point("while abandoning a step")
    def abandon_step(self) -> None:
        """Abandon a step that was interrupted: remove the hooks and drop the sample."""
        self._order.give_up()
        self._drop_sample()

    def _drop_sample(self) -> None:
        sampled, self._sampled = self._sampled, None
        if sampled is None:
            return
        steps: dict[str, Callable[[], object]] = {
            "while removing hooks": sampled.remove_hooks,
            "while abandoning a sample": sampled.release_data,
            "while receiving the result of a sample": lambda: self._end_sample(sampled.step),
            "while reducing a sample with other ranks": lambda: self._pipeline.join_abandoned_sample(
                sampled.make_captured_step(dict)
            ),
        }
        run_all_guarded(self._errors.guard, steps)

    @guard_entry_point("while reading a loss")
    def watch_loss(self, loss: Any, tokens: torch.Tensor | float = 1) -> None:
        """Pass the loss of a micro-batch before it is scaled and backpropagated. Then we also record dY in units of the
        unscaled loss.

        Call this if the model does not return the loss and no Megatron schedule computes the loss. In steps that are not
        sampled, the call does nothing.

        Args:
            loss: a scalar tensor with gradient. Anything else is ignored.
            tokens: the number of tokens, if `loss` is a sum over tokens but training minimizes their mean.
        """
        if self._sampled:
            self._sampled.add_microbatch_loss(loss, tokens)

    @guard_entry_point("while ending a step")
    def end_step(self, *unnamed: Any, **scalars: Any) -> None:
        """Call after the backward pass, on all ranks. Remove the hooks, measure and record.

        Args:
            unnamed: values without a name. They are not recorded, and cause a warning.
            scalars: numbers or scalar tensors of the step, which are read in the background: `loss`, `grad_norm`, `lr`,
                `loss_scale`, `skipped`, `consumed_samples`, as far as you know them. Pass `grad_scale`, the factor of dY, if
                we should not measure it. Other names are not recorded, and cause a warning.
        """
        if self.closed:
            return
        began, step, sampled = self._order.is_open, self._order.end(), self._sampled
        if self._idle:
            return
        writes_steps = self._ranks.rank in self._shard_group.leaders
        self._order.warn_of_unnamed(unnamed, "end_step")
        tell = self._errors.warn if writes_steps else lambda message: None
        scalars = select_recordable_scalars(scalars, tell, self._watched.dump is not None)
        if step is None:
            if began:  # other ranks may have begun the step with a valid number
                self._begun = None
                self._tell_triggers(scalars)
            return
        if sampled:
            scalars = sampled.read_gradient_multiplier() | scalars
            # Other ranks may have measured operands that this rank has not measured.
            opened = sampled.is_looked_at or (self._ranks.world > 1 and not self._recording.stuck)
            sampled.remove_hooks()
        self._sampled = self._begun = None
        self._tell_triggers(scalars)
        if writes_steps:
            self._delivery.queue_scalars(step, scalars)
        if sampled:
            self._summary.due += 1
            self._end_sample(step)
            self._delivery.record_sampled_step(sampled, self._schedule.explain_sampling(step), opened)
            sampled.release_data()
        else:
            self._delivery.record_due_scalars()
        if self._schedule.is_sampled(step + 1):
            self._recording.submit_job(self._live_control.read_control_file)
        if self._errors.raises:
            self.flush()

    @guard_entry_point("while noting an evaluation")
    def report_validation(self, step: int | None = None, **losses: Any) -> None:
        """Record the losses of an evaluation. `nemo-fp8-debug gate` checks these losses too.

        Args:
            step: the training step before the evaluation, or None for the last step.
            losses: numbers or scalar tensors, by name, which are read in the background.
        """
        if not self.closed and not self._idle and self._ranks.writes_record:
            self._delivery.record_validation(max(self._order.current, 0) if step is None else step, losses)

    def _tell_triggers(self, scalars: Mapping[str, Any]) -> None:
        with self._errors.guard("while watching the loss"):
            try:
                self._live_control.end_step(self._order.current, scalars.get("loss"), scalars.get("grad_norm"))
            except TimeoutError as error:
                self._pipeline.stop_sampling(self._order.current, error)

    @guard_entry_point("while closing the record")
    def close(self) -> None:
        """End the run and record all remaining data. A second call does nothing."""
        if self.closed:
            return
        failed, self._closed = is_exception_underway(), True
        steps: dict[str, Callable[[], object]] = {
            "while adding up waits": self._waits.stop_counting,
            "while ending a step": lambda: None if failed else self._order.warn_if_open(),
            "while abandoning a step": self.abandon_step,
            "while ranks part": self._pipeline.close,
            "while recording steps": self._delivery.flush_steps,
            "while recording the end": lambda: self._delivery.write_status(None, ended=True),
            "while unregistering the monitor": self._closed_by_hand,
            "while closing the record": self._recording.close,
            "while closing the record again": lambda: None if self._recording.closed else self._recording.close(),
            "while summing up": lambda: self._sum_up(failed),
            "while releasing the model": self._release,
        }
        run_all_guarded(self._errors.guard, steps)

    def _sum_up(self, failed: bool) -> None:
        was_idle, self._idle = self._idle, True  # without recorders (a plan alone) no sample was expected
        if not failed:
            self._order.warn_if_nothing_sampled(self._schedule.config.describe_schedule(), self._pipeline.over or was_idle)
        self._summary.print_last_line(self._pipeline.over, self._recording.stuck, self._waits)

    def _release(self) -> None:
        """Release the model, which would otherwise live as long as the monitor."""
        self._model = self._model.drop_model_references()
        del self._watched, self._live_control, self._delivery, self._pipeline

    @guard_entry_point("while recording")
    def flush(self) -> None:
        """Wait until every sample so far is recorded."""
        if not self.closed:
            self._delivery.flush()


def _note_folder(folder: str | None, monitor: Monitor, warn: Callable[[str], object]) -> None:
    """Note which monitor records to a folder. Call `warn` if another open monitor records to the same folder."""
    if folder is None:
        return
    earlier = _of_folder.get(folder)
    _of_folder[folder] = monitor
    if earlier is not None and not earlier.closed:
        warn(f"another monitor of this process records to {folder} too, as another attempt; close that monitor")


def _close_at_exit(monitor: Monitor, keep: bool) -> Callable[[], object]:
    """Close the monitor when the process ends, so that nothing is lost. Return a function that cancels this.

    Args:
        keep: whether to keep a reference to the monitor until then. Otherwise its threads might still wait for other ranks
            when the interpreter ends, and the process would end with an error.
    """
    close = monitor.close if keep else partial(_close, weakref.ref(monitor))
    atexit.register(close)
    return partial(atexit.unregister, close)


def _close(monitor: weakref.ref[Monitor]) -> None:
    if found := monitor():
        found.close()
