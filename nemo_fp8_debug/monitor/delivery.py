"""From what was captured of a step to the recorders: measured in the background, with the scalars of all steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.arguments import shown
from ..core.error_guard import ErrorGuard
from ..core.sample import Sample
from ..distributed import Ranks
from ..record.dump import TensorDump
from .live_control import LiveControl
from .pipeline import Outcome, Pipeline
from .recorder_queue import Recording
from .sampled_step import SampledStep
from .step_scalars import StepScalars, rows, usable_losses

#: steps whose scalars are kept on the device between samples, at the most
STEPS_HELD = 1000
#: seconds after which they are recorded all the same, so that a run that is killed has not lost more
SECONDS_HELD = 15.0


class Delivery:
    """Takes sampled steps, and the scalars of every step, to the recorders of this rank."""

    def __init__(
        self,
        ranks: Ranks,
        recording: Recording,
        pipeline: Pipeline,
        live_control: LiveControl,
        dump: TensorDump | None,
        errors: ErrorGuard,
        layers: Sequence[str] | None,
    ) -> None:
        """
        Args:
            layers: patterns of those that are looked at.
        """
        self._ranks, self._recording, self._pipeline, self._live_control = ranks, recording, pipeline, live_control
        self._progress: Callable[[], dict[str, Any]] = dump.progress if dump else dict
        self._errors = errors
        self._layers = layers
        self._steps: dict[int, StepScalars] = {}
        self._flushed = time.monotonic()

    def note(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Keep the scalars of a step."""
        with self._errors.guard("while noting the step"):
            self._steps[step] = StepScalars.noted(scalars)
            self._recording.deliver(wait=False)

    def note_validation(self, step: int, losses: Mapping[str, Any]) -> None:
        """Record the losses of an evaluation."""
        with self._errors.guard("while noting an evaluation"):
            noted = StepScalars.noted(usable_losses(losses, self._errors.warn))
            self._recording.submit_validation(step, lambda: {n: float(value) for n, value in noted.values.items()})

    def submit(self, sampled: SampledStep, why: str | None, opened: bool) -> None:
        """Measure a sampled step, and record it.

        Args:
            why: it was sampled out of turn.
            opened: whether any rank can have looked at it.
        """
        steps, self._steps, self._flushed = self._steps, {}, time.monotonic()
        step, outcome = sampled.step, self._pipeline.submit(sampled.captured(lambda: rows(steps)))
        if not self._ranks.writes:
            return
        steps[step].trigger = why
        if opened:
            self._recording.submit(lambda: self._sample(step, outcome, steps))
            self.report(step)
        self._recording.submit_steps(lambda: rows(steps))

    def _sample(self, step: int, outcome: Callable[[], Outcome | None], steps: dict[int, StepScalars]) -> Sample | None:
        found = outcome()
        if found is None:
            return None
        for other, numbers in found.steps.items():
            if other in steps:
                steps[other].of_others = numbers
        scalars = steps[step].numbers()
        sample = Sample(step, self._pipeline.finish(found.tables, scalars), scalars, steps[step].trigger)
        self._live_control.see_sample(sample)
        if self._ranks.world > 1 and self._layers is not None and not len(sample):
            message = f"the sample of step {step} is empty: no layer on any rank matches {shown(self._layers)}"
            self._errors.warn(message, kind="empty sample")
        return sample

    def report(self, step: int | None, ended: bool = False) -> None:
        """Write the status file, once what was submitted so far is recorded."""
        self._recording.submit_job(lambda: self._live_control.report(step, self._progress(), ended))

    def relieve(self) -> None:
        """Record the scalars of steps if there are many of them, or if it is a while since the last ones were."""
        if len(self._steps) >= STEPS_HELD or time.monotonic() - self._flushed > SECONDS_HELD:
            self.flush_steps()

    def flush_steps(self) -> None:
        """Record the scalars of the steps since the last sample."""
        self._flushed = time.monotonic()
        steps, self._steps = self._steps, {}
        if steps and self._ranks.writes:
            with self._errors.guard("while recording steps"):
                self._recording.submit_steps(lambda: rows(steps))

    def flush(self) -> None:
        """Wait until every sample so far is recorded."""
        with self._errors.guard("while recording"):
            self._pipeline.settle()
            self._recording.deliver(wait=True)
