"""Gradients that are multiplied, told from what the gradient norm and dY do; weights that shrink; harm that is likely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnosed_runs import CULPRIT, EVERY, LAYERS, ONSET, N, corrupted, falling, nothing, write

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.diagnosis.decide import Decision
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.diagnosis import Diagnosis
from nemo_fp8_debug.analysis.diagnosis.finding import Finding
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.analysis.story.story import story

#: dY of all layers moves with the gradient norm from here on
FACTOR = 8.0


def norms(factor: float = 1.0, at: int = ONSET, ramp: int = 1) -> dict[int, float]:
    noise = np.random.default_rng(3).lognormal(0, 0.1, N)
    return {i: float(noise[i] * factor ** min(max(i - at + 1, 0) / ramp, 1.0)) for i in range(N)}


def multiplied(step: int) -> Mapping[str, Any]:
    """dY, with a scale that follows."""
    return {"amax": 4.0 * FACTOR, "scale": 100.0 / FACTOR} if step >= ONSET else {"amax": 4.0}


def found(of: Diagnosis, rule: str) -> Finding | None:
    return next((f for f in of.findings if f.rule == rule), None)


class TestGradientNorm:
    @pytest.mark.parametrize("paired", [True, False])
    @pytest.mark.parametrize(("layers", "where"), [(LAYERS, "so the loss is multiplied"), ([], "after the backward pass")])
    def test_that_moves_to_another_level_tells_where(
        self, tmp_path: Path, paired: bool, layers: list[str], where: str
    ) -> None:
        run = write(tmp_path / "run", multiplied, grad_norm=norms(FACTOR), culprit=layers, changed="grad_output")
        baseline = write(tmp_path / "baseline", grad_norm=norms()) if paired else None
        told = diagnose(run, baseline)
        assert told.cause == "multiplier" and told.confidence != "low" and where in told.verdict()
        assert told.decision.finding and told.decision.finding.since == ONSET
        assert told.harm == ("harmless so far" if paired else "unknown")

    def test_a_baseline_of_other_batches_hides_nothing_with_its_noise(self, tmp_path: Path) -> None:
        noise = np.random.default_rng(9).lognormal(0, 0.8, N)
        noisy = {i: float(norm * by) for (i, norm), by in zip(norms().items(), noise, strict=True)}
        baseline = write(tmp_path / "baseline", grad_norm=noisy)
        told = found(diagnose(write(tmp_path / "run", grad_norm=norms(FACTOR)), baseline), "gradient norm")
        assert (
            told and told.since == ONSET and 0.8 * FACTOR < float(told.evidence.split(" is ")[1].split()[0]) < 1.2 * FACTOR
        )
        assert not found(diagnose(write(tmp_path / "usual", grad_norm=norms()), baseline), "gradient norm")

    def test_what_the_baseline_does_too_is_not_told(self, tmp_path: Path) -> None:
        run, baseline = (write(tmp_path / name, grad_norm=norms(FACTOR)) for name in ("run", "baseline"))
        assert not found(diagnose(run, baseline), "gradient norm")

    def test_with_half_of_the_layers_does_not_tell(self, tmp_path: Path) -> None:
        run = write(tmp_path / "run", multiplied, grad_norm=norms(FACTOR), culprit=LAYERS[:2], changed="grad_output")
        rule = found(diagnose(run), "gradient norm")
        assert rule and (rule.cause, rule.strength) == ("unknown", "hint")

    def test_that_moves_slowly_is_no_factor(self, tmp_path: Path) -> None:
        assert not found(diagnose(write(tmp_path / "run", grad_norm=norms(FACTOR, ramp=40))), "gradient norm")

    def test_that_moves_with_the_loss_is_no_factor(self, tmp_path: Path) -> None:
        run = write(tmp_path / "run", losses=falling(left=ONSET), grad_norm=norms(FACTOR))
        assert not found(diagnose(run), "gradient norm")

    def test_that_moves_with_the_batch_size_is_no_factor(self, tmp_path: Path) -> None:
        consumed = {i: float(8 * i + 24 * max(0, i - ONSET + 1)) for i in range(N)}
        run = write(tmp_path / "run", grad_norm=norms(1 / 4), consumed_samples=consumed)
        assert not found(diagnose(run), "gradient norm")

    def test_that_of_the_baseline_moves_is_not_the_run_s(self, tmp_path: Path) -> None:
        run, baseline = write(tmp_path / "run", grad_norm=norms()), write(tmp_path / "b", grad_norm=norms(FACTOR))
        moved = diagnose(run, baseline)
        assert moved.cause == "none" and moved.culprit is None

    @pytest.mark.parametrize(
        ("factor", "scale", "told"), [(900.0, 1024.0, True), (900.0, 65536.0, False), (20.0, 16.0, False)]
    )
    def test_that_is_the_loss_scale_times_the_baseline_s_is_not_unscaled(
        self, tmp_path: Path, factor: float, scale: float, told: bool
    ) -> None:
        scales = dict.fromkeys(range(N), scale)
        run = write(tmp_path / "run", grad_norm=norms(factor, 0), loss_scale=scales)
        rule = found(diagnose(run, write(tmp_path / "baseline", grad_norm=norms(), loss_scale=scales)), "gradient norm")
        assert rule and (rule.cause, rule.since) == ("multiplier", 0)
        assert ("the loss scale that both report" in rule.evidence) == told

    @pytest.mark.parametrize("norm", [norms(), norms(1.5), dict.fromkeys(range(8), 1.0), {0: float("nan")}])
    def test_noise_and_few_values_are_nothing(self, tmp_path: Path, norm: dict[int, float]) -> None:
        assert not found(diagnose(write(tmp_path / "run", grad_norm=norm)), "gradient norm")

    def test_clipping_of_one_dy_is_not_explained_away(self, tmp_path: Path) -> None:
        """An operand that went wrong before the gradient norm moved is what it began with."""
        run = write(tmp_path / "run", corrupted, grad_norm=norms(FACTOR, ONSET + 2 * EVERY))
        told = diagnose(run, write(tmp_path / "baseline", grad_norm=norms()))
        assert told.culprit and told.cause == "corrupted_scale"


def shrinking(decay: float, rate: float = 1e-3) -> Any:
    """Weights whose root mean square falls as under a weight decay, from the onset on."""

    def change(step: int) -> Mapping[str, Any]:
        size = np.exp(-decay * rate * max(0, step - ONSET))
        return {"mse": 1e-4 * size**2, "relative_error": 0.02, "amax": 4.0 * size, "scale": 100.0 / size}

    return change


class TestWeights:
    @pytest.mark.parametrize("paired", [True, False])
    def test_that_shrink_faster_than_weight_decay_are_named_with_the_decay(self, tmp_path: Path, paired: bool) -> None:
        rates = dict.fromkeys(range(N), 1e-3)
        run = write(tmp_path / "run", shrinking(4.0), lr=rates, culprit=LAYERS, changed="weight")
        baseline = write(tmp_path / "baseline", shrinking(0.0), lr=rates, culprit=LAYERS, changed="weight")
        told = diagnose(run, baseline if paired else None)
        assert told.cause == "weight_decay" and "a weight decay of 4" in told.verdict()
        assert told.decision.finding and told.decision.finding.since == ONSET + EVERY

    @pytest.mark.parametrize("decay", [0.0, 0.1, 0.3])
    def test_of_usual_decay_are_nothing(self, tmp_path: Path, decay: float) -> None:
        rates = dict.fromkeys(range(N), 1e-3)
        run = write(tmp_path / "run", shrinking(decay), lr=rates, culprit=LAYERS, changed="weight")
        assert not found(diagnose(run), "weight decay")

    def test_of_a_baseline_that_does_the_same_are_nothing(self, tmp_path: Path) -> None:
        rates = dict.fromkeys(range(N), 1e-3)
        both = [
            write(tmp_path / name, shrinking(4.0), lr=rates, culprit=LAYERS, changed="weight")
            for name in ("run", "baseline")
        ]
        assert not found(diagnose(*both), "weight decay")

    def test_of_one_layer_or_without_a_learning_rate_do_not_tell(self, tmp_path: Path) -> None:
        one = write(tmp_path / "one", shrinking(4.0), lr=dict.fromkeys(range(N), 1e-3), changed="weight")
        blind = write(tmp_path / "blind", shrinking(4.0), culprit=LAYERS, changed="weight")
        assert not found(diagnose(one), "weight decay") and not found(diagnose(blind), "weight decay")


def lost(step: int) -> Mapping[str, Any]:
    """The scale of one operand is so small at once that nearly all values become zero."""
    wrong = {"scale": 1e-3, "scale_ratio_log2": -16.6, "underflow_pct": 95.0, "mse": 1.0, "relative_error": 0.98}
    return wrong if step >= ONSET else {}


def jump_of(told: Diagnosis) -> float:
    assert told.loss.level_shift is not None
    return told.loss.level_shift[1]


class TestLikelyHarm:
    @pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
    def test_alone_a_tensor_that_is_lost_shows_no_harm(self, tmp_path: Path, role: str) -> None:
        told = diagnose(write(tmp_path / "run", lost, changed=role))
        assert told.culprit and (told.culprit.layer, told.culprit.role, told.culprit.since) == (CULPRIT, role, ONSET)
        assert told.harm == told.to_json()["harm"] == "unknown"

    @pytest.mark.parametrize(("above", "harm"), [(1.2, "unknown"), (0.99, "unknown"), (0.94, "unknown")])
    def test_a_gap_that_was_there_before_is_no_harm(self, tmp_path: Path, above: float, harm: str) -> None:
        noise = [np.random.default_rng(seed).normal(1, 0.2, N) for seed in (1, 2)]
        losses = [{i: loss * float(by[i]) for i, loss in falling().items()} for by in noise]
        losses[0] = {i: loss * above for i, loss in losses[0].items()}
        run, baseline = write(tmp_path / "run", lost, losses[0]), write(tmp_path / "baseline", losses=losses[1])
        told = diagnose(run, baseline)
        assert told.culprit and told.harm == harm

    @staticmethod
    def apart(
        folder: Path, percent: float, layers: list[str] = LAYERS, change: Any = lost, since: int = -N, steps: int = 1
    ) -> Diagnosis:
        """Two runs of other batches, of which one lies above the other.

        Args:
            since: step from which on it comes to that; it does so all along unless told otherwise.
            steps: in which it does.
        """
        noise = [np.random.default_rng(seed).normal(1, 0.02, N) for seed in (1, 2)]
        above = 1 + np.clip((np.arange(N) - since) / steps, 0, 1) * percent / 100
        by = above, np.ones(N)
        losses = [
            {i: float(above[i] * of[i]) * loss for i, loss in falling().items()} for above, of in zip(by, noise, strict=True)
        ]
        baseline = write(folder / "baseline", losses=losses[1], layers=layers)
        return diagnose(write(folder / "run", change, losses[0]), baseline)

    def test_a_gap_that_another_seed_may_explain_is_told_as_one(self, tmp_path: Path) -> None:
        told = self.apart(tmp_path, 10, since=ONSET, steps=40)
        assert told.harm == "likely" and "With this fault, harm is likely." in told.verdict()
        assert "Another seed can explain up to 12%." in told.verdict()

    def test_another_seed_explains_less_than_another_model(self, tmp_path: Path) -> None:
        deeper = [*LAYERS, "decoder.layers.2.mlp.linear_fc1"]
        ramp = {"since": ONSET, "steps": 40}
        assert self.apart(tmp_path / "one", 15, **ramp).harm == "harmful"
        assert self.apart(tmp_path / "other", 15, deeper, **ramp).harm == "likely"

    def test_without_sizes_of_weights_models_are_not_taken_for_the_same(self, tmp_path: Path) -> None:
        runs = [Run.read(write(tmp_path / name)) for name in ("run", "baseline")]
        blind = [replace(run, metrics=run.metrics.select_roles("input", "grad_output")) for run in runs]
        assert compare(*runs).loss.same_model and not compare(*blind).loss.same_model

    @pytest.mark.parametrize(("percent", "harm"), [(30, "unknown"), (60, "harmful")])
    def test_the_loss_of_another_model_may_fall_farther_from_the_start_on(
        self, tmp_path: Path, percent: float, harm: str
    ) -> None:
        deeper = [*LAYERS, "decoder.layers.2.mlp.linear_fc1"]
        assert self.apart(tmp_path, percent, deeper, nothing).harm == harm

    def test_a_loss_that_rises_from_that_of_another_model_is_harmful(self, tmp_path: Path) -> None:
        deeper = [*LAYERS, "decoder.layers.2.mlp.linear_fc1"]
        assert self.apart(tmp_path, 30, deeper, nothing, since=ONSET).harm == "harmful"

    @pytest.mark.parametrize(("percent", "harm"), [(0.7, "unknown"), (4, "likely")])
    @pytest.mark.parametrize("models", [1, 2])
    def test_beside_any_model_it_needs_the_limit(self, tmp_path: Path, models: int, percent: float, harm: str) -> None:
        layers = LAYERS if models == 1 else [*LAYERS, "decoder.layers.2.mlp.linear_fc1"]
        told = self.apart(tmp_path, percent, layers, since=ONSET, steps=40)
        assert told.culprit and told.harm == harm

    @pytest.mark.parametrize("change", ["recipe", "nonfinite"])
    def test_a_changed_recipe_or_nan_that_is_gone_explains_no_gap(self, tmp_path: Path, change: str) -> None:
        def changed(step: int) -> Mapping[str, Any]:
            if change == "recipe":
                return {"recipe": "current", "scale_source": "emulated"} if step >= ONSET else {}
            return {"nan": 3} if step == ONSET else {}

        told = self.apart(tmp_path, 8, change=changed)
        expected = {"recipe": "changed_recipe", "nonfinite": "nonfinite"}[change]
        assert (told.cause, told.harm) == (expected, "unknown")

    @pytest.mark.parametrize(("until", "harm"), [(N, "harmful"), (ONSET + 40, "unknown")])
    @pytest.mark.parametrize("above", [1.0, 1.02, 1.03])
    def test_a_rise_that_is_gone_by_the_end_is_no_harm(self, tmp_path: Path, above: float, until: int, harm: str) -> None:
        noise = [np.random.default_rng(seed).normal(1, 0.03, N) for seed in (1, 2)]
        losses = [{i: loss * float(of[i]) for i, loss in falling().items()} for of in noise]
        losses[0] = {i: loss * above for i, loss in losses[0].items()}  # another seed, all along
        risen = {i: loss * (1.08 if ONSET <= i < until else 1) for i, loss in losses[0].items()}
        told = diagnose(write(tmp_path / "run", corrupted, risen), write(tmp_path / "baseline", losses=losses[1]))
        assert told.culprit and told.harm == harm

    def test_a_jump_of_the_loss_is_told_with_its_step(self, tmp_path: Path) -> None:
        noise = [np.random.default_rng(seed).normal(1, 0.02, N) for seed in (1, 2)]
        losses = [{i: loss * float(of[i]) for i, loss in falling().items()} for of in noise]
        jumped = {i: 1.03 * loss * (1.3 if i >= ONSET else 1.0) for i, loss in losses[0].items()}
        decayed = {i: loss * (1.06 / 1.3 if i >= ONSET + 30 else 1.0) for i, loss in jumped.items()}
        told = diagnose(write(tmp_path / "run", losses=decayed), write(tmp_path / "baseline", losses=losses[1]))
        assert (told.harm, told.cause) == ("likely", "software")
        assert f"The loss jumped by {jump_of(told):.3g}% at step {ONSET}" in told.verdict()
        assert f"at step {ONSET}." in story(told)["headline"]["title"]
        untold = replace(told, decision=Decision(None, "unknown"))
        for text in (untold.verdict(), story(untold)["headline"]["cause_told"]):
            assert text.startswith("We cannot tell what is wrong.")

    def test_what_follows_the_baseline_is_harmless_so_far(self, tmp_path: Path) -> None:
        assert diagnose(write(tmp_path / "run", lost), write(tmp_path / "baseline")).harm == "harmless so far"

    def test_nothing_found_makes_nothing_likely(self, tmp_path: Path) -> None:
        assert diagnose(write(tmp_path / "run", nothing)).harm == "unknown"


class TestOtherDepth:
    """Operands of a layer at another depth differ more: X and W count from twice the least rise on, dY from four times."""

    @pytest.mark.parametrize(
        ("role", "bits", "named"),
        [
            ("grad_output", 9.0, False),
            ("grad_output", 15.0, True),
            ("input", 9.0, True),
            ("input", 5.0, False),
            ("weight", 9.0, True),
        ],
    )
    def test_an_operand_must_be_farther_out(self, tmp_path: Path, role: str, bits: float, named: bool) -> None:
        def outlier(step: int) -> Mapping[str, Any]:
            wrong = {"outlier_log2": 4.0 + bits, "underflow_pct": 1.0, "mse": 1.0}
            return wrong if step >= ONSET else {"outlier_log2": 4.0}

        def usual(step: int) -> Mapping[str, Any]:
            return {"outlier_log2": 4.0}

        deeper = [*LAYERS, "decoder.layers.2.mlp.linear_fc1"]
        of: dict[str, Any] = {"culprit": LAYERS[0], "changed": role}
        run = write(tmp_path / "run", outlier, **of)
        assert (diagnose(run, write(tmp_path / "deeper", usual, layers=deeper, **of)).culprit is not None) == named
        assert diagnose(run, write(tmp_path / "same", usual, **of)).culprit is not None
