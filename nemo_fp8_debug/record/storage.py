"""A folder, local or at any fsspec address. Only this module knows the difference.

A run limits the time for remote storage: each request has a time limit, and after a failure we pause requests. Drivers retry
in layers. For example, s3fs retries 5 times what botocore already retries 5 times. Without a limit, a server that does not
answer would block a write, and all later writes, for 25 times the driver's timeout of 15 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import inspect
import io
import os
import stat
import time
import uuid
from collections.abc import Iterator
from typing import Any

from fsspec.asyn import sync
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ..errors import ConfigError
from .migration import list_table_folders
from .schema import SCHEMAS, STATUS, parse_attempt_number

#: longest time of a request in seconds, including the driver's retries
LIMIT = 20.0
#: lowest upload speed that we wait for, in bytes per second
SLOWEST = 1 << 20
#: pause after a failure, as a multiple of the failed request's time, so that failed requests take about a tenth of the total
#: time
REST = 9
#: shortest failed request in seconds that causes a pause; faster failures cost little
_QUICK = 1.0


class RequestLimits:
    """Limits the time of a run's requests to one storage server."""

    def __init__(self) -> None:
        self._asked_again = 0.0  # earliest time of the next request, by the monotonic clock
        self._why = ""

    def allow_next_request(self) -> None:
        """Allow the next request at once, even if the last request failed recently."""
        self._asked_again = 0.0

    def call_within_limits(self, fs: Any, method: str, *arguments: Any, size: int = 0, **options: Any) -> Any:
        """Call a method of a file system.

        Args:
            fs: an fsspec file system. If it is not asynchronous, such as sftp, the call has no time limit.
            size: bytes to send.

        Raises:
            TimeoutError: no answer arrived in time.
            ConnectionError: requests are paused after a failure.
            Exception: any error of the driver.

        Example:
            >>> import fsspec
            >>> limits, fs = RequestLimits(), fsspec.filesystem("memory")
            >>> limits.call_within_limits(fs, "pipe_file", "/limits/example", b"content", size=7)
            >>> limits.call_within_limits(fs, "cat_file", "/limits/example")
            b'content'
        """
        with self.guard_request():
            coroutine = getattr(fs, f"_{method}", None)
            if not inspect.iscoroutinefunction(coroutine):
                return getattr(fs, method)(*arguments, **options)
            limit = LIMIT + size / SLOWEST
            try:
                return sync(fs.loop, coroutine, *arguments, timeout=limit, **options)
            except asyncio.TimeoutError:
                raise TimeoutError(f"no answer within {limit:.0f} s") from None

    @contextlib.contextmanager
    def guard_request(self) -> Iterator[None]:
        """Run a request in a `with` block. If the request fails after a long time, pause further requests.

        Raises:
            ConnectionError: requests are paused.
        """
        began = time.monotonic()
        if began < self._asked_again:
            raise ConnectionError(f"requests are paused after {self._why}")
        try:
            yield
        except (FileNotFoundError, FileExistsError):  # the server has answered, even if late
            raise
        except Exception as error:
            now = time.monotonic()
            if now - began > _QUICK:
                self._asked_again, self._why = now + REST * (now - began), f"{type(error).__name__}: {error}"
            raise


class NotAFileError(OSError):
    """The path is a pipe, a socket or a device."""


class FolderStorage:
    """A folder. Methods name its files by their paths below the folder, with `/` between names."""

    def __init__(self, address: str | os.PathLike[str]) -> None:
        """
        Args:
            address: a path, or `s3://bucket/run`, `gs://...`, `memory://...`: any address that fsspec has a driver for.

        Raises:
            ConfigError: no driver for the address is installed.
        """
        path = os.fspath(address)
        try:  # do not give a plain path to fsspec, which treats :: in a path as a chain of file systems
            self._fs, root = url_to_fs(path) if "://" in path else (LocalFileSystem(), LocalFileSystem._strip_protocol(path))
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{path} is not an address that can be written to: {error}") from None
        self._root = root.rstrip("/")
        #: file that must exist before we write to a local folder; if it does not exist, the folder was deleted or is not
        #: mounted
        self.anchor = ""
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self._limits: RequestLimits | None = None

    @classmethod
    def open_for_writing(cls, address: str | os.PathLike[str]) -> FolderStorage:
        """Return a storage for a run to write to. `RequestLimits` apply to remote requests.

        Raises:
            ConfigError: as for `FolderStorage(address)`.
        """
        storage = cls(address)
        storage._limits = None if storage.is_local else RequestLimits()
        return storage

    def __str__(self) -> str:
        return self._root if self.is_local else str(self._fs.unstrip_protocol(self._root))

    __fspath__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FolderStorage) and str(self) == str(other)

    __hash__ = None  # type: ignore[assignment]

    def open_subfolder(self, name: str) -> FolderStorage:
        """Return the folder `name` below this folder."""
        inner = object.__new__(FolderStorage)
        inner._fs, inner._root, inner.is_local, inner.anchor = self._fs, self.path(name), self.is_local, ""
        inner._limits = self._limits
        return inner

    def path(self, name: str) -> str:
        """Return the path of a file in the syntax of its file system."""
        return f"{self._root}/{name}" if name else self._root

    def list_names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, sorted. Return an empty list if the folder does not exist."""
        path = self.path(folder)
        self._fs.invalidate_cache(path)
        try:
            found: list[str] = self._call("ls", path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(p.rstrip("/").rpartition("/")[2] for p in found)

    def list_entries(self, folder: str = "") -> Iterator[tuple[str, str]]:
        """Yield each name in a folder and its kind: `folder`, `link` or `file`.

        If the listing does not contain the kind of a file, we query the file. Pipes, sockets and devices are skipped.

        Raises:
            OSError: the folder cannot be read.
        """
        path = self.path(folder)
        if self.is_local:
            with os.scandir(path or "/") as found:
                for entry in found:
                    kind = "link" if entry.is_symlink() else "folder" if entry.is_dir() else "file"
                    if kind == "folder" or entry.is_file(follow_symlinks=False) or (kind == "link" and not _is_odd(entry)):
                        yield entry.name, kind
            return
        self._fs.invalidate_cache(path)
        for about in self._fs.ls(path, detail=True):
            kind = "folder" if about["type"] == "directory" else "file"
            if name := about["name"].rstrip("/").removeprefix(path.rstrip("/")).strip("/"):
                yield name, kind

    def read_modification_time(self, name: str) -> float | None:
        """Return the modification time of a file, in seconds since 1970. Return None if its file system does not provide the
        time.
        """
        try:
            return (
                os.stat(self.path(name)).st_mtime if self.is_local else float(self._fs.modified(self.path(name)).timestamp())
            )
        except (NotImplementedError, KeyError, AttributeError):
            return None

    def measure_size(self, folder: str, prefix: str = "") -> int:
        """Return the total size in bytes of all files in and below a folder whose names begin with `prefix`. Return 0 if the
        folder does not exist.
        """
        self._fs.invalidate_cache()
        found = self._call("find", self.path(folder), detail=True)
        return sum(about["size"] for path, about in found.items() if path.rpartition("/")[2].startswith(prefix))

    def list_all_files(self) -> list[str]:
        """Return the names of all files in and below this folder, sorted."""
        self._fs.invalidate_cache()
        return sorted(path.removeprefix(self._root).strip("/") for path in self._fs.find(self._root))

    @property
    def does_anchor_exist(self) -> bool:
        """Return False if the anchor of a local folder no longer exists."""
        return not (self.is_local and self.anchor) or os.path.exists(self.path(self.anchor))

    def has_matching_file(self, pattern: str) -> bool:
        """Return whether this folder directly contains a file with a name that matches the glob `pattern`."""
        self._fs.invalidate_cache(self._root)  # drivers cache listings forever, but a run adds files
        return any(fnmatch.filter(files, pattern) for _, _, files in self._fs.walk(self._root, maxdepth=1))

    def find_folders_with_file(self, pattern: str) -> list[FolderStorage]:
        """Return every folder that contains a file with a name that matches the glob `pattern`: this folder, or a folder
        below it.
        """
        self._fs.invalidate_cache()
        # Do not use the file system's own glob, because the folder's name may contain [, * or ?.
        walked = ((str(folder), files) for folder, _, files in self._fs.walk(self._root))
        roots = sorted(folder for folder, files in walked if fnmatch.filter(files, pattern))
        return [self.open_subfolder(root.removeprefix(self._root).strip("/")) for root in roots]

    def read_file(self, name: str) -> bytes:
        """Return the content of a file."""
        content: bytes = self._call("cat_file", self.path(name))
        return content

    def open(self, name: str) -> Any:
        """Open a file for reading as a binary file object. Refuse a pipe, because opening it would wait for a writer.

        Raises:
            OSError: the file is a pipe, a socket or a device.
        """
        path = self.path(name)
        if self.is_local:
            return open(path, "rb", opener=_open_file)
        with self._limits.guard_request() if self._limits else contextlib.nullcontext():
            return self._fs.open(path, "rb")

    def open_file_in_one_request(self, name: str) -> Any:
        """Open a file like `open`, but read a remote file whole, in one request within the limits of the run."""
        return self.open(name) if self.is_local else io.BytesIO(self.read_file(name))

    def refuse_pipes_and_devices(self, name: str) -> None:
        """Raise an error for a file that may never end, such as a pipe that waits for a writer.

        Raises:
            OSError: the file is a pipe, a socket or a device.
        """
        if self.is_local and _is_odd(self.path(name)):
            raise OSError(f"{self.path(name)} is not a file")

    def make_folder(self, folder: str) -> None:
        """Make a folder, if the file system has folders."""
        self._call("makedirs", self.path(folder), exist_ok=True)

    def create_file(self, name: str, content: bytes) -> None:
        """Write a new file. If two writers call this at the same time on a local file system, one of them gets an error.

        Raises:
            FileExistsError: the file exists.
        """
        if not self.is_local:
            self._call("pipe_file", self.path(name), content, mode="create", size=len(content))
            return
        with open(self.path(name), "xb") as file:  # fsspec would check first and create later, which is not atomic
            file.write(content)

    def replace_file(self, name: str, content: bytes) -> None:
        """Write a file. Replace it if it exists. Readers of a local file see either the old content or all of the new
        content.

        Raises:
            FileNotFoundError: the `anchor` of a local folder is missing.
        """
        path = self.path(name)
        if not self.is_local:
            self._call("pipe_file", path, content, size=len(content))
            return
        if self.anchor:
            os.stat(self.path(self.anchor))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex}.part"
        try:
            with open(temporary, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError:
            if os.path.exists(temporary):
                os.remove(temporary)
            raise

    def delete_file(self, name: str) -> None:
        """Delete a file."""
        self._call("rm_file", self.path(name))

    def allow_next_request(self) -> None:
        """End a pause, so that the next remote request is sent."""
        if self._limits:
            self._limits.allow_next_request()

    def _call(self, method: str, *arguments: Any, size: int = 0, **options: Any) -> Any:
        """Call a method of the file system within the run's limits, if it has any."""
        if self._limits:
            return self._limits.call_within_limits(self._fs, method, *arguments, size=size, **options)
        return getattr(self._fs, method)(*arguments, **options)


def _is_odd(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is something other than a file or a folder."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _open_file(path: str, flags: int) -> int:
    """Open a file without waiting for a writer."""
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    raise IsADirectoryError(f"{path} is a folder") if stat.S_ISDIR(mode) else NotAFileError(f"{path} is not a file")


#: folders of a record, including `tensors` for dumps
TABLES = frozenset({*(folder for table in SCHEMAS for folder in list_table_folders(table)), "tensors"})


def is_link_out_of_folder(storage: FolderStorage, name: str) -> bool:
    """Return True if a name below a local folder leads out of the folder through a link. The folder's own path must be free
    of links.
    """
    root = storage.path("").rstrip("/")
    return not f"{os.path.realpath(storage.path(name))}/".startswith(f"{root}/")


def find_link_out_of_folder(storage: FolderStorage, folder: str) -> str | None:
    """Return the first name in a record that is a link out of `storage`, or None.

    Args:
        storage: a folder. Its path must be free of links.
        folder: the record's folder, below `storage`.
    """
    if not storage.is_local:
        return None
    for name, kind in sorted(storage.list_entries(folder)):
        is_part = name in TABLES or name == STATUS or parse_attempt_number(name) is not None
        if kind == "link" and is_part and is_link_out_of_folder(storage, join_path(folder, name)):
            return name
    for table in sorted(TABLES):
        inside = join_path(folder, table)
        try:
            links = [f"{inside}/{name}" for name, kind in storage.list_entries(inside) if kind == "link"]
        except OSError:
            continue
        if any(is_link_out_of_folder(storage, link) for link in links):
            return f"a part of {table}"
    return None


def join_path(folder: str, name: str) -> str:
    """Return the path of a name below a folder. The folder may be an empty string."""
    return "/".join(filter(None, (folder, name)))
