"""Finding the tensors of a checkpoint, whatever its format; nothing of their values is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import RecordError
from .pickles import Placeholder, load_pickle, load_torch
from .stored import Contents, Entry, Piece, Stored, read_bytes

_EXTRA = "_extra_state"
#: levels of mappings in mappings, and entries, at the most
_DEEPEST, _MOST = 64, 1_000_000

#: safetensors' names of dtypes: https://huggingface.co/docs/safetensors/index#format
_SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def open_checkpoint(path: Path) -> Contents:
    """Find the tensors of a checkpoint.

    Args:
        path: a Megatron distributed or DCP checkpoint, a NeMo 2 checkpoint, a folder of safetensors, or a file that
            safetensors, torch.save or Lightning wrote.

    Raises:
        RecordError: there is no checkpoint, its format is not known, or nothing of it can be read.
    """
    if not path.exists():
        raise RecordError(f"{path} does not exist")
    contents = _open_folder(path) if path.is_dir() else _open_file(path)
    if not contents.tensors:
        raise RecordError("; ".join(contents.faults) or f"{path} holds no tensors")
    return contents


def _open_file(path: Path) -> Contents:
    if path.suffix == ".safetensors":
        return _safetensors([path], Contents("safetensors"))
    if path.name.endswith(".safetensors.index.json"):
        return _indexed(path)
    if path.suffix == ".distcp" or path.name in (".metadata", "metadata.json"):
        raise RecordError(f"{path} is one file of a distributed checkpoint; give its folder, {path.parent}")
    return _torch_file(path)


def _open_folder(path: Path) -> Contents:
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
        return _safetensors(files, Contents("safetensors"))
    inside = sorted(p.name for p in path.iterdir())
    shown = f"it holds {', '.join(inside[:5])}{' ...' if len(inside) > 5 else ''}" if inside else "it is empty"
    raise RecordError(
        f"{path} is not a checkpoint: no .metadata (Megatron, DCP), no weights/ (NeMo 2), no *.safetensors; {shown}"
    )


def _without_metadata(path: Path) -> str:
    backend = _json(path / "metadata.json").get("sharded_backend")
    if backend == "zarr":
        return f"{path} is a zarr checkpoint, which is not read; load it with Megatron and save it as torch_dist"
    return f"{path} has metadata.json but no .metadata: the checkpoint was not saved to its end, or not copied whole"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bytes(path, 0, path.stat().st_size).tobytes())
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise RecordError(f"{path} is damaged: not a JSON object")
    return found


def _add(contents: Contents, name: str, value: Any) -> None:
    """A tensor, or the extra state of a module."""
    if name.rpartition(".")[2].startswith(_EXTRA):
        contents.extra_states[name] = lambda: value
    elif isinstance(value, Stored):
        contents.tensors[name] = Entry.whole(value)


# --- safetensors ----------------------------------------------------------------------------------------------------------


def _indexed(index: Path) -> Contents:
    """The files that an index of Hugging Face names."""
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise RecordError(f"{index} is damaged: no weight_map")
    names = {str(name) for name in weight_map.values()}
    if outside := sorted(name for name in names if Path(name).name != name):
        raise RecordError(f"{index} was not read: it names a file outside its folder, {outside[0]}")
    contents = _safetensors([index.parent / name for name in sorted(names)], Contents("safetensors"))
    contents.lost = set(weight_map) - set(contents.tensors) - set(contents.extra_states)
    if contents.lost and not contents.faults:
        contents.faults.append(f"{index} names tensors that its files do not hold: {', '.join(sorted(contents.lost)[:3])}")
    return contents


def _safetensors(files: list[Path], contents: Contents) -> Contents:
    """Format: https://huggingface.co/docs/safetensors/index#format (8 bytes length, a JSON header, the values)."""
    for file in files:
        try:
            _read_header(file, contents)
        except RecordError as error:
            contents.faults.append(str(error))
    return contents


def _read_header(file: Path, contents: Contents) -> None:
    length = int.from_bytes(read_bytes(file, 0, 8).tobytes(), "little")
    try:
        header = json.loads(read_bytes(file, 8, length).tobytes())
        for name, about in header.items():
            if name == "__metadata__":
                continue
            dtype = _SAFETENSORS.get(about["dtype"])
            if dtype is None:
                contents.faults.append(f"{file}: {name} has dtype {about['dtype']}, which is not known")
                continue
            begin, end = about["data_offsets"]
            stored = Stored(file, 8 + length + begin, dtype, tuple(about["shape"]))
            if end - begin != dtype.itemsize * torch.Size(stored.shape).numel():
                raise ValueError(f"{name} has shape {stored.shape} in {end - begin} bytes")
            _add(contents, name, stored)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{file} is not a safetensors file, or damaged: {error}") from None


# --- torch.save -----------------------------------------------------------------------------------------------------------


def _torch_file(path: Path) -> Contents:
    found = load_torch(path)
    contents = Contents("torch file")
    if isinstance(found, Mapping):
        if isinstance(found.get("state_dict"), Mapping) and "pytorch-lightning_version" in found:
            contents.format = "Lightning checkpoint"
        for key in ("state_dict", "model", "module"):  # Lightning, Megatron, DeepSpeed
            if isinstance(found.get(key), Mapping):
                found = found[key]
                break
    _flatten(path, found, contents)
    return contents


def _flatten(path: Path, content: Any, contents: Contents) -> None:
    """Entries of mappings in mappings. A small file can have mappings that hold themselves, or each other many times."""
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
            _add(contents, name, value)


# --- DCP, Megatron's torch_dist --------------------------------------------------------------------------------------------


def _distributed(folder: Path) -> Contents:
    """Of `.metadata`, which is a pickle of torch.distributed.checkpoint.metadata.Metadata or a subclass."""
    file = folder / ".metadata"
    with file.open("rb") as opened:
        metadata = load_pickle(opened, str(file))
    contents = Contents("distributed checkpoint")
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
            dtype = about.get("properties").state[0]
            contents.tensors[name] = Entry(dtype, tuple(about.get("size")), tuple(pieces))
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        raise RecordError(f"{file} is damaged, or of a version that is not known: {error}") from None
    return contents


def _piece(folder: Path, name: str, chunk: Placeholder, places: Mapping[Any, Placeholder]) -> Piece:
    offsets, shape = tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))
    info = places.get((name, offsets))

    def open_() -> Stored:
        found = _load(folder, info, f"{name} at {offsets}")
        if not isinstance(found, Stored):
            raise RecordError(f"{folder}: {name} is not a tensor in its file, as .metadata says")
        return found.viewed(shape)

    return Piece(offsets, shape, open_)


def _object(folder: Path, info: Placeholder | None) -> Callable[[], Any]:
    def open_() -> Any:
        found = _load(folder, info, "an extra state")
        return found[0] if isinstance(found, list) and len(found) == 1 else found  # Megatron saves lists of one

    return open_


def _load(folder: Path, info: Placeholder | None, what: str) -> Any:
    """What lies at one place of a checkpoint's files."""
    if info is None:
        raise RecordError(f"{folder / '.metadata'} does not say where {what} lies")
    name = info.get("relative_path")
    if not isinstance(name, str) or Path(name).name != name:
        raise RecordError(f"{folder / '.metadata'} names a file outside its folder, {name}; it was not read")
    if info.get("transform_descriptors"):
        raise RecordError(f"{folder / name} was written through {info.get('transform_descriptors')}, which is not read")
    return load_torch(folder / name, info.get("offset"), info.get("length"))
