"""Every metric against a float64 oracle that follows the definitions value by value, and shares no code with the package."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensors import KINDS, SIXTEEN_BIT, random_patterns

from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.kernels.cuda.sums import sum_part_rows
from nemo_fp8_debug.numerics import metrics
from nemo_fp8_debug.numerics.formats import E4M3, E5M2, FloatFormat
from nemo_fp8_debug.numerics.histogram import HistogramBatch
from nemo_fp8_debug.numerics.metrics import METRICS, DeferredRowSum, QuantizationSums, ValueMoments

TARGET = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FLT_MAX = np.finfo(np.float32).max

COUNTS = ("n", "nan", "inf")
#: Sums agree to 1e-12, and metrics that are quotients or roots of them to a few times that. What is a logarithm of one
#: (1e-12 in relative_error is 20 / ln 10 * 1e-12 dB) or a 1 that rounding moves has this as its absolute tolerance.
RELATIVE = dict.fromkeys(METRICS, 1e-12) | {"cosine": 2e-12, "kurtosis": 3e-12, "sqnr_db": 0.0}
ABSOLUTE = dict.fromkeys(METRICS, 0.0) | {"sqnr_db": 1e-11}


def current_scale(values: npt.NDArray[Any], fmt: FloatFormat) -> np.float32:
    """Format limit / amax in float32; 1 where there is no amax, the largest float32 where the quotient overflows."""
    finite = np.abs(values[np.isfinite(values)])
    if not finite.size or finite.max() == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        return np.minimum(np.float32(fmt.max) / np.float32(finite.max()), FLT_MAX)


def oracle(values: npt.NDArray[np.float32], scale: np.float32, fmt: FloatFormat) -> dict[str, float]:
    """All metrics and counts of float32 `values` (those of a 16-bit tensor are float32 values too)."""
    limit = np.float32(ml_dtypes.finfo(TARGET[fmt.name]).max)
    finite = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        product = finite * scale
    x = finite.astype(np.float64)
    q = np.clip(product, -limit, limit).astype(TARGET[fmt.name]).astype(np.float64) / np.float64(scale)
    n, magnitude = x.size, np.sort(np.abs(x[x != 0]))
    sum_x2, sum_q2, sum_xq = math.fsum(x * x), math.fsum(q * q), math.fsum(x * q)
    sum_error2 = math.fsum((x - q) ** 2)

    of: dict[str, float] = dict.fromkeys(METRICS, math.nan)
    of |= {"n": n, "nan": int(np.isnan(values).sum()), "inf": int(np.isinf(values).sum())}
    if n:
        of["amax"] = float(np.abs(x).max())
        of["underflow_pct"] = 100 * int(((x != 0) & (q == 0)).sum()) / n
        of["overflow_pct"] = 100 * int((np.abs(product) > np.float32(limit) * np.float32(1 + 2**-22)).sum()) / n
        of["mse"] = sum_error2 / n
    if magnitude.size:
        amax, amin, median = magnitude[-1], magnitude[0], magnitude[(magnitude.size - 1) // 2]
        of["relative_error"] = math.sqrt(sum_error2 / sum_x2)
        of["sqnr_db"] = -20 * math.log10(of["relative_error"]) if sum_error2 else math.inf
        of["cosine"] = sum_xq / math.sqrt(sum_x2 * sum_q2) if sum_q2 else math.nan
        of["scale_ratio_log2"] = math.log2(float(scale) / float(current_scale(values, fmt)))
        of["amin"] = float(amin)
        of["dynamic_range_log2"] = math.log2(amax / amin)
        of["outlier_log2"] = math.log2(amax / median)
        of["kurtosis"] = n * math.fsum(x**4) / sum_x2**2
    return of


def values_of(x: torch.Tensor) -> npt.NDArray[np.float32]:
    return x.detach().float().numpy().reshape(-1)


def measured(
    moments: ValueMoments, sums: QuantizationSums, scale: npt.ArrayLike, current: npt.ArrayLike
) -> list[dict[str, float]]:
    """Metrics and counts, a dictionary a row."""
    columns = metrics.compute_metrics(moments, sums, torch.tensor(scale), torch.tensor(current))
    columns |= {name: getattr(moments, name) for name in COUNTS}
    return [{name: column[i].item() for name, column in columns.items()} for i in range(len(moments.n))]


def from_histograms(jobs: list[tuple[torch.Tensor, np.float32, FloatFormat]]) -> list[dict[str, float]]:
    batch = HistogramBatch.pack_histograms([count_histogram(x) for x, _, _ in jobs])
    scale = np.array([scale for _, scale, _ in jobs], np.float32)
    current = np.array([current_scale(values_of(x), fmt) for x, _, fmt in jobs], np.float32)
    sums = metrics.quantization_sums_of_histograms(batch, torch.from_numpy(scale), [fmt for _, _, fmt in jobs])
    return measured(metrics.compute_histogram_moments(batch), sums, scale, current)


def from_float32(x: torch.Tensor, scale: np.float32, fmt: FloatFormat) -> dict[str, float]:
    moments = metrics.compute_float32_moments(x)
    sums = metrics.quantization_sums_of_float32(x, torch.tensor(scale), fmt)
    return measured(moments, sums, [scale], [current_scale(values_of(x), fmt)])[0]


def assert_metrics(got: dict[str, float], want: dict[str, float]) -> None:
    assert {name: got[name] for name in COUNTS} == {name: want[name] for name in COUNTS}
    for name in METRICS:
        expected = pytest.approx(want[name], rel=RELATIVE[name], abs=ABSOLUTE[name], nan_ok=True)
        assert got[name] == expected, name


SCALES: dict[str, Callable[[np.float32], np.float32]] = {
    "current": lambda current: current,
    "clipping": lambda current: min(current, FLT_MAX / 8) * np.float32(8),
    "underflowing": lambda current: current * np.float32(2**-12),
    "odd": lambda current: current * np.float32(0.3),
    "one": lambda current: np.float32(1),
}
ANY_SCALE = st.floats(2**-149, FLT_MAX, width=32).map(np.float32)
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


@FORMATS
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_of_histograms(kind: str, dtype: torch.dtype, scale: str, fmt: FloatFormat) -> None:
    x = KINDS[kind](dtype)
    in_use = SCALES[scale](current_scale(values_of(x), fmt))
    assert_metrics(from_histograms([(x, in_use, fmt)])[0], oracle(values_of(x), in_use, fmt))


@FORMATS
@settings(max_examples=150)
@given(
    bits=hnp.arrays(np.uint16, st.integers(0, 30), elements=st.integers(0, 0xFFFF)),
    dtype=st.sampled_from(SIXTEEN_BIT),
    scale=ANY_SCALE,
)
def test_of_histograms_of_any_bits(
    fmt: FloatFormat, bits: npt.NDArray[np.uint16], dtype: torch.dtype, scale: np.float32
) -> None:
    x = torch.from_numpy(bits.view(np.int16)).view(dtype)
    assert_metrics(from_histograms([(x, scale, fmt)])[0], oracle(values_of(x), scale, fmt))


@pytest.fixture(params=[7, None], ids=["small-chunks", "one-chunk"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(metrics, "_CHUNK", request.param)


@FORMATS
@pytest.mark.parametrize("scale", ["current", "clipping", "underflowing"])
@pytest.mark.parametrize("kind", KINDS)
def test_of_float32(kind: str, scale: str, fmt: FloatFormat, chunks: None) -> None:
    x = KINDS[kind](torch.bfloat16).detach().float() if kind == "subnormal" else KINDS[kind](torch.float32)
    in_use = SCALES[scale](current_scale(values_of(x), fmt))
    want = oracle(values_of(x), in_use, fmt) | {"outlier_log2": math.nan}  # the one that needs the median
    assert_metrics(from_float32(x, in_use, fmt), want)


@FORMATS
@settings(max_examples=100)
@given(bits=hnp.arrays(np.uint32, st.integers(0, 30), elements=st.integers(0, 0xFFFFFFFF)), scale=ANY_SCALE)
def test_of_any_float32_bits(fmt: FloatFormat, bits: npt.NDArray[np.uint32], scale: np.float32) -> None:
    x = torch.from_numpy(bits.view(np.float32))
    want = oracle(values_of(x), scale, fmt) | {"outlier_log2": math.nan}
    assert_metrics(from_float32(x, scale, fmt), want)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_of_all_zeros_only_counts_are_known(dtype: torch.dtype) -> None:
    got = from_histograms([(torch.zeros(8, dtype=dtype), np.float32(1), E4M3)])[0]
    known = {name: got[name] for name in METRICS if not math.isnan(got[name])}
    assert known == {"underflow_pct": 0, "overflow_pct": 0, "mse": 0, "amax": 0}


def test_of_nothing_nothing_is_known() -> None:
    got = from_histograms([(torch.zeros(0, dtype=torch.bfloat16), np.float32(1), E4M3)])[0]
    assert all(math.isnan(got[name]) for name in METRICS)


def test_an_unknown_scale_leaves_the_metrics_of_the_tensor_alone() -> None:
    got = from_histograms([(KINDS["random"](torch.bfloat16), np.float32("nan"), E4M3)])[0]
    known = {name for name in METRICS if not math.isnan(got[name])}
    assert known == {"amax", "amin", "dynamic_range_log2", "outlier_log2", "kurtosis"}


def test_a_tensor_lost_to_underflow_has_no_cosine() -> None:
    got = from_histograms([(torch.full((4,), 2.0**-20, dtype=torch.bfloat16), np.float32(1), E4M3)])[0]
    assert got["underflow_pct"] == 100
    assert got["relative_error"] == 1
    assert math.isnan(got["cosine"])


def mixed_jobs() -> list[tuple[torch.Tensor, np.float32, FloatFormat]]:
    """Every kind of tensor, in both dtypes, formats and many scales, next to each other."""
    return [
        (x, SCALES[scale](current_scale(values_of(x), fmt)), fmt)
        for i, kind in enumerate(KINDS)
        for dtype in SIXTEEN_BIT
        for scale, fmt in [(list(SCALES)[i % len(SCALES)], (E4M3, E5M2)[i // 2 % 2])]
        for x in [KINDS[kind](dtype)]
    ]


def test_a_batch_gives_what_its_tensors_give_one_by_one() -> None:
    jobs = mixed_jobs()
    for together, job in zip(from_histograms(jobs), jobs, strict=True):
        np.testing.assert_equal(together, from_histograms([job])[0])  # NaN equals NaN; bit-equal otherwise


def test_an_empty_batch() -> None:
    assert from_histograms([]) == []


def test_fold_adds_up_the_parts_of_each_owner() -> None:
    scale = torch.tensor([3.0, 3.0, 0.5, 3.0])
    tensors = [random_patterns(500, torch.float16, seed) for seed in range(4)]
    formats = [E4M3, E4M3, E5M2, E4M3]
    parts = metrics.quantization_sums_of_histograms(
        HistogramBatch.pack_histograms([count_histogram(x) for x in tensors]), scale, formats
    )
    aggregated = parts.sum_rows_by_owner(torch.tensor([0, 0, 2, 0]), 3)
    whole = [torch.cat([tensors[0], tensors[1], tensors[3]]), torch.zeros(0, dtype=torch.float16), tensors[2]]
    want = metrics.quantization_sums_of_histograms(
        HistogramBatch.pack_histograms([count_histogram(x) for x in whole]),
        torch.tensor([3.0, 1.0, 0.5]),
        [E4M3, E4M3, E5M2],
    )
    assert torch.equal(aggregated.underflows, want.underflows)
    assert torch.equal(aggregated.overflows, want.overflows)
    for name in ("sum_error2", "sum_xq", "sum_q2"):
        torch.testing.assert_close(getattr(aggregated, name), getattr(want, name), rtol=1e-12, atol=0)


def test_merge_gives_the_moments_of_the_whole() -> None:
    x = KINDS["non-finite"](torch.float32)
    parts = ValueMoments.concat([metrics.compute_float32_moments(part) for part in (x[:1], x[1:9], x[9:9], x[9:])])
    merged, want = metrics.merge_moments(parts), metrics.compute_float32_moments(x)
    for name in ("n", "nan", "inf", "amax", "amin"):
        assert torch.equal(getattr(merged, name), getattr(want, name))
    for name in ("sum_x2", "sum_x4"):
        torch.testing.assert_close(getattr(merged, name), getattr(want, name), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_one_histogram_on_its_device_gives_what_a_batch_gives(dtype: torch.dtype, fmt: FloatFormat) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5000) * 2.0 ** torch.randint(-12, 8, (5000,))).to(dtype)
    x[:3] = torch.tensor([torch.nan, torch.inf, 0.0])
    scale = torch.tensor(37.5)
    alone = metrics.quantization_sums_of_counts(count_histogram(x), scale, fmt)
    batch = metrics.quantization_sums_of_histograms(HistogramBatch.pack_histograms([count_histogram(x)]), scale[None], [fmt])
    for name in ("underflows", "overflows"):
        assert torch.equal(getattr(alone, name), getattr(batch, name))
    for name in ("sum_error2", "sum_xq", "sum_q2"):
        torch.testing.assert_close(getattr(alone, name), getattr(batch, name), rtol=1e-14, atol=0)


def test_each_row_is_a_table_of_its_own() -> None:
    batch = HistogramBatch.pack_histograms([count_histogram(torch.randn(50).bfloat16()) for _ in range(3)])
    found = metrics.compute_histogram_moments(batch)
    for i, row in enumerate(found.each()):
        assert all(torch.equal(getattr(row, f.name), getattr(found.row(i), f.name)) for f in dataclasses.fields(found))
        assert row.summed_row is row


def test_what_a_device_left_in_parts_is_added_up_where_it_is_moved_to() -> None:
    parts = DeferredRowSum(torch.tensor([[1.0, 0, 2, 3, 4], [2, 1, 0.5, 0, 1]], dtype=torch.float64), sum_part_rows)
    at_home = parts.moved(lambda x: 2 * x)
    sums = at_home.moved(lambda x: x / 2).summed_row
    assert at_home.summed_row.sum_q2.item() == 10
    assert (sums.underflows.tolist(), sums.overflows.tolist(), sums.underflows.dtype) == ([3], [1], torch.int64)
    assert (sums.sum_error2.item(), sums.sum_xq.item(), sums.sum_q2.item()) == (2.5, 3.0, 5.0)
