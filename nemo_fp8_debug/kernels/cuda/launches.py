"""Starts kernels that Numba compiles.

Numba's own launch takes 120 us of the host, since it asks each time what its arguments are. Here cuda.core, which Numba is
built on, launches what Numba has compiled, with parameters laid out as Numba lays them out. That happens only if Numba names
the fields of an array that are known here, and the driver the sizes of all parameters; else Numba's own launch does it.

Imported only where there is a CUDA device, or Numba's simulator, which runs the same source without one
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
from ..memory import DeviceMemory, current_stream

cuda: Any = numba.cuda

#: fields of an array, each of which is a parameter
_FIELDS = ("meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides")
#: bytes of a Python integer
_INTEGER = 8
_entered = threading.local()
_HERE = contextlib.nullcontext()


class Stream(NamedTuple):
    """A stream of a CUDA device."""

    device: int
    handle: int

    @classmethod
    def current(cls, device: torch.device) -> Stream:
        """Torch's current one."""
        return cls(device.index, current_stream(device))


#: how many blocks of threads, how many threads each has, and where there are streams the one to run in
Grid = tuple[int, int] | tuple[int, int, Stream]
#: an array in a device's memory, or in the simulator's, a number, or a tuple of numbers
Argument = Any


def on_device(function: Callable[..., Any]) -> Any:
    """A function that kernels call."""
    return cuda.jit(function, device=True)


class Kernel:
    """A function that the host starts."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = cuda.jit(function)
        #: by device; None: Numba has to launch it
        self._direct: dict[int, Any] = {}

    def start(self, grid: Grid, *arguments: Argument) -> None:
        """Start it and do not wait for it. The first call on a device compiles."""
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
            _core().launch(_stream(stream), _config(blocks, threads), kernel, *parameters(arguments))

    def _found(self, device: int, arguments: Sequence[Argument]) -> Any:
        """What cuda.core launches."""
        with cuda.gpus[device]:
            compiled = self._function.specialize(*arguments)
            try:
                kernel = _checked(compiled, arguments)
            except Exception as error:  # of many kinds, where Numba or cuda.core is another than is known here
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                warn(f"Numba launches a kernel on cuda:{device}, which takes the host 0.1 ms each time ({why})")
                return None
        return kernel


def _checked(compiled: Any, arguments: Sequence[Argument]) -> Any:
    """The kernel of cuda.core in what Numba has compiled for these arguments.

    Raises:
        ValueError: its parameters are not those that are known here.
    """
    (definition,) = compiled.overloads.values()
    array = cuda.types.Array(cuda.types.uint8, 1, "C")
    fields = compiled.targetctx.data_model_manager.lookup(array)
    kernel = definition._codelibrary.get_cufunc().kernel
    sizes = [of.size for of in kernel.arguments_info]
    if fields.field_count != len(_FIELDS) or any(fields.get_field_position(name) != i for i, name in enumerate(_FIELDS)):
        raise ValueError("Numba lays arrays out in another way")
    if sizes != [getattr(of, "nbytes", _INTEGER) for of in parameters(arguments)]:
        raise ValueError("its parameters have other sizes")
    return kernel


def parameters(arguments: Sequence[Argument]) -> list[Any]:
    """Arguments as a kernel of Numba takes them: an array is seven integers, a tuple its elements."""
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
def _stream(stream: Stream) -> Any:
    return _core().Stream.from_handle(stream.handle)


@functools.lru_cache(maxsize=1024)
def _config(blocks: int, threads: int) -> Any:
    return _core().LaunchConfig(grid=blocks, block=threads)


def _device(index: int) -> contextlib.AbstractContextManager[Any]:
    """Where the device's context is that of this thread."""
    entered: set[int] = _entered.__dict__.setdefault("devices", set())
    if index not in entered:
        torch.zeros(1, device=torch.device("cuda", index))  # the first thing that a thread does there brings it about
        entered.add(index)
    return _HERE if torch.cuda.current_device() == index else torch.cuda.device(index)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
