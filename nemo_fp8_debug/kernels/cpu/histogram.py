"""Count the magnitude patterns of 16-bit values in CPU memory, at one value per clock cycle."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray
from numpy.lib.stride_tricks import as_strided

from .jit import (
    AHEAD,
    JOB,
    CompiledJob,
    add_atomically,
    compile_job,
    counters_at,
    counts_at,
    jit,
    prefetch_cache_line,
    take_next_share,
    values_at,
    view_job_numbers,
)
from .threads import ZeroedArrays, run_job_shares

Counts = npt.NDArray[np.int64]
Counters = npt.NDArray[np.uint32]
Values = npt.NDArray[np.uint16]

#: for fewer values than this, clearing and adding up private counters takes more time than they save, if caches are full
SMALL = 1 << 20
#: least number of values for each thread
GRAIN = 1 << 19
#: number of values to count between two checks that no private 32-bit counter can overflow
RUN = 1 << 30
_private = ZeroedArrays((4, 32768), np.uint32)


@jit
def _count_directly(values: Values, counts: Counts) -> None:
    for r in range(values.shape[0]):
        for i in range(values.shape[1]):
            counts[values[r, i] & 0x7FFF] += 1


@jit
def count_bit_patterns_if_small(address: int, n: int, counts: int) -> None:
    """Count fewer than `SMALL` values, like `count_bit_patterns`. The values are at `address`, the counters at `counts`."""
    _count_directly(carray(values_at(address), (1, n)), carray(counts_at(counts), 32768))


@jit
def sum_last_counts(counts: int, first: int) -> int:
    """Return the sum of the counters from index `first` on. `counts` is the address of the counters."""
    total: int = carray(counts_at(counts), 32768)[first:].sum()
    return total


@jit
def list_occupied_bins(address: int, bins: Counts, counts: Counts) -> int:
    """Write the non-empty bins, in ascending order, to `bins`, and their counts to `counts`. Return how many there are.

    `address` is the address of the histogram.
    """
    table, n = carray(counts_at(address), 32768), 0
    for i in range(0, 32768, 8):  # most groups of eight are empty
        prefetch_cache_line(table, i + AHEAD)
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
def _move(private: tuple[Counters, ...], counts: int) -> None:
    a, b, c, d = private
    for start in range(0, 32768, 8):  # most groups of eight are empty
        some = a[start] | b[start] | c[start] | d[start]
        for i in range(start + 1, start + 8):
            some |= a[i] | b[i] | c[i] | d[i]
        if some:
            for i in range(start, start + 8):
                count = np.int64(a[i]) + b[i] + c[i] + d[i]
                if count:
                    add_atomically(counts + 8 * i, count)
                a[i] = b[i] = c[i] = d[i] = 0


@jit
def _count_in_turn(run: Values, following: Values, private: tuple[Counters, ...]) -> None:
    # Use four tables in turn. Neighboring values are often equal, and updates of one counter would wait for each other.
    a, b, c, d = private
    whole = run.size // 32 * 32
    for start in range(0, whole, 32):
        for ahead in range(start + AHEAD, start + AHEAD + 32, 8 if run.strides[0] > 2 else 32):
            if ahead < run.size:
                prefetch_cache_line(run, ahead)
            else:
                prefetch_cache_line(following, ahead - run.size)
        for i in range(start, start + 32, 4):
            a[run[i] & 0x7FFF] += 1
            b[run[i + 1] & 0x7FFF] += 1
            c[run[i + 2] & 0x7FFF] += 1
            d[run[i + 3] & 0x7FFF] += 1
    for i in range(whole, run.size):
        a[run[i] & 0x7FFF] += 1


@functools.cache
def _counting() -> CompiledJob:
    """Compile the loop that counts the values of a matrix in memory. Its rows and columns may have any strides.

    Each share has four private tables, uint32 [32768], which are zero before and after its work. A finished share writes
    a 1.
    Shares consist of rows, or of columns if there are fewer rows than shares.
    """

    @compile_job
    def count(job: int) -> None:
        numbers = carray(counts_at(job), JOB + view_job_numbers(job)[1])
        shares, address, rows, columns, stride, step = numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]
        counts = numbers[7]
        while True:
            share = take_next_share(job)
            if share >= shares:
                return
            tables = carray(counters_at(numbers[8] + share * 16 * 32768), (4, 32768))
            private = tables[0], tables[1], tables[2], tables[3]
            top, bottom, left, right = 0, rows, 0, columns
            if rows >= shares:
                top, bottom = rows * share // shares, rows * (share + 1) // shares
            else:
                left, right = columns * share // shares, columns * (share + 1) // shares
            counted, size = 0, (right - left - 1) * step + 1
            for r in range(top, bottom):
                row = carray(values_at(address + 2 * (r * stride + left * step)), size)
                # If a view has gaps, the next row does not directly follow this row in memory.
                below = carray(values_at(address + 2 * (min(r + 1, bottom - 1) * stride + left * step)), size)
                for first in range(0, right - left, RUN):
                    end = min(first + RUN, right - left)
                    if counted + end - first > 1 << 32:
                        _move(private, counts)
                        counted = 0
                    counted += end - first
                    if step == 1:
                        _count_in_turn(row[first:end], below, private)
                    else:
                        shape, apart = (right - left,), (2 * step,)
                        _count_in_turn(as_strided(row, shape, apart)[first:end], as_strided(below, shape, apart), private)
            _move(private, counts)
            numbers[JOB + share] = 1

    return count


def count_bit_patterns(values: Values, counts: Counts, threads: int) -> None:
    """Add to `counts[p]` how often the magnitude pattern `p` (sign bit cleared) occurs.

    Args:
        values: uint16 [n] or [rows, columns], with any strides that are not negative. Long rows are counted fastest.
        counts: int64 [32768], contiguous. It is updated in place.
        threads: largest number of threads that run at once, see `run_job_shares`.
    """
    values = np.atleast_2d(values)
    if values.size < SMALL:
        _count_directly(values, counts)
        return
    shares = min(threads, max(1, values.size // GRAIN))
    tables = _private.take_array(shares)
    rows, columns = values.shape
    stride, step = (of // values.itemsize for of in values.strides)
    where = values.ctypes.data, rows, columns, stride, step, counts.ctypes.data, tables.ctypes.data
    job = run_job_shares(_counting(), where, shares, 1)
    if not all(job[JOB:]):
        raise MemoryError(f"no room to count {values.size} values")
    _private.return_array(tables)
