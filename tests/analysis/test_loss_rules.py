"""Rules on the loss, on planted losses: spikes, and where it left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import scipy.stats
from rule_findings import Values, said

from nemo_fp8_debug.analysis.diagnosis.rules.divergence import diverged_at_the_start, divergence
from nemo_fp8_debug.analysis.diagnosis.rules.spikes import chance, compared, spikes
from nemo_fp8_debug.analysis.loss.curve import LossCurve
from nemo_fp8_debug.analysis.loss.outcome import LossOutcome


def curve(losses: Values, every: int = 1) -> LossCurve:
    values = np.asarray(losses, np.float64)
    return LossCurve.of(pl.DataFrame({"step": np.arange(len(values)) * every, "loss": values}))


def noisy(n: int = 300, seed: int = 0, at: dict[int, float] | None = None) -> LossCurve:
    losses = 2 + np.random.default_rng(seed).normal(0, 0.02, n)
    for step, height in (at or {}).items():
        losses[step] += height
    return curve(losses)


class TestSpikes:
    def test_are_counted_with_the_steps_to_recovery(self) -> None:
        found = spikes(noisy(at={100: 3, 101: 2, 102: 1, 200: 5}))
        assert [(s.step, s.recovery) for s in found] == [(100, 3), (200, 1)]

    @pytest.mark.parametrize("seed", range(5))
    def test_noise_is_none_and_neither_is_a_loss_that_falls(self, seed: int) -> None:
        noise = 1 + np.random.default_rng(seed).normal(0, 0.01, 300)
        assert spikes(noisy(seed=seed)) == [] == spikes(curve((2 + 9 * np.exp(-np.arange(300) / 30)) * noise))

    def test_a_spike_at_the_end_has_not_recovered(self) -> None:
        found = spikes(noisy(at={299: 4}))
        assert [(s.step, s.recovery) for s in found] == [(299, None)]
        told = compared(noisy(at={299: 4}), None)
        assert told and "1 spike in 300 losses, without recovery" in told.evidence

    def test_alone_they_are_neither_many_nor_few(self) -> None:
        found = compared(noisy(at=dict.fromkeys(range(50, 250, 10), 4.0)), None)
        assert found and said(found) == ("unknown", "low")

    def test_more_frequent(self) -> None:
        found = compared(noisy(at=dict.fromkeys(range(50, 250, 10), 4.0)), noisy(seed=1, at={100: 4}))
        assert found and said(found) == ("unknown", "high") and "more frequent" in found.evidence

    def test_slower_recovery(self) -> None:
        slow = {at + i: 4.0 for at in (80, 140, 200) for i in range(8)}
        found = compared(noisy(at=slow), noisy(seed=1, at={80: 4, 140: 4, 200: 4}), "sample")
        assert found and said(found) == ("unknown", "medium") and "recovery in 8 samples (median)" in found.evidence

    def test_as_many_as_the_good_run_has(self) -> None:
        found = compared(noisy(at={80: 4, 140: 4}), noisy(seed=1, at={60: 4}))
        assert found and said(found) == ("none", "medium")

    @pytest.mark.parametrize("losses", [[], [1.0], [np.nan] * 50, [np.inf, 1.0], [0.0] * 40, [2.0] * 40 + [np.nan] * 40])
    def test_odd_losses_are_no_error(self, losses: list[float]) -> None:
        for other in (None, curve(losses), noisy()):
            found = compared(curve(losses), other)
            assert found is None or said(found)
            compared(noisy(at={100: 4}), other)

    @pytest.mark.parametrize(("mine", "theirs"), [(1, 0), (3, 0), (7, 2), (40, 55), (2000, 1800)])
    @pytest.mark.parametrize("losses", [(100, 100), (1000, 300)])
    def test_the_chance_is_that_of_the_binomial_test(self, mine: int, theirs: int, losses: tuple[int, int]) -> None:
        expected = scipy.stats.binomtest(mine, mine + theirs, losses[0] / sum(losses), "greater").pvalue
        assert chance(mine, theirs, *losses) == pytest.approx(expected, rel=1e-6)


def outcome(since: int | None, n: int = 300) -> LossOutcome:
    """Of a run that rises by half from a step on, with a baseline that does not."""
    run, baseline = noisy(n), noisy(n)
    if since is None:
        return LossOutcome.of(run, baseline)
    return LossOutcome.of(curve(np.where(run.steps >= since, 1.5, 1.0) * run.losses), baseline)


class TestDivergence:
    def test_from_the_start_and_in_mid_run_ask_for_other_things(self) -> None:
        start, later = (divergence(outcome(since), "step")[0] for since in (5, 150))
        assert (start.since, later.since) == (5, 150) and "from step 150 on: a gap of +50%" in later.evidence
        assert start.advice != later.advice
        assert (
            diverged_at_the_start(noisy(), 25)
            and not diverged_at_the_start(noisy(), 27)
            and not diverged_at_the_start(noisy(), None)
        )

    @pytest.mark.parametrize("since", [5, 150])
    def test_no_recipe_helps_a_run_that_quantizes_nothing(self, since: int) -> None:
        quantizes, not_so = (divergence(outcome(since), "step", each)[0].advice for each in (True, False))
        assert "BF16" in quantizes and "BF16" not in not_so and "data" in not_so

    def test_a_reference_run_that_diverges_too_is_software(self) -> None:
        found = divergence(replace(outcome(100), reference=outcome(120).run), "step")
        assert [(f.rule, f.cause) for f in found] == [("divergence", "unknown"), ("reference", "software")]
        assert [f.rule for f in divergence(replace(outcome(100), reference=noisy()), "step")] == ["divergence"]
        assert [f.cause for f in divergence(replace(outcome(None), reference=outcome(120).run), "step")] == ["none"]

    @pytest.mark.parametrize("n", [0, 1, 4])
    def test_too_few_losses_tell_nothing(self, n: int) -> None:
        assert [f.cause for f in divergence(outcome(None, n), "step")] == ["unknown"]
