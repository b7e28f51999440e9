"""The loop over histograms in host memory gives what the metrics compute, to the last bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.kernels.cpu.histograms import Histograms
from nemo_fp8_debug.numerics import metrics
from nemo_fp8_debug.numerics.formats import BF16, E4M3, E5M2
from nemo_fp8_debug.numerics.histogram import Histogram, HistogramBatch
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling, compute_cast_scales

ANY = hnp.arrays(np.uint16, st.integers(0, 300))
#: some that lie close together, as those of real tensors do
NORMAL = st.integers(0, 2**32 - 1).map(lambda seed: bits(torch.randn(500, generator=torch.Generator().manual_seed(seed))))
SCALES = [torch.tensor(1.0), torch.tensor(3.7e-3), torch.tensor(2.0**60), torch.tensor(6.1e-30)]


def bits(x: torch.Tensor) -> npt.NDArray[np.uint16]:
    return x.bfloat16().view(torch.int16).numpy().view(np.uint16)


def of_bits(patterns: npt.NDArray[np.uint16], dtype: torch.dtype) -> Histogram:
    return count_histogram(torch.from_numpy(patterns.view(np.int16)).view(dtype))


def same(found: object, want: object) -> bool:
    pairs = [(column, getattr(want, name)) for name, column in vars(found).items()]
    return all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True) for a, b in pairs)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.one_of(ANY, NORMAL), st.sampled_from([torch.bfloat16, torch.float16])), max_size=4),
    st.sampled_from([*SCALES, CurrentScaling(), CurrentScaling(power_of_two=True)]),
    st.sampled_from([E4M3, E5M2, BF16]),
)
def test_they_give_what_the_metrics_compute(
    tensors: list[tuple[npt.NDArray[np.uint16], torch.dtype]], scale: torch.Tensor | CurrentScaling, fmt: metrics.FloatFormat
) -> None:
    histograms, formats = [of_bits(*of) for of in tensors], [fmt] * len(tensors)
    batch = HistogramBatch.pack_histograms([of_bits(*of) for of in tensors])
    want = metrics.compute_histogram_moments(batch)
    scales = compute_cast_scales([scale] * len(tensors), formats, want.amax.float())
    found = Histograms(histograms)
    for of, (patterns, dtype) in zip(histograms, tensors, strict=True):
        assert np.array_equal(of.occupied_bins, of_bits(patterns, dtype).occupied_bins)
    assert same(found.value_moments, want)
    assert np.array_equal(found.amax(), batch.amax())
    assert same(found.quantization_sums(scales, formats), metrics.quantization_sums_of_histograms(batch, scales, formats))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_magnitudes_at_once(dtype: torch.dtype) -> None:
    """As many bins as there can be, each a number of times that needs all bits of a float64."""
    counted = Histogram(dtype, torch.arange(1, 32769) ** 3)
    want = metrics.compute_histogram_moments(HistogramBatch.pack_histograms([Histogram(dtype, counted.counts.clone())]))
    assert same(Histograms([counted]).value_moments, want)


def test_some_of_them_in_another_order() -> None:
    histograms = [count_histogram((10.0**i * torch.randn(100 * i)).bfloat16()) for i in range(4)]
    found = Histograms(histograms).select([2, 0])
    assert found.value_moments.n.tolist() == [200, 0]
    sums = found.quantization_sums(torch.tensor([2.0, 1.0]), [E4M3, E5M2])
    alone = Histograms(histograms[2:3]).quantization_sums(torch.tensor([2.0]), [E4M3])
    assert sums.sum_error2[0] == alone.sum_error2[0] > 0
    assert sums.sum_error2[1] == 0
