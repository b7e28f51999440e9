"""Compile the loops over CPU memory with Numba, and add instructions that Numba lacks.

The cache of machine code compares the date of the loop's own file. After a change here, save the files that import it too.
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

#: values read ahead (2 KiB); the hardware's own prefetcher stops at every 4 KiB page and halves the speed
AHEAD = 1024
#: numbers of a job in front of the results of its shares
JOB = 16


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function that releases the GIL. Cache the machine code on disk if there is a writable place for it."""
    try:
        compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True, **options)(function)
    return compiled


@dataclass(frozen=True)
class Work:
    """Machine code that takes the address of a job. Nothing in it can fail."""

    address: int
    #: runs the job in this thread, without the GIL
    alone: Callable[[Any], None]
    #: keeps the machine code alive
    compiled: object


def work(function: Callable[[int], None]) -> Work:
    """Compile a function of one address at once, with the cache of `jit`."""
    try:
        compiled: Any = numba.cfunc(types.void(types.intp), cache=True)(function)
    except RuntimeError:
        compiled = numba.cfunc(types.void(types.intp))(function)
    return Work(compiled.address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address), compiled)


def instruction(function: Callable[..., Any], prefer_literal: bool = False) -> Callable[..., Any]:
    """Return Numba's `intrinsic`, with a type that does not count the typing context among the arguments."""
    return intrinsic(prefer_literal=prefer_literal)(function)


@instruction
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of `array[index]`, but not into the closest cache, which has few lines on their way at once.

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
    """Compile a cast from an address to a pointer. An array for each call takes longer than counting a small tensor."""

    @instruction
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.uintp), generate

    return pointer


values_at, counters_at, counts_at = _pointer_to(types.uint16), _pointer_to(types.uint32), _pointer_to(types.int64)
floats_at, doubles_at = _pointer_to(types.float32), _pointer_to(types.float64)


@jit
def job_at(address: int) -> Any:
    """Return the numbers of a job, int64 [16]."""
    return carray(counts_at(address), JOB)


@instruction
def add_to(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address, atomically, and return the value before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(address, types.int64), generate


@jit
def next_share(job: int) -> int:
    """Return the next share of the job at this address that no other thread has. The job's first number counts them."""
    share: int = add_to(job, 1)
    return share
