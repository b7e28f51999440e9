"""List the contents of a checkpoint in any format: names, shapes, and tensors. Tensors are read only when needed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...errors import RecordError
from .pickles import UnloadedObject, load_pickle, load_torch_file, stores_every_value

_EXTRA = "_extra_state"
#: largest depth of nested mappings, and largest number of entries
_DEEPEST, _MOST = 64, 1_000_000
#: largest number of elements of a tensor that has more elements than its storage
_MOST_EXPANDED = 1 << 28


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that is stored in one place."""

    #: index of the part's first element in the whole tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    #: function that returns the values, or raises RecordError
    open: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, whole or in pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass
class CheckpointContents:
    """The tensors and extra states of a checkpoint, by their names in the checkpoint."""

    format: str
    tensors: dict[str, CheckpointTensor] = field(default_factory=dict)
    #: for each module, a function that returns its extra state: a tensor, a placeholder for io.BytesIO, or None
    extra_states: dict[str, Callable[[], Any]] = field(default_factory=dict)
    #: names of tensors that are in an index but in no file, or that have no values
    lost: set[str] = field(default_factory=set)
    #: sentences about unreadable parts
    faults: list[str] = field(default_factory=list)

    def add_entry(self, name: str, value: Any, path: Path) -> None:
        """Add a tensor or the extra state of a module. Ignore any other value."""
        if name.rpartition(".")[2].startswith(_EXTRA):
            self.extra_states[name] = lambda: value
        elif isinstance(value, torch.Tensor) and not stores_every_value(value):
            self.lost.add(name)
            self.faults.append(f"{path}: {name} was not read: a sparse, nested or meta tensor")
        elif isinstance(value, torch.Tensor):
            if value.numel() > max(value.untyped_storage().nbytes() // value.itemsize, _MOST_EXPANDED):
                raise RecordError(f"{path} was not read: {name} repeats the values of its storage too many times")
            shape = tuple(value.shape)
            self.tensors[name] = CheckpointTensor(value.dtype, shape, (Piece((0,) * len(shape), shape, value.detach),))


def open_checkpoint(path: Path) -> CheckpointContents:
    """Find the tensors of a checkpoint.

    Args:
        path: a Megatron distributed or DCP checkpoint, a NeMo 2 checkpoint, a folder of safetensors, or a file that
            safetensors, torch.save or Lightning wrote.

    Raises:
        RecordError: there is no checkpoint, its format is unknown, or no part of it is readable.
    """
    if not path.exists():
        raise RecordError(f"{path} does not exist")
    contents = _open_folder(path) if path.is_dir() else _open_file(path)
    if not contents.tensors:
        raise RecordError("; ".join(contents.faults) or f"{path} holds no tensors")
    return contents


def _open_file(path: Path) -> CheckpointContents:
    if path.suffix == ".safetensors":
        return _safetensors([path])
    if path.name.endswith(".safetensors.index.json"):
        return _indexed(path)
    if path.suffix == ".distcp" or path.name in (".metadata", "metadata.json"):
        raise RecordError(f"{path} is one file of a distributed checkpoint; give its folder, {path.parent}")
    return _torch_file(path)


def _open_folder(path: Path) -> CheckpointContents:
    if (path / "weights").is_dir():
        contents = _open_folder(path / "weights")
        contents.format = f"NeMo 2, {contents.format}"
        return contents
    if (path / ".metadata").is_file():
        return _distributed(path)
    if (path / "metadata.json").is_file():
        raise RecordError(_without_metadata(path))
    if indices := sorted(path.glob("*.safetensors.index.json")):
        return _indexed(indices[0])
    if files := sorted(path.glob("*.safetensors")):
        return _safetensors(files)
    inside = sorted(p.name for p in path.iterdir())
    shown = f"it holds {', '.join(inside[:5])}{' ...' if len(inside) > 5 else ''}" if inside else "it is empty"
    raise RecordError(
        f"{path} is not a checkpoint: no .metadata (Megatron, DCP), no weights/ (NeMo 2), no *.safetensors; {shown}"
    )


def _without_metadata(path: Path) -> str:
    backend = _json(path / "metadata.json").get("sharded_backend")
    if backend == "zarr":
        return f"{path} is a zarr checkpoint, which we cannot read; load it with Megatron and save it as torch_dist"
    return f"{path} has metadata.json but no .metadata: saving did not finish, or not all files were copied"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_bytes(path))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise RecordError(f"{path} is damaged: not a JSON object")
    return found


# --- safetensors ----------------------------------------------------------------------------------------------------------


def _indexed(index: Path) -> CheckpointContents:
    """Open the files that are listed in an index file of Hugging Face."""
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise RecordError(f"{index} is damaged: no weight_map")
    names = {str(name) for name in weight_map.values()}
    if outside := sorted(name for name in names if Path(name).name != name):
        raise RecordError(f"{index} was not read: it names a file outside its folder, {outside[0]}")
    contents = _safetensors([index.parent / name for name in sorted(names)])
    contents.lost = set(weight_map) - set(contents.tensors) - set(contents.extra_states)
    if contents.lost and not contents.faults:
        contents.faults.append(f"{index} names tensors that its files lack: {', '.join(sorted(contents.lost)[:3])}")
    return contents


def _safetensors(files: list[Path]) -> CheckpointContents:
    """Open files, and keep them memory-mapped."""
    contents = CheckpointContents("safetensors")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a mapping)
                    contents.add_entry(name, opened.get_tensor(name), file)
        except OSError as error:
            contents.faults.append(f"{file} cannot be read: {error.strerror or error}")
        except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            is_large = "Cannot allocate memory" in str(error)
            why = "is larger than memory" if is_large else "is damaged, or has an unsupported dtype"
            contents.faults.append(f"{file} {why}: {error}")
    return contents


# --- torch.save -----------------------------------------------------------------------------------------------------------


def _torch_file(path: Path) -> CheckpointContents:
    found = load_torch_file(path)
    contents = CheckpointContents("torch file")
    if isinstance(found, Mapping):
        if isinstance(found.get("state_dict"), Mapping) and "pytorch-lightning_version" in found:
            contents.format = "Lightning checkpoint"
        for key in ("state_dict", "model", "module"):  # Lightning, Megatron, DeepSpeed
            if isinstance(found.get(key), Mapping):
                found = found[key]
                break
    for name, value in _flatten(path, found):
        contents.add_entry(name, value, path)
    return contents


def _flatten(path: Path, content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested mappings, within limits, because a mapping in a small file may contain itself."""
    left, seen = [("", content, 0)], 0
    while left:
        name, value, depth = left.pop()
        seen += 1
        if seen > _MOST or depth > _DEEPEST:
            limit = f"{_MOST:,} entries" if seen > _MOST else f"{_DEEPEST} levels"
            raise RecordError(f"{path} was not read: it has more than {limit}")
        if isinstance(value, Mapping) and not name.rpartition(".")[2].startswith(_EXTRA):
            inner = [(f"{name}.{key}" if name else str(key), part, depth + 1) for key, part in value.items()]
            left += reversed(inner)
        else:
            yield name, value


# --- DCP, Megatron's torch_dist --------------------------------------------------------------------------------------------


def _distributed(folder: Path) -> CheckpointContents:
    """Open a folder by its `.metadata`, a pickle of torch.distributed.checkpoint.metadata.Metadata or a subclass."""
    file = folder / ".metadata"
    metadata = load_pickle(_bytes(file), str(file))
    contents = CheckpointContents("distributed checkpoint")
    try:
        places = {
            (key.get("fqn"), tuple(key.get("offset") or ())): info for key, info in metadata.get("storage_data").items()
        }
        for name, about in metadata.get("state_dict_metadata").items():
            if (chunks := about.get("chunks")) is None:
                if _EXTRA in name.rpartition(".")[2]:
                    contents.extra_states[name] = _object(folder, places.get((name, ())))
                continue
            pieces = [_piece(folder, name, chunk, places) for chunk in chunks]
            shape = _sizes(about.get("size"))
            contents.tensors[name] = CheckpointTensor(about.get("properties").state[0], shape, tuple(pieces))
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise RecordError(f"{file} is damaged, or of an unsupported version: {error}") from None
    return contents


def _sizes(given: Any) -> tuple[int, ...]:
    sizes = tuple(given)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"a shape {sizes}")
    return sizes


def _piece(folder: Path, name: str, chunk: UnloadedObject, places: Mapping[Any, UnloadedObject]) -> Piece:
    offsets, shape = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
    info = places.get((name, offsets))

    def open_() -> torch.Tensor:
        found = _load(folder, info, f"{name} at {offsets}")
        if not isinstance(found, torch.Tensor) or not stores_every_value(found) or found.numel() != math.prod(shape):
            raise RecordError(f"{folder}: {name} at {offsets} is not a tensor of shape {shape} in its file")
        return found.detach().reshape(shape)

    return Piece(offsets, shape, open_)


def _object(folder: Path, info: UnloadedObject | None) -> Callable[[], Any]:
    def open_() -> Any:
        found = _load(folder, info, "an extra state")
        return found[0] if isinstance(found, list) and len(found) == 1 else found  # Megatron saves lists with one element

    return open_


def _load(folder: Path, info: UnloadedObject | None, what: str) -> Any:
    """Load the object at one place in a checkpoint's files."""
    if not isinstance(info, UnloadedObject):
        raise RecordError(f"{folder / '.metadata'} does not say where {what} is")
    name, offset, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or Path(name).name != name:
        raise RecordError(f"{folder / '.metadata'} names a file outside its folder, {name}; it was not read")
    if info.get("transform_descriptors"):
        raise RecordError(f"{folder / name} was written through {info.get('transform_descriptors')}, which we cannot read")
    if type(offset) is not int or type(length) is not int:
        raise RecordError(f"{folder / '.metadata'} is damaged: {what} is at {offset}, {length} bytes")
    return load_torch_file(folder / name, offset, length)
