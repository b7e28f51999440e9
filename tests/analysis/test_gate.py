"""The gate: pass, fail or cannot tell, by exit code, line and JSON, of records and of series."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from diagnosed_runs import falling, write
from fault_injection.judge import baseline_of, runs_by_part
from fault_injection.records import StoredRun, read_run, truths
from test_gap import SIGNS, curve, pair, signed
from typer.testing import CliRunner, Result

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.loss.gate import CANNOT_TELL, FAIL, PASS, gate, gate_all_losses
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.cli.healthy import tell_outcome
from nemo_fp8_debug.errors import ConfigError


class TestDecision:
    @pytest.mark.parametrize(("percent", "outcome"), [(0.0, PASS), (1.0, FAIL)])
    @pytest.mark.parametrize("paired", [True, False])
    def test_decides_half_a_point_from_the_limit(self, percent: float, outcome: str, paired: bool) -> None:
        n = 5000 if paired else 60000
        found = [gate([run], [good], 0.5) for run, good in (pair(n, 1 + percent / 100, paired, seed) for seed in range(20))]
        assert [each.outcome for each in found if each].count(outcome) >= 18

    @pytest.mark.parametrize("wrong", [PASS, FAIL])
    def test_is_wrong_at_the_limit_in_5_of_100(self, wrong: str) -> None:
        found = [gate([run], [good], 0.5) for run, good in (pair(1000, 1.005, True, seed) for seed in range(300))]
        assert sum(each.outcome == wrong for each in found if each) <= 0.09 * 300

    def test_says_how_many_more_steps_would_tell(self) -> None:
        found = gate(*([each] for each in pair(300, 1.0, False, 5)), 1.0)
        assert found and found.outcome == CANNOT_TELL and found.estimated_steps_to_decide is not None
        run, good = pair(300 + 4 * found.estimated_steps_to_decide, 1.0, False, 5)
        longer = gate([run], [good], 1.0)
        assert longer and longer.error < found.error / 1.5

    def test_a_loss_of_nan_fails(self) -> None:
        found = gate([curve([2.0] * 50 + [np.nan] * 50)], [curve([2.0] * 100)], 0.5)
        assert found and found.outcome == FAIL


class TestAnySign:
    @pytest.mark.parametrize(("start", "end"), SIGNS)
    def test_tells_a_healthy_loss_from_one_that_gets_worse(self, start: float, end: float) -> None:
        baseline = signed(0, start, end)
        found = [gate([signed(1, start, end, worse)], [baseline], 5.0) for worse in (0.0, 0.5)]
        assert [each.outcome for each in found if each] == [PASS, FAIL]

    def test_several_baselines_tell_of_the_recipe(self) -> None:
        baselines = [curve(signed(seed, 2.0, -3.0).losses + seed / 100) for seed in range(3)]
        found = gate([signed(9, 2.0, -3.0)], baselines, 5.0)
        assert found and (found.outcome, found.of) == (PASS, "the recipe")


class TestFarBelow:
    """Records of the benchmark's runs that were given the same data again and again, and of clean runs."""

    @staticmethod
    def pairs(kind: str, baseline: str) -> Iterator[tuple[StoredRun, StoredRun]]:
        """Runs with their baselines."""
        for truth in truths("tune"):
            name = baseline_of(truth, baseline) if truth["kind"] == kind else None
            if name is not None:
                yield read_run(truth), read_run(runs_by_part(Path(truth["path"]).parent)[truth["path"]][name])

    def test_repeated_data_does_not_pass_and_is_said(self) -> None:
        low = [
            (run, good)
            for run, good in self.pairs("repeated_data", "near")
            if run.loss.final_loss < 0.8 * good.loss.final_loss
        ]
        assert len(low) > 10
        for run, good in low:
            found = gate_all_losses([run], [good], 2.0)
            assert found and found.outcome == FAIL and found.loss.gap < -12
            assert "check for repeated data, leaked labels or a missing mask" in " ".join(tell_outcome(found, "step"))
            verdict = diagnose(run, good)
            assert verdict.harm == "unknown" and "% below the baseline's (95% interval" in verdict.verdict()
            assert verdict.cause == "none" and "The loss is too low to trust." in verdict.verdict()

    def test_no_clean_run_is_far_below(self) -> None:
        clean = [pair for _, pair in zip(range(40), self.pairs("none", "other"), strict=False)]
        assert not any(found.loss.is_far_below for pair in clean if (found := gate_all_losses([pair[0]], [pair[1]], 2.0)))

    def test_beyond_a_limit_that_is_itself_below(self) -> None:
        """Who asks for a loss 50% lower gets a pass at 55%."""
        assert [gate([curve([level] * 100)], [curve([2.0] * 100)], -50.0).outcome for level in (0.9, 0.5)] == [PASS, FAIL]  # type: ignore[union-attr]


class TestSeeds:
    def test_several_tell_of_the_recipe(self) -> None:
        """Seeds differ by 1%: a pair is sure of its gap, and the recipe's is not known to a point."""
        by_seed = np.random.default_rng(0).normal(0, 0.01, 4)
        pairs = [pair(2000, 1 + off, True, seed) for seed, off in enumerate(by_seed)]
        alone = gate([pairs[0][0]], [pairs[0][1]], 5.0)
        found = gate([run for run, _ in pairs], [good for _, good in pairs], 5.0)
        assert alone and found and (alone.of, found.of) == ("this pair", "the recipe")
        assert found.freedom == 3 and found.error == pytest.approx(100 * by_seed.std(ddof=1) / 2, rel=0.1)

    def test_one_run_with_several_baselines_bears_its_own_seed(self) -> None:
        baselines = [pair(2000, 1 + off, True, 7)[0] for off in (-0.01, 0.0, 0.01)]
        found = gate([pair(2000, 1.0, True, 7)[1]], baselines, 5.0)
        assert found and found.error == pytest.approx(1.0 * np.sqrt(1 + 1 / 3), rel=0.1)

    def test_a_baseline_that_is_given_twice_is_refused(self) -> None:
        run, good = pair(500, 1.02, False, 1)
        with pytest.raises(ConfigError, match="two of the baselines have the same losses"):
            gate([run], [good, good], 0.5)

    @pytest.mark.parametrize(("runs", "baselines"), [(2, 3), (0, 1), (1, 0), (3, 1)])
    def test_numbers_that_do_not_fit_are_refused(self, runs: int, baselines: int) -> None:
        losses = curve([2.0] * 100)
        with pytest.raises(ConfigError, match=f"{runs} runs and {baselines} baselines"):
            gate([losses] * runs, [losses] * baselines, 0.5)


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["gate", *map(str, arguments)])


class TestCommand:
    @pytest.mark.parametrize(("beyond", "status", "word"), [(9, 0, "PASS"), (-9, 1, "FAIL"), (0.1, 3, "CANNOT TELL")])
    def test_exit_code_and_line(self, tmp_path: Path, beyond: float, status: int, word: str) -> None:
        noise = np.random.default_rng(0).normal(1.48, 0.02, 1000)
        slow = {i: loss * noise[i] for i, loss in falling().items()}
        baseline, run = write(tmp_path / "baseline"), write(tmp_path / "run", losses=slow)
        gap = json.loads(called(run, "--baseline", baseline, "--max-gap", "1", "--json").stdout)["gap"]
        limit = f"{gap + beyond}%"
        found = called(run, "--baseline", baseline, "--max-gap", limit)
        assert (found.exit_code, found.stdout.split(":")[0]) == (status, word), found.output
        assert (
            "cannot separate the effect of the recipe from the effect of the seed" in found.stdout
            and "arXiv:2412.19437" in found.stdout
        )
        plain = json.loads(called(run, "--baseline", baseline, "--max-gap", limit, "--json").stdout)
        assert plain["outcome"] == word.lower() and plain["low"] <= plain["gap"] <= plain["high"]

    def test_json_of_a_run_that_ended_in_nan_is_json(self, tmp_path: Path) -> None:
        lost = {i: loss if i < 100 else float("nan") for i, loss in falling().items()}
        found = called(write(tmp_path / "run", losses=lost), "--baseline", write(tmp_path / "b"), "--max-gap", "1", "--json")
        assert found.exit_code == 1 and json.loads(found.stdout, parse_constant=pytest.fail)["gap"] is None

    @pytest.mark.parametrize("options", [["--max-gap", "much"], ["--max-gap", "1", "--last", "0%"], ["--max-gap", "nan"]])
    def test_wrong_usage_exits_with_2_in_a_line(self, tmp_path: Path, options: list[str]) -> None:
        run = write(tmp_path / "run")
        found = called(run, "--baseline", run, *options)
        assert found.exit_code == 2 and found.stderr.count("\n") == 1

    def test_a_missing_record_is_no_failed_gate(self, tmp_path: Path) -> None:
        assert called(tmp_path, "--baseline", tmp_path, "--max-gap", "1").exit_code == 2


def evaluated(folder: Path, every: int = 5, factor: float = 1.0, seed: int = 1) -> Path:
    """A run of training losses that are all alike, and evaluations `factor` above those of others."""
    moves = np.random.default_rng(seed).normal(0, 1e-4, 200)
    losses = {step: 2.0 * factor * (1 + moves[step]) for step in range(0, 200, every)}
    noise = np.random.default_rng(0).normal(1.48, 0.001, 1000)
    trained = {i: loss * noise[i] for i, loss in falling().items()}
    return write(folder, losses=trained, validation={"val_loss": losses})


class TestEvaluations:
    @pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.02, 1)])
    def test_count_beside_the_training_loss(self, tmp_path: Path, factor: float, status: int) -> None:
        """Training is alike in both, so it is the evaluation that decides."""
        run, baseline = evaluated(tmp_path / "run", 1, factor), evaluated(tmp_path / "baseline", 1, seed=2)
        found = called(run, "--baseline", baseline, "--max-gap", "1%")
        assert found.exit_code == status, found.output
        first = found.stdout.splitlines()[0]
        assert ("validation, val_loss" in first) == bool(status)
        plain = json.loads(called(run, "--baseline", baseline, "--max-gap", "1%", "--json").stdout)
        assert plain["validation"]["val_loss"]["gap"] == pytest.approx(100 * (factor - 1), abs=0.05)
        assert plain["not_judged"] == {}

    def test_few_are_not_judged(self, tmp_path: Path) -> None:
        run, baseline = evaluated(tmp_path / "run", 5, 1.5), evaluated(tmp_path / "baseline", 5)
        found = called(run, "--baseline", baseline, "--max-gap", "1%")
        assert found.exit_code == 0
        assert "Not judged: validation, val_loss; fewer than 10 evaluations are in the steps that count" in found.stdout

    def test_of_one_run_alone_are_not_judged(self, tmp_path: Path) -> None:
        run, baseline = evaluated(tmp_path / "run", 1, 1.5), write(tmp_path / "baseline")
        found = json.loads(called(run, "--baseline", baseline, "--max-gap", "50%", "--json").stdout)
        assert found["not_judged"] == {"val_loss": "not all runs have it"}

    def test_the_more_are_judged_the_surer_a_failure_must_be(self, tmp_path: Path) -> None:
        run, baseline = evaluated(tmp_path / "run", 1), evaluated(tmp_path / "baseline", 1, seed=2)
        of_run, of_baseline = Run.read(run), replace(Run.read(baseline), loss=curve([2.0, 2.1] * 100))
        both, alone = gate_all_losses([of_run], [of_baseline], 1.0), gate([of_run.loss], [of_baseline.loss], 1.0)
        assert (
            both
            and alone
            and both.loss.confidence_bounds[0] < alone.confidence_bounds[0]
            and both.loss.confidence_bounds[1] == alone.confidence_bounds[1]
        )
