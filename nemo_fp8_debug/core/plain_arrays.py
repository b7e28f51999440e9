"""Encode arrays as bytes that any process can read: a header in JSON, followed by the arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: alignment of each array in bytes
_ALIGNED = 16


def encode_arrays(arrays: Mapping[str, Array]) -> bytes:
    """Return arrays as bytes.

    Args:
        arrays: arrays of numbers or booleans, by name.

    Example:
        >>> decode_arrays(encode_arrays({"counts": np.arange(3), "none": np.zeros((0, 2))}))["counts"]
        array([0, 1, 2])
    """
    header = {name: [array.dtype.str, *array.shape] for name, array in arrays.items()}
    text = json.dumps(header, separators=(",", ":")).encode()
    parts = [len(text).to_bytes(8, "little") + text, *(np.ascontiguousarray(array).tobytes() for array in arrays.values())]
    return b"".join(part + b"\0" * (-len(part) % _ALIGNED) for part in parts)


def decode_arrays(data: bytes) -> dict[str, Array]:
    """Return the arrays that `encode_arrays` encoded. They are read-only."""
    length = int.from_bytes(data[:8], "little")
    found, at = dict[str, Array](), _aligned(8 + length)
    for name, (kind, *shape) in json.loads(data[8 : 8 + length]).items():
        dtype, count = np.dtype(kind), math.prod(shape)
        found[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at = _aligned(at + dtype.itemsize * count)
    return found


def _aligned(place: int) -> int:
    return place + -place % _ALIGNED
