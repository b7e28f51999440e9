"""What benchmarks/peers holds our cost against computes our metrics."""

from __future__ import annotations

import pytest
import torch
from benchmarks.peers.eager_metrics import NAMES, eager_metrics

from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.numerics import metrics
from nemo_fp8_debug.numerics.formats import E4M3, E5M2, FloatFormat
from nemo_fp8_debug.numerics.histogram import HistogramBatch
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("precision", "digits"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_eager_formulas_give_our_metrics(fmt: FloatFormat, precision: torch.dtype, digits: float) -> None:
    torch.manual_seed(0)
    x = (torch.randn(100, 100) * (4 * torch.randn(100, 100)).exp()).bfloat16()
    x[0, 0], x[0, 1], x[0, 2] = torch.nan, torch.inf, 0
    batch = HistogramBatch.pack_histograms([count_histogram(x)])
    moments = metrics.compute_histogram_moments(batch)
    scale = CurrentScaling().compute_scale(batch.amax(), torch.tensor([fmt.max]))
    ours = metrics.compute_metrics(moments, metrics.quantization_sums_of_histograms(batch, scale, [fmt]), scale, scale)
    ours |= {"nan": moments.nan, "inf": moments.inf}
    theirs = eager_metrics(x, fmt.dtype, precision)
    assert set(NAMES) == {*metrics.METRICS, "nan", "inf"}
    assert theirs == pytest.approx({name: ours[name].item() for name in NAMES}, rel=digits)
