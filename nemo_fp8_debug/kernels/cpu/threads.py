"""Run work in several threads at once, in torch's own threads if possible."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .jit import JOB, CompiledJob

_PROCESS = os.getpid()


def run_job_shares(work: CompiledJob, numbers: tuple[int, ...], shares: int, results: int = 0) -> Any:
    """Run a job of `shares` parts in as many threads as torch has. Each thread takes the next share until none is left.

    Args:
        numbers: arguments of the job, stored after the count of taken shares and the number of shares.
        results: how many numbers each share writes, after the first `JOB` numbers.

    Returns:
        The job as an int64 array, with results from index `JOB` on. A result that no share has written is zero.
    """
    job = _numbers(JOB + results * shares)(0, shares, *numbers)
    if shares == 1:
        work.alone(job)
    elif team := _team():
        team(work.address, job, 0, 0)  # 0: as many threads as torch's next operation; any other number restarts the threads
    else:
        jobs = [_pool().submit(work.alone, job) for _ in range(shares - 1)]
        work.alone(job)
        for other in jobs:
            other.result()
    return job


class ZeroedArrays:
    """Arrays of zeros for the shares of a job.

    A share must leave its array zero. We reuse the arrays, because getting new memory from the system takes long.
    """

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        """
        Args:
            shape: shape of each share's array.
        """
        self._shape, self._dtype = shape, dtype
        self._kept: list[npt.NDArray[Any]] = []

    def take_array(self, shares: int) -> npt.NDArray[Any]:
        """Return an array of zeros, [at least `shares`, *shape], for exclusive use. Give it back only if it is all zeros."""
        found = self._kept.pop() if self._kept else None
        return found if found is not None and len(found) >= shares else np.zeros((shares, *self._shape), self._dtype)

    def return_array(self, zeros: npt.NDArray[Any]) -> None:
        """Keep an array of zeros for a later `take_array`."""
        self._kept.append(zeros)


@functools.cache
def _numbers(length: int) -> Any:
    return ctypes.c_int64 * length


@functools.cache
def _team() -> Callable[..., None] | None:
    """Return the function `GOMP_parallel` of torch's OpenMP library, or None if the library lacks it.

    The OpenMP libraries of GNU, LLVM and Intel have it. Our own threads would compete with torch's threads, which spin for a
    while after each operation. Our own threads would also take several times as long to wake up.
    """
    if os.getpid() != _PROCESS:
        return None
    try:
        team: Callable[..., None] = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    team.argtypes, team.restype = (pointer, pointer, number, number), None  # type: ignore[attr-defined]
    return team


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return a pool of our own threads, kept between calls."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="nemo_fp8_debug")


if hasattr(os, "register_at_fork"):
    # A forked child inherits teams and pools without their threads, so it would wait forever for these threads.
    os.register_at_fork(after_in_child=_team.cache_clear)
    os.register_at_fork(after_in_child=_pool.cache_clear)
