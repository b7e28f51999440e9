"""Inputs that move to another level at once: attention without its mask in runs of the benchmark, and made series."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import pytest
from fault_injection.judge import baseline_of
from fault_injection.records import read_run, truths

from nemo_fp8_debug.analysis.diagnosis.culprit import Evidence, blamed
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.rules.finding import Finding
from nemo_fp8_debug.analysis.diagnosis.rules.inputs import inputs
from nemo_fp8_debug.analysis.loss.curve import LossCurve
from nemo_fp8_debug.analysis.loss.outcome import LossOutcome
from nemo_fp8_debug.analysis.runs.metrics import Metrics
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.analysis.story.story import story

STEPS, INTERVAL, LAYERS, ONSET = 300, 5, 3, 181
#: of the benchmark, runs without a mask from some step on: the GEMM behind attention
UNMASKED = {"gpt-100": "self_attention.linear_proj", "llama-008": "self_attn.o_proj", "vit-204": "attention.output.dense"}


def named(part: str, kind: str) -> Mapping[str, Any]:
    return next(told for told in truths("released") if told["part"] == part and kind in (told["kind"], told["name"]))


@pytest.mark.parametrize("part", UNMASKED)
def test_attention_without_its_mask_is_named_by_the_gemm_behind_it(part: str) -> None:
    truth = named(part, "no_mask")
    other = named(part, str(baseline_of(truth, "other")))
    told = diagnose(read_run(truth), read_run(other))
    found = told.blame.finding
    assert told.harm == "harmful" and told.cause == "software" and told.culprit is None
    assert found is not None and found.layer is not None and found.layer.endswith(UNMASKED[part])
    assert found.since is not None and truth["onset"] <= found.since < truth["onset"] + INTERVAL
    assert found.evidence in told.verdict()
    said = [(event["step"], event["row"], event["what"]) for event in story(told)["events"]]
    assert (found.since, "X", f"X of {found.layer} goes to another level") in said


def made(
    changed: float = 0.0,
    of_loss: float = 0.0,
    kinds: tuple[str, ...] = ("fc1",),
    outlier: float = 0.0,
    noise: float = 0.01,
    seed: int = 0,
    interval: int = INTERVAL,
    until: int = STEPS,
) -> Run:
    """A run of layers whose X is another from ONSET on.

    Args:
        changed: part by which all values of X grow, in these kinds of GEMM of two.
        of_loss: part by which the loss does.
        outlier: part by which one value of 1,000 does, the largest.
        noise: standard deviation of the level from sample to sample, a part of it.
        until: step before which all that is so.
    """
    random, steps = np.random.default_rng(seed), np.arange(STEPS)
    acts = (steps >= ONSET) & (steps < until)
    losses = 2 * np.exp(random.normal(0, 0.02, STEPS)) * (1 + of_loss * acts)
    rows = [
        {
            "step": step,
            "layer": f"layers.{layer}.{kind}",
            "role": "input",
            "amax": median * 16 * most,
            "outlier_log2": 4 + np.log2(most),
            "relative_error": 0.026,
            "mse": (0.026 * median) ** 2 * (2 + (16 * most) ** 2 / 1000),
        }
        for step in range(0, STEPS, interval)
        for layer in range(LAYERS)
        for kind in ("fc1", "fc2")
        for median in [np.exp(random.normal(0, noise)) * (1 + changed * (kind in kinds) * acts[step])]
        for most in [1 + outlier * acts[step]]
    ]
    return Run(
        path="made",
        fingerprint={},
        metrics=Metrics.of(pl.DataFrame(rows)),
        loss=LossCurve.of(pl.DataFrame({"step": steps, "loss": losses})),
    )


def found_in(run: Run, baseline: Run | None = None, same_model: bool = True) -> list[Finding]:
    return inputs(run, baseline, LossOutcome.of(run.loss, None if baseline is None else baseline.loss, 2.0, same_model))


def test_a_move_that_is_no_noise_is_told_with_its_size() -> None:
    (found,) = found_in(made(-0.2), made(seed=1))
    assert (found.layer, found.since, found.role) == ("layers.*.fc1", 185, None)
    assert "goes down by" in found.evidence and "and the loss" not in found.evidence
    assert 18 < float(found.evidence.split(" by ")[1].split("%")[0]) < 22
    assert found_in(made(-0.2))  # alone as well


def test_a_small_move_counts_if_the_loss_rises_with_it() -> None:
    assert not found_in(made(0.08, noise=0.03), made(seed=1, noise=0.03))
    (found,) = found_in(made(0.08, of_loss=0.1, noise=0.03), made(seed=1, noise=0.03))
    assert "and the loss rises by" in found.evidence and found.since == 185


@pytest.mark.parametrize(
    ("changed", "of_loss", "named"),
    [(0.07, 0.02, False), (0.07, 0.1, True), (0.06, 0.1, False), (0.14, 0.0, False), (0.2, 0.0, True)],
)
def test_beside_another_model_the_move_and_the_rise_must_be_surer(changed: float, of_loss: float, named: bool) -> None:
    run, baseline = made(changed, of_loss=of_loss, noise=0.03, seed=4), made(seed=104, noise=0.03)
    assert found_in(run, baseline) and bool(found_in(run, baseline, same_model=False)) == named


@pytest.mark.parametrize(
    "run",
    [
        made(seed=4),
        made(of_loss=0.1, seed=4),
        made(outlier=63.0, seed=4),  # an outlier is the business of operands
        made(0.2, seed=4, until=ONSET + 2 * INTERVAL),  # it does not stay
        made(0.2, seed=4, interval=50),  # too few samples
    ],
    ids=["nothing", "the loss alone", "an outlier", "a transient", "few samples"],
)
def test_what_is_no_move_of_the_level(run: Run) -> None:
    assert not found_in(run, made(seed=1)) and not found_in(run)


def test_what_the_baseline_does_too_is_not_told() -> None:
    assert found_in(made(0.2)) and not found_in(made(0.2), made(0.2, seed=1))


def test_a_record_without_inputs_has_none() -> None:
    run = made(0.2)
    whole = run.metrics.frame()
    for rows in (whole.filter(role="weight"), *(whole.with_columns(pl.lit(0.0).alias(name)) for name in ("amax", "mse"))):
        assert not found_in(Run(path="made", fingerprint={}, metrics=Metrics.of(rows), loss=run.loss))


def test_noise_seldom_moves_that_far() -> None:
    assert sum(bool(found_in(made(seed=seed), made(seed=seed + 1000))) for seed in range(60)) == 0


@pytest.mark.parametrize(("since", "cause"), [(60, "step_size"), (64, "step_size"), (68, "software")])
def test_what_went_wrong_between_gemms_by_then_is_named_first(since: int, cause: str) -> None:
    moved = Finding("inputs", "software", "medium", "...", layer="layers.*.fc1", since=64, severity=1)
    step = Finding("steps of weights", "step_size", "medium", "...", layer="layers.0.fc1", role="update", since=since)
    assert blamed(Evidence([moved, step], 64, 70, True, True)).cause == cause
