"""What the loops over CPU memory are compiled with: Numba, and what it has no word for.

Machine code that is kept on disk is dated by the file of its loop: who changes this file saves those that import it as well.
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
#: numbers of a job, before what its shares write
JOB = 16


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile without the GIL; keep the machine code on disk where a writable place for it exists."""
    try:
        compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True, **options)(function)
    return compiled


@dataclass(frozen=True)
class Work:
    """Machine code that takes the address of a job; nothing in it can fail."""

    address: int
    #: runs it in this thread, without the GIL
    alone: Callable[[Any], None]
    #: what the machine code lives as long as
    compiled: object


def work(function: Callable[[int], None]) -> Work:
    """As `jit`, of a function of one address, at once."""
    try:
        compiled: Any = numba.cfunc(types.void(types.intp), cache=True)(function)
    except RuntimeError:
        compiled = numba.cfunc(types.void(types.intp))(function)
    return Work(compiled.address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address), compiled)


def instruction(function: Callable[..., Any], prefer_literal: bool = False) -> Callable[..., Any]:
    """Numba's `intrinsic`, whose own type counts the typing context among the arguments."""
    return intrinsic(prefer_literal=prefer_literal)(function)


@instruction
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]`, but not in the closest cache, which has few lines on their way
    at once.

    An index past the end is harmless, since a prefetch cannot fault.
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
    """From an address to a pointer: building an array for each call would take longer than to count a small tensor."""

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
    """The numbers of a job, int64 [16]."""
    return carray(counts_at(address), JOB)


@instruction
def add_to(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address, which other threads may do as well; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(address, types.int64), generate


@jit
def next_share(job: int) -> int:
    """The next share that no other thread has got from the job at this address, whose first number counts them."""
    share: int = add_to(job, 1)
    return share
