"""Tensors that stay in their file: where their values lie, and how they are read a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import RecordError

#: values read at once; bounds what is held of a checkpoint to some MiB
_BLOCK = 1 << 20
#: rows of a block come in multiples of this, so that scales of 128 x 128 blocks do not straddle two
ROWS = 128


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, not read yet."""

    path: Path
    #: bytes from the start of the file to the first value
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    #: in values; row-major where left out
    stride: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.stride:
            object.__setattr__(self, "stride", row_major(self.shape))
        numbers = (self.offset, *self.shape, *self.stride)
        if len(self.shape) != len(self.stride) or not all(type(n) is int and n >= 0 for n in numbers):
            raise RecordError(f"{self.path} is damaged: a tensor of shape {self.shape} and strides {self.stride}")

    def at(self, index: tuple[int, ...]) -> Stored:
        """The part at `index` along the leading axes."""
        skipped = sum(i * step for i, step in zip(index, self.stride, strict=False))
        n = len(index)
        return Stored(self.path, self.offset + skipped * self.dtype.itemsize, self.dtype, self.shape[n:], self.stride[n:])

    def viewed(self, shape: tuple[int, ...]) -> Stored:
        """The same values in another shape.

        Raises:
            RecordError: the shape has another number of values, or the values do not lie row by row.
        """
        if shape == self.shape:
            return self
        if _count(shape) != _count(self.shape) or self.stride != row_major(self.shape):
            raise RecordError(f"{self.path} is damaged: holds a tensor of shape {self.shape} where {shape} is announced")
        return Stored(self.path, self.offset, self.dtype, shape)

    def read(self) -> torch.Tensor:
        """The whole tensor.

        Raises:
            RecordError: the file ends before its values do, or cannot be read.
        """
        if 0 in self.shape:
            return torch.zeros(self.shape, dtype=self.dtype)
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        values = torch.from_numpy(read_bytes(self.path, self.offset, span * self.dtype.itemsize)).view(self.dtype)
        return values.as_strided(self.shape, self.stride)

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """A matrix in blocks of whole rows, `(first row, [rows, columns])`; in one where its rows do not lie in turn.

        Raises:
            RecordError: as `read` does.
        """
        rows, columns = self.shape
        if self.stride != row_major(self.shape):
            yield 0, self.read()
            return
        step = max(1, _BLOCK // max(1, columns * ROWS)) * ROWS
        for first in range(0, rows, step):
            here = self.offset + first * columns * self.dtype.itemsize
            yield first, Stored(self.path, here, self.dtype, (min(step, rows - first), columns)).read()


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that lies in one place."""

    #: where the part begins in the whole tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    #: finds the values; raises RecordError where that fails
    open: Callable[[], Stored]


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint, whole or in pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, stored: Stored) -> Entry:
        """A tensor in one piece."""
        return cls(stored.dtype, stored.shape, (Piece((0,) * len(stored.shape), stored.shape, lambda: stored),))


@dataclass
class Contents:
    """What a checkpoint holds, by the names it uses."""

    format: str
    tensors: dict[str, Entry] = field(default_factory=dict)
    #: finds the extra state of a module: a Stored tensor, a stand-in for io.BytesIO, or None
    extra_states: dict[str, Callable[[], Any]] = field(default_factory=dict)
    #: names that an index knows and no file has
    lost: set[str] = field(default_factory=set)
    #: what could not be read, a sentence each
    faults: list[str] = field(default_factory=list)


def read_bytes(path: Path, offset: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`length` bytes of a file from `offset` on.

    Raises:
        RecordError: the file cannot be read or ends before.
    """
    try:
        size = path.stat().st_size
        if offset + length > size:  # before memory is asked for: a damaged header may announce any length
            raise RecordError(f"{path} is damaged: values up to byte {offset + length} are announced, it has {size}")
        with path.open("rb") as file:
            return np.fromfile(file, np.uint8, length, offset=offset)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from None


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in values, of a tensor whose last axis runs fastest."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
