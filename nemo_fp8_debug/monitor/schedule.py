"""Which steps are sampled and dumped, and why: the same answer on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..options.config import Config
from ..options.control_file import Control


@dataclass(frozen=True)
class Window:
    """Steps that are sampled, every one of them, beside those whose turn it is."""

    first: int
    #: inclusive
    last: int
    why: str
    #: layers to dump, as patterns
    dump: Sequence[str]


class Schedule:
    """Starts from the configuration; control files and triggers change it."""

    def __init__(self, config: Config) -> None:
        self._configured = config
        #: what is in force
        self.config = config
        self._windows: list[Window] = []

    def samples(self, step: int) -> bool:
        """Whether `step` is sampled."""
        return self.config.samples(step) or any(w.first <= step <= w.last for w in self._windows)

    def why(self, step: int) -> str | None:
        """Why `step` is sampled, where it is by more than its turn."""
        return "; ".join(w.why for w in self._windows if w.first <= step <= w.last) or None

    def dumped(self, step: int) -> list[str]:
        """Patterns of the layers that are dumped at `step`."""
        regular = list(self.config.dump) if self.config.samples(step) else []
        return regular + [p for w in self._windows if w.first <= step <= w.last for p in w.dump]

    def trigger(self, step: int, why: str) -> None:
        """Sample `step` and those after it, because of `why`."""
        self._windows = [w for w in self._windows if w.last >= step]
        last = step + self._configured.trigger_steps - 1
        self._windows.append(Window(step, last, why, self._configured.trigger_dump))

    def obey(self, control: Control, step: int) -> Window | None:
        """Do as a control file says, from `step` on; returns the steps that it has sampled, if it names a number."""
        changes = dict(control.changes)
        self._windows = [w for w in self._windows if w.last >= step and not w.why.startswith("control")]
        if control.steps is None:
            self.config = replace(self._configured, **changes)
            return None
        window = Window(step, step + control.steps - 1, "control file", tuple(changes.pop("dump", ())))
        self.config = replace(self._configured, **changes)
        self._windows.append(window)
        return window
