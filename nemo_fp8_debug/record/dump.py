"""Dump tensors of chosen operands as safetensors files, in the background and within a budget of bytes.

    RUN/tensors/attempt-0-step-00000120/rank-00000.call-000.input.decoder.layers.3.mlp.linear_fc2.9f3c02d1.safetensors

A file contains one operand of one call on one rank. `value` is the operand that the GEMM was given, before quantization.
`codes` is `value * scale` cast to the format in use. `scale` is one float32. Metadata names the operand.
The file's name ends in the CRC-32 of its content.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition
from typing import Any

import safetensors.torch
import torch

from ..core.keys import ROLES
from ..core.text import format_number
from ..core.waits import DUMPS, WaitTimes
from ..errors import RecordError
from ..numerics.formats import FORMATS, FloatFormat
from ..numerics.histogram import DTYPES
from ..numerics.metrics import compute_amax, compute_finite_amax
from ..numerics.tensor_scaling import CurrentScaling, quantize
from .dump_names import FOLDER, make_tensor_file_name
from .dump_names import dumped_files as dumped_files
from .reader import find_record
from .storage import FolderStorage

#: largest number of bytes that may wait to be written; if a run dumps faster than the disk writes, its hooks wait
IN_FLIGHT = 4 << 30
#: seconds that all hooks of a step may wait in total for earlier tensors to be written; after that, tensors are left out
PATIENCE = 30.0
#: number of values that are quantized at once
_CHUNK = 1 << 24
_DTYPES = (*DTYPES, torch.float32)


@dataclass(frozen=True)
class DumpedTensorInfo:
    """The description of a dumped tensor."""

    attempt: int
    step: int
    rank: int
    layer: str
    role: str
    #: index of the GEMM's call in the step; each micro-batch is a separate call
    call: int
    recipe: str
    format: FloatFormat
    scale_source: str

    @property
    def step_folder(self) -> str:
        """Return the folder of the step's files."""
        return f"{FOLDER}/attempt-{self.attempt}-step-{self.step:08d}"

    def make_file_name(self, checksum: str) -> str:
        """Return the file's name. If the layer's name is too long, the file's name contains only its beginning. The metadata
        contains the whole name.
        """
        tensor = make_tensor_file_name(self.layer, self.role)
        return f"{self.step_folder}/rank-{self.rank:05d}.call-{self.call:03d}.{tensor}.{checksum}.safetensors"

    def metadata(self) -> dict[str, str]:
        """Return the description as metadata for safetensors."""
        return {**{key: str(value) for key, value in vars(self).items()}, "format": self.format.name}


class TensorDumper:
    """Copies tensors in hooks and writes them in the background."""

    def __init__(
        self,
        storage: FolderStorage,
        rank: int,
        max_bytes: int,
        min_free_bytes: int,
        submit: Callable[[Callable[[], None]], None],
        waits: WaitTimes | None = None,
    ) -> None:
        """
        Args:
            storage: folder of the run record.
            max_bytes: limit for all dumps of this rank, including dumps of earlier attempts.
            min_free_bytes: bytes to leave free on the disk.
            submit: function that runs another function in the background, in order of submission.
            waits: total of the training thread's waiting times.
        """
        self._storage, self._submit, self._waits = storage, submit, waits or WaitTimes()
        self._max_bytes, self._min_free_bytes = max_bytes, min_free_bytes
        self._room = Condition()
        self._in_flight = 0
        self._step, self._left, self._moves = -1, 0.0, True
        self.taken = storage.measure_size(
            FOLDER, f"rank-{rank:05d}."
        )  # bytes written or waiting; two threads change the number
        self.tensors = self.bytes = 0  # written since the start
        #: how many tensors were left out, by reason
        self.left_out: dict[str, int] = {}

    def dump_tensor(self, about: DumpedTensorInfo, x: torch.Tensor, scale: torch.Tensor | CurrentScaling) -> None:
        """Copy `x` in a hook, and write it in the background.

        Args:
            x: the operand. If it is a DTensor, we dump this rank's shard.
            scale: the float32 scale that `x` is cast with, or the rule that computes the scale.
        """
        if hasattr(x, "to_local"):
            x = x.to_local()
        size = x.numel() * (x.element_size() + about.format.dtype.itemsize)
        if self.taken + size > self._max_bytes:
            self._leave_out(f"the dump's budget of {_readable(self._max_bytes)} is used up")
            return
        if not self._wait_for_room(about.step, size):
            self._leave_out(f"{_readable(self._in_flight)} were still waiting to be written after {PATIENCE:.0f} s")
            return
        fetch = _copy(x.detach())
        self._submit(lambda: self._write(about, fetch, scale, size))

    def _wait_for_room(self, step: int, size: int) -> bool:
        with self._room:
            if step != self._step and self._moves:  # while a write hangs, grant no further waiting time
                self._step, self._left, self._moves = step, PATIENCE, False
            there_is = self._fits(size)
            if not there_is:
                began = time.monotonic()
                with self._waits.measure_wait(DUMPS):
                    there_is = self._room.wait_for(lambda: self._fits(size), self._left)
                self._left = max(0.0, self._left - (time.monotonic() - began))
            self._in_flight += size if there_is else 0
            self.taken += size if there_is else 0
        return there_is

    def _fits(self, size: int) -> bool:
        return self._in_flight == 0 or self._in_flight + size <= IN_FLIGHT

    def _write(
        self, about: DumpedTensorInfo, fetch: Callable[[], torch.Tensor], scale: torch.Tensor | CurrentScaling, size: int
    ) -> None:
        written = False
        try:
            if self._storage.is_local and shutil.disk_usage(self._storage.path("")).free - size < self._min_free_bytes:
                self._leave_out(f"the disk would be left with less than {_readable(self._min_free_bytes)}")
                return
            x = fetch()
            if isinstance(scale, CurrentScaling):
                amax = compute_amax(x) if about.scale_source == "engine" else compute_finite_amax(x)
                scale = scale.compute_scale(amax, about.format.max)
            content = _encode(about, x, scale.detach().float().cpu())
            self._storage.replace_file(about.make_file_name(f"{zlib.crc32(content):08x}"), content)
            self.tensors += 1
            self.bytes += len(content)
            written = True
        except Exception as error:
            # Leave out the file's name. Otherwise each file's error would be listed as a separate reason.
            self._leave_out(f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}")
        finally:
            with self._room:
                self._in_flight -= size
                self.taken -= 0 if written else size
                self._moves = True
                self._room.notify_all()

    def _leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def progress(self) -> dict[str, Any]:
        """Return how much was written since the process started, how much waits, the budget, and why tensors are missing."""
        return {
            "tensors": self.tensors,
            "bytes": self.bytes,
            "bytes_waiting": self._in_flight,
            "budget_bytes": self._max_bytes,
            "budget_left_bytes": max(0, self._max_bytes - self.taken),
            "left_out": dict(self.left_out),
        }


def _copy(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy a tensor to host memory. Return a function that waits for the copy and returns it, for use in the
    background.
    """
    if x.device.type != "cuda":
        copy = x.contiguous().clone() if x.device.type == "cpu" else x.to("cpu").contiguous()
        return lambda: copy
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def fetch() -> torch.Tensor:
        arrived.synchronize()
        return pinned

    return fetch


def _encode(about: DumpedTensorInfo, x: torch.Tensor, scale: torch.Tensor) -> bytes:
    codes = torch.empty(x.shape, dtype=about.format.dtype)
    for piece, into in zip(x.reshape(-1).split(_CHUNK), codes.view(-1).split(_CHUNK), strict=True):
        into.copy_(quantize(piece, scale, about.format))
    return safetensors.torch.save({"value": x, "codes": codes, "scale": scale.reshape(())}, about.metadata())


def _readable(size: int) -> str:
    return f"{format_number(size / (1 << 30))} GiB"


def read_dump(run: str | os.PathLike[str], name: str) -> tuple[DumpedTensorInfo, dict[str, torch.Tensor]]:
    """Return a dumped tensor after checking its file.

    Args:
        run: the record, or a folder above it. A path or any fsspec address.
        name: the file's name, from `dumped_files`.

    Returns:
        The description (`attempt`, `step`, `rank`, `layer`, `role`, `call`, `recipe`, `format`, `scale_source`), and three
        tensors by name. `value` is the operand that the GEMM was given, before quantization, in its own dtype. `codes` is
        `value * scale` cast to FP8, with the same shape as `value`. `scale` is one float32.

    Raises:
        RecordError: the file is damaged or is not a dump, or `run` contains no record or several.
        OSError: the file cannot be read.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> options = {"roles": ["weight"], "dump": ["0"], "dump_min_free_bytes": 0, "table_rows": 0}
        >>> monitor = Monitor(model, "runs/weights", interval=1, **options)
        >>> with monitor.step(0):
        ...     model(torch.ones(8, 32)).sum().backward()
        >>> monitor.close()
        >>> (name,) = (name for *_, name in dumped_files("runs/weights"))
        >>> about, tensors = read_dump("runs/weights", name)
        >>> about.layer, tensors["codes"].dtype, tensors["codes"].shape
        ('0', torch.float8_e4m3fn, torch.Size([32, 32]))
    """
    storage = run if isinstance(run, FolderStorage) else find_record(run)
    content = storage.read_file(name)
    if not name.endswith(f".{zlib.crc32(content):08x}.safetensors"):
        raise RecordError("it is damaged or foreign: its name does not end in the checksum of its content")
    try:
        tensors = safetensors.torch.load(content)
        about = _about(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"])
        value, codes, scale = tensors["value"], tensors["codes"], tensors["scale"]
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise RecordError(f"it is not a dump of a tensor: {type(error).__name__}: {error}") from None
    if value.dtype not in _DTYPES or codes.dtype != about.format.dtype or codes.shape != value.shape:
        raise RecordError(f"it is not a dump of a tensor: values in {value.dtype}, codes in {codes.dtype}")
    if scale.dtype != torch.float32 or scale.dim() != 0:
        raise RecordError("it is not a dump of a tensor: its scale is not one float32")
    return about, tensors


def _about(metadata: dict[str, str]) -> DumpedTensorInfo:
    if metadata["role"] not in ROLES:
        raise ValueError(f"unknown role {metadata['role']!r}")
    numbers: Any = {key: int(metadata[key]) for key in ("attempt", "step", "rank", "call")}
    texts: Any = {key: metadata[key] for key in ("layer", "role", "recipe", "scale_source")}
    return DumpedTensorInfo(**numbers, **texts, format=FORMATS[metadata["format"]])
