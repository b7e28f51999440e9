"""Where a loss leaves another one or its own course, and what is noise."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from compared_runs import Losses, falling, rising

from nemo_fp8_debug.analysis.loss.curve import LossCurve
from nemo_fp8_debug.analysis.loss.gap import find_rise_above_baseline


def curve(losses: npt.ArrayLike) -> LossCurve:
    values = np.asarray(losses, np.float64)
    return LossCurve.from_steps_table(pl.DataFrame({"step": np.arange(len(values)), "loss": values}))


class TestLossCurve:
    def test_a_clean_run_did_not_diverge(self) -> None:
        assert curve(list(falling().values())).divergence_step is None

    @pytest.mark.parametrize("n", [50, 100, 1000])
    def test_noise_is_no_divergence(self, n: int) -> None:
        """3% of noise, as small batches have, on a loss that has long stopped to fall."""
        runs = [curve(2 * (1 + np.random.default_rng(seed).normal(0, 0.03, n))) for seed in range(20)]
        assert [run.divergence_step for run in runs if run.divergence_step is not None] == []

    @pytest.mark.parametrize("n", [50, 100, 1000])
    def test_noise_does_not_set_two_runs_apart(self, n: int) -> None:
        runs = [curve(2 * (1 + np.random.default_rng(seed).normal(0, 0.03, n))) for seed in range(21)]
        apart = [find_rise_above_baseline(b, a) for a, b in itertools.pairwise(runs)]
        assert [step for step in apart if step is not None] == []

    @pytest.mark.parametrize("n", [100, 1000])
    @pytest.mark.parametrize("lasting", [0.0, 0.5, 0.9])
    def test_noise_is_no_other_level(self, n: int, lasting: float) -> None:
        """Of a loss that falls, and whose noise depends on the value before."""
        for seed in range(50):
            noise = np.random.default_rng(seed).normal(0, 0.05 * np.sqrt(1 - lasting**2), n)
            for i in range(1, n):
                noise[i] += lasting * noise[i - 1]
            assert curve(2 + 2 / (1 + np.arange(n) / 20) + noise).level_shift is None

    @pytest.mark.parametrize("at", [100, 120, 170])
    def test_a_loss_that_goes_up_and_learns_on_has_another_level(self, at: int) -> None:
        """It falls below its own minimum again, so that it does not diverge."""
        steps = np.arange(400)
        falls = 4 * np.exp(-steps / 150) + np.random.default_rng(at).normal(0, 0.05, 400)
        found = curve(falls + np.where(steps < at, 0, 1.0))
        assert found.level_shift is not None and abs(found.level_shift[0] - at) <= 5
        assert 5 < found.level_shift[1] < 60 and found.divergence_step is None
        assert curve(falls).level_shift is None

    def test_a_spike_that_comes_back_is_no_other_level(self) -> None:
        losses = 2 + np.random.default_rng(0).normal(0, 0.05, 240)
        losses[100:118] += 1.5
        assert curve(losses).level_shift is None

    @pytest.mark.parametrize("at", [0, 60, 198, 199])
    def test_a_lone_spike_is_not_counted(self, at: int) -> None:
        losses = np.array(list(falling().values()))
        losses[at] = 50
        assert curve(losses).divergence_step is None

    @pytest.mark.parametrize("since", [60, 120, 180])
    def test_a_divergence_is_found_near_its_step(self, since: int) -> None:
        losses = np.array(list(falling().values()))
        losses[since:] += 1
        assert curve(losses).divergence_step == pytest.approx(since, abs=2)

    def test_steps_are_those_of_the_table(self) -> None:
        table = pl.DataFrame({"step": [30, 10, 20, 40, 50, 60], "loss": [1.0, 2.0, 1.5, 9.0, 9.0, 9.0]})
        assert LossCurve.from_steps_table(table).divergence_step == 40

    def test_the_later_row_of_a_step_counts(self) -> None:
        table = pl.DataFrame({"step": [0, 1, 1], "loss": [1.0, 7.0, 3.0]})
        assert LossCurve.from_steps_table(table).losses.tolist() == [1, 3]

    @pytest.mark.parametrize("gone", [np.nan, np.inf])
    def test_a_loss_that_is_no_longer_a_number_diverged(self, gone: float) -> None:
        losses = np.array(list(falling().values()))
        losses[90:] = gone
        found = curve(losses)
        assert found.divergence_step == pytest.approx(90, abs=2)
        # A running median of a falling loss with infinities in its window turns a little early.
        assert find_rise_above_baseline(found, curve(list(falling().values()))) == pytest.approx(90, abs=4)
        assert found.minimum_step_and_loss is not None
        assert found.minimum_step_and_loss[1] < 3

    def test_a_lone_nan_is_not_counted(self) -> None:
        losses = np.array(list(falling().values()))
        losses[90] = np.nan
        assert curve(losses).divergence_step is None

    def test_no_losses(self) -> None:
        none = curve([])
        assert (none.final_loss, none.minimum_step_and_loss, none.divergence_step) == (None, None, None)
        assert find_rise_above_baseline(none, curve([1.0])) is None
        assert find_rise_above_baseline(curve([1.0]), none) is None

    def test_a_single_loss(self) -> None:
        one = curve([3.0])
        assert (one.final_loss, one.minimum_step_and_loss, one.divergence_step) == (3, (0, 3), None)
        assert find_rise_above_baseline(one, one) is None
        assert find_rise_above_baseline(one, curve([2.0])) is None  # one step is not "for good"

    def test_above_compares_at_the_same_step(self) -> None:
        fast, slow = curve(np.linspace(5, 1, 100)), curve(np.linspace(5, 3, 100))
        assert find_rise_above_baseline(slow, fast) == pytest.approx(5, abs=5)  # where they are 2% apart
        assert find_rise_above_baseline(fast, slow) is None

    def test_above_compares_runs_that_logged_other_steps(self) -> None:
        def every_tenth(losses: Losses) -> LossCurve:
            return LossCurve.from_steps_table(
                pl.DataFrame({"step": range(0, 200, 10), "loss": [losses[i] for i in range(0, 200, 10)]})
            )

        fine, coarse = curve(list(falling().values())), every_tenth(falling())
        assert find_rise_above_baseline(coarse, fine) is find_rise_above_baseline(fine, coarse) is None
        assert find_rise_above_baseline(curve(list(rising().values())), coarse) == pytest.approx(125, abs=10)
        assert find_rise_above_baseline(every_tenth(rising()), fine) == pytest.approx(125, abs=10)
