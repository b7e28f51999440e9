"""Tensors that cannot be out of the band are not measured sample by sample: what is told is the same as if they were."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from nemo_fp8_debug.analysis.comparison import onset
from nemo_fp8_debug.analysis.comparison.onset import EVIDENCE
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable

TENSORS, SAMPLES = 6, 30
METRICS = ("mse", *dict.fromkeys(evidence.metric for evidence in EVIDENCE if evidence.metric != "nonfinite"))


def record(random: np.random.Generator, interval: int, spoiled: float) -> MetricsTable:
    """Courses that wander, with steps up, spikes, missing values, zeros and infinities."""
    shape = (TENSORS, SAMPLES)
    rows = {
        "step": np.tile(np.arange(SAMPLES) * interval, TENSORS),
        "layer": np.repeat([f"layer {i}" for i in range(TENSORS)], SAMPLES),
        "role": np.repeat(["input", "weight", "grad_output"] * (TENSORS // 3), SAMPLES),
        "nan": (random.random(shape) < spoiled / 20).astype(int).ravel(),
        "inf": np.zeros(TENSORS * SAMPLES, int),
        "n": np.full(TENSORS * SAMPLES, 4096),
    }
    for name in METRICS:
        values = np.exp(random.normal(0, 1, (TENSORS, 1)) + random.normal(0, 0.1, shape))
        values[:, SAMPLES // 2 :] *= np.exp2(random.integers(-1, 4, (TENSORS, 1)))
        for other in (np.nan, 0.0, np.inf, 100.0):
            values[random.random(shape) < spoiled / 10] = other
        rows[name] = values.ravel()
    return MetricsTable.from_rows(pl.DataFrame(rows).sort("step", maintain_order=True))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 32), st.sampled_from([(5, 5), (5, 10), (10, 5), (7, 5)]), st.sampled_from([0.0, 0.1, 0.5]))
def test_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, seed: int, intervals: tuple[int, int], spoiled: float) -> None:
    random = np.random.default_rng(seed)
    baseline, run = (record(random, interval, spoiled).grid for interval in intervals)
    found = onset.find_unfiltered_onsets(baseline, run)
    with monkeypatch.context() as patch:
        patch.setattr(onset, "_may_be_out", lambda _, pair: np.arange(len(pair.tensors)))
        assert_frame_equal(found, onset.find_unfiltered_onsets(baseline, run))


def test_most_steady_tensors_are_left_out_and_those_that_rise_are_not() -> None:
    baseline, run = (record(np.random.default_rng(seed), 5, 0.0).grid for seed in (1, 2))
    pair = onset.AlignedRunSamples(baseline, run)
    left = {evidence.metric: TENSORS - len(onset._may_be_out(evidence, pair)) for evidence in EVIDENCE}
    assert left["nonfinite"] == TENSORS and 0 < left["relative_error"] < TENSORS
