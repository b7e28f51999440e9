"""Layers whose weights no longer learn: runs of the benchmark whose gradients of a layer stop arriving, and healthy ones."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from facts_of import found_by
from fault_injection.records import read_run, truths
from hypothesis import given
from hypothesis import strategies as st

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.finding import Finding
from nemo_fp8_debug.analysis.diagnosis.rules.weights import ConstantRangeState, find_still_weights
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.analysis.story.story import story


def still_weights(run: Run, baseline: Run | None) -> list[Finding]:
    return found_by(find_still_weights, run, baseline)


def run_of(part: str, name: str) -> Run:
    return read_run(next(told for told in truths("all") if (told["part"], told["name"]) == (part, name)))


def name_of(part: str, kind: str) -> str:
    return next(str(told["name"]) for told in truths("all") if (told["part"], told["kind"]) == (part, kind))


#: layer whose gradients stop to arrive, and when
STOPPED = {"llama-202": ("model.layers.1", 141), "moe-200": ("model.layers.0", 106), "te-209": ("decoder.layers.1", 50)}


@pytest.mark.parametrize("part", STOPPED)
@pytest.mark.parametrize("baseline", ["a", "b", None])
def test_a_layer_without_gradients_is_named(part: str, baseline: str | None) -> None:
    layer, onset = STOPPED[part]
    run = run_of(part, name_of(part, "gradient_layer"))
    told = diagnose(run, None if baseline is None else run_of(part, baseline))
    assert told.cause == "frozen_weights" and told.culprit is None and f"W of {layer} stand still" in told.verdict()
    found = told.decision.finding
    # Momentum moves a weight for some steps more, so the onset is told later, and never earlier.
    assert found is not None and found.layer == layer and found.since is not None and onset <= found.since < 230
    assert (found.since, "weights", layer) in [(e["step"], e["kind"], e["layer"]) for e in story(told)["events"]]


@pytest.mark.parametrize("part", STOPPED)
def test_what_stands_still_in_the_baseline_too_is_not_told(part: str) -> None:
    run = run_of(part, name_of(part, "gradient_layer"))
    assert still_weights(run, None) and not still_weights(run, run)


def test_weights_that_are_stored_in_codes_may_stand_still() -> None:
    run = run_of("llama-202", name_of("llama-202", "gradient_layer"))
    source = pl.when(role="weight").then(pl.lit("stored")).otherwise("scale_source").alias("scale_source")
    assert not still_weights(
        replace(run, metrics=MetricsTable.from_rows(run.metrics.read_all_rows().with_columns(source))), None
    )


def test_layers_of_healthy_runs_learn() -> None:
    clean = [told for told in truths("all") if told["kind"] == "none"][::16]
    assert len(clean) > 90
    assert [told["part"] for told in clean if still_weights(read_run(told), None)] == []


def standing(ranges: Any) -> ConstantRangeState:
    found = ConstantRangeState.make_unsampled(2)
    for step, of_range in ranges:
        found.add(step, np.array(of_range))
    return found


@given(
    st.lists(st.lists(st.sampled_from([1.0, 1.0001, 2.0, np.nan]), min_size=2, max_size=2), max_size=12), st.integers(0, 12)
)
def test_stretches_add_up_to_the_whole(ranges: list[list[float]], at: int) -> None:
    steps = list(enumerate(ranges))
    whole, added = standing(steps), standing(steps[:at]) + standing(steps[at:])
    known = np.isfinite(whole.last)
    for field in fields(ConstantRangeState):
        mine, theirs = (np.asarray(getattr(each, field.name), dtype=float)[known] for each in (whole, added))
        assert np.array_equal(mine, theirs), field.name


def test_a_weight_that_never_moved_is_not_one_that_stopped() -> None:
    steps = [(step, [3.0, 3.0 + 0.1 * min(step, 2)]) for step in range(8)]
    found = standing(steps)
    assert (found.moves.tolist(), found.samples.tolist(), found.since.tolist()) == ([0, 2], [8, 6], [0, 2])
