"""TensorBoard event files, written in the caller's thread."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Protocol

import google_crc32c
from tensorboard.compat import tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import summary as summaries

from .storage import Storage

#: seconds that events may wait to be handed to the disk
_FLUSH = 120.0
_files = itertools.count()


class EventWriter(Protocol):
    """What is used of a SummaryWriter."""

    file_writer: Any

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Markdown."""

    def add_custom_scalars(self, layout: Mapping[str, Any]) -> None:
        """The page of charts; the last one written is shown."""

    def flush(self) -> None:
        """Hand everything to the disk."""


class EventFile:
    """A TensorBoard event file, written in the caller's thread; after a fault another one is begun.

    What SummaryWriter writes in a thread of its own ends for good with the first fault, as of a disk that is full.
    """

    def __init__(self, folder: str | os.PathLike[str] | Storage) -> None:
        """
        Args:
            folder: a path or an fsspec address; that of a run's record as its storage.
        """
        self.file_writer = self
        self._storage = folder if isinstance(folder, Storage) else Storage(folder)
        self.log_dir = str(self._storage)
        self._file: Any = None
        self._name = ""  # of the file that is begun; another attempt to begin it takes its place
        self._flushed = time.monotonic()
        if self._storage.is_local:
            tf.io.gfile.makedirs(self.log_dir)

    def add_summary(self, summary: Summary, step: int) -> None:
        """Write an event; it is lost where the folder cannot be written, of which the record in it tells."""
        try:
            self._file = self._file or self._begun()
            self._write(self._file, Event(wall_time=time.time(), step=step, summary=summary))
            self._name = ""
        except Exception as error:
            self._file = None  # it may end in half an event, and nothing after that would be read
            if not isinstance(error, OSError):
                raise

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Markdown."""
        self.add_summary(summaries.text(tag, text), step)

    def add_custom_scalars(self, layout: Mapping[str, Any]) -> None:
        """The page of charts; the last one written is shown."""
        self.add_summary(summaries.custom_scalars(layout), 0)

    def flush(self) -> None:
        """Hand everything to the disk."""
        if self._file:
            self._file.flush()
        self._flushed = time.monotonic()

    def _begun(self) -> Any:
        if not self._name:
            self._name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        local, name = self._storage.is_local, self._name
        file = tf.io.gfile.GFile(f"{self.log_dir}/{name}", "wb") if local else _RemoteFile(self._storage, name)
        self._write(file, Event(wall_time=time.time(), file_version="brain.Event:2"))
        return file

    def _write(self, file: Any, event: Event) -> None:
        file.write(_framed(event.SerializeToString()))
        if time.monotonic() - self._flushed > _FLUSH:  # each time sends the whole file, where it is a remote one
            file.flush()
            self._flushed = time.monotonic()


class _RemoteFile:
    """A file that is uploaded whole at each flush; what could not be uploaded is at the next one.

    Through the driver that writes the record: TensorBoard's own has credentials and time limits of its own.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self._name = storage, name
        self._content = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the run

    def write(self, data: bytes) -> None:
        self._content.write(data)

    def flush(self) -> None:
        self._content.seek(0)
        content = self._content.read()
        with contextlib.suppress(Exception):  # the record at the same place says so
            self._storage.write(self._name, content)


def _framed(data: bytes) -> bytes:
    """A record of a TFRecord file. TensorBoard's own writer takes the checksums in Python, in longer than all metrics take.

    Source: `tensorflow/core/lib/io/record_writer.h`.
    """
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
