"""Give NumPy and Numba access to a tensor's memory, and keep a supply of cleared histograms on a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..numerics.histogram import BINS

#: number of histograms that are cleared at once (8 MiB)
AT_ONCE = 32

#: empty histograms by device and stream. Only the stream that cleared a histogram may count into it
_empty: dict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)
#: returns the handle of torch's current stream, in a tenth of the time that torch takes to make a stream object
_raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Memory:
    """A tensor's memory, which keeps the tensor alive as long as NumPy reads it."""

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
    """Part of a tensor's memory on a CUDA device, as an argument of kernels.

    The tensor must live until the kernel starts.
    """

    __slots__ = ("address", "itemsize", "length", "typestr")

    def __init__(self, x: torch.Tensor, typestr: str, length: int, offset: int = 0) -> None:
        """
        Args:
            x: the tensor.
            typestr: type to read the memory as, such as "u8".
            length: number of elements of this type.
            offset: bytes between the start of the tensor and the first element.
        """
        self.typestr, self.length = typestr, length
        self.address = x.data_ptr() + (offset if length else 0)  # if the length is zero, still an address on the device
        self.itemsize = int(typestr[1:])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface for Numba. Torch's own lacks bfloat16. We name no stream, because readers would wait for it."""
        return {
            "version": 3,
            "shape": (self.length,),
            "typestr": np.dtype(self.typestr).str,
            "data": (self.address, False),
            "strides": None,
            "stream": None,
        }


def read_address(x: torch.Tensor) -> int:
    """Return the address of the memory of a tensor that is not empty.

    Raises:
        ValueError: the tensor's memory was freed.
    """
    if not (address := x.data_ptr()):
        raise ValueError("the memory of the tensor was freed")
    return address


def view_bits(x: torch.Tensor) -> npt.NDArray[Any]:
    """Return the bits of a tensor in CPU memory as unsigned integers, with its shape and strides.

    We do not call `Tensor.numpy()`, because afterwards the memory can never be resized. FSDP resizes the memory of a
    gathered weight to zero.

    Raises:
        ValueError: the tensor's memory was freed.
    """
    if not x.numel():
        return np.zeros(x.shape, f"u{x.element_size()}")
    read_address(x)
    return np.asarray(_Memory(x))


def get_current_stream(device: torch.device) -> int:
    """Return the handle of torch's current stream on a CUDA device."""
    handle: int = _raw(device.index) if _raw else torch.cuda.current_stream(device).cuda_stream
    return handle


def take_empty_histogram(device: torch.device) -> torch.Tensor:
    """Return an empty histogram, int64 [32768], for use in torch's current stream."""
    if device.type != "cuda":
        return torch.zeros(BINS, dtype=torch.int64, device=device)
    empty = _empty[device, get_current_stream(device)]
    try:
        return empty.pop()
    except IndexError:
        with torch.inference_mode(False):  # later calls may use the other histograms outside of inference mode
            first, *others = torch.zeros(AT_ONCE, BINS, dtype=torch.int64, device=device).unbind()
        empty += others
        return first


def forget_empty_histograms() -> None:
    """Free the histograms that are still unused."""
    _empty.clear()
