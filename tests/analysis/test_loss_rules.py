"""Rules on the loss, on planted losses: where it left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from facts_of import Values, facts_of, said

from nemo_fp8_debug.analysis.diagnosis.facts import Facts
from nemo_fp8_debug.analysis.diagnosis.rules.losses import find_reference
from nemo_fp8_debug.analysis.diagnosis.rules.settings import diverged_at_the_start
from nemo_fp8_debug.analysis.loss.curve import LossCurve
from nemo_fp8_debug.analysis.loss.outcome import LossOutcome
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.analysis.runs.run import Run


def curve(losses: Values, every: int = 1) -> LossCurve:
    values = np.asarray(losses, np.float64)
    return LossCurve.from_steps_table(pl.DataFrame({"step": np.arange(len(values)) * every, "loss": values}))


def noisy(n: int = 300) -> LossCurve:
    return curve(2 + np.random.default_rng(0).normal(0, 0.02, n))


def facts(loss: LossOutcome) -> Facts:
    """Facts of a run that has losses and one operand."""
    metrics = MetricsTable.from_rows(pl.DataFrame([{"step": 0, "layer": "fc", "role": "input", "scale_source": "engine"}]))
    return facts_of(Run("made", {}, metrics, loss.run), None, loss)


def outcome(since: int | None, n: int = 300) -> LossOutcome:
    """Of a run that rises by half from a step on, with a baseline that does not."""
    run, baseline = noisy(n), noisy(n)
    if since is None:
        return LossOutcome.judge_loss(run, baseline)
    return LossOutcome.judge_loss(curve(np.where(run.steps >= since, 1.5, 1.0) * run.losses), baseline)


class TestDivergence:
    @pytest.mark.parametrize(("since", "at_the_start"), [(25, True), (27, False), (150, False), (None, False)])
    def test_at_the_start_is_within_a_running_median(self, since: int | None, at_the_start: bool) -> None:
        assert diverged_at_the_start(facts(outcome(since))) == at_the_start

    def test_a_reference_run_that_diverges_too_is_software(self) -> None:
        (found,) = find_reference(facts(replace(outcome(100), reference=outcome(120).run)))
        assert said(found) == ("software", "clear") and found.since == 120 and "BF16" not in found.advice
        assert not [*find_reference(facts(replace(outcome(100), reference=noisy())))]
        assert not [*find_reference(facts(replace(outcome(None), reference=outcome(120).run)))]

    @pytest.mark.parametrize("n", [0, 1, 4])
    def test_too_few_losses_tell_nothing(self, n: int) -> None:
        few = facts(outcome(None, n))
        assert few.loss.harm == "unknown" and not [*find_reference(few)]
