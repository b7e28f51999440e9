"""Start kernels that Numba compiles.

A launch by Numba takes 120 us on the host, because Numba determines the types of the arguments each time. So we launch
Numba's machine code with cuda.core, which Numba is built on, and lay out parameters as Numba does. First we check that
Numba's arrays have exactly the fields that we know, and that the driver reports the parameter sizes that we expect. If not,
Numba launches the kernel.

This module is imported only if there is a CUDA device, or if Numba's simulator runs the same source on a CPU
(`NUMBA_ENABLE_CUDASIM=1`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba.cuda
import torch

from ...errors import warn
from ..memory import DeviceMemory, get_current_stream

cuda: Any = numba.cuda

#: fields of a Numba array; each field is a parameter of the kernel
_FIELDS = ("meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides")
#: size in bytes of a Python integer as a parameter
_INTEGER = 8
_entered = threading.local()
_HERE = contextlib.nullcontext()


class CudaStream(NamedTuple):
    """A stream of a CUDA device."""

    device: int
    handle: int

    @classmethod
    def current(cls, device: torch.device) -> CudaStream:
        """Return torch's current stream of a device."""
        return cls(device.index, get_current_stream(device))


#: number of thread blocks, number of threads in each, and the stream to run in (the simulator has no streams)
Grid = tuple[int, int] | tuple[int, int, CudaStream]
#: argument of a kernel: an array in the memory of a device or the simulator, a number, or a tuple of numbers
Argument = Any


def compile_device_function(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call."""
    return cuda.jit(function, device=True)


class CudaKernel:
    """A compiled function that the host starts."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = cuda.jit(function)
        #: by device, the kernel as an object of cuda.core, or None if Numba has to launch the kernel
        self._direct: dict[int, Any] = {}

    def start(self, grid: Grid, *arguments: Argument) -> None:
        """Start the kernel without waiting for it. The first call on a device compiles it."""
        if len(grid) == 2:
            self._function[grid](*arguments)
            return
        blocks, threads, stream = grid
        if stream.device not in self._direct:
            self._direct[stream.device] = self._found(stream.device, arguments)
        if (kernel := self._direct[stream.device]) is None:
            with cuda.gpus[stream.device]:
                self._function[blocks, threads, cuda.external_stream(stream.handle)](*arguments)
            return
        with _device(stream.device):
            _core().launch(_stream(stream), _config(blocks, threads), kernel, *flatten_kernel_arguments(arguments))

    def _found(self, device: int, arguments: Sequence[Argument]) -> Any:
        """Return the kernel for cuda.core to launch, or None if Numba has to launch it."""
        with cuda.gpus[device]:
            compiled = self._function.specialize(*arguments)
            try:
                kernel = _checked(compiled, arguments)
            except Exception as error:  # an unsupported version of Numba or cuda.core may raise many kinds
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                warn(f"Numba launches a kernel on cuda:{device}, which takes the host 0.1 ms each time ({why})")
                return None
        return kernel


def _checked(compiled: Any, arguments: Sequence[Argument]) -> Any:
    """Return Numba's machine code for these arguments, as a kernel of cuda.core.

    Raises:
        ValueError: Numba lays out the kernel's parameters in a way that is not supported.
    """
    (definition,) = compiled.overloads.values()
    array = cuda.types.Array(cuda.types.uint8, 1, "C")
    fields = compiled.targetctx.data_model_manager.lookup(array)
    kernel = definition._codelibrary.get_cufunc().kernel
    sizes = [of.size for of in kernel.arguments_info]
    if fields.field_count != len(_FIELDS) or any(fields.get_field_position(name) != i for i, name in enumerate(_FIELDS)):
        raise ValueError("unsupported layout of arrays in Numba")
    if sizes != [getattr(of, "nbytes", _INTEGER) for of in flatten_kernel_arguments(arguments)]:
        raise ValueError("unsupported sizes of its parameters")
    return kernel


def flatten_kernel_arguments(arguments: Sequence[Argument]) -> list[Any]:
    """Return the arguments in the form that Numba's kernels take: an array as seven integers, a tuple as its elements."""
    found: list[Any] = []
    for argument in arguments:
        if isinstance(argument, DeviceMemory):
            n, size = argument.length, argument.itemsize
            found += (0, 0, n, size, argument.address, n, size)
        elif isinstance(argument, tuple):
            found += argument
        else:
            found.append(argument)
    return found


@functools.cache
def _core() -> Any:
    import cuda.core

    return cuda.core


@functools.lru_cache(maxsize=64)
def _stream(stream: CudaStream) -> Any:
    return _core().Stream.from_handle(stream.handle)


@functools.lru_cache(maxsize=1024)
def _config(blocks: int, threads: int) -> Any:
    return _core().LaunchConfig(grid=blocks, block=threads)


def _device(index: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the device's CUDA context is current in this thread."""
    entered: set[int] = _entered.__dict__.setdefault("devices", set())
    if index not in entered:
        torch.zeros(1, device=torch.device("cuda", index))  # a thread's first operation on a device creates the context
        entered.add(index)
    return _HERE if torch.cuda.current_device() == index else torch.cuda.device(index)


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
