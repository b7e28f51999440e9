"""Reading pickles of strangers: torch's files, DCP's metadata and Transformer Engine's extra state, without running them.

A pickle runs whatever callables it names. Here a name becomes plain data, or a stand-in that remembers its arguments and
does nothing; nothing is imported, and any other name is refused.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from ...errors import RecordError
from .stored import Stored


class Placeholder:
    """An object of a class that is not loaded: what it was made of, and nothing else."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Placeholder:
        """Remember the arguments."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None:
        """What unpickling calls for subclasses of list."""

    def get(self, name: str) -> Any:
        """An attribute of the object; None where it has none of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


#: classes of these packages, and these names, become stand-ins
_STAND_IN_PACKAGES = (
    "torch.distributed.",
    "megatron.core.",
    "transformer_engine.",
    "lightning.",
    "pytorch_lightning.",
    "numpy",
    "pathlib",
)
_STAND_IN_NAMES = {
    ("_io", "BytesIO"),
    ("argparse", "Namespace"),
    ("builtins", "getattr"),  # how some Pythons pickle a member of an enum
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
}


def _encoded(text: str, encoding: str) -> bytes:
    return str(text).encode("latin1")


def _parameter(data: Any, *rest: Any) -> Any:
    return data


#: elements of a tensor that repeats the values of its storage
_MOST_EXPANDED = 1 << 28


@dataclass(frozen=True)
class _Region:
    """A storage in a torch file."""

    path: Path
    offset: int
    length: int
    dtype: torch.dtype | None


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any) -> Any:
    """A tensor of a storage: still in its file, or in memory where the storage is."""
    if not isinstance(storage, _Region):
        return torch._utils._rebuild_tensor(storage, offset, tuple(size), tuple(stride))
    dtype = next((r for r in rest if isinstance(r, torch.dtype)), storage.dtype)
    if dtype is None:
        raise pickle.UnpicklingError("a tensor without a dtype")
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
    if offset < 0 or (offset + span) * dtype.itemsize > storage.length:
        raise pickle.UnpicklingError("a tensor that exceeds its storage")
    if math.prod(size) > max(storage.length // dtype.itemsize, _MOST_EXPANDED):
        raise pickle.UnpicklingError("a tensor that repeats the values of its storage too many times")
    return Stored(storage.path, storage.offset + offset * dtype.itemsize, dtype, tuple(size), tuple(stride))


def _storage_from_bytes(data: bytes) -> Any:
    """What `torch.storage._load_from_bytes` makes, which itself would unpickle anything."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # of whatever the bytes make torch trip over
        raise _Refused("torch.storage._load_from_bytes with something that is not a storage") from None


def load_torch_bytes(data: bytes, source: str) -> Any:
    """What torch.save wrote to memory, if tensors and plain values are all it holds.

    Raises:
        RecordError: it holds something else, or is damaged.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # of whatever the bytes make torch trip over
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RecordError(f"{source} was not read: torch.load with weights_only refuses it ({reason})") from None


_DATA: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "Counter"): collections.Counter,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("_codecs", "encode"): _encoded,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch.storage", "_load_from_bytes"): _storage_from_bytes,
}
_STORAGES: dict[tuple[str, str], torch.dtype | None] = {
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "ShortStorage"): torch.int16,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "BoolStorage"): torch.bool,
    ("torch.storage", "UntypedStorage"): None,
}


class _Refused(pickle.UnpicklingError):
    """A name that is neither data nor has a stand-in."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], region: Callable[[str], tuple[Path, int, int]] | None) -> None:
        super().__init__(file)
        self._region = region

    def find_class(self, module: str, name: str) -> Any:
        known = ("builtins" if module == "__builtin__" else module, name)
        if known in _DATA:
            return _DATA[known]
        if known in _STORAGES:
            return known
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if known in _STAND_IN_NAMES or module.startswith(_STAND_IN_PACKAGES):
            return type(name, (Placeholder,), {})
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> Any:
        kind, storage, key, *_ = identity
        if kind != "storage" or self._region is None:
            raise pickle.UnpicklingError(f"a reference {identity!r}")
        return _Region(*self._region(key), _STORAGES[storage])


def load_pickle(file: IO[bytes], source: str, region: Callable[[str], tuple[Path, int, int]] | None = None) -> Any:
    """The data in a pickle; nothing it names is run.

    Args:
        source: the file, and what in it, for errors.
        region: path, offset and length in bytes of each storage that the pickle refers to.

    Raises:
        RecordError: the pickle is damaged, or names what is neither data nor a known class of a checkpoint.
    """
    try:
        _check_memo(file)
        return _Unpickler(file, region).load()
    except _Refused as error:
        raise RecordError(
            f"{source} was not read: it names {error}, which unpickling would run; if you trust the file, load it "
            "yourself and save its weights as safetensors"
        ) from None
    except RecordError:
        raise
    except Exception as error:  # a damaged pickle can raise anything, MemoryError and RecursionError included
        raise RecordError(f"{source} is damaged: {error or type(error).__name__}") from None


def _check_memo(file: IO[bytes]) -> None:
    """Refuse a memo index larger than the pickle itself: unpickling makes room for every index below it."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    for opcode, index, _ in pickletools.genops(file):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and cast(int, index) > size:
            raise pickle.UnpicklingError(f"it has the memo index {index}, in a pickle of {size} bytes")
    file.seek(0)


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        wanted = max(0, min(len(buffer), self._length - self._at))
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def load_torch(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """What torch.save wrote to a file or a part of one, with every tensor left in the file as a `Stored`.

    Raises:
        RecordError: it cannot be read, is damaged, is not a torch file, or names what unpickling would run.
    """
    try:
        size = path.stat().st_size
        end = size if length is None else offset + length
        if not 0 <= offset <= end <= size:
            raise RecordError(f"{path} is damaged: bytes {offset} to {end} are announced, it has {size}")
        with path.open("rb") as file:
            window = cast(IO[bytes], io.BufferedReader(_Window(file, offset, end - offset)))
            with zipfile.ZipFile(window) as archive:
                return _load_archive(archive, file, path, offset)
    except (zipfile.BadZipFile, struct.error, EOFError, NotImplementedError, ValueError, KeyError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(
            f"{path} is not a torch file, or damaged ({error}); a file from before torch 1.6 must be loaded and saved again"
        ) from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from None


def _load_archive(archive: zipfile.ZipFile, file: IO[bytes], path: Path, start: int) -> Any:
    names = {name.partition("/")[2]: info for name, info in archive.NameToInfo.items()}
    if "data.pkl" not in names:
        raise RecordError(f"{path} is not a torch file: an archive without data.pkl")
    if "constants.pkl" in names:
        raise RecordError(f"{path} is a TorchScript program, not a checkpoint; save the model's state_dict instead")
    for name in ("data.pkl", "byteorder"):
        if name in names and names[name].compress_type != zipfile.ZIP_STORED:  # it may become a thousand times as long
            raise RecordError(f"{path} was not read: a compressed archive, which torch.save does not write")
    if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
        raise RecordError(f"{path} was written on a big-endian machine, which is not supported")

    def region(key: str) -> tuple[Path, int, int]:
        info = names[f"data/{key}"]
        if info.compress_type != zipfile.ZIP_STORED:
            raise pickle.UnpicklingError("a compressed archive, which torch.save does not write")
        file.seek(start + info.header_offset)
        name_length, extra_length = struct.unpack("<26xHH", file.read(30))
        return path, start + info.header_offset + 30 + name_length + extra_length, info.file_size

    return load_pickle(io.BytesIO(archive.read(names["data.pkl"])), str(path), region)
