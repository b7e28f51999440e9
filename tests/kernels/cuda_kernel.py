"""The CUDA kernel in Numba's simulator, which runs its source without a device, against NumPy's count and the CPU kernel's.

A process of its own, with `NUMBA_ENABLE_CUDASIM=1`: Numba looks at that when it is imported.
"""

from __future__ import annotations

import cuda_simulator
import numpy as np
import numpy.typing as npt
import torch
from cuda_simulator import bits
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nemo_fp8_debug.kernels.cpu import histogram
from nemo_fp8_debug.kernels.cuda import histogram as cuda
from nemo_fp8_debug.numerics.histogram import BINS, DTYPES, find_infinity_bin

Patterns = npt.NDArray[np.uint16]
INFINITY = {dtype: find_infinity_bin(dtype) for dtype in DTYPES}
BF16, FP16 = DTYPES


def at(address: int, patterns: Patterns) -> Patterns:
    """A copy that starts so many values behind an 8-byte boundary."""
    room = np.zeros(len(patterns) // 4 + 2, np.uint64).view(np.uint16)
    room[address : address + len(patterns)] = patterns
    return room[address : address + len(patterns)]


def counted(values: Patterns, infinity: int, grid: tuple[int, int], before: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    counts = before.copy()
    cuda_simulator.count(values, infinity, counts, grid)
    return counts


def check(values: Patterns, infinity: int, grid: tuple[int, int] = (1, 2)) -> None:
    before = np.arange(BINS, dtype=np.int64) << 33  # counts are added to what is there, of more than 32 bits
    got = counted(values, infinity, grid, before) - before
    np.testing.assert_array_equal(got, np.bincount(values & 0x7FFF, minlength=BINS))
    on_cpu = np.zeros(BINS, np.int64)
    histogram.count_bit_patterns(values, on_cpu, 1)
    np.testing.assert_array_equal(got, on_cpu)


def around(middle: int) -> st.SearchStrategy[int]:
    """Patterns close to one another, of either sign, and a few from anywhere."""
    close = st.integers(max(0, middle - 40), min(0x7FFF, middle + 40))
    return st.one_of(close, close.map(lambda p: p | 0x8000), st.just(0), st.integers(0, 0xFFFF))


PATTERNS = st.sampled_from([0, 0x0C00, 0x3F80, 0x7F7F]).flatmap(lambda middle: st.lists(around(middle), max_size=80))


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(PATTERNS, st.integers(0, 3), st.sampled_from(DTYPES), st.sampled_from([(1, 2), (3, 1)]))
@example([], 0, BF16, (1, 2))
@example([0x3F80], 3, BF16, (1, 2))
@example([0x3F80] * 3, 1, BF16, (1, 2))
def sizes_alignments_and_grids(patterns: list[int], address: int, dtype: torch.dtype, grid: tuple[int, int]) -> None:
    check(at(address, np.array(patterns, np.uint16)), INFINITY[dtype], grid)


def all_patterns() -> None:
    check(np.arange(1 << 16, dtype=np.uint16), INFINITY[BF16])


def values_of_any_size() -> None:
    """Of real values, wherever on the axis they lie."""
    torch.manual_seed(0)
    for dtype in DTYPES:
        for scale in (1e-7, 1e-3, 1.0, 1e3):
            x = bits((scale * torch.randn(1 << 11)).to(dtype))
            check(x, INFINITY[dtype])


def values_on_both_sides_of_the_window() -> None:
    first = np.full(64, 0x4000, np.uint16)  # where each block puts its window
    edge = 0x4000 + cuda.SPARE - cuda.WINDOW
    others = np.array(
        [1, edge - 1, edge, 0x4000 + cuda.SPARE - 1, 0x4000 + cuda.SPARE, 0x7F7F, 0x7F80, 0x7FFF, 0xFFC0, 0x8000]
    )
    for grid in ((1, 2), (2, 2)):
        check(np.concatenate([first, np.repeat(others, 5).astype(np.uint16)]), INFINITY[BF16], grid)


def padding_in_front() -> None:
    x = np.concatenate([np.zeros(100, np.uint16), bits(torch.linspace(1, 2, 301).bfloat16())])
    check(x, INFINITY[BF16], (2, 3))


def tensors_of_one_value() -> None:
    for pattern in (0, 0x8000, 0x0001, 0x3F80, 0xC049, 0x7F80, 0x7FC0, 0xFFFF):
        check(np.full(203, pattern, np.uint16), INFINITY[BF16], (2, 2))


def words_lie_on_their_boundaries() -> None:
    for n in range(12):
        for address in range(0, 16, 2):
            head, body = cuda.words_of(address, n)
            assert head + 4 * body <= n < head + 4 * body + 4 or head == n
            assert not body or (address + 2 * head) % 8 == 0


if __name__ == "__main__":
    words_lie_on_their_boundaries()
    sizes_alignments_and_grids()
    values_on_both_sides_of_the_window()
    padding_in_front()
    tensors_of_one_value()
    values_of_any_size()
    all_patterns()
    print("counted")
