"""A run beside several runs that went well: what sets it apart from all of them, and a loss beside what seeds differ by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from diagnosed_runs import CULPRIT, LAYERS, ONSET, N, corrupted, falling, nothing, write
from typer.testing import CliRunner

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.loss.curve import LossCurve
from nemo_fp8_debug.analysis.loss.outcome import LossOutcome
from nemo_fp8_debug.analysis.loss.seeds import mean_of
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.errors import ConfigError


def losses(seed: int, above: float = 0.0, n: int = 400) -> LossCurve:
    """Of other batches for each seed; percent above what they all tend to."""
    noise = np.random.default_rng(seed).normal(0, 0.01, n)
    table = {"step": range(n), "loss": (2 + 3 * np.exp(-np.arange(n) / 40)) * (1 + noise) * (1 + above / 100)}
    return LossCurve.of(pl.DataFrame(table))


#: percent that three baselines end apart from what they all tend to
APART = (-0.2, 0.0, 0.2)


class TestLoss:
    def outcome(self, above: float, apart: tuple[float, ...] = APART) -> LossOutcome:
        first, *others = (losses(seed, each) for seed, each in enumerate(apart, start=1))
        return LossOutcome.of(losses(0, above), first, same_model=True, others=others)

    def test_a_gap_that_one_seed_may_explain_is_harm_beside_several_that_agree(self) -> None:
        assert self.outcome(11.0, APART[:1]).harm == "unknown"
        assert self.outcome(11.0).harm == "harmful"
        assert self.outcome(11.0, (-4.0, 0.0, 4.0)).harm == "unknown"  # seeds differ by as much
        assert self.outcome(0.0).harm in ("none", "gap")

    def test_it_is_compared_with_their_mean(self) -> None:
        found = self.outcome(5.0, (-4.0, 0.0, 4.0))
        assert found.gap is not None and found.gap.percent == pytest.approx(5.0, abs=0.5)
        assert found.seeds is not None and found.seeds.spread == pytest.approx(4.0, abs=0.5)
        told = found.told()
        assert "the mean of 3 runs of other batches, which end" in told and "1 in 20 would end" in told

    def test_beside_one_of_the_same_batches_no_other_counts(self) -> None:
        run, twin = losses(0, 1.0), losses(0)
        found = LossOutcome.of(run, twin, same_model=True, others=[losses(1), losses(2)])
        assert found.baseline is twin and found.seeds is None and found.gap is not None
        assert found.gap.paired and found.gap.percent == pytest.approx(1.0, abs=0.01)

    def test_baselines_of_the_same_batches_are_one(self) -> None:
        """A copy that differs by next to nothing does not show what seeds differ by."""
        found = LossOutcome.of(losses(0, 5.0), losses(1), same_model=True, others=[losses(1, 0.05), losses(1, 0.1)])
        assert found.seeds is None and found.harm == "unknown"
        found = LossOutcome.of(losses(0, 5.0), losses(1), same_model=True, others=[losses(1, 0.05), losses(2)])
        assert found.seeds is not None and found.seeds.n == 2

    def test_the_mean_is_over_steps_that_all_cover(self) -> None:
        every, other = range(0, 100), range(50, 200, 2)
        curves = [
            LossCurve.of(pl.DataFrame({"step": steps, "loss": [float(step) for step in steps]})) for steps in (every, other)
        ]
        mean = mean_of(curves)
        assert mean.steps.tolist() == list(range(50, 100)) and np.allclose(mean.losses, mean.steps)

    def test_baselines_without_steps_in_common_leave_the_first(self) -> None:
        early, late = (LossCurve.of(pl.DataFrame({"step": range(k, k + 50), "loss": [2.0] * 50})) for k in (0, 500))
        assert LossOutcome.of(losses(0), early, others=[late]).baseline is early

    @pytest.mark.parametrize("bad", [[], [1.0], [np.nan] * 400])
    def test_a_baseline_whose_loss_tells_nothing_is_no_error(self, bad: list[float]) -> None:
        other = LossCurve.of(pl.DataFrame({"step": range(len(bad)), "loss": bad}, {"step": pl.Int64, "loss": pl.Float64}))
        assert LossOutcome.of(losses(0), losses(1), same_model=True, others=[other]).told()


def more_lost(percent: float) -> Any:
    """An X that underflows from a step on."""

    def change(step: int) -> Mapping[str, Any]:
        return {"underflow_pct": percent, "mse": 1e-2, "relative_error": 0.2} if step >= ONSET else {}

    return change


class TestOperands:
    @pytest.mark.parametrize(("usual", "named"), [(0.0, True), (6.0, True), (28.0, False)])
    def test_what_another_baseline_does_as_well_is_not_told(self, tmp_path: Path, usual: float, named: bool) -> None:
        run = write(tmp_path / "run", more_lost(30.0), falling(0, ONSET + 8))
        first = write(tmp_path / "first", losses=falling(1))
        other = write(tmp_path / "other", more_lost(usual) if usual else nothing, falling(2))
        alone, both = diagnose(run, first), diagnose(run, [first, other])
        assert alone.culprit is not None and alone.culprit.layer == CULPRIT
        assert (both.culprit is not None and both.culprit.layer == CULPRIT) == named
        assert both.comparison is not None and both.comparison.out_of_band.is_empty() != named

    def test_nan_is_never_usual(self, tmp_path: Path) -> None:
        def lost(step: int) -> Mapping[str, Any]:
            return {"nan": 3, "nonfinite_order": 1} if step >= ONSET else {}

        run = write(tmp_path / "run", lost, falling(0))
        first, other = write(tmp_path / "first", losses=falling(1)), write(tmp_path / "other", lost, falling(2))
        assert diagnose(run, [first, other]).cause == "nonfinite"

    def test_a_scale_that_no_other_has_is_told(self, tmp_path: Path) -> None:
        run = write(tmp_path / "run", corrupted, falling(0, ONSET + 8))
        baselines = [write(tmp_path / f"seed_{seed}", losses=falling(seed)) for seed in (1, 2, 3)]
        found = diagnose(run, baselines)
        assert (found.harm, found.cause) == ("harmful", "corrupted_scale")
        assert found.culprit is not None and found.culprit.layer == CULPRIT
        assert any("2 more baselines are looked at" in note for note in found.notes)


def norms(factor: float = 1.0, seed: int = 0) -> dict[int, float]:
    """A gradient norm that moves by a factor at a step."""
    noise = 1 + np.random.default_rng(seed).normal(0, 0.02, N)
    return {i: float(noise[i] * (factor if i >= 120 else 1.0)) for i in range(N)}


class TestRules:
    @pytest.mark.parametrize(("others", "named"), [(norms(1.0, 2), True), (norms(16.0, 2), False), ({}, True)])
    def test_a_move_that_another_baseline_makes_too_is_not_told(
        self, tmp_path: Path, others: dict[int, float], named: bool
    ) -> None:
        run = write(tmp_path / "run", losses=falling(0), grad_norm=norms(16.0))
        first = write(tmp_path / "first", losses=falling(1), grad_norm=norms(1.0, 1))
        other = write(tmp_path / "other", losses=falling(2), grad_norm=others)
        assert diagnose(run, first).cause == "multiplier"
        found = diagnose(run, [first, other])
        assert (found.cause == "multiplier") == named, found.verdict()


def scaled(losses: Mapping[int, float], factor: float) -> dict[int, float]:
    return {step: factor * loss for step, loss in losses.items()}


class TestUse:
    def test_on_the_command_line(self, tmp_path: Path) -> None:
        run = write(tmp_path / "run", losses=falling(0))
        baselines = [write(tmp_path / f"seed_{seed}", losses=falling(seed)) for seed in (1, 2, 3)]
        options = [part for each in baselines for part in ("--baseline", str(each))]
        result = CliRunner().invoke(app, ["diagnose", str(run), *options, "--json"])
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        assert told["seeds"]["n"] == 3 and 0 <= told["seeds"]["spread"] < 1
        assert "mean of 3 runs of other batches" in told["verdict"]

    def test_one_in_a_list_is_one(self, tmp_path: Path) -> None:
        run, first = write(tmp_path / "run", losses=falling(0)), write(tmp_path / "first", losses=falling(1))
        assert diagnose(run, [first]).to_json() == diagnose(run, first).to_json()
        assert diagnose(run, []).to_json() == diagnose(run).to_json()

    def test_harm_begins_where_seeds_no_longer_explain_it(self, tmp_path: Path) -> None:
        """The run lies 0.5% above all along, as seeds may, and rises by 8% with a scale that jumps."""
        rising = {i: loss * (1.005 + 0.08 * (i >= ONSET + 4)) for i, loss in falling(0).items()}
        run = write(tmp_path / "run", corrupted, rising)
        baselines = [write(tmp_path / f"seed_{s}", losses=scaled(falling(s), 1 + (s - 2) / 400)) for s in (1, 2, 3)]
        found = diagnose(run, baselines)
        assert found.harm == "harmful" and found.divergence_step == pytest.approx(ONSET + 4, abs=4)
        assert found.culprit is not None and found.cause == "corrupted_scale"

    def test_they_must_be_of_one_model(self, tmp_path: Path) -> None:
        run, first = write(tmp_path / "run", losses=falling(0)), write(tmp_path / "first", losses=falling(1))
        other = write(tmp_path / "other", losses=falling(2), layers=LAYERS[:2])
        with pytest.raises(ConfigError, match="of different models"):
            diagnose(run, [first, other])

    def test_the_same_batches_are_said(self, tmp_path: Path) -> None:
        run, twin = write(tmp_path / "run", losses=falling(0)), write(tmp_path / "twin", losses=falling(0))
        found = diagnose(run, [write(tmp_path / "first", losses=falling(1)), twin])
        assert found.loss.gap is not None and found.loss.gap.paired
        assert found.baseline is not None and found.baseline.path == str(twin)
        assert any("saw the run's batches" in note for note in found.notes)
