"""Find and name records below folders. Only this module turns a name in a request into a file."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.threads import run_in_background
from ...errors import ConfigError
from ...record.schema import parse_attempt_number
from ...record.storage import TABLES, FolderStorage, find_link_out_of_folder, is_link_out_of_folder, join_path
from ..web import NotFoundError, quote_text

#: name of the folder in which a callback puts its record; names of runs leave out this folder
_USUAL = "fp8_debug"
#: least time between two searches: in seconds, and as a multiple of the last search's duration
_PAUSE, _REST = 3.0, 10.0
#: longest time in seconds that requests wait for the first search, counted from its beginning
_FIRST = 2.0
_URL = re.compile(r"[a-zA-Z][0-9a-zA-Z.+-]*://")
_SEVERAL = "name the place itself: `nemo-fp8-debug view PLACE`, or TensorBoard's --logdir_spec name:target"


@dataclass(frozen=True)
class LogdirRoot:
    """A folder that TensorBoard shows. The names of its runs begin with `name`."""

    name: str
    address: str


def parse_logdir_flags(flags: Any) -> list[LogdirRoot]:
    """Return the roots in --logdir and --logdir_spec, parsed like in TensorBoard."""
    logdir, spec = getattr(flags, "logdir", None), getattr(flags, "logdir_spec", None)
    if logdir:
        return [LogdirRoot("", os.path.expanduser(logdir))]
    return [_specified(part) for part in (spec or "").split(",") if part]


def _specified(part: str) -> LogdirRoot:
    named = ":" in part and not _URL.match(part) and not part.startswith("/") and not os.path.splitdrive(part)[0]
    name, path = part.split(":", 1) if named else ("", part)
    return LogdirRoot(name, path if _URL.match(path) else os.path.expanduser(path))


@dataclass
class FoundRecords:
    """The result of a search of all roots."""

    records: dict[str, FolderStorage] = field(default_factory=dict)
    #: reasons why folders are not read, by folder name
    refused: dict[str, str] = field(default_factory=dict)


class LogdirRecords:
    """The records below some roots, searched in the background on demand."""

    def __init__(self, roots: Sequence[LogdirRoot], warm: Callable[[FolderStorage], None]) -> None:
        """
        Args:
            warm: function that is called in the background with each record that was found.
        """
        self.roots, self._warm = roots, warm
        self._found = FoundRecords()
        self._is_looking = False
        self._lock = threading.Lock()
        self._some = threading.Event()  # a record was found, or the first search is over
        self._done = threading.Event()  # the first search is over
        self._next = 0.0
        self._begun = time.monotonic()

    def list_known_records(self) -> FoundRecords:
        """Return the known records. Search again after some seconds, and wait a little for the first search."""
        self.start_search()
        self._done.wait(max(0.0, self._begun + _FIRST - time.monotonic()))
        return self._found

    def has_records(self, wait: float) -> bool:
        """Return True if a record is known. Wait up to `wait` seconds for the first record."""
        self.start_search()
        self._some.wait(wait)
        return bool(self._found.records)

    def await_first_search(self) -> None:
        """Wait until all roots have been searched once."""
        self.start_search()
        self._done.wait()

    def get_record(self, name: str) -> FolderStorage:
        """Return the record of a run.

        Raises:
            NotFoundError: there is no run of that name, or a link has replaced it.
        """
        records = self.list_known_records().records
        if name not in records:
            some = ", ".join(quote_text(known) for known in list(records)[:3]) or "none yet"
            raise NotFoundError(f"There is no run {quote_text(name)} below the logdir. Runs found so far: {some}.")
        if _was_swapped(records[name]):
            raise NotFoundError(f"A link has replaced the folder of run {quote_text(name)}; put the folder back.")
        return records[name]

    def start_search(self) -> None:
        """Begin to search for records in the background, if the last search is some seconds old."""
        with self._lock:
            if not self._is_looking and time.monotonic() >= self._next:
                if not self._done.is_set():
                    self._begun = time.monotonic()
                self._is_looking = True
                run_in_background("fp8-logdir", self._look)

    def _look(self) -> None:
        began, found = time.monotonic(), FoundRecords()
        if not self._done.is_set():
            self._found = found  # requests can read the results while the first search adds them
        try:
            for root in self.roots:
                for name, storage in _records(root, found.refused):
                    found.records[name] = storage
                    self._some.set()
        finally:
            self._found = found
            self._some.set()
            self._done.set()
            for storage in found.records.values():
                self._warm(storage)
            now = time.monotonic()
            with self._lock:
                self._next = now + max(_PAUSE, _REST * (now - began))
                self._is_looking = False


def _records(root: LogdirRoot, refused: dict[str, str]) -> Iterator[tuple[str, FolderStorage]]:
    """Yield names and folders of the records of a root. Add folders that are not read to `refused`."""
    try:
        storage = FolderStorage(os.path.realpath(root.address) if "://" not in root.address else root.address)
    except ConfigError as error:
        refused[root.name or root.address] = f"{error}; install the driver or name another folder."
        return
    taken: set[str] = set()
    for folder in _walk(storage, root, refused):
        name = _name(root, folder.removesuffix(_USUAL).rstrip("/") if folder.rpartition("/")[2] == _USUAL else folder)
        if name in taken:  # a record inside another record's folder
            name = _name(root, folder)
        taken.add(name)
        yield name, storage.open_subfolder(folder) if folder else storage


def _name(root: LogdirRoot, folder: str) -> str:
    return join_path(root.name, folder) or "."


def _walk(storage: FolderStorage, root: LogdirRoot, refused: dict[str, str]) -> Iterator[str]:
    """Yield folders with a record, breadth first."""
    waiting = [""]
    for folder in waiting:
        try:
            entries = list(storage.list_entries(folder))
        except Exception as error:  # drivers of remote file systems raise their own errors
            if not isinstance(error, FileNotFoundError):  # deleted meanwhile
                refused[_readable(_name(root, folder))] = f"The folder cannot be read ({_said(error)}); fix its permissions."
            continue
        links = [name for name, kind in entries if kind == "link"]
        out = {name for name in links if is_link_out_of_folder(storage, join_path(folder, name))}
        is_record = any(kind != "folder" and parse_attempt_number(name) is not None for name, kind in entries)
        if is_record and (bad := find_link_out_of_folder(storage, folder)):
            refused[_readable(_name(root, folder))] = f"{bad} of the record is a link out of the logdir; {_SEVERAL}."
        elif is_record:
            yield folder
        else:
            for name in out:
                if storage.is_local and os.path.isdir(storage.path(join_path(folder, name))):
                    refused[_readable(_name(root, join_path(folder, name)))] = (
                        f"It is a link out of the logdir, which is not followed; {_SEVERAL}."
                    )
        for name, kind in sorted(entries):
            below = join_path(folder, name)
            if kind != "folder" or (is_record and name in TABLES):
                continue
            if _readable(name) == name:
                waiting.append(below)
            else:
                refused[_readable(_name(root, below))] = "Its name is not UTF-8, so no address can contain it; rename it."


def _was_swapped(storage: FolderStorage) -> bool:
    """Return True if a folder of a record's path was replaced by a link after the search."""
    path = storage.path("") or "/"
    return storage.is_local and os.path.realpath(path) != path


def _readable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _said(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__)


def name_roots(addresses: Sequence[str]) -> list[LogdirRoot]:
    """Return roots for addresses. If the only address is a folder with several runs, their names do not include the
    folder.
    """
    if len(addresses) == 1 and not _is_record(addresses[0]):
        return [LogdirRoot("", addresses[0])]
    return [LogdirRoot(name, address) for name, address in zip(name_runs(addresses), addresses, strict=True)]


def name_runs(addresses: Sequence[str]) -> list[str]:
    """Return the shortest path suffix that tells each run apart. Number addresses that are repeated.

    Example:
        >>> name_runs(["runs/a/bad/fp8_debug", "runs/b/bad", "runs/baseline"])
        ['a/bad', 'b/bad', 'baseline']
    """
    parts = [_parts(address) for address in addresses]
    names = ["/".join(_end(part, parts)) for part in parts]
    met: Counter[str] = Counter()
    for i, name in enumerate(names):
        met[name] += 1
        if met[name] > 1:
            names[i] = f"{name} ({met[name]})"
    return names


def _parts(address: str) -> list[str]:
    parts = [part for part in FolderStorage(address).path("").split("/") if part]
    return (parts[:-1] if len(parts) > 1 and parts[-1] == _USUAL else parts) or ["."]


def _end(part: list[str], parts: list[list[str]]) -> list[str]:
    others = [other for other in parts if other != part]
    lengths = (n for n in range(1, len(part)) if all(other[-n:] != part[-n:] for other in others))
    return part[-next(lengths, len(part)) :]


def _is_record(address: str) -> bool:
    root = FolderStorage(address)
    return any(
        parse_attempt_number(name) is not None
        for place in (root, root.open_subfolder(_USUAL))
        for name in place.list_names()
    )
