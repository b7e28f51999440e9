"""Numba's CUDA simulator, which runs a kernel's source in threads of the host, made fit for many of them.

Imported under `NUMBA_ENABLE_CUDASIM=1`, which Numba looks at when it is imported itself.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba.cuda.simulator.kernelapi import FakeCUDAShared
from numba.np.numpy_support import as_dtype


def _array(self: Any, shape: int, dtype: Any) -> Any:
    frame = sys._getframe(1)
    return self._allocations.setdefault((frame.f_code.co_filename, frame.f_lineno), np.empty(shape, as_dtype(dtype)))


# Its own looks whether this line has its array and then makes one: of threads that look at the same time each got its own.
FakeCUDAShared.array = _array
sys.setswitchinterval(1e-4)  # it waits for its threads in a busy loop
