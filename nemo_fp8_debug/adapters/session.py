"""The common part of the adapters: a monitor that starts with a run, and ends when the run or the process ends."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from ..core.error_guard import ErrorGuard
from ..errors import ConfigError, warn
from ..monitor.monitor import Monitor
from ..options.config import Config


def start_monitor(make: Callable[[], Monitor], raises: bool) -> Monitor | None:
    """Return the monitor that `make` returns. If `make` fails, warn and return None.

    Args:
        raises: whether an error of `make` ends the run, instead of causing a warning. A ConfigError always does.

    Raises:
        ConfigError: as for `Monitor`. Either all ranks raise it or none does, because a rank that continued
            without the others would wait forever.
    """
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:
        if raises:
            raise
        warn(f"this run is not monitored, because of an error at its start: {type(error).__name__}: {error}")
        return None


class FrameworkRun:
    """A run of a framework. Before `start`, this object has only plain values, so that launchers can copy and pickle it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """
        Args:
            options: fields of `Config`.

        Raises:
            ConfigError: an option cannot be used.
        """
        self.errors = ErrorGuard(Config(**options).on_error)
        self._options = dict(options)
        self._monitor: Monitor | None = None

    def start(
        self, model: nn.Module | Sequence[nn.Module], folder: str | None, steps: tuple[int, int] | None = None
    ) -> bool:
        """Find the GEMMs and open the record before the first step. Close an earlier run that was interrupted.

        Args:
            model: as for `Monitor`.
            folder: the framework's output folder. The record goes to `fp8_debug` in it, unless `output` is set.
            steps: the first and the last step of the run, if the framework provides them.

        Returns:
            True if the run is monitored.

        Raises:
            ConfigError: as for `Monitor`.
        """
        self.close()
        output = self._options.get("output") or os.path.join(folder or ".", "fp8_debug")
        self._monitor = start_monitor(lambda: Monitor(model, **{**self._options, "output": output}), self.errors.raises)
        if self._monitor is None:
            return False
        if steps:
            self._monitor.expect_steps(*steps)
        # Frameworks send no event when an exception ends the run, so also close the monitor when the process ends.
        atexit.register(self.close)
        return True

    def begin_step(self, step: int) -> None:
        """Begin a step. Call this before the forward pass."""
        self.errors.step = partial(int, step)  # a partial can be pickled
        if self._monitor:
            self._monitor.begin_step(step)

    def watch_loss(self, loss: Any, tokens: Any = 1) -> None:
        """Call `Monitor.watch_loss`."""
        if self._monitor:
            self._monitor.watch_loss(loss, tokens)

    def end_step(self, **scalars: Any) -> None:
        """End a step. Call this after the backward pass, with scalars as for `Monitor.end_step`."""
        if self._monitor:
            self._monitor.end_step(**scalars)

    def report_validation(self, step: int | None, losses: Mapping[str, Any]) -> None:
        """Call `Monitor.report_validation`."""
        if self._monitor:
            self._monitor.report_validation(step, **losses)

    def close(self) -> None:
        """End the run, and record all remaining data."""
        atexit.unregister(self.close)
        if self._monitor:
            self._monitor.close()
            self._monitor = None
