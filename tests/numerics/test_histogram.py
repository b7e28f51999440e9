"""Histograms against NumPy's count of the same bit patterns."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from processes import GUARD
from tensors import KINDS, SIXTEEN_BIT, counted, random_patterns

from nemo_fp8_debug.kernels import count_histogram, torch_fallback
from nemo_fp8_debug.kernels.cpu import histogram
from nemo_fp8_debug.kernels.memory import view_bits
from nemo_fp8_debug.numerics.histogram import BINS, Histogram, HistogramBatch, list_pattern_magnitudes

PATTERNS = hnp.arrays(np.uint16, st.integers(0, 40), elements=st.integers(0, 0xFFFF))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_counts(got: Histogram, x: torch.Tensor) -> None:
    assert got.dtype == x.dtype
    assert not got.rounded
    np.testing.assert_array_equal(got.counts.numpy(), counted(x))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, dtype: torch.dtype) -> None:
    x = KINDS[kind](dtype)
    assert_counts(count_histogram(x), x)


@pytest.mark.parametrize("extra", [-1, 0, 1, 2, 3, 29])
@pytest.mark.parametrize("view", [np.s_[:], np.s_[1:], np.s_[2:], np.s_[3:-1]], ids=str)
def test_sizes_and_alignments_around_the_kernels_threshold(extra: int, view: slice) -> None:
    start, stop = view.start or 0, view.stop or 0
    x = random_patterns(histogram.SMALL + extra + start - stop, torch.bfloat16)[view]
    assert len(x) == histogram.SMALL + extra
    assert_counts(count_histogram(x), x)


@pytest.mark.parametrize("size", [histogram.GRAIN - 1, histogram.GRAIN + 3, 2 * histogram.GRAIN + 7])
@pytest.mark.parametrize("kind", ["random", "constant"])
def test_sizes_that_are_shared_among_threads(size: int, kind: str, two_threads: None) -> None:
    x = random_patterns(size + 1, torch.float16)[1:] if kind == "random" else torch.full((size,), 0.1, dtype=torch.float16)
    assert_counts(count_histogram(x), x)


def test_a_transposed_tensor_above_the_threshold() -> None:
    x = random_patterns(300 * (histogram.SMALL // 300 + 1), torch.bfloat16).view(300, -1).t()
    assert_counts(count_histogram(x), x)


VIEWS = [np.s_[:, :300], np.s_[:, 1::2], np.s_[::3, 5:-1], np.s_[:, :3], np.s_[:, :, 2:70], np.s_[0, 0, ::2]]


@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_views_with_gaps(view: tuple[slice, ...], order: tuple[int, ...], two_threads: None) -> None:
    x = random_patterns(16 * 700 * 200, torch.float16).view(16, 700, 200)[view]
    assert_counts(count_histogram(x.permute(order) if x.dim() == 3 else x), x)


def test_private_counters_are_emptied_before_they_run_over() -> None:
    """2^32 and more of a value on one thread; their memory is one value, repeated by its strides."""
    n = (1 << 32) + (1 << 21)
    x = torch.full((), 1.5, dtype=torch.bfloat16).expand(4, n // 4)
    counts = np.zeros(BINS, np.int64)
    histogram.count_bit_patterns(view_bits(x), counts, threads=1)
    assert counts[0x3FC0] == counts.sum() == n


@pytest.mark.parametrize("rows", [3, 1 << 18])
def test_one_value_that_is_repeated_by_its_strides(rows: int) -> None:
    x = torch.full((), 1.5, dtype=torch.bfloat16).expand(rows, 8)
    assert_counts(count_histogram(x), x)


def test_memory_can_be_resized_as_before() -> None:
    """As FSDP does with that of a gathered weight."""
    x = torch.randn(64, 3).bfloat16()
    assert_counts(count_histogram(x), x.clone())
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wider_values_are_rounded_to_bfloat16_and_marked(dtype: torch.dtype) -> None:
    x = torch.randn(1000, dtype=dtype)
    got = count_histogram(x)
    assert got.rounded
    assert got.dtype == torch.bfloat16
    np.testing.assert_array_equal(got.counts.numpy(), counted(x.bfloat16()))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_counts_the_same(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_fallback, "CHUNK", 100)
    x = KINDS[kind](dtype)
    counts = torch.zeros(BINS, dtype=torch.int64)
    torch_fallback.count_bit_patterns(x.detach().contiguous().reshape(-1).view(torch.int16), counts)
    assert torch.equal(counts, count_histogram(x).counts)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_a_bin_stands_for_the_magnitude_of_its_pattern(dtype: torch.dtype) -> None:
    own = list_pattern_magnitudes()[SIXTEEN_BIT.index(dtype) * BINS :][:BINS]
    patterns = torch.arange(BINS, dtype=torch.int32).to(torch.int16).view(dtype).float()
    assert torch.equal(own.nan_to_num(-1), patterns.nan_to_num(-1))


def test_threads_may_count_at_the_same_time() -> None:
    arrays = [random_patterns(2 * histogram.GRAIN, torch.bfloat16, seed) for seed in range(3)]

    def count(job: int) -> bool:
        x = arrays[job % 3]
        counts = np.zeros(BINS, np.int64)
        histogram.count_bit_patterns(x.view(torch.int16).numpy().view(np.uint16), counts, threads=2 + job % 2)
        return np.array_equal(counts, counted(x))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(count, range(12)))


def test_a_process_forked_after_the_threads_were_used_still_counts(two_threads: None) -> None:
    x = random_patterns(2 * histogram.GRAIN, torch.bfloat16)
    want = count_histogram(x).counts.numpy()

    def count_in_child() -> None:
        counts = np.zeros(BINS, np.int64)
        histogram.count_bit_patterns(x.view(torch.int16).numpy().view(np.uint16), counts, threads=2)
        np.testing.assert_array_equal(counts, want)

    child = multiprocessing.get_context("fork").Process(target=count_in_child)
    child.start()
    child.join(GUARD)
    finished = child.exitcode
    child.kill()
    assert finished == 0


@settings(max_examples=50)
@given(PATTERNS, PATTERNS, st.sampled_from(SIXTEEN_BIT))
def test_histograms_of_parts_add_up(a: npt.NDArray[np.uint16], b: npt.NDArray[np.uint16], dtype: torch.dtype) -> None:
    x, y = (torch.from_numpy(bits.view(np.int16)).view(dtype) for bits in (a, b))
    assert_counts(count_histogram(x) + count_histogram(y), torch.cat([x, y]))


def test_a_sum_is_marked_rounded_if_one_part_is() -> None:
    exact, rounded = count_histogram(torch.ones(3, dtype=torch.bfloat16)), count_histogram(torch.ones(3))
    assert (exact + rounded).rounded
    assert not (exact + exact).rounded


def test_histograms_of_different_dtypes_refuse_to_add() -> None:
    with pytest.raises(ValueError, match=r"float16.*bfloat16"):
        Histogram(torch.bfloat16) + Histogram(torch.float16)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 700), max_size=5), st.integers(0, 2**32 - 1))
def test_bins_of_a_histogram_add_up_whatever_is_beside_it(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    histograms = [count_histogram(torch.randn(20 * length, generator=generator).bfloat16()) for length in lengths]
    batch = HistogramBatch.pack_histograms(histograms)
    per_bin = batch.bin_magnitudes.double() * batch.bin_counts
    sums = batch.sum_bins(per_bin)
    alone = [HistogramBatch.pack_histograms([of]) for of in histograms]
    assert sums.tolist() == [float(one.sum_bins(one.bin_magnitudes.double() * one.bin_counts)) for one in alone]
    exact = [math.fsum(part.tolist()) for part in per_bin.split(batch.room.tolist())] if lengths else []
    torch.testing.assert_close(sums, torch.tensor(exact, dtype=torch.float64), rtol=1e-14, atol=0)
