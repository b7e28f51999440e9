"""Counts the magnitude patterns of 16-bit values in CPU memory: one counter update per value, at the rate of one a cycle."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

Counts = npt.NDArray[np.int64]
Counters = npt.NDArray[np.uint32]
Values = npt.NDArray[np.uint16]

#: below this many values clearing and folding private counters costs more than they save, in a step whose caches are full
SMALL = 1 << 20
#: values one thread gets at the least
GRAIN = 1 << 19
#: values of a row that are counted before it is asked whether private 32-bit counters have room for more
RUN = 1 << 30
#: values read ahead (2 KiB); the hardware's own prefetcher stops at every 4 KiB page and halves the speed
AHEAD = 1024


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile without the GIL; keep the machine code on disk where a writable place for it exists."""
    try:
        compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True, **options)(function)
    return compiled


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]`; an index past the end is harmless, since a prefetch cannot fault."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, byte, i32 = signature.args[0], ir.IntType(8).as_pointer(), ir.IntType(32)
        memory = context.make_array(kind)(context, builder, args[0])
        item = cgutils.get_item_pointer(context, builder, kind, memory, [args[1]])
        declared = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        llvm_prefetch = cgutils.get_or_insert_function(builder.module, declared, "llvm.prefetch.p0i8")
        builder.call(llvm_prefetch, [builder.bitcast(item, byte), i32(0), i32(3), i32(1)])  # read, keep in all levels, data
        return context.get_dummy_value()

    return types.void(array, index), generate


def _pointer_to(kind: Any) -> Any:
    """From an address to a pointer: building an array for each call would take longer than to count a small tensor."""

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.uintp), generate

    return pointer


values_at, counts_at = _pointer_to(types.uint16), _pointer_to(types.int64)


@jit
def _count_directly(values: Values, counts: Counts) -> None:
    for r in range(values.shape[0]):
        for i in range(values.shape[1]):
            counts[values[r, i] & 0x7FFF] += 1


@jit
def count_few(address: int, n: int, counts: int) -> None:
    """As `count_patterns` in this thread, of values and counters at addresses; for less than `SMALL` of them."""
    _count_directly(carray(values_at(address), (1, n)), carray(counts_at(counts), 32768))


@jit
def last_counts(counts: int, first: int) -> int:
    """The sum of the counters at an address from one of them on."""
    total: int = carray(counts_at(counts), 32768)[first:].sum()
    return total


@jit
def occupied(address: int, bins: Counts, counts: Counts) -> int:
    """Bins of a sketch, at an address, that are not empty, ascending, and their counts; how many."""
    table, n = carray(counts_at(address), 32768), 0
    for i in range(0, 32768, 8):  # most are empty
        prefetch(table, i + AHEAD)  # type: ignore[call-arg]
        some = table[i]
        for j in range(i + 1, i + 8):
            some |= table[j]
        if some:
            for j in range(i, i + 8):
                if table[j]:
                    bins[n], counts[n] = j, table[j]
                    n += 1
    return n


@jit
def _move(private: tuple[Counters, ...], counts: Counts) -> None:
    a, b, c, d = private
    for i in range(32768):
        counts[i] += np.int64(a[i]) + b[i] + c[i] + d[i]
        a[i] = b[i] = c[i] = d[i] = 0


@jit
def _count_in_turn(values: Values, counts: Counts) -> None:
    # Four tables in turn: equal neighbours, which are common, would otherwise wait for each other.
    a, b = np.zeros(32768, np.uint32), np.zeros(32768, np.uint32)
    c, d = np.zeros(32768, np.uint32), np.zeros(32768, np.uint32)
    counted = 0
    for r in range(values.shape[0]):
        for first in range(0, values.shape[1], RUN):
            run = values[r, first : first + RUN]
            if counted + run.size > 1 << 32:
                _move((a, b, c, d), counts)
                counted = 0
            counted += run.size
            whole = run.size // 32 * 32
            following = values[min(r + 1, values.shape[0] - 1)]  # which does not lie behind this one where a view has gaps
            for start in range(0, whole, 32):
                if start + AHEAD < run.size:
                    prefetch(run, start + AHEAD)  # type: ignore[call-arg]
                else:
                    prefetch(following, start + AHEAD - run.size)  # type: ignore[call-arg]
                for i in range(start, start + 32, 4):
                    a[run[i] & 0x7FFF] += 1
                    b[run[i + 1] & 0x7FFF] += 1
                    c[run[i + 2] & 0x7FFF] += 1
                    d[run[i + 3] & 0x7FFF] += 1
            for i in range(whole, run.size):
                a[run[i] & 0x7FFF] += 1
    _move((a, b, c, d), counts)


@functools.lru_cache(maxsize=1)
def pool(threads: int) -> ThreadPoolExecutor:
    """Threads of our own, kept between calls."""
    return ThreadPoolExecutor(threads, thread_name_prefix="nemo_fp8_debug")


if hasattr(os, "register_at_fork"):
    # A forked child inherits the pool without its threads and would wait for them for ever.
    os.register_at_fork(after_in_child=pool.cache_clear)


def count_patterns(values: Values, counts: Counts, threads: int) -> None:
    """Add to `counts[p]` how often the magnitude pattern `p` (sign bit cleared) occurs.

    Uses threads of its own and not Numba's, whose fall-back threading layer ends the process when two threads enter it
    at once, as autograd's do.

    Args:
        values: uint16 [n] or [rows, columns], of any strides; long rows are counted fastest.
        counts: int64 [32768], added to in place.
        threads: at most this many run at once.
    """
    values = np.atleast_2d(values)
    if values.size < SMALL:
        _count_directly(values, counts)
        return
    parts = min(threads, max(1, values.size // GRAIN))
    mine, *others = np.array_split(values, parts, axis=int(len(values) < parts))
    partial = [np.zeros(32768, np.int64) for _ in others]
    jobs = [pool(threads).submit(_count_in_turn, v, c) for v, c in zip(others, partial, strict=True)]
    _count_in_turn(mine, counts)
    for job, part in zip(jobs, partial, strict=True):
        job.result()
        counts += part
