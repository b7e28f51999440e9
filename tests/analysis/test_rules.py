"""Rules on multipliers and settings, on planted runs and fingerprints; none guesses where evidence is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest
import torch
from facts_of import facts_of, found_by, said
from samples import FINGERPRINT, sample
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.analysis.diagnosis.finding import Finding
from nemo_fp8_debug.analysis.diagnosis.rules.gradients import find_factor
from nemo_fp8_debug.analysis.diagnosis.rules.settings import KNOWN, find_settings
from nemo_fp8_debug.analysis.loss.curve import LossCurve
from nemo_fp8_debug.analysis.loss.outcome import LossOutcome
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.record.writer import RunRecordWriter


def run(folder: Path, steps: dict[int, dict[str, Any]], calls: int = 1) -> Run:
    record = RunRecordWriter(folder)
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
        assert found_by(find_factor, found) == [] == found_by(find_factor, found, found)

    @pytest.mark.parametrize(
        ("multiplier_", "scale", "means"),
        [
            (1.0, 2.0**20, "is not applied"),
            (2.0**32, 2.0**16, "applies the loss scale twice"),
            ([1.0] * 10 + [0.125] * 10, None, "divides the loss"),
            ([2.0**16] * 10 + [2.0**10] * 10, 2.0**16, "divides the loss"),
            ([1.0] * 10 + [0.0] * 10, None, "divides the loss"),
            ([0.0] * 10 + [1.0] * 10, None, "divides the loss"),
            ([1.0] * 10 + [-1.0] * 10, None, "divides the loss"),
        ],
    )
    def test_faults(self, tmp_path: Path, multiplier_: Any, scale: Any, means: str) -> None:
        (found,) = found_by(find_factor, reported(tmp_path / "bad", multiplier_, scale))
        assert said(found) == ("multiplier", "proof") and means in found.advice
        assert found.since == (10 if isinstance(multiplier_, list) else 0)

    def test_a_loss_scale_times_tokens_is_not_certain(self, tmp_path: Path) -> None:
        (found,) = found_by(find_factor, reported(tmp_path / "bad", 2.0**16 * 500, 2.0**16))
        assert said(found) == ("multiplier", "hint")

    def test_what_the_good_run_does_too_is_no_fault(self, tmp_path: Path) -> None:
        moves = [1.0] * 10 + [0.125] * 10
        runs = [reported(tmp_path / name, moves) for name in ("baseline", "bad")]
        assert found_by(find_factor, runs[1], runs[0]) == []

    def test_another_multiplier_than_the_good_runs_is_a_hint(self, tmp_path: Path) -> None:
        baseline = reported(tmp_path / "baseline", 1.0)
        (found,) = found_by(find_factor, reported(tmp_path / "bad", 0.125), baseline)
        assert said(found) == ("multiplier", "hint") and "0.125" in found.evidence
        for name, value, scale, calls in (("scaled", 64.0, 64.0, 1), ("accumulated", 0.125, None, 8)):
            assert found_by(find_factor, reported(tmp_path / name, value, scale, calls), baseline) == []

    @pytest.mark.parametrize(
        ("value", "in_baseline", "strength"), [(1.0, 1024.0, "proof"), (0.25, 256.0, "proof"), (1.0, 800.0, "hint")]
    )
    def test_a_loss_scale_of_both_that_only_the_good_run_applies(
        self, tmp_path: Path, value: float, in_baseline: float, strength: str
    ) -> None:
        """Accumulation and averaging may divide both, and seldom by as much as the loss scale."""
        baseline = reported(tmp_path / "baseline", in_baseline, 1024.0)
        (found,) = found_by(find_factor, reported(tmp_path / "bad", value, 1024.0), baseline)
        assert said(found) == ("multiplier", strength) and ("is not applied" in found.advice) == (strength == "proof")

    def test_a_good_run_that_does_not_know_its_own(self, tmp_path: Path) -> None:
        baseline = reported(tmp_path / "baseline", None)
        assert found_by(find_factor, reported(tmp_path / "bad", 0.125), baseline) == []
        assert len(found_by(find_factor, reported(tmp_path / "moved", [1.0] * 10 + [0.125] * 10), baseline)) == 1


RECOMPUTED = {"fp8": "e4m3", "recompute_modules": ["core_attn"]}
GATHERED = "overlap_param_gather_with_optimizer_step"
OVERLAPPED = {"overlap_param_gather": True}
REUSED = OVERLAPPED | {"reuse_grad_buf_for_mxfp8_param_ag": True}
FULLY = {"recompute_granularity": "full"}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "Fp8Recipe.blockwise"}
PIPELINE = {"fp8": "hybrid", "pipeline_model_parallel_size": 2}
OLD_TE = {"transformer-engine": "1.11.0"}
DEEPSPEED = {"class": "DeepSpeedEngine"}
PARALLEL = {"fp8": "hybrid", "tensor_model_parallel_size": 2, "context_parallel_size": 2}
CAPTURED = REUSED | {"cuda_graph_impl": "local"}
FUSED_LOSS = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}


def settings(bad: dict[str, Any], baseline: dict[str, Any] | None, from_the_start: bool) -> list[Finding]:
    """What is found in the settings of a run whose loss rises from its first steps on, or does not."""
    losses = np.linspace(3, 30, 200) if from_the_start else np.linspace(3, 2, 200)
    curve = LossCurve.from_steps_table(pl.DataFrame({"step": range(200), "loss": losses}))
    made = Run(
        "made",
        bad,
        MetricsTable.from_rows(pl.DataFrame([{"step": 0, "layer": "fc", "role": "input", "scale_source": "engine"}])),
        curve,
    )
    other = baseline if baseline is None else replace(made, fingerprint=baseline)
    return list(find_settings(facts_of(made, other, LossOutcome(curve))))


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

    OTHERS: ClassVar[list[tuple[dict[str, Any], str]]] = [
        ({"backend_options": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "risky_features_on": {GATHERED: True}}, "#1771"),
        ({"backend_options": {"fp4": "e2m1", "context_parallel_size": 2}}, "#2051"),
        ({"backend_options": RECOMPUTED, "risky_features_on": {"recompute_granularity": "selective"}}, "#7538"),
        ({"backend_options": {"fp4": "e2m1", "fp4_param": True}, "risky_features_on": OVERLAPPED}, "#4562"),
        ({"backend_options": BLOCKWISE, "risky_features_on": OVERLAPPED | {"fp8_param_gather": True}}, "#4562"),
        ({"backend_options": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "risky_features_on": REUSED}, "#5236"),
        ({"backend_options": {"fp8": "e4m3", "mtp_num_layers": 1}, "risky_features_on": FULLY}, "#4593"),
        ({"backend_options": BLOCKWISE | {"num_moe_experts": 8}}, "#7523"),
        ({"versions": OLD_TE, "backend_options": {"fp8": "hybrid"}, "risky_features_on": FULLY}, "#1190"),
        ({"versions": {"transformer-engine": "1.2"}, "backend_options": PIPELINE, "risky_features_on": FULLY}, "#539"),
        ({"versions": {"deepspeed": "0.17.6"}, "model": DEEPSPEED}, "#7718"),
        ({"versions": {"deepspeed": "0.18.10"}, "model": DEEPSPEED}, "#7985"),
        ({"versions": {"bitsandbytes": "0.36.0"}}, "#659"),
        ({"versions": {"transformer-engine": "2.1"}, "risky_features_on": {"tp_comm_overlap": True}}, "#1616"),
        ({"versions": {"transformer-engine": "1.13.0"}, "backend_options": PARALLEL}, "#1528"),
        ({"backend_options": {"fp8": "hybrid", "fp8_recipe": "mxfp8", "num_moe_experts": 8}}, "#3342"),
        ({"backend_options": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "risky_features_on": CAPTURED}, "#3076"),
        ({"backend_options": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "risky_features_on": REUSED}, "#5487"),
        ({"backend_options": {"fp4": "e2m1"}, "devices": {"compute_capability": "12.1"}}, "#3281"),
        ({"versions": {"transformer-engine": "2.5.0+abc"}, "backend_options": FUSED_LOSS}, "#1750"),
        ({"backend_options": {"activation_func_fp8_input_store": True}}, "#1751"),
    ]

    @pytest.mark.parametrize(("bad", "issue"), [(MXFP8, "#638"), (PARAMETERS, "#2272"), (TE, "#1047"), *OTHERS])
    def test_known_faults(self, bad: dict[str, Any], issue: str) -> None:
        found = {said(f): f.evidence for f in settings(bad, None, False) if issue in f.evidence}
        assert list(found) == [("software", "hint")]
        assert {f.strength for f in settings(bad, {"versions": {}}, True) if f.rule == "known issue"} == {"clear"}
        assert [f for f in settings(bad, bad, True) if f.rule == "known issue"] == []

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
            {"backend_options": {"fp4": "e2m1", "context_parallel_size": 1}},
            {"backend_options": {"fp4": "e2m1", "context_parallel_size": "2 or so"}},
            {"backend_options": RECOMPUTED, "risky_features_on": {"recompute_granularity": None}},
            {"backend_options": {"fp8": "hybrid", "fp8_recipe": "delayed"}, "risky_features_on": OVERLAPPED},
            {"backend_options": {"fp8": "hybrid", "fp8_recipe": "delayed"}, "risky_features_on": REUSED},
            {"backend_options": {"mtp_num_layers": 1}, "risky_features_on": FULLY},
            {"backend_options": BLOCKWISE | {"num_moe_experts": None}},
            {"versions": {"transformer-engine": "1.12"}, "backend_options": PIPELINE, "risky_features_on": FULLY},
            {"versions": OLD_TE, "backend_options": {"fp8": None}, "risky_features_on": FULLY},
            {"versions": {"deepspeed": "0.18.0"}, "model": {"class": "GPT"}},
            {"versions": {"deepspeed": "0.17.5"}, "model": DEEPSPEED},
            {"versions": {"deepspeed": "0.18.3"}, "model": DEEPSPEED},
            {"versions": {"deepspeed": "0.18.11"}, "model": DEEPSPEED},
            {"versions": {"bitsandbytes": "0.35.4"}},
            {"versions": {"bitsandbytes": "0.41.1"}},
            {"versions": {"transformer-engine": "2.2"}, "risky_features_on": {"tp_comm_overlap": True}},
            {"versions": {"transformer-engine": "1.13.0"}, "backend_options": PARALLEL | {"context_parallel_size": 1}},
            {"backend_options": {"fp4": "e2m1"}, "devices": {"compute_capability": "10.0"}},
            {"versions": {"transformer-engine": "2.6.0"}, "backend_options": FUSED_LOSS},
            {
                "versions": {"transformer-engine": "2.5.0"},
                "backend_options": FUSED_LOSS | {"cross_entropy_fusion_impl": "native"},
            },
        ],
    )
    def test_what_is_not_known_is_no_fault(self, fingerprint: dict[str, Any]) -> None:
        assert [f for known in KNOWN if known.holds(fingerprint) for f in [known]] == []
        for baseline in (None, {}, fingerprint):
            assert [f.rule for f in settings(fingerprint, baseline, False) if f.rule != "features"] == []

    def test_parameters_that_are_gathered_while_gradients_are_reduced(self) -> None:
        """They have one fault less than those that are not."""
        overlapped = {"fp8_param": 1, "overlap_param_gather": 1, "overlap_grad_reduce": 1}
        found = settings(self.PARAMETERS | {"risky_features_on": overlapped}, None, False)
        assert not any("#2272" in f.evidence for f in found)

    def test_features_that_the_good_run_did_not_have_on(self) -> None:
        bad = {"risky_features_on": {"cpu_offloading": True, "recompute_granularity": "full"}}
        for baseline in ({"risky_features_on": {}}, None):
            (found,) = settings(bad, baseline, True)
            assert said(found) == ("software", "hint") and found.evidence.startswith("CPU offloading: on")
        assert settings(bad, None, False) == [] == settings(bad, bad, True)
        assert settings(bad, {"versions": {}}, False) == []  # a baseline that does not say

    def test_fp8_without_effect(self) -> None:
        engine = "none: fp8 is configured but has no effect without Transformer Engine"
        (found,) = settings({"recipe": {"fp8_engine": engine}}, None, False)
        assert said(found) == ("software", "hint") and "has no effect" in found.evidence

    def test_other_versions_are_a_hint(self) -> None:
        (found,) = settings({"versions": {"torch": "2.8"}}, {"versions": {"torch": "2.7"}}, False)
        assert said(found) == ("software", "hint") and "torch 2.7 -> 2.8" in found.evidence

    def test_the_fingerprint_of_a_real_run_is_clean(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(8, 8))
        monitor = Monitor(model, recorders=[RunRecordWriter(tmp_path)], interval=1)
        with monitor.step(0) as report:
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            report(loss=loss.item())
        monitor.close()
        real = Run.read(tmp_path).fingerprint
        assert real["versions"] and settings(real, None, True) == [] == settings(real, real, True)
