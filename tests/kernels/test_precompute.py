"""What is precomputed of histograms in host memory is what the metrics compute, to the last bit."""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nemo_fp8_debug.kernels import histogram_of
from nemo_fp8_debug.kernels.cpu.precompute import precompute
from nemo_fp8_debug.numerics import metrics
from nemo_fp8_debug.numerics.formats import BF16, E4M3, E5M2
from nemo_fp8_debug.numerics.histogram import Histogram, HistogramBatch
from nemo_fp8_debug.numerics.precomputed import CastRequest, Histograms
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling, scales_of

ANY = hnp.arrays(np.uint16, st.integers(0, 300))
#: some that lie close together, as those of real tensors do
NORMAL = st.integers(0, 2**32 - 1).map(lambda seed: bits(torch.randn(500, generator=torch.Generator().manual_seed(seed))))
SCALES = [torch.tensor(1.0), torch.tensor(3.7e-3), torch.tensor(2.0**60), torch.tensor(6.1e-30)]


def bits(x: torch.Tensor) -> npt.NDArray[np.uint16]:
    return x.bfloat16().view(torch.int16).numpy().view(np.uint16)


def of_bits(patterns: npt.NDArray[np.uint16], dtype: torch.dtype) -> Histogram:
    return histogram_of(torch.from_numpy(patterns.view(np.int16)).view(dtype))


def same(found: object, want: object) -> bool:
    pairs = [(column, getattr(want, name)) for name, column in vars(found).items()]
    return all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True) for a, b in pairs)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.one_of(ANY, NORMAL), st.sampled_from([torch.bfloat16, torch.float16])), min_size=1, max_size=4),
    st.sampled_from([*SCALES, CurrentScaling(), CurrentScaling(power_of_two=True)]),
    st.sampled_from([E4M3, E5M2]),
)
def test_precomputed_of_is_what_is_computed(
    tensors: list[tuple[npt.NDArray[np.uint16], torch.dtype]], scale: torch.Tensor | CurrentScaling, fmt: metrics.FloatFormat
) -> None:
    histograms = [of_bits(*of) for of in tensors]
    batch = HistogramBatch.of(copy.deepcopy(histograms))
    want = metrics.moments(batch)
    scales = scales_of([scale] * len(histograms), [fmt] * len(histograms), want.amax.float())
    precompute([(of, [(scale, fmt)]) for of in histograms])
    for of, (patterns, dtype) in zip(histograms, tensors, strict=True):
        assert of.precomputed
        assert np.array_equal(np.concatenate([of.occupied]), np.concatenate([of_bits(patterns, dtype).occupied]))
    (precomputed, _), found = histograms[0].precomputed or (None, 0), Histograms(histograms)
    assert same(found.moments, want)
    assert precomputed
    sums = precomputed.sums_for(range(len(histograms)), scales, [fmt] * len(histograms))
    assert sums
    assert same(sums, metrics.quantization_sums(batch, scales, [fmt] * len(histograms)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_magnitudes_at_once(dtype: torch.dtype) -> None:
    """As many bins as there can be, each a number of times that needs all bits of a float64."""
    counted = Histogram(dtype, torch.arange(1, 32769) ** 3)
    want = metrics.moments(HistogramBatch.of([Histogram(dtype, counted.counts.clone())]))
    precompute([(counted, [])])
    assert same(Histograms([counted]).moments, want)


def test_what_is_not_a_cast_to_fp8_is_left_to_the_metrics() -> None:
    counted = histogram_of(torch.randn(1000).bfloat16())
    requests: list[CastRequest] = [(torch.tensor(1.0), BF16), (torch.tensor(2.0), E4M3)]
    precompute([(counted, requests)])
    assert counted.precomputed
    assert counted.precomputed[0].sums_for([0], torch.tensor([1.0]), [BF16]) is None
    assert counted.precomputed[0].sums_for([0], torch.tensor([2.0]), [E4M3])
    assert float(Histograms([counted]).quantization_sums(torch.tensor([1.0]), [BF16]).sum_error2) == 0
