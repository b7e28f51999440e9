"""The JSON of the command: what ran where, each attempt at each part. Nothing in it is ever overwritten."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
#: a part whose last attempt ended so does not run again
FINISHED = ("done", "not on this device", "not emulated")
#: what all parts of one file share, and how to name it
SHARED = {"emulated": "emulation", "device": "device", "sources": "sources", "versions": "versions"}


class Refused(Exception):
    """In one line: what is wrong, with what, and what to do."""


@dataclass
class Results:
    """A file of results; `add` writes it."""

    path: Path
    data: dict[str, Any]

    @classmethod
    def open(cls, path: Path, resume: Path | None, about: dict[str, Any]) -> Results:
        """Begin a file, or go on with one.

        Args:
            path: is written; if it exists it is gone on with.
            resume: is read instead, and left as it is; None for `path` itself.
            about: of this machine and these sources, as `probe` tells.

        Raises:
            Refused: the file to go on with cannot be read, or belongs to something else.
        """
        if resume and path.exists() and not (resume.exists() and path.samefile(resume)):
            raise Refused(f"{path} exists already; leave --resume out to go on with it, or name another --results")
        old = resume or path
        if resume and not old.exists():
            raise Refused(f"{old} does not exist; --resume names the JSON of an earlier call")
        data = {"schema": SCHEMA, **about, "parts": {}}
        if old.exists():
            recorded = read(old)
            for key, name in SHARED.items():
                if recorded[key] != about[key]:
                    other = f"{name} ({_difference(recorded[key], about[key])})"
                    raise Refused(f"{old} was recorded with other {other}; to begin anew, name another --results")
            data["parts"] = recorded["parts"]
        return cls(path, data)

    def finished(self, part: str) -> bool:
        """Whether a part need not run again."""
        return any(attempt["status"] in FINISHED for attempt in self.data["parts"].get(part, [])[-1:])

    def add(self, part: str, attempt: dict[str, Any]) -> None:
        """Note an attempt behind earlier ones, and write the file."""
        self.data["parts"].setdefault(part, []).append(attempt)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write(self.path, json.dumps(self.data, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Results of an earlier call.

    Raises:
        Refused: there are none in the file.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read ({error}); expected a JSON that run.sh wrote") from None
    if not isinstance(data, dict) or not {*SHARED, "parts"} <= data.keys() or data.get("schema") != SCHEMA:
        raise Refused(f"{path} is not a JSON of run.sh with schema {SCHEMA}; name another file")
    return data


def write(path: Path, text: str) -> None:
    """Replace a file as a whole: whoever reads it finds the old text or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def last_attempts(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The attempt that counts of each part: the last."""
    return ((name, attempts[-1]) for name, attempts in data["parts"].items())


def _difference(old: Any, new: Any) -> str:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"{_short(old)}, here {_short(new)}"
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    return ", ".join(f"{name} {_short(old.get(name))}, here {_short(new.get(name))}" for name in names)


def _short(value: Any) -> str:
    return "none" if value is None else str(value.get("name", value) if isinstance(value, dict) else value)


def broken(attempt: dict[str, Any], emulated: bool) -> list[str]:
    """Promises that an attempt did not keep; those of time say nothing over emulated kernels."""
    measures = attempt.get("results", {}).get("measures", [])
    return [m["what"] for m in measures if m["kept"] is False and not (emulated and m["of_time"])]
