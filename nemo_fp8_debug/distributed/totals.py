"""Sums of scalars over all ranks, at every step that ranks decide something by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..core.waits import LOSSES
from .gloo import Group
from .patience import Patience


class Totals:
    """Adds up over the run's own group on GPUs, and over one of the monitor's on CPUs."""

    def __init__(self, waits: Patience) -> None:
        """
        Args:
            waits: of the training thread.
        """
        self._patience = waits
        self._everyone: Group | None = None
        self._apart = False

    def of(self, values: Sequence[torch.Tensor], world: int, connect: Callable[[float], Group]) -> torch.Tensor:
        """Sums over all ranks, float64 on the device of the run; called on all ranks, at the same steps.

        On a GPU they are not yet waited for.

        Args:
            values: scalar tensors.
            world: ranks that take part.
            connect: makes a group of them, within so many seconds.

        Raises:
            TimeoutError: a rank does not take part in time.
        """
        sums = torch.stack([value.double() for value in values])
        if world > 1 and sums.device.type != "cpu":
            # The run's own: all ranks take part in each, or the next one of the run would meet another.
            dist.all_reduce(sums)
        elif world > 1 and not self._apart:
            try:
                self._add_up(sums, connect)
            except Exception as error:
                self._apart = True
                raise TimeoutError(f"not all ranks reported their loss: {error}") from error
        return sums

    def _add_up(self, sums: torch.Tensor, connect: Callable[[float], Group]) -> None:
        if self._everyone is None:
            with self._patience.spending(LOSSES) as seconds:
                self._everyone = connect(seconds)
        with self._patience.spending(LOSSES) as seconds:
            self._everyone.add_up(sums, seconds)
        self._patience.renew()

    def close(self, in_sync: bool) -> None:
        """Part.

        Args:
            in_sync: all ranks have done the same.
        """
        if self._everyone:
            self._everyone.close(in_sync)
