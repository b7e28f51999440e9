"""Hands what loggers get of a run to their threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.sample import Sample
from ..scalars import ScalarRecorder
from ..start_here import LayerMap, Overview
from .logger_thread import LoggerThread
from .page import ComparisonPage
from .sink import PREFIX, Sink

#: sampled steps from one map of the layers to the next; the last one is shown in any case
MAP_INTERVAL = 20
#: seconds that the end of a run waits for all loggers together
CLOSING = 120.0
#: of steps, for runs that were started here
_OF_STEPS = ("loss", "grad_norm", "lr", "loss_scale")


class LoggerRecorder:
    """A summary of each sample for loggers: computed once, in the background, and handed on without waiting."""

    in_callers_thread = False

    def __init__(
        self, sinks: Sequence[Sink], page: ComparisonPage, every_tensor: Callable[[], ScalarRecorder] | None = None
    ) -> None:
        """
        Args:
            page: that is attached at the end.
            every_tensor: makes what writes the scalars of single tensors, for loggers that are to get them too.
        """
        self._threads = [LoggerThread(sink) for sink in sinks]
        self._overview = Overview()
        self._every_tensor = every_tensor() if every_tensor else None
        self._page = page
        self._samples = 0
        self._map: LayerMap | None = None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Have all runs started or joined."""
        self._overview.open(fingerprint)
        for thread in self._threads:
            thread.submit(lambda sink: sink.open(fingerprint), needed=True)

    def record(self, sample: Sample) -> None:
        """Hand one sampled step on."""
        found = self._overview.of(sample)
        scalars = found.scalars | (self._every_tensor.scalars(sample).values if self._every_tensor else {})
        rows = {sample.step: _named(scalars)}
        texts = {PREFIX + name: text for name, text in found.texts.items()}
        self._each(lambda sink: sink.log(rows))
        self._each(lambda sink: sink.tell(texts))
        self._map = LayerMap.of(sample)
        if self._samples % MAP_INTERVAL == 0:
            self._show_map()
        self._samples += 1

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        """Hand losses on to runs that were started here; in others the host logs them."""
        known = {step: {name: of[name] for name in _OF_STEPS if name in of} for step, of in steps.items()}
        if rows := {step: _named(of) for step, of in known.items() if of}:
            self._each(lambda sink: sink.log(rows) if sink.owned else None)

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """The same with the losses of an evaluation."""
        rows = {step: _named(losses)}
        self._each(lambda sink: sink.log(rows) if sink.owned else None)

    def close(self) -> None:
        """What is left waits for `finish`, when the record is complete."""

    def finish(self, failed: bool) -> None:
        """Show the last map, attach the page, end what was started here, and wait for it, so long at the most.

        Args:
            failed: whether the run did.
        """
        self._show_map()
        self._each(self._attach, last=True)
        self._each(lambda sink: sink.close(failed), last=True)
        deadline = time.monotonic() + CLOSING
        for thread in self._threads:
            thread.finish(deadline)

    def _attach(self, sink: Sink) -> None:
        if page := self._page.path():
            sink.attach(page)

    def _show_map(self) -> None:
        shown, self._map = self._map, None
        if shown:
            self._each(lambda sink: sink.show(shown))

    def _each(self, job: Callable[[Sink], None], last: bool = False) -> None:
        for thread in self._threads:
            thread.submit(job, last=last)


def _named(scalars: Mapping[str, float | None]) -> dict[str, float]:
    """Those that are finite, as loggers get them."""
    known = {name: float(value) for name, value in scalars.items() if value is not None and math.isfinite(value)}
    return {name if name.startswith("fp8") else PREFIX + name: value for name, value in known.items()}
