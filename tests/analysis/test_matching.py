"""Runs that were not made alike: other intervals, lengths, batch sizes and recipes, several bad ones, one growing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import FINGERPRINT, sample
from unlike_runs import CULPRIT, first_out, rows, run_cli, write

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.comparison.onset import compute_running_median
from nemo_fp8_debug.analysis.runs.grid import SamplePairs, compute_last_axis_median
from nemo_fp8_debug.analysis.story.summary import serialize_comparison, summarize, tell_conclusion
from nemo_fp8_debug.errors import ConfigError
from nemo_fp8_debug.record.writer import RunRecordWriter


class TestPairs:
    @pytest.mark.parametrize(
        ("baseline", "bad", "pairs"),
        [
            ([0, 20, 40], [0, 5, 10, 15, 20, 25, 30, 35, 40], [(0, 0), (20, 20), (40, 40)]),
            ([0, 10, 20, 30], [0, 15, 30], [(0, 0), (10, 15), (30, 30)]),
            ([0, 10, 20], [4, 14, 24], [(0, 4), (10, 14), (20, 24)]),
            ([0, 10, 20], [100, 110], []),
            ([0, 10, 20], [10], [(10, 10)]),
            ([7], [7], [(7, 7)]),
            ([7], [8], []),
            ([], [1], []),
        ],
    )
    def test_samples_that_belong_together(self, baseline: list[int], bad: list[int], pairs: list[tuple[int, int]]) -> None:
        found = SamplePairs.pair_nearest(np.array(baseline, np.int64), np.array(bad, np.int64))
        assert [(baseline[i], bad[j]) for i, j in zip(found.baseline, found.run, strict=True)] == pairs


def with_holes(shape: tuple[int, int], share: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = np.round(rng.normal(size=shape), 1)  # with ties
    values[rng.random(shape) < share] = np.nan
    return values


@pytest.mark.parametrize("holes", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("n", [1, 5, 8, 9, 10, 40])
def test_medians_are_those_of_sorted_values(n: int, holes: float) -> None:
    values = with_holes((20, n), holes)
    for of_one, whole, smooth in zip(values, compute_last_axis_median(values), compute_running_median(values), strict=True):
        known = of_one[~np.isnan(of_one)]
        np.testing.assert_array_equal(whole, np.median(known) if len(known) else np.nan)
        for i in range(n):
            start = min(max(i - 4, 0), max(n - 9, 0))
            window = np.sort(of_one[start : start + 9])
            window = window[~np.isnan(window)]
            np.testing.assert_array_equal(smooth[i], window[(len(window) - 1) // 2] if len(window) else np.nan)


class TestSteps:
    @pytest.mark.parametrize("steps", [range(0, 200, 15), range(5, 200, 10), range(3, 200, 7), range(0, 90, 10)])
    def test_runs_of_other_intervals_and_lengths(self, tmp_path: Path, steps: range) -> None:
        baseline, bad = write(tmp_path / "baseline"), write(tmp_path / "bad", steps, since=40)
        found = compare(bad, baseline)
        onset = min(step for step in steps if step >= 40)
        assert found.out_of_band.select("layer", "role", "onset").rows()[0] == (*CULPRIT, onset)
        assert found.tensors.select("layer", "role").rows()[0] == CULPRIT and found.tensors["drift_log2"][0] > 3

    def test_what_comes_after_the_good_run_is_told(self, tmp_path: Path) -> None:
        baseline, bad = write(tmp_path / "baseline", range(0, 100, 10)), write(tmp_path / "bad", range(0, 300, 10))
        assert "The baseline's samples end at step 90, the run's at 290. Later samples are not compared." in (
            compare(bad, baseline).notes
        )

    def test_a_single_sample_ranks_and_says_that_it_tells_no_onset(self, tmp_path: Path) -> None:
        baseline, bad = write(tmp_path / "baseline", range(1)), write(tmp_path / "bad", range(1), since=0)
        found = compare(bad, baseline)
        assert found.tensors.select("layer", "role").rows()[0] == CULPRIT
        assert found.out_of_band.is_empty() and found.notes[0].startswith(
            "1 samples of the run are within the baseline's steps"
        )

    def test_a_record_that_still_grows(self, tmp_path: Path) -> None:
        baseline, bad = write(tmp_path / "baseline"), write(tmp_path / "bad", range(0, 120, 10), since=60, close=False)
        assert first_out(baseline, bad) == (*CULPRIT, 60)


class TestSamples:
    def test_batch_sizes_may_differ(self, tmp_path: Path) -> None:
        baseline, bad = write(tmp_path / "baseline", batch=8), write(tmp_path / "bad", range(0, 100, 5), since=50, batch=16)
        assert first_out(baseline, bad, by="samples") == (*CULPRIT, 800)
        assert "from sample 800" in summarize(compare(bad, baseline, by="samples"))

    def test_steps_between_those_that_know_are_filled_in(self, tmp_path: Path) -> None:
        baseline, bad = write(tmp_path / "baseline", batch=8), write(tmp_path / "bad", since=100, batch=8)
        record = RunRecordWriter(bad)
        record.open(FINGERPRINT)
        record.record_steps({step: {"loss": 9.0} for step in range(105, 190, 10)})
        record.close()
        loss = compare(bad, baseline, by="samples").run.loss
        assert dict(zip(loss.steps, loss.losses, strict=True))[105 * 8] == 9.0

    def test_a_run_that_does_not_know_is_refused(self, tmp_path: Path) -> None:
        baseline, bad = write(tmp_path / "baseline", batch=8), write(tmp_path / "bad")
        result = run_cli(baseline, bad, "--by", "samples")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"error: {bad} does not record consumed samples; match the runs by step\n"

    def test_another_way_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be matched by 'epochs'; choose from step, samples"):
            compare(tmp_path / "baseline", write(tmp_path / "baseline"), by="epochs")


class TestRecipes:
    def test_what_was_measured_differently_is_told(self, tmp_path: Path) -> None:
        runs = []
        for name, recipe, source in (("bf16", "delayed-hybrid", "emulated"), ("fp8", "current-hybrid", "engine")):
            record = RunRecordWriter(tmp_path / name)
            record.open(
                {"recipe": {"measured_against": recipe}, "risky_features_on": {"fp8_param": True} if name == "fp8" else {}}
            )
            for step in range(0, 100, 10):
                record.record(sample(step, [r | {"recipe": recipe, "scale_source": source} for r in rows()]))
            record.close()
            runs.append(tmp_path / name)
        found = compare(*runs)
        assert "different recipes (current-hybrid and delayed-hybrid)" in found.notes[0]
        assert list(found.notes[1:]) == ["Nothing in the run is quantized, so the metrics show what FP8 would do to it."]
        assert found.differences().rows() == [
            ("recipe.measured_against", "current-hybrid", "delayed-hybrid", True),
            ("risky_features_on.fp8_param", "True", None, True),
        ]


class TestWhere:
    def test_groups_and_lead(self, tmp_path: Path) -> None:
        baseline, bad = write(tmp_path / "baseline"), write(tmp_path / "bad", since=100)
        found = compare(bad, baseline)
        lead = found.out_of_band["lead"][0]
        assert found.divergence_step is not None and lead == found.divergence_step - 100
        groups = {(r["by"], r["group"]): r for r in found.count_out_of_band_groups().to_dicts()}
        assert groups["kind", "linear_fc2"] == groups["kind", "linear_fc2"] | {"tensors": 6, "out_of_band": 1, "onset": 100}
        assert groups["depth", "layer 0"]["out_of_band"] == 0 and groups["depth", "layer 1"]["out_of_band"] == 1
        assert groups["role", "X"]["tensors"] == 8 and groups["role", "dY"]["out_of_band"] == 0
        assert [r["lead"] for r in serialize_comparison(found)["tensors"][:2]] == [lead, None]

    @pytest.mark.parametrize(
        ("harmed", "said"),
        [
            (
                lambda r: r["layer"].endswith("linear_fc2") and r["role"] == "input",
                "All 12 tensors out of band are X of linear_fc2.",
            ),
            (lambda r: ".layers.0." in r["layer"], "All 12 tensors out of band are in layer 0, the first."),
            (lambda r: r["role"] == "grad_output", "All 48 tensors out of band are dY."),
            (
                lambda r: r["layer"].split(".")[2] in ("8", "9"),
                "All 24 tensors out of band are in the last third of the layers.",
            ),
            (lambda r: True, None),
        ],
    )
    def test_what_those_that_left_have_in_common(
        self, tmp_path: Path, harmed: Callable[[Any], bool], said: str | None
    ) -> None:
        for name, bad in (("baseline", False), ("bad", True)):
            record = RunRecordWriter(tmp_path / name)
            record.open(FINGERPRINT)
            for step in range(0, 60, 10):
                worse = {"underflow_pct": 30.0, "mse": 1.0} if bad and step >= 20 else {}
                record.record(sample(step, [r | (worse if harmed(r) else {}) for r in rows(depths=12)]))
            record.close()
        verdict = summarize(compare(tmp_path / "bad", tmp_path / "baseline"))
        assert (said in verdict) if said else ("tensors out of band are" not in verdict)


class TestSeveral:
    def test_each_is_compared_with_the_good_one(self, tmp_path: Path) -> None:
        baseline = write(tmp_path / "baseline")
        bad = [write(tmp_path / f"bad{since}", since=since) for since in (60, 120)]
        found = json.loads(run_cli(baseline, *bad, "--json").stdout)["comparisons"]
        assert [one["out_of_band"][0]["onset"] for one in found] == [60, 120]
        assert [one["runs"]["run"]["path"] for one in found] == [str(path) for path in bad]
        printed = run_cli(baseline, *bad).stdout
        assert all(tell_conclusion(compare(path, baseline)) in printed for path in bad)
