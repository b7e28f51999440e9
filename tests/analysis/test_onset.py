"""Since when tensors are out of a baseline's band: planted rises, noise, other intervals, and size."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from nemo_fp8_debug import Emulation, Monitor
from nemo_fp8_debug.analysis.comparison import onset
from nemo_fp8_debug.analysis.comparison.onset import EVIDENCE, IN_A_ROW
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable

STEPS = range(0, 400, 10)
LAYERS = ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"]
ROLES = ["input", "weight", "grad_output"]
CULPRIT = ("decoder.layers.1.mlp.linear_fc2", "input")
#: what a healthy tensor's metrics are, and the standard deviation of each from sample to sample
USUAL = {
    "underflow_pct": (0.3, 0.05),
    "overflow_pct": (0.0, 0.0),
    "scale_ratio_log2": (-0.5, 0.1),
    "relative_error": (0.027, 0.0005),
    "outlier_log2": (4.0, 0.2),
    "mse": (1e-5, 5e-7),
}


def onsets(baseline: pl.DataFrame, of_run: pl.DataFrame) -> pl.DataFrame:
    return onset.find_onsets(MetricsTable.from_rows(baseline), MetricsTable.from_rows(of_run))


def run(seed: int, steps: range = STEPS, since: int | None = None, **rise: float) -> pl.DataFrame:
    """A healthy run; metrics of the culprit rise by so much from a step on, its MSE tenfold unless told otherwise."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for step in steps:
        for layer in LAYERS:
            for role in ROLES:
                row: dict[str, Any] = {name: mean + rng.normal(0, spread) for name, (mean, spread) in USUAL.items()}
                if (layer, role) == CULPRIT and since is not None and step >= since:
                    row["mse"] *= rise.get("mse", 10)
                    row |= {name: row[name] + by for name, by in rise.items() if name in row and name != "mse"}
                bad = rise.get("nonfinite", 0) if (layer, role) == CULPRIT and step == since else 0
                rows.append({"step": step, "layer": layer, "role": role, "nan": int(bad), "inf": 0, **row})
    return pl.DataFrame(rows)


#: arguments of a healthy run, and of one in which three points more underflow
RISEN: list[tuple[int, dict[str, Any]]] = [(0, {}), (1, {"since": 200, "underflow_pct": 3.0})]


@pytest.mark.parametrize("seed", range(20))
def test_runs_that_differ_by_noise_alone_have_none(seed: int) -> None:
    assert onsets(run(seed), run(seed + 100)).is_empty()


@pytest.mark.parametrize(
    ("metric", "by"),
    [
        ("underflow_pct", 5.0),
        ("overflow_pct", 0.1),
        ("scale_ratio_log2", 3.0),
        ("relative_error", 0.05),
        ("outlier_log2", 4.0),
    ],
)
def test_a_rise_is_found_at_its_step_in_its_tensor(metric: str, by: float) -> None:
    found = onsets(run(0), run(1, since=200, **{metric: by}))
    assert found.select("layer", "role", "metric", "onset").rows() == [(*CULPRIT, metric, 200)]
    row = found.row(0, named=True)
    assert row["value"] - row["expected"] == pytest.approx(by, rel=0.3)
    assert row["excess"] > 1 and row["tensor"] == "X"


def test_one_nan_is_enough_and_comes_first() -> None:
    found = onsets(run(0), run(1, since=200, nonfinite=1, underflow_pct=5))
    assert found.select("metric", "onset").rows()[0] in [("nonfinite", 200), ("underflow_pct", 200)]
    assert set(found["metric"]) == {"nonfinite", "underflow_pct"}


def test_a_lone_sample_is_no_onset() -> None:
    bad = run(1)
    culprit = (pl.col("layer") == CULPRIT[0]) & (pl.col("role") == CULPRIT[1])
    for steps in ([200], [200, 210], [200, 220, 240]):
        once = bad.with_columns(
            underflow_pct=pl.when(culprit & pl.col("step").is_in(steps)).then(20).otherwise("underflow_pct")
        )
        assert len(steps) <= IN_A_ROW and onsets(run(0), once).is_empty()


@pytest.mark.parametrize(("usual", "out"), [(0.3, True), (20.0, False)])
def test_a_rise_of_three_points_is_much_of_little_and_little_of_much(usual: float, out: bool) -> None:
    """FP8 loses 0.3% to underflow, and FP4 20%."""
    levels = [run(seed, **given).with_columns(pl.col("underflow_pct") + usual - 0.3) for seed, given in RISEN]
    assert onsets(*levels).is_empty() != out


@pytest.mark.parametrize(("bits", "out"), [(5.0, False), (9.0, True)])
def test_an_outlier_that_costs_nothing_counts_if_it_is_far_out(bits: float, out: bool) -> None:
    found = onsets(run(0), run(1, since=200, outlier_log2=bits, mse=1.0))
    assert (CULPRIT in found.select("layer", "role").rows()) == out


def test_an_outlier_of_one_sample_is_a_transient() -> None:
    one = run(1).with_columns(
        pl.when((pl.col("step") == 200) & (pl.col("layer") == CULPRIT[0]) & (pl.col("role") == CULPRIT[1]))
        .then(16.0)
        .otherwise("outlier_log2")
        .alias("outlier_log2")
    )
    assert onsets(run(0), one).select("layer", "role", "onset", "samples").rows() == [(*CULPRIT, 200, 1)]


def test_a_gradient_that_vanishes_is_no_culprit() -> None:
    """It underflows, and yet loses less."""
    assert onsets(run(0), run(1, since=200, underflow_pct=50, relative_error=0.5, mse=0.01)).is_empty()


def test_the_earlier_one_comes_first() -> None:
    bad = run(1, since=200, underflow_pct=5)
    other = (pl.col("layer") == LAYERS[0]) & (pl.col("role") == "weight") & (pl.col("step") >= 150)
    bad = bad.with_columns(overflow_pct=pl.when(other).then(2.0).otherwise("overflow_pct"))
    bad = bad.with_columns(mse=pl.when(other).then(2 * pl.col("mse")).otherwise("mse"))
    assert onsets(run(0), bad).select("layer", "onset").rows() == [(LAYERS[0], 150), (CULPRIT[0], 200)]


def test_runs_need_not_sample_the_same_steps() -> None:
    found = onsets(run(0, range(0, 300, 15)), run(1, range(5, 400, 10), since=200, underflow_pct=5))
    assert found.select("layer", "role", "onset").rows() == [(*CULPRIT, 205)]


def test_what_the_good_run_does_not_cover_is_not_judged() -> None:
    assert onsets(run(0, range(0, 200, 10)), run(1, since=200, underflow_pct=5)).is_empty()


def test_a_metric_that_trends_in_the_good_run_may_do_so_in_the_other() -> None:
    def trending(seed: int) -> pl.DataFrame:
        return run(seed).with_columns(pl.col("underflow_pct") + pl.col("step") / 20)

    assert onsets(trending(0), trending(1)).is_empty()


def test_a_transient_of_both_runs_is_no_onset() -> None:
    """As while weights grow faster than a delayed scale follows: shorter than what a running median shows."""

    def passing(seed: int) -> pl.DataFrame:
        then = pl.when(pl.col("step").is_in([10, 20, 30]))
        clipped = then.then(0.5).otherwise(0.0), then.then(2 * pl.col("mse")).otherwise("mse")
        return run(seed).with_columns(overflow_pct=clipped[0], mse=clipped[1])

    assert onsets(passing(0), passing(1)).is_empty()
    assert len(onsets(run(0), passing(1))) == len(LAYERS) * len(ROLES)


@pytest.mark.parametrize("empty", ["baseline", "bad", "both"])
def test_nothing_comes_of_nothing(empty: str) -> None:
    none = run(0).clear()
    baseline, bad = (none if empty in (name, "both") else run(0) for name in ("baseline", "bad"))
    assert onsets(baseline, bad).is_empty()


def test_absent_metrics_are_not_out() -> None:
    absent = run(1, since=200, underflow_pct=5).with_columns(pl.lit(None, pl.Float64).alias(e) for e in USUAL)
    assert onsets(run(0), absent).is_empty() and onsets(absent, run(0)).is_empty()
    assert {e.metric for e in EVIDENCE} - {"nonfinite"} <= set(USUAL)


@pytest.mark.parametrize(
    ("bits", "samples", "out"), [(-8.0, 20, True), (-8.0, 1, False), (-14.0, 1, True), (-4.0, 20, False)]
)
def test_a_scale_that_is_far_too_small_is_out(bits: float, samples: int, out: bool) -> None:
    then = pl.col("step").is_between(200, 200 + 10 * samples - 1) & (pl.col("layer") == CULPRIT[0])
    bad = run(1).with_columns(scale_ratio_log2=pl.when(then).then(bits).otherwise("scale_ratio_log2"))
    found = onsets(run(0), bad)
    assert set(found["layer"]) == ({CULPRIT[0]} if out else set())
    assert found["onset"].to_list() == [200] * (3 if out else 0)


@pytest.mark.parametrize(
    ("usual", "bits", "out"), [(-3.0, -0.5, False), (-3.0, 0.5, False), (-3.0, 1.5, True), (0.5, 1.7, True)]
)
def test_a_scale_that_comes_nearer_to_what_values_ask_for_clips_none(usual: float, bits: float, out: bool) -> None:
    then = pl.col("step") >= 200
    baseline, bad = (run(seed).with_columns(scale_ratio_log2=pl.lit(usual)) for seed in (0, 1))
    bad = bad.with_columns(scale_ratio_log2=pl.when(then).then(bits).otherwise("scale_ratio_log2"))
    assert onsets(baseline, bad).is_empty() != out


def test_a_scale_that_was_as_small_in_the_baseline_is_not() -> None:
    then = pl.col("step").is_between(180, 220)
    both = [
        run(seed).with_columns(pl.when(then).then(-14.0).otherwise("scale_ratio_log2").alias("scale_ratio_log2"))
        for seed in (0, 1)
    ]
    assert onsets(*both).is_empty()


@pytest.mark.parametrize("lasting", [2, 30])
def test_the_made_up_scales_of_the_baseline_are_not_in_its_band(lasting: int) -> None:
    def made_up(samples: int, seed: int) -> pl.DataFrame:
        of_culprit = (pl.col("layer") == CULPRIT[0]) & (pl.col("role") == CULPRIT[1]) & (pl.col("step") < STEPS[samples])
        lost = [
            pl.when(of_culprit).then(x).otherwise(name).alias(name) for name, x in (("underflow_pct", 99.0), ("mse", 1.0))
        ]
        return run(seed).with_columns(lost)

    found = onsets(made_up(2, 0), made_up(lasting, 1))
    assert found["onset"].to_list() == ([0] if lasting > 2 else [])


def test_scales_that_stay_1_are_named_beside_a_good_run(tmp_path: Path) -> None:
    def train(name: str, follow: bool) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        optimizer, emulation = torch.optim.SGD(model.parameters(), lr=0.1), Emulation(model, "delayed(amax_history_len=4)")
        emulation.attach()
        with closing(Monitor(model, tmp_path / name, interval=1, table_rows=0)) as monitor:
            for step in range(12):
                with monitor.step(step):
                    loss = nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(8, (32,)))
                    (loss * 2.0**-16).backward()
                    if not follow:
                        for state in emulation.states.values():
                            state.amax.zero_()
                    emulation.end_step()
                    optimizer.step()
                    optimizer.zero_grad()
        return tmp_path / name

    found = diagnose(train("bad", follow=False), train("good", follow=True))
    assert found.culprit is not None
    assert (found.culprit.role, found.culprit.since, found.cause) == ("grad_output", 0, "stale_scale"), found.verdict()
