"""A run beside several that went well: its loss beside their mean and what seeds differ by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from diagnosed_runs import CULPRIT, LAYERS, ONSET, corrupted, falling, write
from samples import FINGERPRINT, sample
from typer.testing import CliRunner

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.narrator import tell_loss_outcome
from nemo_fp8_debug.analysis.loss.curve import LossCurve
from nemo_fp8_debug.analysis.loss.outcome import LossOutcome
from nemo_fp8_debug.analysis.loss.seeds import choose_baseline_loss, mean_of
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.errors import ConfigError
from nemo_fp8_debug.record.writer import RunRecordWriter


def losses(seed: int, above: float = 0.0, n: int = 400) -> LossCurve:
    """Of other batches for each seed; percent above what they all tend to."""
    noise = np.random.default_rng(seed).normal(0, 0.01, n)
    table = {"step": range(n), "loss": (2 + 3 * np.exp(-np.arange(n) / 40)) * (1 + noise) * (1 + above / 100)}
    return LossCurve.from_steps_table(pl.DataFrame(table))


#: percent that three baselines end apart from what they all tend to
APART = (-0.2, 0.0, 0.2)


def outcome(above: float, apart: tuple[float, ...] = APART, same_model: bool = True) -> LossOutcome:
    """Of a run so many percent above, beside baselines that are as far apart."""
    curves = {f"seed_{seed}": losses(seed, each) for seed, each in enumerate(apart, start=1)}
    found = choose_baseline_loss(("run", losses(0, above)), curves)
    return LossOutcome.judge_loss(losses(0, above), found.curve, same_model=same_model, seeds=found.seeds)


class TestLoss:
    def test_a_gap_that_one_seed_may_explain_is_harm_beside_several_that_agree(self) -> None:
        assert outcome(11.0, APART[:1]).harm == "unknown"
        assert outcome(11.0).harm == "harmful"
        assert outcome(11.0, (-4.0, 0.0, 4.0)).harm == "unknown"  # seeds differ by as much
        assert outcome(0.0).harm in ("none", "gap")

    def test_what_seeds_differ_by_says_nothing_of_another_model(self) -> None:
        assert outcome(11.0, same_model=False).harm == outcome(11.0, APART[:1], same_model=False).harm == "unknown"

    def test_it_is_compared_with_their_mean(self) -> None:
        found = outcome(5.0, (-4.0, 0.0, 4.0))
        assert found.gap is not None and found.gap.percent == pytest.approx(5.0, abs=0.5)
        assert found.seeds is not None and found.seeds.spread == pytest.approx(4.0, abs=0.5)
        told = tell_loss_outcome(found)
        assert "above the baselines' mean" in told and "mean of 3 runs of other batches" in told
        assert "1 in 20 runs of another seed ends" in told and "Fewer than 1 in 20" in tell_loss_outcome(
            outcome(5.0, (-1.0, 0.0, 1.0))
        )

    def test_harm_begins_where_most_seeds_no_longer_explain_it(self) -> None:
        """The run lies 1% above all along, as a seed may, and 15% from step 200 on."""
        run = losses(0, 1.0)
        run = LossCurve.from_steps_table(
            pl.DataFrame({"step": run.steps, "loss": run.losses * np.where(run.steps >= 200, 1.14, 1.0)})
        )
        found = choose_baseline_loss(
            ("run", run), {f"{seed}": losses(seed, each) for seed, each in enumerate((-1.0, 0.0, 1.0), start=1)}
        )
        told = LossOutcome.judge_loss(run, found.curve, same_model=True, seeds=found.seeds)
        assert told.harm == "harmful" and told.rise_step == pytest.approx(200, abs=4)

    @pytest.mark.parametrize("apart", [0.25, 2.0])
    def test_runs_of_the_same_recipe_are_hardly_ever_called_harmed(self, apart: float) -> None:
        """Seeds that differ by 0.25%, and by 2%, three of them and one more to be judged, 60 times."""
        drawn = np.random.default_rng(1).normal(0, apart, (60, 4))
        harms = []
        for i, (mine, *theirs) in enumerate(drawn):
            run = losses(1000 + 4 * i, mine)
            found = choose_baseline_loss(
                ("run", run), {f"{k}": losses(1001 + 4 * i + k, each) for k, each in enumerate(theirs)}
            )
            harms.append(LossOutcome.judge_loss(run, found.curve, same_model=True, seeds=found.seeds).harm)
        assert harms.count("harmful") == 0


class TestWhichCount:
    def told(self, **baselines: LossCurve) -> tuple[int, str]:
        """How many count beside a run, and the notes."""
        found = choose_baseline_loss(("run", losses(0, 5.0)), baselines)
        return 1 if found.seeds is None else found.seeds.n, " ".join(found.notes)

    def test_one_of_the_same_batches_is_the_only_one(self) -> None:
        twin = losses(0)
        found = choose_baseline_loss(("run", losses(0, 1.0)), {"a": losses(1), "twin": twin, "b": losses(2)})
        assert found.curve is twin and found.seeds is None and found.notes[0].startswith("twin saw the run's batches")

    def test_of_several_of_the_same_batches_one(self) -> None:
        """A copy that differs by next to nothing does not show what seeds differ by."""
        n, told = self.told(a=losses(1), copy=losses(1, 0.05))
        assert n == 1 and told == "copy does not count for the loss: it saw the batches of a."
        assert self.told(a=losses(1), copy=losses(1, 0.05), b=losses(2))[0] == 2

    def test_none_of_which_that_cannot_be_told(self) -> None:
        n, told = self.told(a=losses(1, n=30), b=losses(2, n=30))
        assert n == 1 and "with 30 losses in common we cannot tell" in told

    def test_not_one_that_ended_early(self) -> None:
        """It would have the end of the run not looked at."""
        n, told = self.told(a=losses(1), b=losses(2), short=losses(3, n=100))
        why = "it covers 100 steps of the run, but another baseline covers 400"
        assert n == 2 and told == f"short does not count for the loss: {why}."
        assert self.told(short=losses(3, n=100), a=losses(1), b=losses(2))[0] == 2
        assert self.told(a=losses(1), twin=losses(0, n=100))[0] == 1

    def test_not_one_that_diverged_itself(self) -> None:
        bad = losses(3)
        for harm in (1.4, np.nan):
            diverged = np.where(bad.steps >= 300, harm, 1.0) * bad.losses
            curve = LossCurve.from_steps_table(pl.DataFrame({"step": bad.steps, "loss": diverged}))
            n, told = self.told(a=losses(1), bad=curve, b=losses(2))
            assert n == 2 and "bad does not count for the loss: it diverges itself, from 3" in told

    def test_not_the_run_itself(self) -> None:
        """Nor under another name, as another path to its record."""
        for name in ("run", "elsewhere"):
            n, told = self.told(a=losses(1), **{name: losses(0, 5.0)}, b=losses(2))
            assert n == 2 and told == f"{name} does not count for the loss: it is the run itself."

    def test_a_loss_that_is_lost_for_a_step_is_left_out(self) -> None:
        table = pl.DataFrame({"step": range(400), "loss": losses(1).losses}).with_columns(
            loss=pl.when(pl.col("step") == 380).then(float("nan")).otherwise("loss")
        )
        found = choose_baseline_loss(("run", losses(0)), {"a": LossCurve.from_steps_table(table), "b": losses(2)})
        assert found.seeds is not None and found.seeds.spread < 1 and 380 not in found.curve.steps

    def test_the_mean_is_at_the_steps_of_the_one_with_most(self) -> None:
        every, other = range(0, 200), range(50, 250, 4)
        curves = [
            LossCurve.from_steps_table(pl.DataFrame({"step": steps, "loss": [float(step) for step in steps]}))
            for steps in (other, every)
        ]
        mean = mean_of(curves)
        assert mean.steps.tolist() == list(range(50, 200)) and np.allclose(mean.losses, mean.steps)

    @pytest.mark.parametrize("bad", [[], [1.0], [np.nan] * 400, [0.0] * 400, [-1.0] * 400])
    def test_one_whose_loss_tells_nothing_is_no_error(self, bad: list[float]) -> None:
        other = LossCurve.from_steps_table(
            pl.DataFrame({"step": range(len(bad)), "loss": bad}, {"step": pl.Int64, "loss": pl.Float64})
        )
        for order in ({"a": losses(1), "bad": other}, {"bad": other, "a": losses(1)}, {"bad": other, "worse": other}):
            found = choose_baseline_loss(("run", losses(0)), order)
            assert tell_loss_outcome(LossOutcome.judge_loss(losses(0), found.curve, same_model=True, seeds=found.seeds))


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

    def test_no_other_baseline_clears_an_operand(self, tmp_path: Path) -> None:
        run = write(tmp_path / "run", corrupted, falling(0, ONSET + 8))
        baselines = [write(tmp_path / "first", losses=falling(1)), write(tmp_path / "other", corrupted, falling(2))]
        found = diagnose(run, baselines)
        assert (found.harm, found.cause) == ("harmful", "corrupted_scale")
        assert found.culprit is not None and found.culprit.layer == CULPRIT

    def test_one_that_has_no_samples_counts_for_the_loss(self, tmp_path: Path) -> None:
        run, first = write(tmp_path / "run", losses=falling(0)), write(tmp_path / "first", losses=falling(1))
        record = RunRecordWriter(tmp_path / "unsampled")
        record.open(FINGERPRINT)
        record.record_steps({step: {"loss": loss} for step, loss in falling(2).items()})
        record.close()
        found = diagnose(run, [first, tmp_path / "unsampled"])
        assert found.loss.seeds is not None and found.loss.seeds.n == 2

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
        wider = tmp_path / "wider"
        record = RunRecordWriter(wider)
        record.open(FINGERPRINT)
        rows = [{"layer": layer, "role": "weight", "n": 16384} for layer in LAYERS]
        record.record(sample(0, rows))
        record.record_steps({step: {"loss": loss} for step, loss in falling(2).items()})
        record.close()
        for each in (other, wider):
            with pytest.raises(ConfigError, match="are of different models"):
                diagnose(run, [first, each])

    def test_the_same_batches_are_said(self, tmp_path: Path) -> None:
        run, twin = write(tmp_path / "run", losses=falling(0)), write(tmp_path / "twin", losses=scaled(falling(0), 1.001))
        found = diagnose(run, [write(tmp_path / "first", losses=falling(1)), twin])
        assert found.loss.gap is not None and found.loss.gap.paired
        assert any("saw the run's batches" in note for note in found.notes)
