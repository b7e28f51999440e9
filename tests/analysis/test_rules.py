"""Rules one by one, on planted metrics, losses, multipliers and fingerprints; none guesses where evidence is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import scipy.stats
import torch
from samples import FINGERPRINT, sample
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.analysis.diagnosis.rules.divergence import diverged_at_the_start, divergence
from nemo_fp8_debug.analysis.diagnosis.rules.finding import CAUSES, CONFIDENCE, Finding
from nemo_fp8_debug.analysis.diagnosis.rules.grad_scale import multiplier
from nemo_fp8_debug.analysis.diagnosis.rules.known_issues import KNOWN
from nemo_fp8_debug.analysis.diagnosis.rules.operand import Course, why
from nemo_fp8_debug.analysis.diagnosis.rules.settings import settings
from nemo_fp8_debug.analysis.diagnosis.rules.spikes import chance, compared, spikes
from nemo_fp8_debug.analysis.runs.loss import LossCurve
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.record.writer import RunRecord

LAYER, STEPS, ONSET = "decoder.layers.0.mlp.linear_fc1", range(0, 200, 10), 100
AT = STEPS.index(ONSET)
N = len(STEPS)
AFTER = np.arange(N) >= AT

Values = npt.ArrayLike


def course(**metrics: Values) -> Course:
    """An ordinary operand but for these metrics; `wanted` is the log2 of the scale that the values ask for."""
    wanted = np.broadcast_to(np.asarray(metrics.pop("wanted", 6.0), np.float64), N)
    scale = np.broadcast_to(np.asarray(metrics.pop("scale", 6.0), np.float64), N)
    ordinary = {"outlier_log2": 3.0, "underflow_pct": 0.1, "overflow_pct": 0.0, "amax": 4.0, "nan": 0, "inf": 0}
    columns = {name: np.broadcast_to(value, N) for name, value in (ordinary | metrics).items()}
    columns = {"scale": 2.0**scale, "scale_ratio_log2": scale - wanted} | columns
    rows = pl.DataFrame({"step": STEPS, "layer": LAYER, "role": "input"} | columns)
    return Course.of(rows.with_columns(pl.col(pl.Float64).fill_nan(None)), LAYER, "input")


def said(found: Finding) -> tuple[str, str]:
    assert found.cause in CAUSES and found.confidence in CONFIDENCE and not re.search(r"\bnan\b", found.evidence)
    return found.cause, found.confidence


class TestOperand:
    """Why an operand left at a step that is known."""

    FAULTS: ClassVar[dict[str, dict[str, Any]]] = {
        "stale_scale": {"wanted": np.where(AFTER, 3.0, 6.0)},
        "corrupted_scale": {"scale": np.where(AFTER, 12.0, 6.0)},
        "clipping": {"scale": 6 + np.clip(np.arange(N) - AT + 1, 0, 8)},
        "underflow": {"scale": 6 - np.clip(np.arange(N) - AT + 1, 0, 8)},
        "outlier": {"outlier_log2": np.where(AFTER, 12.0, 3.0)},
        "dead": {"amax": np.where(AFTER, 0.0, 4.0)},
        "nonfinite": {"nan": np.where(AFTER, 5, 0)},
    }

    @pytest.mark.parametrize("paired", [True, False])
    @pytest.mark.parametrize("cause", FAULTS)
    def test_a_fault_is_called_by_its_name(self, cause: str, paired: bool) -> None:
        found = why(course(**self.FAULTS[cause]), ONSET, course() if paired else None)
        assert found.cause == cause and found.confidence in ("high", "medium") and found.advice
        assert (found.layer, found.role, found.since, found.operand) == (LAYER, "input", ONSET, f"X of {LAYER}")

    def test_a_scale_that_jumps_back_to_what_values_ask_for_is_not_corrupted(self) -> None:
        scale = np.where(AFTER, 2.0, 12.0)
        assert why(course(scale=scale, scale_ratio_log2=np.where(AFTER, 2.0, 0.0)), ONSET, course()).cause == "clipping"

    def test_a_scale_that_jumps_with_the_values_is_right(self) -> None:
        both = np.where(AFTER, 12.0, 6.0)
        found = why(course(scale=both, wanted=both, underflow_pct=np.where(AFTER, 5.0, 0.1)), ONSET, course())
        assert found.cause == "underflow" and "its scale is right" in found.evidence

    @pytest.mark.parametrize("scale", [np.inf, 0.0, -1.0])
    def test_a_scale_that_is_none_is_corrupted(self, scale: float) -> None:
        bad = course()
        rows = {"step": STEPS, "layer": LAYER, "role": "input", "scale": np.where(AFTER, scale, 64.0)}
        absent = dict.fromkeys(("scale_ratio_log2", "outlier_log2", "underflow_pct", "overflow_pct"), np.full(N, np.nan))
        bad = Course.of(pl.DataFrame(rows | absent | {"amax": 1.0, "nan": 0, "inf": 0}), LAYER, "input")
        assert said(why(bad, ONSET)) == ("corrupted_scale", "high")

    @pytest.mark.parametrize("since", [STEPS[0], STEPS[1], STEPS[-2], STEPS[-1], STEPS[-1] + 1])
    @pytest.mark.parametrize("fault", [*FAULTS.values(), {}])
    @pytest.mark.parametrize("paired", [True, False])
    def test_the_ends_of_a_run_are_no_error(self, since: int, fault: dict[str, Values], paired: bool) -> None:
        found = why(course(**fault), since, course() if paired else None)
        assert found.cause in CAUSES and found.confidence in CONFIDENCE and found.since == since
        assert "nan" not in found.evidence.lower() or found.cause == "nonfinite"

    @pytest.mark.parametrize("since", [STEPS[0], ONSET, STEPS[-1]])
    def test_absent_metrics_are_no_evidence(self, since: int) -> None:
        none = np.full(N, np.nan)
        absent = dict.fromkeys(("scale", "scale_ratio_log2", "outlier_log2", "underflow_pct", "overflow_pct", "amax"), none)
        found = why(course(**absent), since, course())
        assert said(found) == ("unknown", "low") and "scale is not known" in found.evidence

    def test_without_a_scale_values_are_judged_and_nothing_is_said_of_it(self) -> None:
        """As under block recipes."""
        none = np.full(N, np.nan)
        found = why(course(scale=none, scale_ratio_log2=none, underflow_pct=np.where(AFTER, 30.0, 0.1)), ONSET, course())
        assert said(found) == ("underflow", "medium") and "scale is not known" in found.evidence

    def test_an_error_whose_course_is_not_known_is_told_with_low_confidence(self) -> None:
        found = why(course(scale=np.full(N, np.nan), scale_ratio_log2=np.where(AFTER, 4.0, 0.0)), ONSET)
        assert said(found) == ("clipping", "low")

    def test_one_sample_behind_the_onset(self) -> None:
        last = np.arange(N) == N - 1
        assert said(why(course(scale=np.where(last, 12.0, 6.0)), STEPS[-1])) == ("corrupted_scale", "high")

    def test_holes_in_a_metric_do_not_hide_a_jump(self) -> None:
        scale = np.where(AFTER, 12.0, 6.0)
        scale[[AT - 1, AT + 1]] = np.nan
        assert said(why(course(scale=scale), ONSET, course())) == ("corrupted_scale", "high")

    def test_what_is_usual_is_no_cause(self) -> None:
        """Infinities of a mask, an operand of zeros."""
        assert why(course(inf=3), ONSET, course(inf=3)).cause == "unknown"
        assert why(course(amax=0.0), ONSET, course(amax=0.0)).cause == "unknown"

    @pytest.mark.parametrize("metric", [{"underflow_pct": np.linspace(0, 20, N)}, {"outlier_log2": np.linspace(2, 8, N)}])
    def test_a_trend_alone_is_a_hint_and_no_more(self, metric: dict[str, Values]) -> None:
        assert said(why(course(**metric), ONSET))[1] == "low"

    def test_the_loss_may_have_brought_values_about_but_not_scales(self) -> None:
        follow = {cause: why(course(**fault), ONSET).may_follow_the_loss for cause, fault in self.FAULTS.items()}
        assert [cause for cause, may in follow.items() if may] == ["outlier", "dead"]


def curve(losses: Values, every: int = 1) -> LossCurve:
    values = np.asarray(losses, np.float64)
    return LossCurve.of(pl.DataFrame({"step": np.arange(len(values)) * every, "loss": values}))


def noisy(n: int = 300, seed: int = 0, at: dict[int, float] | None = None) -> LossCurve:
    losses = 2 + np.random.default_rng(seed).normal(0, 0.02, n)
    for step, height in (at or {}).items():
        losses[step] += height
    return curve(losses)


class TestSpikes:
    def test_are_counted_with_the_steps_to_recovery(self) -> None:
        found = spikes(noisy(at={100: 3, 101: 2, 102: 1, 200: 5}))
        assert [(s.step, s.recovery) for s in found] == [(100, 3), (200, 1)]

    @pytest.mark.parametrize("seed", range(5))
    def test_noise_is_none_and_neither_is_a_loss_that_falls(self, seed: int) -> None:
        noise = 1 + np.random.default_rng(seed).normal(0, 0.01, 300)
        assert spikes(noisy(seed=seed)) == [] == spikes(curve((2 + 9 * np.exp(-np.arange(300) / 30)) * noise))

    def test_a_spike_at_the_end_has_not_recovered(self) -> None:
        found = spikes(noisy(at={299: 4}))
        assert [(s.step, s.recovery) for s in found] == [(299, None)]
        told = compared(noisy(at={299: 4}), None)
        assert told and "1 spike in 300 losses, without recovery" in told.evidence

    def test_alone_they_are_neither_many_nor_few(self) -> None:
        found = compared(noisy(at=dict.fromkeys(range(50, 250, 10), 4.0)), None)
        assert found and said(found) == ("unknown", "low")

    def test_more_frequent(self) -> None:
        found = compared(noisy(at=dict.fromkeys(range(50, 250, 10), 4.0)), noisy(seed=1, at={100: 4}))
        assert found and said(found) == ("unknown", "high") and "more frequent" in found.evidence

    def test_slower_recovery(self) -> None:
        slow = {at + i: 4.0 for at in (80, 140, 200) for i in range(8)}
        found = compared(noisy(at=slow), noisy(seed=1, at={80: 4, 140: 4, 200: 4}), "sample")
        assert found and said(found) == ("unknown", "medium") and "recovery in 8 samples (median)" in found.evidence

    def test_as_many_as_the_good_run_has(self) -> None:
        found = compared(noisy(at={80: 4, 140: 4}), noisy(seed=1, at={60: 4}))
        assert found and said(found) == ("none", "medium")

    @pytest.mark.parametrize("losses", [[], [1.0], [np.nan] * 50, [np.inf, 1.0], [0.0] * 40, [2.0] * 40 + [np.nan] * 40])
    def test_odd_losses_are_no_error(self, losses: list[float]) -> None:
        for other in (None, curve(losses), noisy()):
            found = compared(curve(losses), other)
            assert found is None or said(found)
            compared(noisy(at={100: 4}), other)

    @pytest.mark.parametrize(("mine", "theirs"), [(1, 0), (3, 0), (7, 2), (40, 55), (2000, 1800)])
    @pytest.mark.parametrize("losses", [(100, 100), (1000, 300)])
    def test_the_chance_is_that_of_the_binomial_test(self, mine: int, theirs: int, losses: tuple[int, int]) -> None:
        expected = scipy.stats.binomtest(mine, mine + theirs, losses[0] / sum(losses), "greater").pvalue
        assert chance(mine, theirs, *losses) == pytest.approx(expected, rel=1e-6)


class TestDeparture:
    def test_from_the_start_and_in_mid_run_ask_for_other_things(self) -> None:
        start, later = (divergence(noisy(), since, None)[0] for since in (5, 150))
        assert "from the start" in start.evidence and "in mid-run, at step 150" in later.evidence
        assert start.advice != later.advice
        assert (
            diverged_at_the_start(noisy(), 25)
            and not diverged_at_the_start(noisy(), 27)
            and not diverged_at_the_start(noisy(), None)
        )

    def test_a_twin_that_leaves_too_is_software(self) -> None:
        assert [(f.rule, f.cause) for f in divergence(noisy(), 100, 120)] == [
            ("divergence", "unknown"),
            ("reference", "software"),
        ]
        assert [f.cause for f in divergence(noisy(), None, 120)] == ["none"]

    @pytest.mark.parametrize("n", [0, 1, 4])
    def test_too_few_losses_do_not_stay(self, n: int) -> None:
        assert [f.cause for f in divergence(noisy(n), None, None)] == ["unknown"]


def run(folder: Path, steps: dict[int, dict[str, Any]], calls: int = 1) -> Run:
    record = RunRecord(folder)
    record.open(FINGERPRINT)
    for step in steps:
        each = steps[step].pop("calls", calls)
        record.record(sample(step, [{"role": "grad_output", "calls": each}, {"role": "input", "calls": 99}]))
    record.record_steps(steps)
    record.close()
    return Run.read(folder)


def reported(folder: Path, multiplier: Any, loss_scale: Any = None, calls: Any = 1) -> Run:
    """A run of 20 samples, a value or one for each."""
    values = [v if isinstance(v, list) else [v] * 20 for v in (multiplier, loss_scale, calls)]
    rows = zip(*values, strict=True)
    steps = {i: {"grad_scale": m, "loss_scale": s, "calls": c, "loss": 2.0} for i, (m, s, c) in enumerate(rows)}
    return run(folder, steps)


class TestMultiplier:
    @pytest.mark.parametrize(
        ("multiplier_", "scale", "calls"),
        [
            (None, None, 1),
            (None, 65536.0, 1),
            (1.0, None, 1),
            (65536.0, 65536.0, 1),
            (65536.0 / 32, 65536.0, 32),  # averaged over micro-batches
            ([2.0**16] * 10 + [2.0**15] * 10, [2.0**16] * 10 + [2.0**15] * 10, 1),  # moves with the loss scale
            ([2.0**16] * 10 + [2.0**15] * 10, [2.0**16] * 9 + [2.0**15] * 11, 1),  # reported once it has moved
            ([1.0] * 10 + [0.25] * 10, None, [1] * 10 + [4] * 10),  # the batch grows
            (0.125, 1.0, 1),
            (4096.0, 1.0, 1),  # a loss that is summed over tokens
            ([1.0, 3.0] * 10, None, 1),  # or averaged over as many as there are
            ([float("nan")] * 20, 1024.0, 1),
            ([1.0] * 10 + [float("nan")] * 10, None, 1),
            (1.0, [float("inf")] * 20, 1),
            (1.0, [float("nan")] * 20, 1),
            (1.0, 0.0, 1),
            ([1.0] * 19 + [8.0], None, 1),  # one sample is too few
            ([2.0**16] * 10 + [None] * 10, [2.0**16] * 10 + [None] * 10, 1),
            ([2.0**16] * 10 + [1.0] * 10, [2.0**16] * 10 + [None] * 10, 1),
        ],
    )
    def test_what_has_an_explanation_is_no_fault(self, tmp_path: Path, multiplier_: Any, scale: Any, calls: Any) -> None:
        found = reported(tmp_path / "bad", multiplier_, scale, calls)
        assert multiplier(found) == [] == multiplier(found, found)

    @pytest.mark.parametrize(
        ("multiplier_", "scale", "means"),
        [
            (1.0, 2.0**20, "is not applied"),
            (2.0**32, 2.0**16, "applied twice"),
            ([1.0] * 10 + [0.125] * 10, None, "divides the loss"),
            ([2.0**16] * 10 + [2.0**10] * 10, 2.0**16, "divides the loss"),
            ([1.0] * 10 + [0.0] * 10, None, "divides the loss"),
            ([1.0] * 10 + [-1.0] * 10, None, "divides the loss"),
        ],
    )
    def test_faults(self, tmp_path: Path, multiplier_: Any, scale: Any, means: str) -> None:
        (found,) = multiplier(reported(tmp_path / "bad", multiplier_, scale))
        assert said(found) == ("multiplier", "high") and means in found.advice
        assert found.since == (10 if isinstance(multiplier_, list) else 0)

    def test_a_loss_scale_times_tokens_is_not_certain(self, tmp_path: Path) -> None:
        (found,) = multiplier(reported(tmp_path / "bad", 2.0**16 * 500, 2.0**16))
        assert said(found) == ("multiplier", "low")

    def test_what_the_good_run_does_too_is_no_fault(self, tmp_path: Path) -> None:
        moves = [1.0] * 10 + [0.125] * 10
        runs = [reported(tmp_path / name, moves) for name in ("baseline", "bad")]
        assert multiplier(runs[1], runs[0]) == []

    def test_another_multiplier_than_the_good_runs_is_a_hint(self, tmp_path: Path) -> None:
        baseline = reported(tmp_path / "baseline", 1.0)
        (found,) = multiplier(reported(tmp_path / "bad", 0.125), baseline)
        assert said(found) == ("multiplier", "low") and "0.125" in found.evidence
        for name, value, scale, calls in (("scaled", 64.0, 64.0, 1), ("accumulated", 0.125, None, 8)):
            assert multiplier(reported(tmp_path / name, value, scale, calls), baseline) == []

    def test_a_good_run_that_does_not_know_its_own(self, tmp_path: Path) -> None:
        baseline = reported(tmp_path / "baseline", None)
        assert multiplier(reported(tmp_path / "bad", 0.125), baseline) == []
        assert len(multiplier(reported(tmp_path / "moved", [1.0] * 10 + [0.125] * 10), baseline)) == 1


class TestSettings:
    MXFP8: ClassVar[dict[str, Any]] = {"backend_options": {"fp8": "hybrid", "fp8_recipe": "Fp8Recipe.mxfp8"}}
    PARAMETERS: ClassVar[dict[str, Any]] = {
        "backend_options": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
        "risky_features_on": {"fp8_param_gather": True},
    }
    TE: ClassVar[dict[str, Any]] = {
        "versions": {"transformer-engine": "1.7.0+4e7caa1"},
        "recipe": {"fp8_engine": "Transformer Engine"},
    }

    @pytest.mark.parametrize(("bad", "issue"), [(MXFP8, "#638"), (PARAMETERS, "#2272"), (TE, "#1047")])
    def test_known_faults(self, bad: dict[str, Any], issue: str) -> None:
        (found,) = settings(bad, None, False)
        assert said(found) == ("software", "medium") and issue in found.evidence
        assert [f.confidence for f in settings(bad, {"versions": {}}, True) if f.rule == "known"] == ["high"]
        assert [f for f in settings(bad, bad, True) if f.rule == "known"] == []

    @pytest.mark.parametrize(
        "fingerprint",
        [
            {},
            {"versions": None, "backend_options": None, "risky_features_on": None, "recipe": None},
            {"versions": {"transformer-engine": None}},
            {"versions": {"transformer-engine": "main-abc"}},
            {"versions": {"transformer-engine": "1.7"}, "recipe": {"fp8_engine": "none"}},
            {"versions": {"transformer-engine": "2.7.0"}},
            {"risky_features_on": {"cpu_offloading": False}},
            PARAMETERS | {"risky_features_on": {"fp8_param": 1, "overlap_param_gather": 1, "overlap_grad_reduce": 1}},
        ],
    )
    def test_what_is_not_known_is_no_fault(self, fingerprint: dict[str, Any]) -> None:
        assert [f for known in KNOWN if known.holds(fingerprint) for f in [known]] == []
        for baseline in (None, {}, fingerprint):
            assert [f.rule for f in settings(fingerprint, baseline, False) if f.rule != "features"] == []

    def test_features_that_the_good_run_did_not_have_on(self) -> None:
        bad = {"risky_features_on": {"cpu_offloading": True, "recompute_granularity": "full"}}
        for baseline, start, confidence in (({"risky_features_on": {}}, True, "medium"), (None, True, "low")):
            (found,) = settings(bad, baseline, start)
            assert said(found) == ("software", confidence) and found.evidence.startswith("CPU offloading: on")
        assert list(settings(bad, None, False)) == [] == list(settings(bad, bad, True))
        assert list(settings(bad, {"versions": {}}, False)) == []  # a baseline that does not say

    def test_fp8_without_effect(self) -> None:
        engine = "none: fp8 is configured but has no effect without Transformer Engine"
        (found,) = settings({"recipe": {"fp8_engine": engine}}, None, False)
        assert said(found) == ("software", "high")

    def test_other_versions_are_a_hint(self) -> None:
        (found,) = settings({"versions": {"torch": "2.8"}}, {"versions": {"torch": "2.7"}}, False)
        assert said(found) == ("software", "low") and "torch 2.7 -> 2.8" in found.evidence

    def test_the_fingerprint_of_a_real_run_is_clean(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(8, 8))
        monitor = Monitor(model, recorders=[RunRecord(tmp_path)], interval=1)
        with monitor.step(0) as report:
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            report(loss=loss.item())
        monitor.close()
        real = Run.read(tmp_path).fingerprint
        assert real["versions"] and list(settings(real, None, True)) == [] == list(settings(real, real, True))
