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
Words = npt.NDArray[np.uint64]

#: below this many values, which a cache close by holds, clearing and folding private counters costs more than they save
SMALL = 1 << 20
#: values one thread gets at the least
GRAIN = 1 << 20
#: words that a private 32-bit counter can take without overflow
CHUNK = 1 << 31
#: words read ahead (2 KiB); the hardware's own prefetcher stops at every 4 KiB page and halves the speed
AHEAD = 256

_MASK = np.uint64(0x7FFF)
_S16, _S32, _S48 = np.uint64(16), np.uint64(32), np.uint64(48)


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile without the GIL; keep the machine code on disk where a writable place for it exists."""
    try:
        compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True, **options)(function)
    return compiled


@intrinsic
def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]`; an index past the end is harmless, since a prefetch cannot fault."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        declared = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        llvm_prefetch = cgutils.get_or_insert_function(builder.module, declared, "llvm.prefetch.p0i8")
        address = builder.bitcast(builder.gep(data, [args[1]]), byte)
        builder.call(llvm_prefetch, [address, i32(0), i32(3), i32(1)])  # read, keep in all levels, data
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


_values_at, _counts_at = _pointer_to(types.uint16), _pointer_to(types.int64)


@jit
def _count_directly(values: npt.NDArray[np.uint16], counts: Counts) -> None:
    whole = values.size // 32 * 32
    for start in range(0, whole, 32):
        _prefetch(values, start + 4 * AHEAD)  # type: ignore[call-arg]
        for i in range(start, start + 32):
            counts[values[i] & 0x7FFF] += 1
    for i in range(whole, values.size):
        counts[values[i] & 0x7FFF] += 1


@jit
def count_few(address: int, n: int, counts: int) -> None:
    """As `count_patterns` in this thread, of values and counters at addresses; for less than `SMALL` of them."""
    _count_directly(carray(_values_at(address), n), carray(_counts_at(counts), 32768))


@jit
def last_counts(counts: int, first: int) -> int:
    """The sum of the counters at an address from one of them on."""
    total: int = carray(_counts_at(counts), 32768)[first:].sum()
    return total


@jit
def _count_words(words: Words, counts: Counts) -> None:
    # One table per position in the word: equal neighbours, which are common, would otherwise wait for each other.
    a, b = np.zeros(32768, np.uint32), np.zeros(32768, np.uint32)
    c, d = np.zeros(32768, np.uint32), np.zeros(32768, np.uint32)
    whole = words.size // 8 * 8
    for start in range(0, whole, 8):
        _prefetch(words, start + AHEAD)  # type: ignore[call-arg]
        for i in range(start, start + 8):
            word = words[i]
            a[word & _MASK] += 1
            b[(word >> _S16) & _MASK] += 1
            c[(word >> _S32) & _MASK] += 1
            d[(word >> _S48) & _MASK] += 1
    for i in range(whole, words.size):
        word = words[i]
        a[word & _MASK] += 1
        b[(word >> _S16) & _MASK] += 1
        c[(word >> _S32) & _MASK] += 1
        d[(word >> _S48) & _MASK] += 1
    for i in range(32768):
        counts[i] += np.int64(a[i]) + b[i] + c[i] + d[i]


def _count_chunks(words: Words, counts: Counts) -> None:
    for start in range(0, words.size, CHUNK):
        _count_words(words[start : start + CHUNK], counts)


@functools.lru_cache(maxsize=1)
def pool(threads: int) -> ThreadPoolExecutor:
    """Threads of our own, kept between calls."""
    return ThreadPoolExecutor(threads, thread_name_prefix="nemo_fp8_debug")


if hasattr(os, "register_at_fork"):
    # A forked child inherits the pool without its threads and would wait for them for ever.
    os.register_at_fork(after_in_child=pool.cache_clear)


def count_patterns(values: npt.NDArray[np.uint16], counts: Counts, threads: int) -> None:
    """Add to `counts[p]` how often the magnitude pattern `p` (sign bit cleared) occurs.

    Uses threads of its own and not Numba's, whose fall-back threading layer ends the process when two threads enter it
    at once, as autograd's do.

    Args:
        values: uint16 [n], contiguous.
        counts: int64 [32768], added to in place.
        threads: at most this many run at once.
    """
    if values.size < SMALL:
        _count_directly(values, counts)
        return
    head = -values.ctypes.data % 8 // 2  # values before the first 8-byte boundary
    body = (values.size - head) // 4
    _count_directly(values[:head], counts)
    _count_directly(values[head + 4 * body :], counts)
    words = values[head : head + 4 * body].view(np.uint64)
    parts = min(threads, max(1, values.size // GRAIN))
    if parts == 1:
        _count_chunks(words, counts)
        return
    mine, *others = np.array_split(words, parts)
    partial = [np.zeros(32768, np.int64) for _ in others]
    jobs = [pool(threads).submit(_count_chunks, w, c) for w, c in zip(others, partial, strict=True)]
    _count_chunks(mine, counts)
    for job, part in zip(jobs, partial, strict=True):
        job.result()
        counts += part
