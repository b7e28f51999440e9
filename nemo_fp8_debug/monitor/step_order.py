"""What a training loop tells of its steps: numbers that are whole and grow, and an end for each beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.arguments import shown, whole_number
from ..options.config import Config

#: the names of the record's files have room for 18 digits
_LARGEST = 10**18 - 1


class StepOrder:
    """Checks the calls of a loop. A mistake costs the step's sample and one warning of its kind, and never raises."""

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        """
        Args:
            warn: takes a message and its kind, and says each kind once.
        """
        self._warn = warn
        self._begun: int | None = None
        #: the last step that began with a valid number; -1: none did
        self.current = -1
        #: whether a step was begun and neither ended nor given up
        self.is_open = False
        #: whether the loop has called anything
        self.used = False
        #: whether a step was sampled
        self.sampled = False
        #: how many steps were begun with a valid number and ended, and the first and the last of them
        self.ended, self.first, self.last = 0, -1, -1

    def expect(self, first: int, last: int, config: Config) -> None:
        """Say so before the run if none of its steps, both inclusive, will be sampled."""
        if not config.triggers and first <= last and not config.samples_any(first, last):
            self._warn(
                f"no step of this run will be sampled: it takes steps {first} to {last}, and {config.turns()} is "
                "sampled; choose a smaller interval",
                "nothing sampled",
            )

    def warn_of_unnamed(self, unnamed: Sequence[Any], called: str) -> None:
        """Say that values without a name were given, if there are any."""
        if unnamed:
            self._warn(f"what {called} was given without a name is not recorded: use {called}(loss=...)", "unnamed")

    def begin(self, given: Any) -> int | None:
        """A step begins; returns its number, or None if that is not valid."""
        self.warn_if_open()
        self.is_open, self._begun, self.used = True, None, True
        step = whole_number(given)
        if step is None or not 0 <= step <= _LARGEST:
            message = (
                f"step {shown(given)} is not sampled: the number of a step is a whole number, at least 0 and below 10**18"
            )
            self._warn(message, "invalid step")
        elif self.ended and step <= self.last:
            self._warn(
                f"step {step} is not sampled, since step {self.last} was before it: numbers of steps must grow. "
                "After a return to an earlier checkpoint, close this monitor and start another one in the same folder",
                "step goes back",
            )
        else:
            self._begun = self.current = step
        return self._begun

    def end(self) -> int | None:
        """A step ends; returns its number, or None if it had no valid one, or never began."""
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
        """The step broke off."""
        self.is_open, self._begun = False, None

    def warn_if_open(self) -> None:
        """Say that a step was not ended, if one was not."""
        if self.is_open:
            which = "a step" if self._begun is None else f"step {self._begun}"
            self._warn(
                f"{which} was begun and not ended, and its sample is dropped: call end_step after the backward pass",
                "no end",
            )

    def warn_if_nothing_sampled(self, turns: str, over: bool) -> None:
        """Say so at the end of a run.

        Args:
            turns: which steps are sampled, in words.
            over: whether sampling ended early, for a reason that was told.
        """
        if not self.used:
            message = "the monitor was told of no step: call begin_step and end_step around each training step"
            self._warn(message, "no step")
        elif self.ended and not self.sampled and not over:
            self._warn(
                f"no step was sampled: the run took {self.ended} steps ({self.first} to {self.last}), and {turns} is "
                "sampled; choose a smaller interval",
                "nothing sampled",
            )
