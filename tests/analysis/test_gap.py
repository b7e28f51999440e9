"""How far a loss lies above another: the interval holds the truth as often as it says, whatever the noise."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import scipy.signal

from nemo_fp8_debug.analysis.diagnosis.narrator import tell_loss_outcome
from nemo_fp8_debug.analysis.loss.curve import LossCurve, estimate_standard_error
from nemo_fp8_debug.analysis.loss.gap import align_losses, measure_gap
from nemo_fp8_debug.analysis.loss.outcome import LossOutcome
from nemo_fp8_debug.analysis.loss.seeds import choose_baseline_loss
from nemo_fp8_debug.analysis.loss.step_change import find_largest_loss_jump, measure_loss_rise_at_step

Floats = npt.NDArray[np.float64]


def curve(losses: npt.ArrayLike, every: int = 1) -> LossCurve:
    values = np.asarray(losses, np.float64)
    return LossCurve.from_steps_table(pl.DataFrame({"step": np.arange(len(values)) * every, "loss": values}))


def noise(n: int, carried: float, rng: np.random.Generator) -> Floats:
    """Of unit variance, each value carrying on a part of the one before."""
    values = scipy.signal.lfilter([1], [1, -carried], rng.normal(size=n + 200))[200:]
    result: Floats = values * np.sqrt(1 - carried**2)
    return result


def pair(n: int, factor: float, paired: bool, seed: int, carried: float = 0.3) -> tuple[LossCurve, LossCurve]:
    """A run and its baseline on a loss that falls; noise of 2%, nearly all of it in common if paired."""
    rng = np.random.default_rng(seed)
    falls = 2 + 2 * np.exp(-5 * np.arange(n) / n)
    common = 0.02 * noise(n, carried, rng)
    own = [0.003 * noise(n, carried, rng) if paired else 0.02 * noise(n, carried, rng) for _ in range(2)]
    shared = common if paired else np.zeros(n)
    return curve(falls * factor * (1 + shared + own[0])), curve(falls * (1 + shared + own[1]))


class TestInterval:
    @pytest.mark.parametrize("paired", [True, False])
    @pytest.mark.parametrize("carried", [0.0, 0.5])
    def test_holds_the_gap_in_95_of_100(self, paired: bool, carried: float) -> None:
        found = [measure_gap(*pair(1000, 1.005, paired, seed, carried)) for seed in range(300)]
        held = sum(
            each is not None and each.compute_confidence_interval()[0] <= 0.5 <= each.compute_confidence_interval()[1]
            for each in found
        )
        assert 0.91 * 300 <= held <= 0.985 * 300

    def test_tells_runs_of_the_same_batches_from_others(self) -> None:
        for seed in range(20):
            assert [align_losses(*pair(300, 1.0, paired, seed)).has_shared_noise for paired in (True, False)] == [
                True,
                False,
            ]

    @pytest.mark.parametrize("n", [30, 60, 120])
    def test_a_steep_fall_in_common_is_not_the_same_batches(self, n: int) -> None:
        falls = 2 + 3 * np.exp(-np.arange(n) / 20)
        drawn = 0.005 * np.random.default_rng(n).normal(size=(100, 3, n))
        others = [align_losses(curve(falls * (1 + a)), curve(falls * (1 + b))).has_shared_noise for a, b, _ in drawn]
        alike = [
            align_losses(curve(falls * (1 + a)), curve(falls * (1 + a + 0.3 * b))).has_shared_noise for a, b, _ in drawn
        ]
        assert sum(others) <= 2 and sum(alike) >= 95

    def test_losses_that_do_not_move_tell_nothing_of_batches(self) -> None:
        assert not align_losses(curve([2.0] * 60), curve([2.0] * 60)).has_shared_noise

    def test_of_the_same_batches_is_far_narrower(self) -> None:
        errors = [measure_gap(*pair(500, 1.0, paired, 1)).error for paired in (True, False)]  # type: ignore[union-attr]
        assert errors[1] > 3 * errors[0]

    def test_a_gap_of_the_visible_size_is_seen_in_about_80_of_100(self) -> None:
        visible = float(np.median([measure_gap(*pair(1000, 1.0, True, seed)).visible for seed in range(50)]))  # type: ignore[union-attr]
        found = [measure_gap(*pair(1000, 1 + visible / 100, True, seed)) for seed in range(100, 300)]
        assert 0.65 < np.mean([each.compute_confidence_interval()[0] > 0 for each in found if each]) < 0.92

    @pytest.mark.parametrize("carried", [0.0, 0.5, 0.8])
    def test_the_standard_error_is_that_of_means(self, carried: float) -> None:
        rng = np.random.default_rng(0)
        series = [noise(500, carried, rng) for _ in range(300)]
        truth = float(np.std([each.mean() for each in series]))
        assert np.median([estimate_standard_error(each)[0] for each in series]) == pytest.approx(truth, rel=0.15)


class TestGap:
    def test_of_other_steps_is_that_of_means_over_stretches(self) -> None:
        losses = 2 + np.random.default_rng(0).normal(0, 0.01, 1000)
        found = measure_gap(curve(losses[5::10] * 1.03, 10), curve(losses))
        assert found and found.percent == pytest.approx(3, abs=0.3)

    def test_too_few_losses_or_nothing_but_zeros_tell_nothing(self) -> None:
        assert measure_gap(curve([2.0] * 9), curve([2.0] * 9)) is None
        assert measure_gap(curve([1.0] * 50), curve([0.0] * 50)) is None
        assert measure_gap(curve([]), curve([2.0] * 50)) is None

    def test_a_loss_that_ends_in_nan_has_an_infinite_gap(self) -> None:
        found = measure_gap(curve([2.0] * 60 + [np.nan] * 40), curve([2.0] * 100))
        assert found and found.ends_nonfinite and found.compute_confidence_interval() == (math.inf, math.inf)

    def test_a_lone_nan_is_left_out_and_counted(self) -> None:
        losses = np.full(100, 2.0)
        losses[95] = np.nan
        found = measure_gap(curve(losses), curve(np.full(100, 2.0)))
        assert found and (found.percent, found.left_out, found.n) == (0.0, 1, 19)

    def test_equal_runs_have_a_gap_of_nothing(self) -> None:
        found = measure_gap(curve([2.0] * 100), curve([2.0] * 100))
        assert found and (found.percent, found.compute_confidence_interval(), found.visible) == (0.0, (0.0, 0.0), 0.0)


class TestOutcome:
    @pytest.mark.parametrize(("percent", "harm"), [(0.25, "gap"), (1.5, "gap"), (5.0, "harmful")])
    def test_a_small_gap_is_seen_and_the_limit_says_whether_it_is_harm(self, percent: float, harm: str) -> None:
        found = LossOutcome(*pair(5000, 1 + percent / 100, True, 3))
        assert found.harm == harm and f"{percent:.2g}"[:3] in tell_loss_outcome(found)

    def test_other_batches_do_not_make_a_loss_that_follows_one_that_is_harmed(self) -> None:
        told = [LossOutcome(*pair(2000, 1.0, False, seed)).harm for seed in range(30)]
        assert "harmful" not in told and told.count("none") + told.count("gap") >= 27

    def test_what_cannot_be_seen_is_said(self) -> None:
        found = LossOutcome(*pair(60, 1.0, False, 1))
        assert found.harm == "unknown" and "cannot tell whether the loss is harmed (2% or more above" in tell_loss_outcome(
            found
        )

    @pytest.mark.parametrize("first", [0, 1, 50])
    def test_nan_is_harm_from_its_first_step_on(self, first: int) -> None:
        losses = np.where(np.arange(100) < first, 2.0, np.nan)
        for baseline in (None, curve([2.0] * 100)):
            found = LossOutcome(curve(losses), baseline)
            assert (found.harm, found.rise_step) == ("harmful", first)

    def test_alone_a_rise_of_4_percent_over_half_the_run_is_harm(self) -> None:
        losses = np.interp(np.arange(3600), [0, 1600, 3600], [3.0, 2.0, 2.08])
        found = LossOutcome(curve(losses + np.random.default_rng(0).normal(0, 0.02, 3600)))
        assert found.harm == "harmful" and found.rise_step is not None and 1600 < found.rise_step < 3300

    def test_alone_a_loss_that_falls_is_not_called_harmless(self) -> None:
        found = LossOutcome(curve(np.linspace(4, 2, 500)))
        assert found.harm == "unknown" and "Without a baseline, we cannot see a gap." in tell_loss_outcome(found)


def signed(seed: int, start: float, end: float, worse: float = 0.0, n: int = 400) -> LossCurve:
    """A loss that falls from a value to another one of any sign, and from the middle on lies a part of that fall higher."""
    steps = np.arange(n)
    falls = end + (start - end) * (np.exp(-steps / (n / 8)) + 0.02 * noise(n, 0.3, np.random.default_rng(seed)))
    return curve(falls + worse * (start - end) * np.clip((steps - n / 2) / (n / 20), 0, 1))


#: all negative, across zero, and around zero in the end
SIGNS = [(-1.0, -3.0), (2.0, -3.0), (3.0, 0.0)]


class TestAnySign:
    @pytest.mark.parametrize(("start", "end"), SIGNS)
    def test_a_healthy_loss_is_not_harmed(self, start: float, end: float) -> None:
        for seed in range(1, 6):
            run, baseline = signed(seed, start, end), signed(0, start, end)
            assert LossOutcome(run).harm == "unknown" and run.divergence_step is run.level_shift is None
            found = LossOutcome(run, baseline, same_model=True)
            assert found.gap is not None and abs(found.gap.percent) < 2
            assert (
                found.harm == "unknown" if found.gap.compute_confidence_interval()[1] > 2 else found.harm in ("none", "gap")
            )

    @pytest.mark.parametrize(("start", "end"), SIGNS)
    @pytest.mark.parametrize("seed", [0, 1])
    def test_one_that_gets_worse_is_harmed_from_then_on(self, start: float, end: float, seed: int) -> None:
        """The loss rises by half of its fall, in percent of what it ends at, or of its range if it ends near zero."""
        run, baseline = signed(seed, start, end, 0.5), signed(0, start, end)
        for found in (LossOutcome(run), LossOutcome(run, baseline, same_model=True)):
            assert found.harm == "harmful" and found.rise_step == pytest.approx(200, abs=25)
        assert found.gap is not None and found.gap.percent == pytest.approx(50 * (start - end) / (-end or 3), abs=5)
        assert ("of the loss's range" in tell_loss_outcome(found)) == (end == 0)

    @pytest.mark.parametrize(("start", "end"), SIGNS)
    def test_rises_and_jumps_have_the_sign_of_the_difference(self, start: float, end: float) -> None:
        steps, baseline = np.arange(400), signed(0, start, end)
        for seed in (0, 1):
            same = signed(seed, start, end).losses
            higher, lower = (curve(same + sign * 0.4 * (start - end) * (steps >= 200)) for sign in (1, -1))
            for other in (None, baseline):
                rise = measure_loss_rise_at_step(higher, other, 200)
                assert rise is not None and rise > 10 and measure_loss_rise_at_step(lower, other, 200) is None
            jump = find_largest_loss_jump(higher, baseline)
            assert (
                jump is not None
                and abs(jump[0] - 200) <= 10
                and jump[1] > 10
                and find_largest_loss_jump(lower, baseline) is None
            )

    @pytest.mark.parametrize("worse", [0.3, -0.3])
    def test_a_constant_that_is_added_changes_no_sign_and_near_zero_nothing(self, worse: float) -> None:
        run, baseline = signed(1, 5.0, 0.0, worse), signed(0, 5.0, 0.0)
        gaps = [
            measure_gap(curve(run.losses - c), curve(baseline.losses - c)) for c in (-9.0, 0.1, 0.2, 0.3, 0.4, 9.0, 99.0)
        ]
        percents = [each.percent for each in gaps if each]
        assert [np.sign(each) for each in percents] == [np.sign(worse)] * 7
        assert np.ptp(percents[1:5]) < 1e-9 and percents[1] == pytest.approx(100 * worse, abs=3)

    def test_seeds_differ_by_as_much_below_zero(self) -> None:
        """They end at 2 and at -1, as far apart."""
        spreads = []
        for below in (0.0, 3.0):
            curves = [curve(signed(seed, 5.0, 2.0).losses + seed / 10 - below) for seed in range(3)]
            found = choose_baseline_loss(
                ("run", signed(9, 5.0 - below, 2.0 - below)), {str(i): each for i, each in enumerate(curves)}
            )
            assert found.seeds is not None and found.notes == []
            spreads.append(found.seeds.spread * (2.1 if not below else 0.9) / 100)
        assert spreads == pytest.approx([0.1, 0.1], rel=0.15)

    def test_a_baseline_is_raised_by_as_much_as_a_gap_says(self) -> None:
        for start, end in SIGNS:
            baseline = signed(0, start, end)
            found = measure_gap(baseline.raise_by_percent(10.0), baseline)
            assert found is not None and found.percent == pytest.approx(10.0)


class TestFarBelow:
    @pytest.mark.parametrize(("factor", "below"), [(0.07, True), (0.8, True), (0.93, False), (1.0, False), (1.3, False)])
    @pytest.mark.parametrize("paired", [True, False])
    def test_is_said_and_no_loss_that_follows(self, factor: float, below: bool, paired: bool) -> None:
        found = LossOutcome(*pair(400, factor, paired, 1), same_model=True)
        assert found.is_far_below == below and (found.harm == "unknown" or not below)
        assert ("check for repeated data, leaked labels or a missing mask" in tell_loss_outcome(found)) == below
        if below:
            ended = f"The loss ended {100 * (1 - factor):.2g}"[:18]
            assert (
                ended in tell_loss_outcome(found)
                and "below" in tell_loss_outcome(found)
                and "follows" not in tell_loss_outcome(found)
            )

    def test_noise_and_what_seeds_and_models_differ_by_are_not(self) -> None:
        run, baseline = pair(400, 0.8, False, 1)
        assert not LossOutcome(run, baseline).is_far_below  # another model may well have learned so much more
        noisy = curve(run.losses + np.random.default_rng(0).normal(0, 3, 400))
        assert LossOutcome(run, baseline, same_model=True).is_far_below
        assert not LossOutcome(noisy, baseline, same_model=True).is_far_below
        several = choose_baseline_loss(("run", run), {str(i): pair(400, 0.75 + i / 4, False, 10 + i)[0] for i in range(3)})
        assert several.seeds is not None and several.seeds.spread > 15
        assert not LossOutcome(run, several.curve, same_model=True, seeds=several.seeds).is_far_below


class TestRise:
    def test_at_a_known_step_is_seen_where_the_loss_goes_on_falling(self) -> None:
        falls = np.linspace(3, 2, 400) + np.random.default_rng(0).normal(0, 0.05, 400)
        risen = falls + np.where(np.arange(400) >= 200, 0.5, 0.0)
        assert measure_loss_rise_at_step(curve(risen), None, 200) == pytest.approx(15, abs=5)
        assert measure_loss_rise_at_step(curve(falls), None, 200) is None

    def test_a_loss_that_is_lost_for_a_step_has_not_risen(self) -> None:
        losses = np.linspace(3, 2, 400) + np.random.default_rng(0).normal(0, 0.05, 400)
        assert measure_loss_rise_at_step(curve(np.where(np.arange(400) == 200, np.nan, losses)), None, 200) is None
        assert measure_loss_rise_at_step(curve(np.where(np.arange(400) >= 200, np.nan, losses)), None, 200) == float("inf")

    def test_that_a_baseline_lies_lower_all_along_is_none(self) -> None:
        run, baseline = pair(600, 1.1, False, 0)
        assert all(measure_loss_rise_at_step(run, baseline, step) is None for step in range(100, 500, 50))

    def test_without_losses_on_either_side_it_is_not_known(self) -> None:
        assert measure_loss_rise_at_step(curve([2.0] * 100), None, 3) is None


def other_batches(
    n: int, seed: int, jump: float = 1.0, carried: float = 0.3, above: float = 1.03
) -> tuple[LossCurve, LossCurve]:
    """A run that ends above a baseline of other batches, as another seed may, and jumps at half of it; the jump decays."""
    run, baseline = pair(n, above, False, seed, carried)
    behind = np.arange(n) - n // 2
    decays = np.where(behind >= 0, np.exp(-np.maximum(behind, 0) / (n / 4)), 0.0)
    return curve(run.losses * (1 + (jump - 1) * decays)), baseline


class TestJump:
    @pytest.mark.parametrize("n", [300, 3000])
    @pytest.mark.parametrize("seed", range(5))
    def test_at_an_unknown_step_is_found_there(self, n: int, seed: int) -> None:
        found = find_largest_loss_jump(*other_batches(n, seed, 1.15))
        assert found is not None and abs(found[0] - n // 2) <= n // 40 and 5 < found[1] < 16

    @pytest.mark.parametrize("carried", [0.0, 0.3, 0.7])
    def test_noise_jumps_in_no_more_runs_than_it_says(self, carried: float) -> None:
        assert sum(find_largest_loss_jump(*other_batches(300, seed, 1.0, carried)) is not None for seed in range(200)) <= 4

    def test_neither_does_a_spike_nor_a_baseline_that_falls_faster(self) -> None:
        run, baseline = other_batches(300, 0)
        spiked = run.losses * np.where(np.arange(300) == 150, 4.0, 1.0)
        assert find_largest_loss_jump(curve(spiked), baseline) is None
        assert find_largest_loss_jump(run, curve(baseline.losses * np.where(np.arange(300) >= 150, 0.9, 1.0))) is None

    def test_a_long_spike_that_comes_back_does_not_last(self) -> None:
        run, baseline = other_batches(3000, 0)
        spiked = curve(run.losses * np.where((np.arange(3000) >= 1500) & (np.arange(3000) < 1700), 1.5, 1.0))
        assert (
            find_largest_loss_jump(spiked, baseline, -1.0) is not None
            and find_largest_loss_jump(spiked, baseline, 2.0) is None
        )
        assert LossOutcome(spiked, baseline, same_model=True).harm == "unknown"

    def test_nor_what_the_baseline_does_there_too(self) -> None:
        both = [curve(each.losses * np.where(np.arange(300) >= 150, 1.2, 1.0)) for each in other_batches(300, 0)]
        assert find_largest_loss_jump(*both) is None

    @pytest.mark.parametrize("losses", [[2.0] * 20, [2.0] * 300, [0.0] * 300, [np.nan] * 300, [2.0] * 299 + [np.inf]])
    def test_odd_losses_have_none(self, losses: list[float]) -> None:
        assert find_largest_loss_jump(curve(losses), curve([2.0] * 300)) is None

    @pytest.mark.parametrize(("jump", "above", "likely"), [(1.15, 1.03, True), (1.0, 1.03, False), (1.15, 0.98, False)])
    def test_makes_harm_likely_where_the_run_ends_above_the_baseline(self, jump: float, above: float, likely: bool) -> None:
        found = LossOutcome(*other_batches(600, 1, jump, above=above), same_model=True)
        assert (found.harm == "likely") == likely
        if likely:
            assert found.harm_onset_step is not None and found.level_shift and abs(found.level_shift[0] - 300) <= 15
            assert "jumped by" in tell_loss_outcome(found) and "so harm is likely" in tell_loss_outcome(found)
        else:
            assert found.harm_onset_step is None and "jumped" not in tell_loss_outcome(found)
