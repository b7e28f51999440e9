"""What the adapters have in common: a monitor that starts with a run of the host, and ends with it or with the process."""

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
    """Return what `make` does; warn and return None if it fails.

    Args:
        raises: an error ends the run.

    Raises:
        ConfigError: as for `Monitor`; on all ranks, or none: one that went on alone would wait for the others for ever.
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


class HostRun:
    """A run of the host. Until it starts it holds plain values only, so that launchers can copy and pickle it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """
        Args:
            options: fields of `Config`.

        Raises:
            ConfigError: one cannot be used.
        """
        self.errors = ErrorGuard(Config(**options).on_error)
        self._options = dict(options)
        self._monitor: Monitor | None = None

    def start(
        self, model: nn.Module | Sequence[nn.Module], folder: str | None, steps: tuple[int, int] | None = None
    ) -> bool:
        """Before the first step: find the GEMMs and open the record; a run before this one that broke off is closed.

        Args:
            model: as for `Monitor`.
            folder: where the host writes; the record goes to `fp8_debug` in it, unless `output` says otherwise.
            steps: the first and the last one that the run will take, if the host knows them.

        Returns:
            Whether the run is monitored.

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
        # These hosts tell no one of an exception that ends the run.
        atexit.register(self.close)
        return True

    def begin_step(self, step: int) -> None:
        """Before the forward pass."""
        self.errors.step = partial(int, step)  # which can be pickled
        if self._monitor:
            self._monitor.begin_step(step)

    def watch_loss(self, loss: Any, tokens: Any = 1) -> None:
        """As `Monitor.watch_loss`."""
        if self._monitor:
            self._monitor.watch_loss(loss, tokens)

    def end_step(self, **scalars: Any) -> None:
        """After the backward pass; scalars as for `Monitor.end_step`."""
        if self._monitor:
            self._monitor.end_step(**scalars)

    def report_validation(self, step: int | None, losses: Mapping[str, Any]) -> None:
        """As `Monitor.report_validation`."""
        if self._monitor:
            self._monitor.report_validation(step, **losses)

    def close(self) -> None:
        """The run is over: record what is left."""
        atexit.unregister(self.close)
        if self._monitor:
            self._monitor.close()
            self._monitor = None
