"""The memory of a tensor as numpy sees it, and Numba on a CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


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


def address_of(x: torch.Tensor) -> int:
    """Where the memory of a tensor, not empty, begins.

    Raises:
        ValueError: the memory has been given back.
    """
    if not (address := x.data_ptr()):
        raise ValueError("it has no memory any longer")
    return address


def bits_of(x: torch.Tensor) -> npt.NDArray[Any]:
    """The bits of a tensor in CPU memory, unsigned, of its shape and strides.

    `Tensor.numpy()` would forbid for good that its memory is resized, and FSDP resizes that of a gathered weight to none.

    Raises:
        ValueError: the memory has been given back.
    """
    if not x.numel():
        return np.zeros(x.shape, f"u{x.element_size()}")
    address_of(x)
    return np.asarray(_Memory(x))
