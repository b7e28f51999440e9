"""Change the sampling of a running job by the control file and by triggers."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.sample import Sample
from ..core.waits import WaitTimes
from ..distributed import MonitoredRanks
from ..errors import warn
from ..options.control_file import LONGEST, NAME, ControlSettings
from ..record.schema import STATUS
from ..record.storage import FolderStorage, NotAFileError
from .schedule import SamplingSchedule, Triggers


class LiveControl:
    """Applies the control file and triggers to the schedule, in the same way on all ranks."""

    def __init__(
        self,
        schedule: SamplingSchedule,
        triggers: Triggers,
        ranks: MonitoredRanks,
        storage: FolderStorage | None,
        check: Callable[[ControlSettings], None],
        say: Callable[[str], None],
        waits: WaitTimes,
    ) -> None:
        """
        Args:
            storage: folder of the run record, or None if there is no control file.
            check: function that raises ConfigError if this run cannot apply a control file.
            say: a function that prints a line.
            waits: adds up the training thread's waiting times.
        """
        self._schedule, self._triggers, self._ranks = schedule, triggers, ranks
        self._storage, self._check, self._say = storage if ranks.writes_record else None, check, say
        self._waits = waits
        #: the control file at the last read, and its content or error; None without a file
        self._read: tuple[ControlFile, ControlSettings | Exception] | None = None
        self._known: ControlFile | None = None  # the control file at the start of the last sampled step
        #: whether this rank knows how the first rank samples the current step
        self.heard = True
        #: whether the first rank has ended sampling
        self.stopped = False
        self._status = Status.read(self._storage)

    @property
    def control_file_state(self) -> dict[str, Any]:
        """The state of the control file, as the status file reports it."""
        return self._status.control

    @property
    def earlier_attempt_ended(self) -> bool:
        """True if an earlier attempt recorded that the run ended."""
        return self._status.ended

    def read_control_file(self) -> None:
        """Read and parse the control file in the background before a sampled step."""
        if self._storage:
            try:
                with self._storage.open_file_in_one_request(NAME) as opened:
                    text = opened.read(LONGEST + 1).decode(errors="replace")
                file = ControlFile(text, self._storage.read_modification_time(NAME))
                if self._read is None or file != self._read[0]:
                    self._read = file, self._understood(text)
            except FileNotFoundError:
                if self._storage.does_anchor_exist:
                    self._read = None
            except NotAFileError as error:
                self._read = ControlFile(str(error), None), error
            except (IsADirectoryError, PermissionError):
                raise
            except Exception:  # the record cannot be reached; the record itself warns about that
                return

    def _understood(self, text: str) -> ControlSettings | Exception:
        try:
            control = ControlSettings.parse(text)
            self._check(control)
        except Exception as error:
            return error
        return control

    def start_step(self, step: int) -> None:
        """Call before a step, on all ranks. A trigger can cause the step to be sampled."""
        self._status.start_step(step)
        if why := self._triggers.find_pending_reason():
            self._schedule.trigger_samples(step, why)

    def start_sample(self, step: int, over: bool) -> None:
        """Call before a sampled step, on all ranks. Apply the control file if it has changed.

        Args:
            over: whether this rank knows that ranks are out of sync. If so, the first rank informs ranks that wait for its
                order.
        """
        if over and not self._ranks.writes_record:
            self.stopped = True
            return
        order = None if over else self._order(step)
        try:
            word = self._ranks.broadcast_value({"over": over, "control": order})
        except Exception:  # the first rank is late or at another step; its order may still come in this step
            if self._ranks.world == 1:
                raise
            self.heard = self.stopped = over
            return
        self.heard = True
        self._hear(word, step)

    def end_sample(self, step: int) -> bool:
        """Call after a sampled step. Return whether the first rank's order has arrived, even if late."""
        if not self.heard:
            self.heard = True
            try:
                self._hear(self._ranks.await_late_value(), step)
            except Exception:
                return False
        return True

    def _hear(self, word: Mapping[str, Any], step: int) -> None:
        self.stopped = word["over"]
        if word["control"] is not None:
            self._schedule.apply_control(ControlSettings.from_plain_values(word["control"]), step)

    def _order(self, step: int) -> dict[str, Any] | None:
        """Return the control file's content that all ranks must apply from `step` on. Return None if it is unchanged or
        invalid.
        """
        file, found = self._read or (None, ControlSettings())
        if file == self._known:
            return None
        self._known, file = file, file or ControlFile("", None)
        if self._status.is_left_over(file):
            self._ignore(file, step)
            return None
        if isinstance(found, Exception):
            self._status.control = {"refused": str(found), "step": step}
            warn(f"the control file changes nothing at step {step}: {found}")
            return None
        control = self._status.what_is_left_of(found, file, step)
        self._status.control = {"obeyed": str(control), "step": step, **file.identity}
        if control.steps is not None:
            self._status.control["last_step"] = step + control.steps - 1
        self._say(f"from step {step} on, {NAME} applies: {control.describe_settings()}")
        return control.plain_values

    def _ignore(self, file: ControlFile, step: int) -> None:
        assert self._storage
        path = self._storage.path(NAME)
        self._status.control = {"ignored": "it was written for an earlier run", "step": step, **file.identity}
        warn(
            f"{path} was written for an earlier run in this folder, and changes nothing: this run starts over at step "
            f"{self._status.first_step}. To apply it to this run, write it again, for example: touch {shlex.quote(path)}"
        )

    def check_sample_triggers(self, sample: Sample) -> None:
        """Pass a sample to the triggers, in the background."""
        self._triggers.check_sample(sample)

    def end_step(self, step: int, loss: Any, grad_norm: Any) -> None:
        """Call after a step, on all ranks. Pass its loss and gradient norm to the triggers."""
        self._triggers.check_step(step, loss, grad_norm)

    def write_status(self, step: int | None, dumped: Mapping[str, Any], ended: bool = False) -> None:
        """Write the state of the control file and of dumps to the status file, in the background.

        Args:
            step: the sampled step, or None if no step was sampled since the last report.
            ended: whether the run is over.
        """
        if self._storage:
            self._status.step = self._status.step if step is None else step
            with contextlib.suppress(Exception):  # if the record cannot be written, it warns itself
                self._storage.replace_file(
                    STATUS, self._status.format_status(dumped, self._waits.to_plain_values(), ended).encode()
                )


@dataclass(frozen=True)
class ControlFile:
    """A control file at the time it was read."""

    text: str
    #: seconds since 1970 when the file was written, or None if the file system does not say
    written: float | None

    @property
    def identity(self) -> dict[str, Any]:
        """Return values that identify this version of the file. They change even if the same text is written again."""
        return {"checksum": zlib.crc32(self.text.encode()), "written": self.written}

    def is_that_of(self, control: Mapping[str, Any]) -> bool:
        """Return whether a status is about this file. In earlier releases, a status does not contain the file's modification
        time.
        """
        known = {"written": self.written, **{k: v for k, v in control.items() if k in ("checksum", "written")}}
        return known == self.identity


class Status:
    """The content of the status file. It starts from the status that an earlier attempt wrote."""

    def __init__(self, earlier: Mapping[str, Any]) -> None:
        """
        Args:
            earlier: the content of the file from the earlier attempt.
        """
        control, step, first = (earlier.get(name) for name in ("control", "step", "first_step"))
        #: state of the control file that the status file reports
        self.control: dict[str, Any] = control if isinstance(control, dict) else {}
        #: the last sampled step
        self.step: int | None = step if isinstance(step, int) else None
        #: the first step of the run, which does not change when the run is resumed
        self.first_step: int = first if isinstance(first, int) else 1
        #: whether the record says that its run has ended
        self.ended: bool = "ended" in earlier
        self._has_begun = False
        self._left_over: dict[str, Any] = self.control if "ignored" in self.control else {}

    @classmethod
    def read(cls, storage: FolderStorage | None) -> Status:
        """Read the status of a record. Return an empty status if the file cannot be used, because a run does not need it."""
        content: Any = {}
        with contextlib.suppress(Exception):
            if storage:
                with storage.open_file_in_one_request(STATUS) as file:
                    content = json.loads(file.read(LONGEST))
        return cls(content if isinstance(content, dict) else {})

    def start_step(self, step: int) -> None:
        """Begin a step. The number of the first step shows whether the run resumes an earlier attempt or starts over."""
        if not self._has_begun and step <= self.first_step:
            self._left_over, self.control, self.first_step = self.control, {}, step
        self._has_begun = True

    def is_left_over(self, file: ControlFile) -> bool:
        """Return whether an earlier run already applied this control file, and the file was not written again since."""
        return "checksum" in self._left_over and file.is_that_of(self._left_over)

    def what_is_left_of(self, control: ControlSettings, file: ControlFile, step: int) -> ControlSettings:
        """Return the control file for a resumed run, without the part of `steps` that was sampled before."""
        last = self.control.get("last_step")
        if control.steps is None or not isinstance(last, int) or not file.is_that_of(self.control):
            return control
        if step > last:
            return ControlSettings({key: value for key, value in control.changes.items() if key != "dump"})
        return replace(control, steps=last - step + 1)

    def format_status(self, dumped: Mapping[str, Any], waited: Mapping[str, Any], ended: bool) -> str:
        """Return the content of the file."""
        now = time.time()
        content: dict[str, Any] = {"step": self.step, "first_step": self.first_step, "time": now}
        content |= {"ended": now} if ended else {}
        return json.dumps(content | {"control": self.control, "dump": dict(dumped), "waited": dict(waited)}, indent=2)
