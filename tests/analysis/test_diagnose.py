"""What rules add up to, over records of runs: with a baseline, with a reference run, alone, and where there is little
to go by."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnosed_runs import CULPRIT, EVERY, FIRST, LAYERS, ONSET, STEPS, N, corrupted, falling, nothing, trending, write
from facts_of import findings_of
from samples import FINGERPRINT, sample
from typer.testing import CliRunner, Result

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.flags import flag_operands_to_change
from nemo_fp8_debug.analysis.diagnosis.narrator import (
    tell_conclusion,
    tell_next_step,
    tell_possible_misses,
    tell_reference_loss,
)
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.analysis.story.story import story
from nemo_fp8_debug.analysis.story.summary import summarize
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.core.text import format_number
from nemo_fp8_debug.errors import ConfigError, RecordError
from nemo_fp8_debug.record.writer import RunRecordWriter


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return write(tmp_path / "baseline")


def below_zero(seed: int = 0, better: float = 0.0, left: int | None = None) -> dict[int, float]:
    """The losses of `falling` 9 lower: from -4 to -7, lower by a part of that from the onset on."""
    return {i: loss - 9 - better * 3 * (i >= ONSET) for i, loss in falling(seed, left).items()}


class TestLossesBelowZero:
    def test_one_that_falls_as_something_changes_has_not_risen(self, tmp_path: Path) -> None:
        good = write(tmp_path / "good", losses=below_zero(1))
        better = diagnose(write(tmp_path / "better", corrupted, below_zero(0, 0.2)), good)
        worse = diagnose(write(tmp_path / "worse", corrupted, below_zero(0, -0.2)), good)
        assert better.harm == "harmless so far"
        assert "rises" not in better.verdict() and "below the baseline's" in better.verdict()
        assert worse.harm == "harmful" and "The loss rose by 8" in worse.verdict() and worse.loss.gap is not None
        assert worse.loss.gap.percent == pytest.approx(100 * 0.6 / 7, rel=0.1)

    def test_healthy_ones_are_not_harmed(self, tmp_path: Path) -> None:
        run, good = write(tmp_path / "run", losses=below_zero(0)), write(tmp_path / "good", losses=below_zero(1))
        alone, beside = diagnose(run), diagnose(run, good)
        assert alone.harm == "unknown" and alone.divergence_step is None
        assert beside.harm in ("none", "gap") and "too few losses" not in beside.verdict()


class TestAPair:
    def test_names_the_operand_the_cause_and_the_lead(self, tmp_path: Path, baseline: Path) -> None:
        found = diagnose(write(tmp_path / "bad", corrupted, falling(left=120)), baseline)
        assert found.culprit and (found.culprit.layer, found.culprit.role, found.culprit.since) == (CULPRIT, "input", ONSET)
        assert (found.cause, found.harm) == ("corrupted_scale", "harmful") and found.confidence in ("medium", "high")
        assert found.divergence_step is not None and found.steps_before_divergence == found.divergence_step - ONSET > 0
        assert f"X of {CULPRIT} went wrong at or before step {ONSET} ({found.confidence} confidence)" in found.verdict()

    @pytest.mark.parametrize(("later", "named"), [(5.0, True), (0.3, False)])
    def test_an_outlier_that_costs_values_only_later_is_named(self, tmp_path: Path, later: float, named: bool) -> None:
        def growing(step: int) -> Mapping[str, Any]:
            grown = {"outlier_log2": 4.0 + max(0.0, (step - ONSET + EVERY) / EVERY), "mse": 1e-3 if step >= ONSET else 1e-4}
            return grown | {"underflow_pct": later if step >= ONSET + 8 * EVERY else 0.0}

        def usual(step: int) -> Mapping[str, Any]:
            return {"outlier_log2": 4.0, "underflow_pct": 0.0, "mse": 1e-4}

        found = diagnose(write(tmp_path / "bad", growing), write(tmp_path / "good", usual))
        assert (found.culprit is not None, found.cause) == (named, "outlier" if named else "none")
        if found.culprit:
            assert (
                f"underflow 0%, overflow 0%; from {ONSET + 8 * EVERY} on underflow 5% instead of 0%"
                in found.culprit.evidence
            )

    def test_another_scale_that_went_wrong_is_told_too(self, tmp_path: Path, baseline: Path) -> None:
        found = diagnose(write(tmp_path / "bad", corrupted, falling(left=120), culprit=[LAYERS[0], CULPRIT]), baseline)
        assert found.culprit and found.culprit.layer == LAYERS[0]
        assert [f.layer for f in found.decision.also] == [CULPRIT]
        assert f"Also wrong by then: X of {CULPRIT}." in found.verdict()
        assert "Also wrong" not in diagnose(write(tmp_path / "one", corrupted), baseline).verdict()
        (also,) = found.to_json()["also_wrong"]
        assert (also["layer"], also["cause"]) == (CULPRIT, "corrupted_scale")

    @pytest.mark.parametrize(("how_many", "named"), [(1, True), (2, True), (3, False)])
    def test_two_outliers_with_the_loss_are_named_and_more_are_its_doing(
        self, tmp_path: Path, how_many: int, named: bool
    ) -> None:
        def outlier(step: int) -> Mapping[str, Any]:
            wrong = {"outlier_log2": 14.0, "underflow_pct": 60.0, "mse": 1e-2, "relative_error": 0.3}
            return wrong if step >= ONSET else {}

        layers = [f"decoder.layers.{i}.mlp.linear_fc2" for i in range(6)]
        run = write(tmp_path / "run", outlier, falling(left=ONSET), layers=layers, culprit=layers[1 : 1 + how_many])
        found = diagnose(run, write(tmp_path / "baseline", layers=layers))
        assert (found.culprit is not None) == named
        assert len(found.decision.also) == (how_many - 1 if named else 0)

    @pytest.mark.parametrize("lr", [None, 1e-4])
    def test_values_that_a_rate_may_have_changed_are_less_sure_without_a_recorded_rate(
        self, tmp_path: Path, lr: float | None
    ) -> None:
        def outlier(step: int) -> Mapping[str, Any]:
            wrong = {"outlier_log2": 14.0, "underflow_pct": 60.0, "mse": 1e-2, "relative_error": 0.3}
            return wrong if step >= ONSET else {}

        rates = {} if lr is None else {"lr": dict.fromkeys(range(N), lr)}
        run = write(tmp_path / "run", outlier, falling(left=ONSET), **rates)
        found = diagnose(run, write(tmp_path / "baseline", **rates))
        assert found.cause == "outlier"
        doubt = "The learning rate may be the cause: this run did not record it."
        assert (doubt in found.verdict()) == (lr is None)
        assert found.confidence != "high" or lr is not None

    def test_a_scale_that_went_wrong_after_the_loss_is_to_be_changed_too(self, tmp_path: Path, baseline: Path) -> None:
        """No loss brings that about, so that the run would not come back without it."""
        turns = itertools.cycle((0, 5 * EVERY))  # of the two operands, in the order of layers

        def one_later(step: int) -> Mapping[str, Any]:
            return corrupted(step - next(turns))

        both = write(tmp_path / "both", one_later, falling(left=112), culprit=[FIRST, CULPRIT])
        found = diagnose(both, baseline)
        assert found.divergence_step is not None and found.divergence_step < ONSET + 5 * EVERY
        assert found.culprit and found.culprit.layer == FIRST
        assert list(flag_operands_to_change(found)) == [(FIRST, "input"), (CULPRIT, "input")]

    def test_an_operand_that_loses_most_of_its_values_after_the_loss_is_to_be_changed_too(self, tmp_path: Path) -> None:
        turns = itertools.cycle((0, 5 * EVERY))

        def one_later(step: int) -> Mapping[str, Any]:
            wrong = {"outlier_log2": 24.0, "underflow_pct": 90.0, "mse": 1e-2, "relative_error": 0.3}
            return wrong if step - next(turns) >= ONSET else {}

        baseline = write(tmp_path / "baseline")
        found = diagnose(write(tmp_path / "both", one_later, falling(left=112), culprit=[FIRST, CULPRIT]), baseline)
        assert found.culprit and found.culprit.layer == FIRST and not found.decision.also
        assert {key: flag.out for key, flag in flag_operands_to_change(found).items()} == {
            (FIRST, "input"): (ONSET, STEPS[-1]),
            (CULPRIT, "input"): (ONSET + 5 * EVERY, STEPS[-1]),
        }

    @pytest.mark.parametrize(("role", "named"), [("input", True), ("grad_output", False)])
    def test_a_batch_of_large_gradients_that_a_scale_lags_behind_is_a_hint(
        self, tmp_path: Path, baseline: Path, role: str, named: bool
    ) -> None:
        def spike(step: int) -> Mapping[str, Any]:
            wrong = {"scale_ratio_log2": 2.0, "overflow_pct": 5.0, "mse": 1e-2, "relative_error": 0.3}
            return wrong if step == ONSET else {}

        found = diagnose(write(tmp_path / "run", spike, changed=role), baseline)
        (told,) = [f for f in found.findings if f.rule == "operand"]
        assert "a transient" in told.evidence and (found.culprit is not None) == named
        assert found.cause == ("clipping" if named else "none")

    def test_without_a_rise_it_is_harmless_so_far(self, tmp_path: Path, baseline: Path) -> None:
        found = diagnose(write(tmp_path / "bad", corrupted), baseline)
        assert (found.cause, found.harm, found.steps_before_divergence) == ("corrupted_scale", "harmless so far", None)

    def test_a_run_like_the_good_one(self, tmp_path: Path, baseline: Path) -> None:
        found = diagnose(write(tmp_path / "again"), baseline)
        assert (found.cause, found.confidence, found.harm, found.culprit) == ("none", None, "none", None)

    def test_a_loss_that_leaves_and_operands_that_do_not(self, tmp_path: Path, baseline: Path) -> None:
        found = diagnose(write(tmp_path / "bad", losses=falling(left=120)), baseline)
        assert (found.cause, found.culprit) == ("software", None)

    def test_what_follows_the_loss_is_not_blamed(self, tmp_path: Path, baseline: Path) -> None:
        assert diagnose(write(tmp_path / "bad", corrupted, falling(left=50)), baseline).culprit is None

    def test_operands_within_the_band_all_along_clear_them_from_the_first_step_on(
        self, tmp_path: Path, baseline: Path
    ) -> None:
        found = diagnose(write(tmp_path / "bad", losses=falling(left=2)), baseline)
        assert found.divergence_step is not None and found.divergence_step < 2 * EVERY
        assert found.cause == "software" and found.culprit is None

    def test_absent_metrics_leave_nothing_to_tell_by(self, tmp_path: Path, baseline: Path) -> None:
        absent = dict.fromkeys(
            ("relative_error", "mse", "underflow_pct", "overflow_pct", "scale_ratio_log2", "outlier_log2")
        )
        bad = write(tmp_path / "bad", lambda step: absent, falling(left=120), layers=[CULPRIT], culprit=CULPRIT)
        assert diagnose(bad, baseline).cause in ("software", "unknown")

    def test_experts_are_one(self, tmp_path: Path) -> None:
        experts = [f"decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc1" for i in ("0", "1", "*")]
        baseline, bad = (
            write(tmp_path / name, change, layers=experts, culprit=experts[2])
            for name, change in (("baseline", nothing), ("bad", corrupted))
        )
        for reference in (baseline, None):
            culprit = diagnose(bad, reference).culprit
            assert culprit and culprit.layer == experts[2]

    def test_one_expert_that_makes_all_of_them_go_out_is_named(self, tmp_path: Path) -> None:
        experts = [f"decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc1" for i in ("0", "1", "*")]
        wrong = [experts[1], experts[2]]
        baseline, bad, both = (
            write(tmp_path / name, change, layers=experts, culprit=culprits)
            for name, change, culprits in (("g", nothing, wrong), ("b", corrupted, wrong), ("all", corrupted, experts))
        )
        one, several = diagnose(bad, baseline).culprit, diagnose(both, baseline).culprit
        assert one and (one.layer, one.cause) == (experts[1], "corrupted_scale")
        assert several and several.layer == experts[2]

    def test_by_samples(self, tmp_path: Path) -> None:
        consumed = {s: float(8 * s) for s in range(N)}
        baseline, bad = (
            write(tmp_path / name, change, consumed_samples=consumed) for name, change in (("g", nothing), ("b", corrupted))
        )
        found = diagnose(bad, baseline, by="samples")
        assert found.culprit and found.culprit.since == 8 * ONSET and f"at or before sample {8 * ONSET}" in found.verdict()

    def test_nothing_quantized_can_have_done_no_harm(self, tmp_path: Path) -> None:
        """Metrics of a BF16 run are what a recipe would make of it."""
        baseline, bad = (
            write(tmp_path / name, change, falling(left=left), "emulated")
            for name, change, left in (("baseline", nothing, None), ("bad", corrupted, 120))
        )
        found = diagnose(bad, baseline)
        assert (found.cause, found.culprit) == ("software", None)


class TestNan:
    @pytest.mark.parametrize("at", [ONSET, ONSET - 3])
    def test_names_the_operand_also_if_it_is_sampled_after_the_loss_was_lost_as_long_as_weights_hold_none(
        self, tmp_path: Path, at: int
    ) -> None:
        losses = {i: loss if i < at else float("nan") for i, loss in falling().items()}
        since = -(-at // EVERY) * EVERY
        bad = write(tmp_path / "bad", lambda step: {"nan": 7, "nonfinite_order": 3} if step >= since else {}, losses)
        found = diagnose(bad)
        assert found.cause == "nonfinite" and found.harm == "harmful" and found.divergence_step == at
        assert found.culprit and found.culprit.layer == CULPRIT and found.confidence != "low"
        json.dumps(found.to_json(), allow_nan=False)

    def test_the_first_in_order_of_execution_is_named(self, tmp_path: Path, baseline: Path) -> None:
        record = RunRecordWriter(tmp_path / "bad")
        record.open(FINGERPRINT)
        order = {layer: i for i, layer in enumerate(reversed(LAYERS))}
        for step in STEPS:
            nan = [{"nan": 1, "nonfinite_order": order[layer]} if step >= ONSET else {} for layer in LAYERS]
            record.record(
                sample(step, [{"layer": x, "scale_source": "engine", **n} for x, n in zip(LAYERS, nan, strict=True)])
            )
        record.close()
        culprit = diagnose(tmp_path / "bad", baseline).culprit
        assert culprit and culprit.layer == LAYERS[-1]

    def test_an_overflow_that_the_optimizer_skipped_is_none(self, tmp_path: Path, baseline: Path) -> None:
        skipped, scale = {s: float(s == ONSET) for s in range(N)}, {s: 1024.0 if s <= ONSET else 512.0 for s in range(N)}
        sought = write(tmp_path / "bad", lambda s: {"inf": 7} if s == ONSET else {}, skipped=skipped, loss_scale=scale)
        assert diagnose(sought, baseline).cause == "none"
        without = write(tmp_path / "without", lambda s: {"inf": 7} if s == ONSET else {}, skipped=skipped)
        assert diagnose(without, baseline).cause == "nonfinite"  # no loss scale is sought
        constant = dict.fromkeys(range(N), 1024.0)
        never = write(tmp_path / "never", lambda s: {"inf": 7} if s == ONSET else {}, skipped=skipped, loss_scale=constant)
        assert diagnose(never, baseline).cause == "nonfinite"
        ever = {s: float(s >= ONSET) for s in range(N)}
        found = diagnose(write(tmp_path / "ever", lambda s: {"inf": 7} if s >= ONSET else {}, skipped=ever), baseline)
        assert found.cause == "nonfinite"


class TestTwin:
    def test_that_leaves_too_is_software(self, tmp_path: Path, baseline: Path) -> None:
        bad, reference = (write(tmp_path / name, losses=falling(left=120)) for name in ("bad", "reference"))
        for usual in (baseline, None):
            found = diagnose(bad, usual, reference)
            assert (found.cause, found.harm) == ("software", "harmful")

    def test_that_leaves_too_acquits_a_scale_that_went_wrong_before(self, tmp_path: Path, baseline: Path) -> None:
        bad = write(tmp_path / "bad", corrupted, falling(left=120))
        found = diagnose(bad, baseline, write(tmp_path / "reference", losses=falling(left=130)))
        assert (found.cause, found.culprit) == ("software", None)

    def test_that_stays_is_what_the_loss_is_compared_with(self, tmp_path: Path, baseline: Path) -> None:
        slow = {i: loss + 0.1 for i, loss in falling().items()}
        bad = write(tmp_path / "bad", losses=slow)
        assert diagnose(bad).harm == "unknown" and diagnose(bad, None, baseline).harm == "harmful"

    def test_without_losses_has_nothing_to_tell(self, tmp_path: Path) -> None:
        bad, reference = write(tmp_path / "bad", losses=falling(left=120)), write(tmp_path / "reference", losses={})
        assert diagnose(bad, None, reference).divergence_step == diagnose(bad).divergence_step is not None


class TestAllClear:
    """Only a loss that follows the baseline's, next to operands in their bands, shows that nothing is wrong."""

    def test_needs_a_loss_that_follows_the_baseline(self, tmp_path: Path, baseline: Path) -> None:
        good = diagnose(write(tmp_path / "good"), baseline)
        assert (good.harm, good.cause, good.confidence) == ("none", "none", None)
        assert "We found nothing wrong." in good.verdict()

    def test_is_not_given_next_to_a_gap_that_nobody_can_tell(self, tmp_path: Path) -> None:
        """Losses so noisy that a gap of a third is no proof of harm."""
        rng = np.random.default_rng(3)
        curves = [{i: float(loss * rng.lognormal(0, 0.6) * f) for i, loss in falling().items()} for f in (1.0, 1.4)]
        found = diagnose(write(tmp_path / "run", losses=curves[1]), write(tmp_path / "other", losses=curves[0]))
        assert found.harm == "unknown" and found.loss.gap is not None and found.loss.gap.percent > 10
        assert found.confidence is None and "confidence" not in found.verdict()
        assert "We could have missed a fault in the learning rate (not recorded), data, gradients" in found.verdict()

    @pytest.mark.parametrize(("times", "told"), [(6.0, "was 6 times it"), (1 / 6, "was 1/6 of it")])
    def test_a_learning_rate_that_left_the_baselines_is_in_the_verdict(
        self, tmp_path: Path, times: float, told: str
    ) -> None:
        usual = dict.fromkeys(range(N), 1e-4)
        good = write(tmp_path / "good", lr=usual)
        found = diagnose(write(tmp_path / "run", lr={s: lr * (times if s > 68 else 1) for s, lr in usual.items()}), good)
        assert told in found.verdict() and "step 68" in found.verdict()
        assert found.cause == ("learning_rate" if times > 1 else "none")
        assert told in story(found)["headline"]["cause_told"]

    @pytest.mark.parametrize(("times", "told"), [(8.0, "8 times the baseline's"), (1 / 8, "1/8 of the baseline's")])
    def test_a_gradient_norm_that_left_the_baselines_is_in_the_verdict(
        self, tmp_path: Path, times: float, told: str
    ) -> None:
        usual = {s: float(n) for s, n in enumerate(np.random.default_rng(0).lognormal(0, 0.1, N))}
        good = write(tmp_path / "good", grad_norm=usual)
        found = diagnose(write(tmp_path / "run", grad_norm={s: n * times for s, n in usual.items()}), good)
        assert f"{told} from the first step on" in found.verdict()
        assert (found.cause, found.decision.finding and found.decision.finding.since) == ("multiplier", 0)


class TestShortBaseline:
    """What needs no baseline is looked at after a baseline's end."""

    def test_a_scale_that_went_wrong_after_its_end_is_named(self, tmp_path: Path) -> None:
        bad, half = write(tmp_path / "bad", corrupted, falling(left=120)), write(tmp_path / "half", until=ONSET - 4)
        found = diagnose(bad, half)
        assert found.culprit and (found.culprit.layer, found.culprit.role, found.culprit.since) == (CULPRIT, "input", ONSET)
        assert found.harm == "harmful" and found.divergence_step is not None and found.divergence_step > ONSET

    def test_a_learning_rate_that_rose_after_its_end_is_told(self, tmp_path: Path) -> None:
        rates = {s: 1e-4 * (6 if s > 150 else 1) for s in range(N)}
        found = diagnose(write(tmp_path / "run", lr=rates), write(tmp_path / "half", until=ONSET, lr=rates))
        assert "from 0.0001 at step 150 to 0.0006" in found.verdict()

    def test_a_run_that_goes_well_is_not_accused(self, tmp_path: Path) -> None:
        found = diagnose(write(tmp_path / "run"), write(tmp_path / "half", until=ONSET))
        assert (found.cause, found.harm, found.culprit) == ("none", "none", None)

    def test_what_both_runs_have_is_told(self, tmp_path: Path, baseline: Path) -> None:
        runs = [write(tmp_path / name, corrupted, falling(left=120)) for name in ("bad", "copy")]
        told = diagnose(*runs).verdict()
        assert f"same trouble: X of {CULPRIT} since step {ONSET}" in told and "nothing wrong" not in told
        assert "both losses rise for good, the run's from step 120 on, the baseline's from 120 on." in told
        assert "same trouble" not in diagnose(write(tmp_path / "good"), baseline).verdict()


class TestWhatABaselineDoesNotShow:
    """No all-clear where most of a run was never compared."""

    def test_after_its_end(self, tmp_path: Path) -> None:
        found = diagnose(write(tmp_path / "run"), write(tmp_path / "half", until=ONSET))
        assert (
            found.confidence is None and f"We could have missed what happened after step {ONSET - EVERY}" in found.verdict()
        )

    def test_after_the_last_sample(self, tmp_path: Path, baseline: Path) -> None:
        record = write(tmp_path / "run", until=24)
        longer = RunRecordWriter(record)
        longer.open(FINGERPRINT)
        longer.record_steps({s: {"loss": loss} for s, loss in falling(1).items() if s >= 24})
        longer.close()
        found = diagnose(record, baseline)
        assert found.confidence is None and "what happened after step 16, the last sample" in found.verdict()

    def test_in_other_tensors(self, tmp_path: Path, baseline: Path) -> None:
        others = [f"other.{i}.fc" for i in range(20)]
        found = diagnose(write(tmp_path / "run", layers=LAYERS + others), baseline)
        assert found.confidence is None and "60 of 72 tensors, which the baseline does not have" in found.verdict()

    def test_what_came_before_a_divergence_after_its_end_is_not_sure(self, tmp_path: Path) -> None:
        def mild(step: int) -> Mapping[str, Any]:
            return {"relative_error": 0.05, "mse": 4e-4, "underflow_pct": 8.0} if step >= 136 else {}

        found = diagnose(write(tmp_path / "run", mild, falling(left=140)), write(tmp_path / "half", until=100))
        assert (found.harm, found.cause, found.confidence) == ("harmful", "underflow", "low")
        assert found.culprit and (found.culprit.layer, found.culprit.since) == (CULPRIT, 136)

    def test_what_the_baseline_does_not_have_is_not_shared(self, tmp_path: Path, baseline: Path) -> None:
        def zero(step: int) -> Mapping[str, Any]:
            gone = {"amax": 0.0, "amin": 0.0, "mse": 0.0, "relative_error": None, "outlier_log2": None}
            return gone | {"scale_ratio_log2": None} if step >= 64 else {}

        bad = write(tmp_path / "bad", zero, falling(left=6), culprit=LAYERS, changed="grad_output")
        assert "same trouble" not in diagnose(bad, baseline).verdict()

    def test_a_loss_that_is_lost_in_both_runs_is_no_software(self, tmp_path: Path) -> None:
        losses = {i: loss if i < 90 else float("nan") for i, loss in falling().items()}
        bad, copy = (write(tmp_path / name, losses=losses) for name in ("bad", "copy"))
        found = diagnose(bad, copy)
        assert found.cause == "unknown" and "same trouble" in found.verdict() and "in the loss at step 90" in found.verdict()

    def test_a_gradient_norm_that_comes_back_is_told(self, tmp_path: Path) -> None:
        usual = {i: 1 + 0.05 * np.sin(i) for i in range(N)}
        good = write(tmp_path / "good", grad_norm=usual)
        found = diagnose(
            write(tmp_path / "run", grad_norm={i: n * (10 if 60 < i < 90 else 1) for i, n in usual.items()}), good
        )
        assert "10 times the baseline's from step 61 to 89" in found.verdict() and found.confidence is None


class TestReference:
    """A BF16 twin with the same gap acquits FP8, however far out an operand is."""

    @pytest.mark.parametrize(
        ("run_gap", "reference_gap", "is_fp8"),
        [(0.3, 0.3, None), (12.0, 12.0, False), (12.0, 11.5, False), (12.0, 9.0, True), (12.0, 0.0, True)],
    )
    def test_fp8_is_the_cause_only_if_the_runs_differ(
        self, tmp_path: Path, run_gap: float, reference_gap: float, is_fp8: bool | None
    ) -> None:
        rng = np.random.default_rng(7)

        def losses(gap: float) -> dict[int, float]:
            since = 120 if gap > 2 else 0
            return {i: float(x * (1 + gap / 100 * (i >= since) + rng.normal(0, 1e-3))) for i, x in falling().items()}

        paths = {name: losses(gap) for name, gap in (("good", 0.0), ("run", run_gap), ("bf16", reference_gap))}
        bad = write(tmp_path / "run", corrupted, paths["run"])
        good, bf16 = (write(tmp_path / name, losses=paths[name]) for name in ("good", "bf16"))
        found = diagnose(bad, good, bf16)
        ends = {name: np.mean([by_step[i] for i in range(160, 200)]) for name, by_step in paths.items()}
        expected = 100 * (ends["bf16"] / ends["good"] - 1)
        assert found.to_json()["reference"]["gap"]["percent"] == pytest.approx(expected, abs=0.01)
        assert format_number(100 * (ends["run"] / ends["bf16"] - 1), "%", signed=True) in found.verdict()
        assert found.is_fp8_the_cause == is_fp8 and (found.culprit is not None) == bool(is_fp8)
        assert found.cause == {None: "none", False: "software", True: "corrupted_scale"}[is_fp8]
        for text in (tell_reference_loss(found.loss), summarize(compare(bad, good, bf16))):
            assert ("FP8 does not explain the loss" in text) != bool(is_fp8)

    def test_one_that_ends_early_acquits_nobody(self, tmp_path: Path) -> None:
        bad, good = write(tmp_path / "bad", corrupted, falling(left=108)), write(tmp_path / "good", losses=falling(1))
        for usual in (good, None):
            found = diagnose(bad, usual, write(tmp_path / "short", losses=falling(2), until=104))
            assert found.culprit and found.cause == "corrupted_scale"
            assert "does not explain" not in found.verdict() and "does not diverge" not in found.verdict()

    def test_one_that_is_too_noisy_to_tell_acquits_nobody(self, tmp_path: Path) -> None:
        def noisy(seed: int, rise: float = 0.0) -> dict[int, float]:
            noise = 1 + np.random.default_rng(seed).normal(0, 0.2, N)
            return {i: float((2 + 3 * np.exp(-i / 20)) * noise[i] * (1 + rise * (i >= 108))) for i in range(N)}

        bad = write(tmp_path / "bad", corrupted, noisy(7, 0.06))
        found = diagnose(bad, write(tmp_path / "good", losses=noisy(7)), write(tmp_path / "bf16", losses=noisy(8)))
        assert found.harm == "harmful" and found.cause == "corrupted_scale"
        assert "too uncertain to blame FP8" in found.verdict() and found.is_fp8_the_cause is None

    def test_its_gap_is_printed_where_the_run_is_not_harmed(self, tmp_path: Path, baseline: Path) -> None:
        bad, bf16 = write(tmp_path / "run", corrupted, falling(1)), write(tmp_path / "bf16", losses=falling(1))
        found = diagnose(bad, baseline, bf16)
        assert found.cause == "none" and found.confidence is None
        assert f"We found nothing that harms the loss. Unusual: X of {CULPRIT} since step {ONSET}" in found.verdict()
        assert found.to_json()["reference"]["differs"] is False


class TestAlone:
    def test_names_a_scale_that_went_wrong(self, tmp_path: Path) -> None:
        found = diagnose(write(tmp_path / "bad", corrupted, falling(left=120)))
        assert found.culprit and found.culprit.layer == CULPRIT and found.harm == "harmful"

    @pytest.mark.parametrize("left", [None, 150])
    def test_metrics_that_trend_are_not_accused(self, tmp_path: Path, left: int | None) -> None:
        found = diagnose(write(tmp_path / "bad", trending, falling(left=left)))
        assert found.culprit is None and found.cause in (("none",) if left is None else ("unknown", "software"))
        assert {f.strength for f in findings_of(found, "operand")} == {"hint"}

    def test_a_run_that_goes_well(self, baseline: Path) -> None:
        found = diagnose(baseline)
        assert (found.cause, found.confidence, found.harm) == ("none", None, "unknown")
        assert "We could have missed" in found.verdict() and "Without a baseline, we cannot see a gap." in found.verdict()

    def test_without_losses(self, tmp_path: Path) -> None:
        found = diagnose(write(tmp_path / "bad", corrupted, {}))
        assert found.harm == "unknown" and found.cause == "corrupted_scale"
        assert "the loss does not diverge" not in [f.evidence for f in found.findings]

    def test_of_few_samples(self, tmp_path: Path) -> None:
        record = RunRecordWriter(tmp_path / "one")
        record.open(FINGERPRINT)
        record.record(sample(0, [{}]))
        record.close()
        found = diagnose(tmp_path / "one")
        assert (found.cause, found.harm) == ("unknown", "unknown")

    def test_in_fp4_nothing_is_known_of_what_is_healthy(self, tmp_path: Path) -> None:
        fp4 = {"format": "e2m1", "recipe": "nvfp4", "underflow_pct": 20.0, "scale_ratio_log2": None}
        run = Run.read(write(tmp_path / "run", lambda step: fp4, culprit=LAYERS))
        assert diagnose(run).culprit is None
        found = diagnose(replace(run, metrics=run.metrics.select_roles("input")))
        assert (found.cause, found.confidence) == ("unknown", None)

    def test_of_no_sample(self, tmp_path: Path, baseline: Path) -> None:
        record = RunRecordWriter(tmp_path / "none")
        record.open(FINGERPRINT)
        record.close()
        for reference in (baseline, None):
            with pytest.raises(RecordError, match="has no sampled step"):
                diagnose(tmp_path / "none", reference)

    def test_a_multiplier_that_moves_comes_before_all_else(self, tmp_path: Path) -> None:
        moved = {s: 1.0 if s < ONSET else 0.125 for s in STEPS}
        found = diagnose(write(tmp_path / "bad", corrupted, falling(left=120), grad_scale=moved))
        assert (found.cause, found.culprit) == ("multiplier", None)


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


class TestCommandLine:
    def test_prints_findings_advice_and_verdict(self, tmp_path: Path, baseline: Path) -> None:
        bad = write(tmp_path / "bad", corrupted, falling(left=120))
        result = cli(bad, "--baseline", baseline)
        assert result.exit_code == 0 and CULPRIT in result.stdout
        found, lines = diagnose(bad, baseline), result.stdout.splitlines()
        assert lines[0] == tell_conclusion(found)
        assert lines[-2] == " ".join(tell_next_step(found, found.advice)) and "nemo-fp8-debug recommend" in lines[-1]
        assert all(
            sentence in found.verdict() for sentence in (*tell_possible_misses(found), *tell_next_step(found, found.advice))
        )

    def test_json(self, tmp_path: Path, baseline: Path) -> None:
        bad = write(tmp_path / "bad", corrupted, falling(left=120))
        found = json.loads(cli(bad, "--baseline", baseline, "--json").stdout, parse_constant=pytest.fail)
        expected = diagnose(bad, baseline)
        assert found == json.loads(json.dumps(expected.to_json() | {"story": story(expected)}))
        assert found["culprit"]["layer"] == found["story"]["headline"]["first"]["layer"] == CULPRIT

    def test_a_baseline_may_be_called_good(self, tmp_path: Path, baseline: Path) -> None:
        bad = write(tmp_path / "bad", corrupted, falling(left=120))
        assert cli(bad, "--good", baseline).stdout == cli(bad, "--baseline", baseline).stdout

    def test_no_advice_on_fp8_where_it_is_not_the_cause(self, tmp_path: Path, baseline: Path) -> None:
        bad, reference = (write(tmp_path / name, losses=falling(left=120)) for name in ("bad", "reference"))
        found = diagnose(bad, baseline, reference)
        assert found.cause == "software"
        assert not [sentence for sentence in found.advice if "recipe" in sentence or "BF16" in sentence]
        assert [note for note in found.notes if not note.startswith("Sampled every 8 steps.")] == []

    @pytest.mark.parametrize(("left", "follows"), [(80, True), (120, False)])
    def test_operands_that_follow_the_divergence_are_said_to(
        self, tmp_path: Path, baseline: Path, left: int, follows: bool
    ) -> None:
        """With a reference run that diverges as well; their scale jumps 24 steps after the loss, or 16 before it."""
        reference = write(tmp_path / "reference", losses=falling(left=left))
        found = diagnose(write(tmp_path / "bad", corrupted, falling(left=left)), baseline, reference)
        assert (found.cause, found.culprit) == ("software", None)
        why = next(row["why"] for row in story(found)["tensors"] if (row["layer"], row["role"]) == (CULPRIT, "input"))
        assert why.startswith(f"Not blamed: out of band since step {ONSET}")
        assert ("24 steps after" in why and "a consequence" in why) == follows

    @pytest.mark.parametrize("name", ["[bold]x[/bold].fc", "a[/]b.fc", "<script>alert(1)</script>.fc"])
    def test_names_are_printed_as_they_are(self, tmp_path: Path, name: str) -> None:
        bad = write(tmp_path / "bad", corrupted, layers=[name], culprit=name)
        result = cli(bad)
        assert result.exit_code == 0 and f"X of {name} went wrong at or before step" in result.stdout

    def test_control_characters_do_not_reach_the_terminal(self, tmp_path: Path) -> None:
        name = "a\x1b[2J\x1b]0;title\x07.fc"
        bad = write(tmp_path / "bad", corrupted, layers=[name], culprit=name)
        result = cli(bad)
        assert result.exit_code == 0 and "\x1b" not in result.stdout and "\x07" not in result.stdout

    def test_errors_are_one_line(self, tmp_path: Path, baseline: Path) -> None:
        for arguments in (
            (tmp_path / "[/a]",),
            (baseline, "--baseline", tmp_path / "none"),
            (baseline, "--by", "moon"),
            (baseline, "--by", "samples"),
        ):
            result = cli(*arguments)
            assert result.exit_code == 1 and result.stdout == ""
            assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        with pytest.raises(ConfigError):
            diagnose(baseline, by="moon")
