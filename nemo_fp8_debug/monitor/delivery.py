"""Measure captured steps in the background, and pass the results and the scalars of all steps to the recorders."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.arguments import format_value, suggest_name
from ..core.error_guard import ErrorGuard
from ..core.sample import Sample
from ..distributed import MonitoredRanks
from ..record.dump import TensorDumper
from ..record.schema import STEP_SCALARS
from .live_control import LiveControl
from .pipeline import ReducedSample, SamplePipeline
from .recorder_queue import RecorderQueue
from .sampled_step import SampledStep

#: largest number of steps whose scalars may stay on the device between samples
STEPS_HELD = 1000
#: largest number of seconds before we record scalars, so that a killed run loses few of them
SECONDS_HELD = 15.0


class SampleDelivery:
    """Delivers sampled steps, and the scalars of every step, to the recorders of this rank."""

    def __init__(
        self,
        ranks: MonitoredRanks,
        recording: RecorderQueue,
        pipeline: SamplePipeline,
        live_control: LiveControl,
        dump: TensorDumper | None,
        errors: ErrorGuard,
        layers: Sequence[str] | None,
    ) -> None:
        """
        Args:
            layers: patterns of the layers that are measured.
        """
        self._ranks, self._recording, self._pipeline, self._live_control = ranks, recording, pipeline, live_control
        self._progress: Callable[[], dict[str, Any]] = dump.progress if dump else dict
        self._errors = errors
        self._layers = layers
        self._steps: dict[int, StepScalars] = {}
        self._flushed = time.monotonic()

    def queue_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Keep the scalars of a step."""
        with self._errors.guard("while noting the step"):
            self._steps[step] = StepScalars.noted(scalars)
            self._recording.deliver(wait=False)

    def record_validation(self, step: int, losses: Mapping[str, Any]) -> None:
        """Record the losses of an evaluation."""
        with self._errors.guard("while noting an evaluation"):
            noted = StepScalars.noted(usable_losses(losses, self._errors.warn))
            self._recording.submit_validation(step, lambda: {n: float(value) for n, value in noted.values.items()})

    def record_sampled_step(self, sampled: SampledStep, why: str | None, opened: bool) -> None:
        """Measure and record a sampled step.

        Args:
            why: the reason for sampling the step, if the interval is not the reason.
            opened: whether any rank may have measured the step.
        """
        steps, self._steps, self._flushed = self._steps, {}, time.monotonic()
        step, outcome = sampled.step, self._pipeline.submit_sample(sampled.make_captured_step(lambda: tabulate_steps(steps)))
        if not self._ranks.writes_record:
            return
        steps[step].trigger = why
        if opened:
            self._recording.submit_sample(lambda: self._sample(step, outcome, steps))
            self.write_status(step)
        self._recording.submit_steps(lambda: tabulate_steps(steps))

    def _sample(
        self, step: int, outcome: Callable[[], ReducedSample | None], steps: dict[int, StepScalars]
    ) -> Sample | None:
        found = outcome()
        if found is None:
            return None
        for other, numbers in found.steps.items():
            if other in steps:
                steps[other].of_others = numbers
        scalars = steps[step].read_numbers()
        sample = Sample(step, self._pipeline.finish_tables(found.tables, scalars), scalars, steps[step].trigger)
        self._live_control.check_sample_triggers(sample)
        if self._ranks.world > 1 and self._layers is not None and not len(sample):
            message = f"the sample of step {step} is empty: no layer on any rank matches {format_value(self._layers)}"
            self._errors.warn(message, kind="empty sample")
        return sample

    def write_status(self, step: int | None, ended: bool = False) -> None:
        """Write the status file as soon as all earlier submissions are recorded."""
        self._recording.submit_job(lambda: self._live_control.write_status(step, self._progress(), ended))

    def record_due_scalars(self) -> None:
        """Record the waiting scalars if there are many, or if the last recording was some time ago."""
        if len(self._steps) >= STEPS_HELD or time.monotonic() - self._flushed > SECONDS_HELD:
            self.flush_steps()

    def flush_steps(self) -> None:
        """Record the scalars of the steps since the last sample."""
        self._flushed = time.monotonic()
        steps, self._steps = self._steps, {}
        if steps and self._ranks.writes_record:
            with self._errors.guard("while recording steps"):
                self._recording.submit_steps(lambda: tabulate_steps(steps))

    def flush(self) -> None:
        """Wait until every sample so far is recorded."""
        with self._errors.guard("while recording"):
            self._pipeline.await_previous_sample()
            self._recording.deliver(wait=True)


def select_recordable_scalars(
    scalars: Mapping[str, Any], warn: Callable[[str], None], in_record: bool = True
) -> dict[str, Any]:
    """Return the scalars of a step that can be recorded: numbers, and tensors of one element. Do not read the tensors yet.

    Args:
        warn: function that is called for each invalid scalar, with a message that names what is valid.
        in_record: whether the scalars go to a run record, which has columns for `STEP_SCALARS` only. If not, the user's
            recorders get all names, and we warn only about names that resemble one of `STEP_SCALARS`.
    """
    found: dict[str, Any] = {}
    for name, value in scalars.items():
        number = _number(value)
        if number is not None:
            found[name] = number
        elif value is not None:
            warn(f"{name} of a step is not recorded: it is not a scalar but {_described(value)}")
    for name in sorted(found.keys() - STEP_SCALARS):
        meant = _meant(name)
        if meant or in_record:
            warn(f"{name} of a step is not in the record{meant}; the record takes {', '.join(STEP_SCALARS)}")
    return found


def usable_losses(losses: Mapping[str, Any], warn: Callable[[str], None]) -> dict[str, Any]:
    """Return the losses of an evaluation that can be recorded. Call `warn` for the other losses."""
    found = {name: _number(value) for name, value in losses.items()}
    for name in losses:
        if found[name] is None:
            warn(f"{name} of an evaluation is not recorded: it is not a scalar but {_described(losses[name])}")
    return {name: value for name, value in found.items() if value is not None}


@functools.lru_cache(maxsize=256)
def _meant(name: str) -> str:
    return suggest_name(name, STEP_SCALARS)


def _number(value: Any) -> Any:
    """Return a number or a tensor of one element, or None for anything else."""
    if torch.is_tensor(value):
        return value if value.numel() == 1 and not value.is_complex() and not value.is_meta else None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except Exception:  # more than one element, or too large for a float
        return None
    return value if isinstance(value, (int, float)) else number


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of {value.numel()} elements" if torch.is_tensor(value) and value.numel() != 1 else kind


@dataclass
class StepScalars:
    """The scalars of one step. The training thread collects them, and a background thread reads their values."""

    #: seconds since 1970
    time: float
    #: numbers, and tensors of one element that stay on their device until they are read
    values: Mapping[str, Any]
    #: the reason for sampling the step, if the interval is not the reason
    trigger: str | None = None
    #: numbers that only other ranks have, such as the loss in the last pipeline stage
    of_others: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def noted(cls, scalars: Mapping[str, Any]) -> StepScalars:
        """Copy scalars, because their tensors may change later."""
        values = {name: value.detach().clone() if torch.is_tensor(value) else value for name, value in scalars.items()}
        return cls(time.time(), values)

    def read_numbers(self) -> dict[str, float]:
        """Return the numbers. If a number is still on the device, wait for the device."""
        numbers = {**self.of_others, "time": self.time, **{name: float(value) for name, value in self.values.items()}}
        scale = numbers.get("grad_scale", 1.0)
        if not math.isfinite(scale) or scale == 0:  # the factor differs between micro-batches, or overflowed
            del numbers["grad_scale"]
        return numbers

    def make_row(self) -> dict[str, Any]:
        """Return the columns of the `steps` table."""
        return self.read_numbers() | ({"trigger": self.trigger} if self.trigger else {})


def tabulate_steps(steps: Mapping[int, StepScalars]) -> dict[int, dict[str, Any]]:
    """Return the columns of the `steps` table, by step."""
    return {step: scalars.make_row() for step, scalars in steps.items()}
