"""What changes the course of a run's sampling while it goes on: the control file and the triggers."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .control import LONGEST, NAME, STATUS, Control
from .distributed import Ranks
from .errors import warn
from .record.place import Place
from .sample import Sample
from .schedule import Schedule
from .triggers import Triggers


class Steering:
    """Tells the schedule what the control file and the triggers say, on all ranks alike."""

    def __init__(
        self, schedule: Schedule, triggers: Triggers, ranks: Ranks, place: Place | None, check: Callable[[Control], None]
    ) -> None:
        """
        Args:
            place: folder of the run record; None: there is none, and no control file.
            check: raises ConfigError where a control file cannot be obeyed in this run.
        """
        self._schedule, self._triggers, self._ranks = schedule, triggers, ranks
        self._place, self._check = place if ranks.writes else None, check
        self._text: str | None = None  # the control file as it was read last
        self._known: str | None = None  # as it was when a sampled step last began
        #: whether the first rank has said how to sample the step that is under way
        self.heard = True
        #: whether it has said that no step is sampled any longer
        self.stopped = False
        #: what became of the control file
        self.state: dict[str, Any] = self._earlier_state()

    def _earlier_state(self) -> dict[str, Any]:
        """What an earlier start of the run made of the control file."""
        try:
            state = json.loads(self._place.read(STATUS))["control"] if self._place else {}
            return state if isinstance(state, dict) else {}
        except Exception:  # whatever it holds, the run can do without
            return {}

    def read(self) -> None:
        """Read the control file; called in the background before a sampled step."""
        if self._place:
            try:
                with self._place.open(NAME) as file:
                    self._text = file.read(LONGEST + 1).decode(errors="replace")
            except FileNotFoundError:
                if self._place.is_there:
                    self._text = None
            except (IsADirectoryError, PermissionError):
                raise
            except Exception:  # the record cannot be reached, and says so
                return

    def start_step(self, step: int) -> None:
        """Before a step, on all ranks: triggers may have it sampled."""
        if why := self._triggers.fired():
            self._schedule.trigger(step, why)

    def start_sample(self, step: int, over: bool) -> None:
        """Before a sampled step, on all ranks: do as the control file says, if it is new.

        Args:
            over: whether this rank knows that ranks have come apart; the first one tells those that wait for its word.
        """
        if over and not self._ranks.writes:
            self.stopped = True
            return
        order = None if over else self._order(step)
        try:
            word = self._ranks.share({"over": over, "control": order})
        except Exception:  # the first rank is late, or at another step: its word comes by the end of the step, or never
            self.heard = False
            return
        self.heard = True
        self._hear(word, step)

    def end_sample(self, step: int) -> bool:
        """After a sampled step: whether all ranks have heard what the first one had to say, if late."""
        if not self.heard:
            self.heard = True
            try:
                self._hear(self._ranks.shared_late(), step)
            except Exception:
                return False
        return True

    def _hear(self, word: Mapping[str, Any], step: int) -> None:
        self.stopped = word["over"]
        if word["control"] is not None:
            self._schedule.obey(Control.parse(word["control"]), step)

    def _order(self, step: int) -> str | None:
        """What all ranks are to obey from `step` on; None where the control file is as before, or cannot be used."""
        if self._text == self._known:
            return None
        self._known, text = self._text, self._text or ""
        try:
            control = self._what_is_left_of(Control.parse(text), text, step)
            self._check(control)
        except Exception as error:  # the other ranks wait for a word in any case
            self.state = {"refused": str(error), "step": step}
            warn(f"the control file changes nothing at step {step}: {error}")
            return None
        self.state = {"obeyed": str(control), "step": step, "checksum": zlib.crc32(text.encode())}
        if control.steps is not None:
            self.state["last_step"] = step + control.steps - 1
        return str(control)

    def _what_is_left_of(self, control: Control, text: str, step: int) -> Control:
        """A resumed run finds the control file again; the steps that it asked for are not sampled twice."""
        last = self.state.get("last_step")
        if self.state.get("checksum") != zlib.crc32(text.encode()) or control.steps is None or not isinstance(last, int):
            return control
        if step > last:
            return Control({key: value for key, value in control.changes.items() if key != "dump"})
        return replace(control, steps=last - step + 1)

    def see_sample(self, sample: Sample) -> None:
        """Let triggers see a sample; called in the background."""
        self._triggers.see_sample(sample)

    def end_step(self, step: int, loss: Any) -> None:
        """After a step, on all ranks: let triggers see its loss."""
        self._triggers.see_loss(step, loss)

    def report(self, step: int, dumped: Mapping[str, Any]) -> None:
        """Tell those who watch the record how the control file fared and how far dumps are; called in the background."""
        if self._place:
            status = {"step": step, "time": time.time(), "control": self.state, "dump": dict(dumped)}
            with contextlib.suppress(Exception):  # a record that cannot be written says so
                self._place.write(STATUS, json.dumps(status, indent=2).encode())
