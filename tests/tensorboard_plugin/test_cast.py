"""What the browser computes from a histogram is what numerics computes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from cast_js import CastJs, cast_js
from histogram_rows import DTYPES, SHOWN, Question, Row, all_by_numerics, row
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_fp8_debug.numerics.formats import BF16, E2M1, E4M3, E5M2, FORMATS, FP16, FloatFormat
from nemo_fp8_debug.numerics.histogram import BINS


@pytest.fixture(scope="module")
def browser_side() -> Iterator[CastJs]:
    with cast_js() as started:
        yield started


def check(browser_side: CastJs, asked: list[Question]) -> None:
    for question, answer, expected in zip(asked, browser_side.ask(asked), all_by_numerics(asked), strict=True):
        for name in ("n", "nan", "inf", "amax", "current", "underflows", "overflows"):
            assert float(answer[name]) == expected[name], (name, question)
        for name in SHOWN:
            got = math.nan if answer[name] is None else float(answer[name])
            # decibels near 0 are a difference of almost nothing
            close = math.isclose(got, expected[name], rel_tol=1e-12, abs_tol=1e-12 if name == "sqnr_db" else 0)
            assert close or (math.isnan(got) and math.isnan(expected[name])), (name, got, expected[name], question)
        assert sum(half["count"] for half in answer["halves"]) == answer["n"] - answer["zeros"]


def random_question(random: np.random.Generator) -> Question:
    fmt = (E4M3, E5M2, E2M1, FP16, BF16)[random.integers(5)]
    rows, scales = [], []
    for _ in range(random.integers(1, 4)):
        dtype = ("bfloat16", "float16")[random.integers(2)]
        middle, width = random.integers(BINS), random.integers(1, BINS)
        bins = np.unique(random.integers(middle - width, middle + width, random.integers(1, 60)).clip(0, BINS - 1))
        counts = np.exp2(random.uniform(0, 24, len(bins))).astype(int)
        rows.append({"dtype": dtype, "bins": bins.tolist(), "counts": counts.tolist()})
        scales.append(float(np.float32(2.0 ** random.uniform(-40, 40))))
    return rows, scales, fmt


def test_metrics_of_thousands_of_histograms_are_those_of_numerics(browser_side: CastJs) -> None:
    random = np.random.default_rng(0)
    for _ in range(12):
        check(browser_side, [random_question(random) for _ in range(100)])


def test_all_values_of_both_dtypes_under_scales_that_put_ties_and_edges_in_the_way(browser_side: CastJs) -> None:
    every = {b: 1 + b % 7 for b in range(BINS)}
    asked: list[Question] = [
        ([row(dtype, every)], [2.0**exponent], fmt)
        for dtype in DTYPES
        for fmt in FORMATS.values()
        for exponent in (-100, 0, 7)
    ]
    check(browser_side, asked)


a_row = st.builds(
    row, st.sampled_from(sorted(DTYPES)), st.dictionaries(st.integers(0, BINS - 1), st.integers(1, 1 << 40), max_size=12)
)
a_scale = st.floats(2.0**-149, 2.0**127, width=32)


@settings(max_examples=100)
@example([row("bfloat16", {0: 5})], 2.0**-100, E4M3)
@example([row("bfloat16", {})], 1.0, E5M2)
@example([row("bfloat16", {0x7F80: 3, 0x7FC0: 2, 0x3F80: 1})], 448.0, E4M3)
@example([row("float16", {0x7C00: 3, 0x7C01: 2, 0x0001: 1})], 2.0**-149, E2M1)
@example([row("bfloat16", {0x7F7F: 1, 1: 1})], 2.0**127, BF16)
@given(st.lists(a_row, min_size=1, max_size=3), a_scale, st.sampled_from(list(FORMATS.values())))
def test_metrics_of_extremes_are_those_of_numerics(
    browser_side: CastJs, rows: list[Row], scale: float, fmt: FloatFormat
) -> None:
    check(browser_side, [(rows, [scale] * len(rows), fmt)])
