"""The memory of a tensor as numpy sees it, and Numba on a CUDA device; histograms that are cleared there in advance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..numerics.histogram import BINS

#: histograms that are cleared at once, 8 MiB
AT_ONCE = 32

#: by device and stream, which has cleared them and which they have to be counted in
_empty: dict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)
#: gives torch's current stream in a tenth of the time that torch takes to make an object of it
_raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Memory:
    """Keeps a tensor alive for as long as numpy reads it."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(x.shape),
            "typestr": np.dtype(f"u{x.element_size()}").str,
            "data": (x.data_ptr(), False),
            "strides": tuple(stride * x.element_size() for stride in x.stride()),
        }


class DeviceMemory:
    """Part of a tensor's memory on a CUDA device, as kernels take it; the tensor has to live until it was taken."""

    __slots__ = ("address", "itemsize", "length", "typestr")

    def __init__(self, x: torch.Tensor, typestr: str, length: int, offset: int = 0) -> None:
        """
        Args:
            x: the tensor.
            typestr: what to take the memory for, as in "u8".
            length: so many of these,
            offset: from so many bytes behind the tensor's start.
        """
        self.typestr, self.length = typestr, length
        self.address = x.data_ptr() + (offset if length else 0)  # an address of the device in any case
        self.itemsize = int(typestr[1:])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """For Numba. Torch's own knows no bfloat16. No stream is named: a reader that was told one waits for it."""
        return {
            "version": 3,
            "shape": (self.length,),
            "typestr": np.dtype(self.typestr).str,
            "data": (self.address, False),
            "strides": None,
            "stream": None,
        }


def read_address(x: torch.Tensor) -> int:
    """Where the memory of a tensor, not empty, begins.

    Raises:
        ValueError: the memory has been given back.
    """
    if not (address := x.data_ptr()):
        raise ValueError("it has no memory any longer")
    return address


def view_bits(x: torch.Tensor) -> npt.NDArray[Any]:
    """The bits of a tensor in CPU memory, unsigned, of its shape and strides.

    `Tensor.numpy()` would forbid for good that its memory is resized, and FSDP resizes that of a gathered weight to none.

    Raises:
        ValueError: the memory has been given back.
    """
    if not x.numel():
        return np.zeros(x.shape, f"u{x.element_size()}")
    read_address(x)
    return np.asarray(_Memory(x))


def current_stream(device: torch.device) -> int:
    """Return the handle of torch's current stream on a CUDA device."""
    handle: int = _raw(device.index) if _raw else torch.cuda.current_stream(device).cuda_stream
    return handle


def empty_histogram(device: torch.device) -> torch.Tensor:
    """Zeros, int64 [32768], for torch's current stream."""
    if device.type != "cuda":
        return torch.zeros(BINS, dtype=torch.int64, device=device)
    empty = _empty[device, current_stream(device)]
    try:
        return empty.pop()
    except IndexError:
        with torch.inference_mode(False):  # others of them may be counted into outside of one
            first, *others = torch.zeros(AT_ONCE, BINS, dtype=torch.int64, device=device).unbind()
        empty += others
        return first


def forget_empty_histograms() -> None:
    """Give the memory of those back that nothing was counted into."""
    _empty.clear()
