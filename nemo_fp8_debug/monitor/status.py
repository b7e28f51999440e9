"""status.json: what a run made of its control file, how far it is, and whether it has ended."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..options.control_file import LONGEST, Control
from ..record.schema import STATUS
from ..record.storage import Storage


@dataclass(frozen=True)
class ControlFile:
    """A control file as it was read."""

    text: str
    #: when it was written, in seconds since 1970; None if the file system does not tell
    written: float | None

    @property
    def identity(self) -> dict[str, Any]:
        """What tells it from another one, the same text written again included."""
        return {"checksum": zlib.crc32(self.text.encode()), "written": self.written}

    def is_that_of(self, control: Mapping[str, Any]) -> bool:
        """Whether the control section of a status is about this file; one of an earlier version does not say when."""
        known = {"written": self.written, **{k: v for k, v in control.items() if k in ("checksum", "written")}}
        return known == self.identity


class Status:
    """What the file holds, begun with what an earlier attempt has left."""

    def __init__(self, earlier: Mapping[str, Any]) -> None:
        """
        Args:
            earlier: the content of the file.
        """
        control, step, first = (earlier.get(name) for name in ("control", "step", "first_step"))
        #: what became of the control file
        self.control: dict[str, Any] = control if isinstance(control, dict) else {}
        #: the step that was sampled last
        self.step: int | None = step if isinstance(step, int) else None
        #: the first step of the run, from which resumed attempts go on
        self.first_step: int = first if isinstance(first, int) else 1
        #: whether the record says that its run is over
        self.ended: bool = "ended" in earlier
        self._has_begun = False
        self._left_over: dict[str, Any] = self.control if "ignored" in self.control else {}

    @classmethod
    def read(cls, storage: Storage | None) -> Status:
        """What is in a record; nothing if the file cannot be used, which a run can do without."""
        content: Any = {}
        with contextlib.suppress(Exception):
            if storage:
                with storage.open_small(STATUS) as file:
                    content = json.loads(file.read(LONGEST))
        return cls(content if isinstance(content, dict) else {})

    def start_step(self, step: int) -> None:
        """A step begins. The first one tells whether an earlier attempt is resumed, or the run starts over."""
        if not self._has_begun and step <= self.first_step:
            self._left_over, self.control, self.first_step = self.control, {}, step
        self._has_begun = True

    def is_left_over(self, file: ControlFile) -> bool:
        """Whether a control file is one that an earlier run has obeyed and that nobody has written since."""
        return "checksum" in self._left_over and file.is_that_of(self._left_over)

    def what_is_left_of(self, control: Control, file: ControlFile, step: int) -> Control:
        """A resumed run finds the control file again; the steps that it asked for are not sampled twice."""
        last = self.control.get("last_step")
        if control.steps is None or not isinstance(last, int) or not file.is_that_of(self.control):
            return control
        if step > last:
            return Control({key: value for key, value in control.changes.items() if key != "dump"})
        return replace(control, steps=last - step + 1)

    def text(self, dumped: Mapping[str, Any], waited: Mapping[str, Any], ended: bool) -> str:
        """The content of the file."""
        now = time.time()
        content: dict[str, Any] = {"step": self.step, "first_step": self.first_step, "time": now}
        content |= {"ended": now} if ended else {}
        return json.dumps(content | {"control": self.control, "dump": dict(dumped), "waited": dict(waited)}, indent=2)
