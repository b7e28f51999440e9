"""What happens around the operands: learning rate, gradient norm, skipped steps, recipes, and the first NaN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from diagnosed_runs import CULPRIT, ONSET, N, corrupted, falling, write

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose, recommend
from nemo_fp8_debug.analysis.diagnosis.diagnosis import Diagnosis
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.analysis.runs.run import Run

NAN = float("nan")


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return write(tmp_path / "baseline", lr=rates(), grad_norm=norms())


def rates(jump: float = 1.0, at: int = ONSET, warm_up: int = 20) -> dict[int, float]:
    """Warm-up, then a slow decay; times a factor from a step on."""
    return {i: 1e-3 * min(1, (i + 1) / warm_up) * (1 - i / (3 * N)) * (jump if i >= at else 1) for i in range(N)}


def norms(factor: float = 1.0, at: int = N) -> dict[int, float]:
    noise = np.random.default_rng(3).lognormal(0, 0.1, N)
    return {i: float(noise[i]) * (factor if i >= at else 1) for i in range(N)}


def evidence(found: Diagnosis, rule: str) -> list[str]:
    return [f.evidence for f in found.findings if f.rule == rule]


class TestLearningRate:
    def test_that_departs_before_the_loss_is_the_cause_with_figures(self, tmp_path: Path, baseline: Path) -> None:
        bad = write(tmp_path / "bad", losses=falling(left=120), lr=rates(1000), grad_norm=norms())
        found = diagnose(bad, baseline)
        assert (found.cause, found.confidence, found.culprit) == ("learning_rate", "high", None)
        assert f"after step {ONSET - 1} and was 1,000 times it" in found.verdict()
        assert [event.kind for event in found.events][:2] == ["lr", "loss"]
        assert [event.step for event in found.events][:2] == [ONSET, found.divergence_step]

    def test_explains_operands_that_went_out_after_it(self, tmp_path: Path, baseline: Path) -> None:
        bad = write(tmp_path / "bad", corrupted, falling(left=120), lr=rates(30, ONSET - 8))
        assert diagnose(bad, baseline).cause == "learning_rate"

    def test_behind_a_scale_that_went_wrong_is_not(self, tmp_path: Path, baseline: Path) -> None:
        bad = write(tmp_path / "bad", corrupted, falling(left=120), lr=rates(30, ONSET + 8))
        found = diagnose(bad, baseline)
        assert found.culprit and found.culprit.layer == CULPRIT

    def test_alone_a_rise_after_the_warm_up_is_seen(self, tmp_path: Path) -> None:
        found = diagnose(write(tmp_path / "bad", losses=falling(left=120), lr=rates(30)))
        assert found.cause == "learning_rate" and found.confidence != "low"

    @pytest.mark.parametrize("warm_up", [1, 20, 150])
    def test_alone_a_warm_up_is_none(self, tmp_path: Path, warm_up: int) -> None:
        assert not evidence(diagnose(write(tmp_path / "run", lr=rates(warm_up=warm_up))), "learning rate")

    def test_that_is_the_same_is_none(self, tmp_path: Path, baseline: Path) -> None:
        assert not evidence(diagnose(write(tmp_path / "run", lr=rates()), baseline), "learning rate")

    def test_without_harm_a_lower_one_is_a_hint(self, tmp_path: Path, baseline: Path) -> None:
        found = diagnose(write(tmp_path / "run", lr=rates(0.5), grad_norm=norms()), baseline)
        assert found.cause == "none" and "1/2 of it" in evidence(found, "learning rate")[0]


class TestGradientNorm:
    def test_that_jumps_by_a_factor_is_multiplied(self, tmp_path: Path, baseline: Path) -> None:
        found = diagnose(write(tmp_path / "run", grad_norm=norms(1024, ONSET)), baseline)
        assert (found.cause, found.confidence) == ("multiplier", "high") and "1,024 times" in found.verdict()
        assert found.decision.finding and found.decision.finding.since == ONSET

    def test_that_grows_is_an_event(self, tmp_path: Path, baseline: Path) -> None:
        grows = {i: norm * 2 ** max(0, (i - ONSET) / 10) for i, norm in norms().items()}
        found = diagnose(write(tmp_path / "run", losses=falling(left=180), grad_norm=grows), baseline)
        assert found.cause == "software"
        assert any(event.kind == "grad_norm" and ONSET <= event.step < ONSET + 40 for event in found.events)

    def test_like_the_baselines_is_none(self, tmp_path: Path, baseline: Path) -> None:
        assert not evidence(diagnose(write(tmp_path / "run", grad_norm=norms()), baseline), "gradient norm")


class TestSkippedSteps:
    @pytest.mark.parametrize("alone", [True, False])
    @pytest.mark.parametrize("first", [0, 1, ONSET])
    def test_all_skipped_with_a_norm_of_nan_is_harm(self, tmp_path: Path, baseline: Path, first: int, alone: bool) -> None:
        lost = {i: NAN if i >= first else norm for i, norm in norms().items()}
        skipped = {i: float(i >= first) for i in range(N)}
        found = diagnose(write(tmp_path / "bad", grad_norm=lost, skipped=skipped), None if alone else baseline)
        assert (found.harm, found.cause, found.divergence_step) == ("harmful", "nonfinite", first)
        assert f"The optimizer takes no step from step {first} on" in found.verdict() and "gradient norm" in found.verdict()

    def test_without_a_norm_skipping_is_the_cause(self, tmp_path: Path, baseline: Path) -> None:
        found = diagnose(write(tmp_path / "bad", skipped={i: float(i >= ONSET) for i in range(N)}), baseline)
        assert (found.harm, found.cause) == ("harmful", "skipped")

    def test_few_are_none(self, tmp_path: Path, baseline: Path) -> None:
        found = diagnose(write(tmp_path / "run", skipped={i: float(i % 100 == 7) for i in range(N)}), baseline)
        assert not evidence(found, "skipped steps")


class TestFirstNan:
    @pytest.mark.parametrize("alone", [True, False])
    @pytest.mark.parametrize("first", [0, 1, ONSET])
    @pytest.mark.parametrize("what", ["loss", "grad_norm"])
    def test_in_a_scalar_is_named(self, tmp_path: Path, baseline: Path, what: str, first: int, alone: bool) -> None:
        losses = {i: NAN if what == "loss" and i >= first else loss for i, loss in falling().items()}
        lost = {i: NAN if what == "grad_norm" and i >= first else norm for i, norm in norms().items()}
        found = diagnose(write(tmp_path / "bad", losses=losses, grad_norm=lost), None if alone else baseline)
        where = f"in the {what.replace('grad_', 'gradient ')} at step {first}"
        assert found.cause == "nonfinite" and where in found.verdict()
        assert found.harm == ("harmful" if what == "loss" else found.harm)

    @pytest.mark.parametrize("alone", [True, False])
    @pytest.mark.parametrize("first", [0, ONSET])
    def test_in_an_operand_is_named(self, tmp_path: Path, baseline: Path, first: int, alone: bool) -> None:
        bad = write(tmp_path / "bad", lambda step: {"nan": 2, "nonfinite_order": 4} if step >= first else {})
        found = diagnose(bad, None if alone else baseline)
        assert (
            found.cause == "nonfinite" and found.culprit and (found.culprit.layer, found.culprit.since) == (CULPRIT, first)
        )

    @pytest.mark.parametrize(
        ("role", "tensor", "producer"),
        [
            ("input", "X", "what runs before that GEMM"),
            ("weight", "W", "the optimizer"),
            ("grad_output", "dY", "the backward pass of what follows that GEMM"),
        ],
    )
    def test_in_an_operand_asks_for_what_computes_it_and_for_no_recipe(
        self, tmp_path: Path, baseline: Path, role: str, tensor: str, producer: str
    ) -> None:
        losses = {i: NAN if i > ONSET else loss for i, loss in falling().items()}
        # Of 4,096 values two are NaN, and the others are counted.
        nan = {"nan": 2, "n": 4094}
        spoiled = write(tmp_path / "bad", lambda step: nan if step >= ONSET else {}, losses=losses, changed=role)
        for good in (None, baseline):
            (advice,) = diagnose(spoiled, good).advice
            assert f"what computes {tensor} of {CULPRIT}: {producer}" in advice and "No recipe fixes NaN" in advice
            assert "BF16" not in advice and "recipe (" not in advice
        found = recommend(spoiled, baseline)
        assert not found.plan.changes

    def test_in_the_loss_asks_for_what_computes_the_loss(self, tmp_path: Path, baseline: Path) -> None:
        losses = {i: NAN if i > ONSET else loss for i, loss in falling().items()}
        (advice,) = diagnose(write(tmp_path / "bad", losses=losses), baseline).advice
        assert "what computes the loss" in advice and "BF16" not in advice

    def test_once_is_told_and_no_harm(self, tmp_path: Path, baseline: Path) -> None:
        once = {i: NAN if i == 73 else norm for i, norm in norms().items()}
        found = diagnose(write(tmp_path / "run", grad_norm=once), baseline)
        assert (found.cause, found.confidence, found.harm) == ("nonfinite", "high", "harmless so far")

    def test_that_the_baseline_has_too_is_none(self, tmp_path: Path) -> None:
        lost = dict.fromkeys(range(N), float("inf"))
        runs = [write(tmp_path / name, grad_norm=lost) for name in ("baseline", "run")]
        assert not evidence(diagnose(runs[1], runs[0]), "nonfinite")


class TestRecipe:
    def test_that_changes_is_the_cause_and_not_the_scale_that_it_moves(self, tmp_path: Path, baseline: Path) -> None:
        def changed(step: int) -> dict[str, object]:
            return (
                corrupted(step) | {"recipe": "delayed-hybrid(margin=17)"} if step >= ONSET else {"recipe": "delayed-hybrid"}
            )

        found = diagnose(write(tmp_path / "bad", changed), baseline)
        assert (found.cause, found.confidence) == ("changed_recipe", "high")
        assert found.culprit and (found.culprit.layer, found.culprit.since) == (CULPRIT, ONSET)
        assert "{" not in " ".join(event.what for event in found.events)

    def test_of_all_operands_is_a_setting(self, baseline: Path) -> None:
        usual = Run.read(baseline)
        rows = usual.metrics.read_all_rows()
        others = [
            rows.with_columns(recipe=pl.when(which).then(pl.lit("mxfp8")).otherwise("recipe"))
            for which in (True, pl.col("layer") == CULPRIT)
        ]
        other, one = (replace(usual, metrics=MetricsTable.from_rows(changed)) for changed in others)
        assert not evidence(diagnose(other, usual), "recipe")
        assert f"The recipe of X of {CULPRIT} and 2 other operands changed" in diagnose(one, usual).verdict()
        is_gradient = (pl.col("layer") == CULPRIT) & (pl.col("role") == "grad_output")
        unlike = others[1].with_columns(recipe=pl.when(is_gradient).then(pl.lit("current-hybrid")).otherwise("recipe"))
        two_changes = diagnose(replace(usual, metrics=MetricsTable.from_rows(unlike)), usual).verdict()
        assert f"The recipe of X of {CULPRIT} and W of {CULPRIT} changed" in two_changes
        left_alone = (
            pl.when(pl.col("layer") == CULPRIT).then(pl.lit("not quantized")).otherwise("scale_source").alias("scale_source")
        )
        alone = [
            replace(usual, metrics=MetricsTable.from_rows(run.metrics.read_all_rows().with_columns(left_alone)))
            for run in (one, usual)
        ]
        assert not evidence(diagnose(*alone), "recipe")

    @pytest.mark.parametrize("before", ["engine", None])
    def test_of_an_operand_that_is_no_longer_quantized_is_named(self, baseline: Path, before: str | None) -> None:
        usual, late = Run.read(baseline), (pl.col("layer") == CULPRIT) & (pl.col("step") >= ONSET)
        rows = usual.metrics.read_all_rows().with_columns(
            recipe=pl.when(late).then(pl.lit("current-hybrid")).otherwise("recipe"),
            scale_source=pl.when(late).then(pl.lit("not quantized")).otherwise(pl.lit(before)),
        )
        assert evidence(diagnose(replace(usual, metrics=MetricsTable.from_rows(rows)), usual), "recipe")


class TestTransient:
    def test_of_a_single_sample_is_named(self, tmp_path: Path, baseline: Path) -> None:
        once = write(tmp_path / "bad", lambda step: corrupted(ONSET) if step == ONSET else {})
        found = diagnose(once, baseline)
        assert found.culprit and (found.culprit.layer, found.culprit.since) == (CULPRIT, ONSET)
        assert found.comparison and found.comparison.out_of_band["samples"].max() == 1
