"""Read the pickles of a checkpoint (torch's files, and the metadata of distributed checkpoints) without running their code.

Unpickling runs any callable that a pickle names. `torch.load` with `weights_only` reads tensors without running callables.
We replace each class of a checkpoint by a placeholder, which only stores its arguments. We refuse any other name.
"""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from packaging.version import Version

from ...errors import RecordError

#: first release of torch in which a file cannot make torch.load with weights_only run code (CVE-2025-32434)
_SAFE_TORCH = "2.6"
#: placeholders replace all classes in these packages, and the names in `_STAND_IN_NAMES`
_STAND_IN_PACKAGES = (
    "torch.distributed.",
    "megatron.core.",
    "transformer_engine.",
    "lightning.",
    "pytorch_lightning.",
    "numpy.",
    "pathlib.",
)
_STAND_IN_NAMES = (
    "_io.BytesIO",
    "argparse.Namespace",
    "builtins.getattr",  # some versions of Python pickle members of an enum with this
    "torch.device",
    "torch.serialization._get_layout",
)


class UnloadedObject:
    """A placeholder for an object of a class that is not loaded. It stores only the object's arguments and state."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> UnloadedObject:
        """Store the arguments."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None:
        """Ignore an item that unpickling appends to a subclass of list."""

    def get(self, name: str) -> Any:
        """Return an attribute of the object, or None if the object has no attribute of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def _stand_in(name: str) -> type[UnloadedObject] | None:
    """Return a placeholder class for a dotted name, or None to refuse the name."""
    if name in _STAND_IN_NAMES or name.startswith(_STAND_IN_PACKAGES):
        return type(name.rpartition(".")[2], (UnloadedObject,), {})
    return None


# --- torch.save -----------------------------------------------------------------------------------------------------------


def load_torch_file(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """Load a torch.save file and keep its tensors memory-mapped, or load a part of a file into memory.

    Raises:
        RecordError: the file is unreadable, damaged or not a torch file, or names code that unpickling would run.
    """
    try:
        if length is None:
            with path.open("rb") as file:
                return _load_archive(file, path, str(path))
        size = path.stat().st_size
        if not 0 <= offset <= offset + length <= size:
            raise RecordError(f"{path} is damaged: it has no bytes {offset} to {offset + length}, only {size} bytes")
        with path.open("rb") as file:
            file.seek(offset)
            return load_torch_bytes(file.read(length), str(path))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from None
    except RecordError:
        raise
    except ValueError as error:  # the name is invalid for a file
        raise RecordError(f"{str(path)!r} cannot be read: {error}") from None


def stores_every_value(tensor: torch.Tensor) -> bool:
    """Return True if a tensor stores each value, unlike sparse, nested and meta tensors."""
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type == "cpu"


def load_torch_bytes(data: bytes, source: str) -> Any:
    """Load the bytes that torch.save wrote.

    Raises:
        RecordError: as in `load_torch_file`.
    """
    return _load_archive(io.BytesIO(data), None, source)


def _load_archive(file: IO[bytes], mapped: Path | None, source: str) -> Any:
    _refuse_old_torch(source)
    try:
        with zipfile.ZipFile(file) as archive:  # a compressed entry may expand a thousandfold
            compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
        if compressed:
            raise RecordError(f"{source} was not read: a compressed archive, which torch.save does not write")
        with _without_safe_globals():
            file.seek(0)
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            stand_ins = {name: known for name in names if (known := _stand_in(name)) is not None}
            if refused := sorted(set(names) - set(stand_ins)):
                raise _refusal(source, refused[0])
            file.seek(0)
            with torch.serialization.safe_globals([(known, name) for name, known in stand_ins.items()]):
                return torch.load(mapped or file, map_location="cpu", weights_only=True, mmap=mapped is not None)
    except RecordError:
        raise
    except zipfile.BadZipFile as error:
        raise RecordError(
            f"{source} is not a torch file, or damaged ({error}); if torch before 1.6 wrote it, load and save it again"
        ) from None
    except Exception as error:  # on a damaged file, torch may raise any error, including MemoryError and RecursionError
        raise _not_read(source, error) from None


def _load_storage(data: bytes, source: str) -> Any:
    """Load the bytes of a storage inside a pickle."""
    _refuse_old_torch(source)
    try:
        with _without_safe_globals():
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # as in _load_archive
        raise _not_read(source, error) from None


@contextlib.contextmanager
def _without_safe_globals() -> Iterator[None]:
    """Disable the callables that other code in this process, such as Megatron, has added to torch.load's list of safe
    globals.
    """
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(allowed)


def _refuse_old_torch(source: str) -> None:
    if Version(torch.__version__) < Version(_SAFE_TORCH):
        raise RecordError(f"{source} was not read: pickles need torch {_SAFE_TORCH} or later, this is {torch.__version__}")


def _not_read(source: str, error: Exception) -> RecordError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return RecordError(f"{source} was not read: torch.load with weights_only refuses it ({reason})")


def _refusal(source: str, name: str) -> RecordError:
    return RecordError(
        f"{source} was not read: it names {name}, which unpickling would run; if you trust the file, load it yourself and "
        "save its weights as safetensors"
    )


# --- other pickles --------------------------------------------------------------------------------------------------------


def load_pickle(data: bytes, source: str) -> Any:
    """Load a pickle of plain values, small tensors and classes of checkpoints.

    Raises:
        RecordError: the pickle is damaged, or names code other than data types and known classes of checkpoints.
    """
    try:
        _check_memo(data)
        return _Unpickler(io.BytesIO(data), source).load()
    except RecordError:
        raise
    except Exception as error:  # a damaged pickle can raise any error, including MemoryError and RecursionError
        raise RecordError(f"{source} is damaged: {error or type(error).__name__}") from None


def _check_memo(data: bytes) -> None:
    """Refuse a memo index larger than the pickle, because unpickling allocates memory for all smaller indices."""
    for opcode, index, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and cast(int, index) > len(data):
            raise pickle.UnpicklingError(f"it has the memo index {index}, in a pickle of {len(data)} bytes")


def _rebuild_tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any) -> Any:
    if 0 not in size and offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= len(storage):
        raise ValueError("a tensor reaches beyond its storage")  # torch would enlarge the storage with uninitialized memory
    return torch._utils._rebuild_tensor(storage, offset, tuple(size), tuple(stride))


_DATA: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], source: str) -> None:
        super().__init__(file)
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full == "torch.storage._load_from_bytes":  # torch's own function would unpickle anything
            return lambda data: _load_storage(data, self._source)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):  # getattr may import a module
            return dtype
        known = _DATA.get(full) or _stand_in(full)
        if known is None:
            raise _refusal(self._source, full)
        return known
