"""From what was captured of a step to the recorders: measured in the background, with the scalars of all steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..core.arguments import shown
from ..core.error_guard import ErrorGuard
from ..core.keys import UNCAST
from ..core.sample import Sample
from ..distributed import Ranks
from ..measurement.states import state_columns
from ..numerics.metric_columns import unscaled
from ..record.dump import TensorDump
from .live_control import LiveControl
from .pipeline import Outcome, Pipeline
from .recorder_queue import Recording
from .sampled_step import SampledStep
from .step_scalars import StepScalars, rows, usable_losses

_Columns = Mapping[str, Sequence[Any]]

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
        measured, scalars = found.measured, steps[step].numbers()
        metrics: _Columns
        what_if: _Columns
        metrics, what_if, copies = (
            columns | unscaled(columns, scalars.get("grad_scale"))
            for columns in (measured.metrics, measured.what_if, measured.copies)
        )
        histograms: _Columns = measured.histograms
        tables: dict[str, Mapping[str, Sequence[Any]]] = {"copies": copies}
        tables |= {name: getattr(measured, name) for name in ("outputs", "verification", "replicas", "block_scales")}
        for name, roles in UNCAST.items():
            (metrics, own), (what_if, tried) = (_apart(columns, roles) for columns in (metrics, what_if))
            if own:
                histograms, tables[f"{name.removesuffix('s')}_histograms"] = _apart(histograms, roles)
                tables[name] = _joined(own, tried)
        if of_states := tables.get("states"):
            tables["states"] = {**of_states, **state_columns(of_states, measured.norms, measured.updates)}
        if of_activations := tables.get("activations"):
            tables["activations"] = _with_own_metrics(of_activations, measured.activations)
        sample = Sample(step, metrics, scalars, histograms, what_if, steps[step].trigger, **tables)
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


def _apart(columns: _Columns, roles: Collection[str]) -> tuple[_Columns, _Columns]:
    """Rows of other roles, and of these; empty if there are none."""
    of_these = [role in roles for role in columns.get("role", ())]
    if not any(of_these):
        return columns, {}
    return _rows(columns, [not mine for mine in of_these]), _rows(columns, of_these)


def _rows(columns: _Columns, kept: Sequence[bool]) -> dict[str, list[Any]]:
    return {name: list(itertools.compress(values, kept)) for name, values in columns.items()} if any(kept) else {}


def _joined(in_use: _Columns, tried: _Columns) -> dict[str, list[Any]]:
    """Rows of both; None in columns that those of what-if recipes lack."""
    none = [None] * len(tried.get("layer", ()))
    return {name: [*values, *tried.get(name, none)] for name, values in in_use.items()}


def _with_own_metrics(columns: _Columns, further: _Columns) -> dict[str, Sequence[Any]]:
    """Rows of activations with the metrics that they alone have."""
    names = [name for name in further if name not in ("layer", "role")]
    found = {key: i for i, key in enumerate(zip(further.get("layer", ()), further.get("role", ()), strict=True))}
    keys = zip(columns["layer"], columns["role"], columns["scale_source"], strict=True)
    at = [found.get((layer, role)) if source != "what-if" else None for layer, role, source in keys]
    return {**columns, **{name: [None if i is None else further[name][i] for i in at] for name in names}}
