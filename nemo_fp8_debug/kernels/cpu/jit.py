"""Compile the loops over CPU memory with Numba, and add instructions that Numba lacks.

Numba's cache of machine code checks only the date of the file that contains a loop. After a change here, also save the files
that import this module, so that Numba compiles their loops again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

#: how many values ahead to prefetch (2 KiB). The hardware's prefetcher alone stops at each 4 KiB page, at half the speed
AHEAD = 1024
#: number of entries at the start of a job, before the results of its shares
JOB = 16


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function so that it releases the GIL. Cache the machine code on disk if a folder for it is writable."""
    try:
        compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True, **options)(function)
    return compiled


@dataclass(frozen=True)
class CompiledJob:
    """Machine code that takes the address of a job. The code raises no errors."""

    address: int
    #: runs the job in this thread, without the GIL
    alone: Callable[[Any], None]
    #: keeps the machine code alive
    compiled: object


def compile_job(function: Callable[[int], None]) -> CompiledJob:
    """Compile a function of one address immediately. Use the same cache as `jit`."""
    try:
        compiled: Any = numba.cfunc(types.void(types.intp), cache=True)(function)
    except RuntimeError:
        compiled = numba.cfunc(types.void(types.intp))(function)
    return CompiledJob(compiled.address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address), compiled)


def instruction(function: Callable[..., Any], prefer_literal: bool = False) -> Callable[..., Any]:
    """Return the function as a Numba intrinsic, typed for its callers, who do not pass the typing context."""
    return intrinsic(prefer_literal=prefer_literal)(function)


@instruction
def prefetch_cache_line(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of `array[index]`.

    We do not load the line into the first-level cache, which can wait for only a few lines at once.
    An index past the end is harmless, because a prefetch cannot fault.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, byte, i32 = signature.args[0], ir.IntType(8).as_pointer(), ir.IntType(32)
        memory = context.make_array(kind)(context, builder, args[0])
        item = cgutils.get_item_pointer(context, builder, kind, memory, [args[1]])
        declared = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        llvm_prefetch = cgutils.get_or_insert_function(builder.module, declared, "llvm.prefetch.p0i8")
        builder.call(llvm_prefetch, [builder.bitcast(item, byte), i32(0), i32(2), i32(1)])  # read, data
        return context.get_dummy_value()

    return types.void(array, index), generate


def _pointer_to(kind: Any) -> Any:
    """Return an intrinsic that casts an address to a pointer.

    Kernels take addresses, because making an array in each call would take longer than counting a small tensor.
    """

    @instruction
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.uintp), generate

    return pointer


values_at, counters_at, counts_at = _pointer_to(types.uint16), _pointer_to(types.uint32), _pointer_to(types.int64)
floats_at, doubles_at = _pointer_to(types.float32), _pointer_to(types.float64)


@jit
def view_job_numbers(address: int) -> Any:
    """Return the first `JOB` entries of the job at this address, int64 [16]."""
    return carray(counts_at(address), JOB)


@instruction
def add_atomically(typing_context: Any, address: Any, number: Any) -> Any:
    """Atomically add a number to the int64 at an address. Return the previous value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(address, types.int64), generate


@jit
def take_next_share(job: int) -> int:
    """Return the next free share of the job at this address.

    The job's first number counts the shares that threads have taken.
    """
    share: int = add_atomically(job, 1)
    return share
