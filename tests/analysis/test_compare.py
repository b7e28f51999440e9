"""Good and bad records side by side: the culprit, the verdict, and records that cannot be compared."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from compared_runs import (
    CULPRIT,
    EXACT,
    NO_ERROR,
    OF_ZEROS,
    STEADY,
    STEPS,
    VANISHING,
    ZERO,
    Rows,
    broken,
    falling,
    healthy,
    rising,
    row,
    write,
)
from samples import FINGERPRINT, sample

from nemo_fp8_debug.analysis.comparison.compare import Comparison, compare
from nemo_fp8_debug.analysis.loss.gap import find_rise_above_baseline
from nemo_fp8_debug.analysis.story.summary import serialize_comparison, summarize
from nemo_fp8_debug.errors import RecordError
from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.record.writer import RunRecordWriter


def all_nan(step: int) -> list[dict[str, Any]]:
    """What is left to say of a step whose tensors hold nothing but NaN."""
    return [healthy_row | dict.fromkeys(METRICS) | {"n": 0, "nan": 4096} for healthy_row in healthy(step)]


def ranking(found: Comparison) -> list[tuple[str, str]]:
    return list(zip(found.tensors["layer"], found.tensors["role"], strict=True))


class TestRanking:
    def test_the_culprit_comes_before_the_gradient_that_vanishes_behind_it(self, baseline: Path, bad: Path) -> None:
        found = ranking(compare(bad, baseline))
        assert found[0] == CULPRIT
        assert found[1:] in ([STEADY, VANISHING], [VANISHING, STEADY])

    def test_a_vanishing_gradient_does_not_count_as_drift(self, baseline: Path, bad: Path) -> None:
        drift = {(r["layer"], r["role"]): r["drift_log2"] for r in compare(bad, baseline).tensors.iter_rows(named=True)}
        assert drift[CULPRIT] > 3
        assert drift[VANISHING] < 0
        assert drift[STEADY] == 0

    def test_a_run_compared_with_itself_has_no_drift(self, baseline: Path) -> None:
        assert compare(baseline, baseline).tensors["drift_log2"].to_list() == [0, 0, 0]

    @pytest.mark.parametrize(
        ("before", "after", "drift"),
        [(0.1, 10.0, math.log2(10.01 / 0.11)), (0.0, 0.0005, math.log2(0.0105 / 0.01))],
        ids=["real", "noise"],
    )
    def test_drift_is_the_ratio_of_underflow_above_a_floor(
        self, tmp_path: Path, before: float, after: float, drift: float
    ) -> None:
        baseline = write(tmp_path / "baseline", lambda step: [row(CULPRIT, underflow_pct=before)], falling())
        bad = write(tmp_path / "bad", lambda step: [row(CULPRIT, underflow_pct=after, mse=1.0)], falling())
        assert compare(bad, baseline).tensors["drift_log2"].to_list() == [pytest.approx(drift)]

    @pytest.mark.parametrize("metric", ["overflow_pct", "relative_error"])
    def test_other_harm_than_underflow_counts_too(self, tmp_path: Path, baseline: Path, metric: str) -> None:
        def harmed(step: int) -> list[dict[str, Any]]:
            return [row(VANISHING, mse=1e-10), row(STEADY), row(CULPRIT, **{"mse": 1e-3, metric: 0.5})]

        assert ranking(compare(write(tmp_path / "bad", harmed, rising()), baseline))[0] == CULPRIT

    def test_only_the_later_half_counts(self, tmp_path: Path, baseline: Path) -> None:
        def warming_up(step: int) -> list[dict[str, Any]]:
            return healthy(step) if step >= 100 else broken(max(STEPS))

        found = compare(write(tmp_path / "bad", warming_up, falling()), baseline)
        assert found.tensors["drift_log2"].to_list() == [0, 0, 0]

    def test_only_steps_that_both_runs_sampled_count(self, tmp_path: Path, baseline: Path) -> None:
        def broken_in_between(step: int) -> list[dict[str, Any]]:
            return healthy(step) if step in STEPS else broken(max(STEPS))

        bad = write(tmp_path / "bad", broken_in_between, falling(), steps=range(0, 200, 5))
        assert compare(bad, baseline).tensors["drift_log2"].to_list() == [0, 0, 0]

    def test_a_tensor_that_fp8_holds_exactly_does_not_drift(self, tmp_path: Path) -> None:
        def both(rows: Rows) -> Rows:
            return lambda step: [row(EXACT, **NO_ERROR), row(ZERO, **OF_ZEROS), *rows(step)]

        baseline = write(tmp_path / "baseline", both(healthy), falling())
        bad = write(tmp_path / "bad", both(broken), rising())
        found = compare(bad, baseline)
        assert ranking(found)[0] == CULPRIT
        assert {r["drift_log2"] for r in found.tensors.to_dicts() if r["layer"] in ("exact", "zero")} <= {0, None}


class TestVerdict:
    def test_names_the_culprit_and_the_step(self, baseline: Path, bad: Path) -> None:
        found = compare(bad, baseline)
        verdict = summarize(found)
        assert f"X of {CULPRIT[0]}" in verdict
        assert VANISHING[0] not in verdict
        assert f"rises for good from step {found.run.loss.divergence_step}" in verdict

    def test_of_a_tensor_that_fp8_holds_exactly_has_no_nan(self, tmp_path: Path) -> None:
        run = write(tmp_path / "run", lambda step: [row(EXACT, **NO_ERROR)], falling())
        assert "nan" not in summarize(compare(run, run))

    def test_says_so_where_the_loss_does_not_leave(self, tmp_path: Path, baseline: Path) -> None:
        found = compare(write(tmp_path / "bad", broken, falling()), baseline)
        assert "loss follows the baseline's" in summarize(found)

    def test_tells_a_slower_fall_from_a_rise(self, tmp_path: Path, baseline: Path) -> None:
        slower = {i: loss * 1.3 for i, loss in falling().items()}
        verdict = summarize(compare(write(tmp_path / "bad", broken, slower), baseline))
        assert "The loss departed from the baseline's around step 0 and ended 30% above" in verdict
        assert "does not rise above its own minimum" in verdict

    def test_a_twin_that_holds_puts_the_blame_on_the_difference(self, tmp_path: Path, baseline: Path, bad: Path) -> None:
        verdict = summarize(compare(bad, baseline, write(tmp_path / "reference", None, falling())))
        assert "The reference run is not harmed." in verdict

    def test_a_twin_that_diverges_too_acquits_fp8(self, tmp_path: Path, baseline: Path, bad: Path) -> None:
        verdict = summarize(compare(bad, baseline, write(tmp_path / "reference", None, rising(100))))
        assert "The reference run diverged too at step 1" in verdict
        assert "FP8 does not explain the loss" in verdict

    def test_a_run_s_gap_to_a_twin_is_told_if_it_did_not_diverge(self, tmp_path: Path, baseline: Path) -> None:
        verdict = summarize(compare(write(tmp_path / "bad", healthy, falling()), baseline, baseline))
        assert "The run's gap to the reference run is 0% (95% interval 0 to 0%)" in verdict

    def test_a_run_that_ended_in_nan_everywhere_has_a_verdict(self, tmp_path: Path, baseline: Path) -> None:
        losses = {i: loss if i < 100 else float("nan") for i, loss in falling().items()}
        bad = write(tmp_path / "bad", lambda step: healthy(step) if step < 100 else all_nan(step), losses)
        assert "rises for good from step 100" in summarize(compare(bad, baseline))


class TestRefused:
    def test_no_step_in_common(self, tmp_path: Path, baseline: Path) -> None:
        late = write(tmp_path / "late", healthy, rising(), steps=range(1005, 1100, 20))
        with pytest.raises(RecordError, match="no sampled step and tensor in common") as error:
            compare(late, baseline)
        assert "has steps 0 to 180" in str(error.value)
        assert "has steps 1005 to 1085" in str(error.value)

    def test_no_layer_in_common(self, tmp_path: Path, baseline: Path) -> None:
        other = write(tmp_path / "other", lambda step: [row(("fc", "input"))], rising())
        with pytest.raises(RecordError, match="layers such as 'fc"):
            compare(other, baseline)

    def test_a_run_without_samples(self, tmp_path: Path, baseline: Path) -> None:
        empty = write(tmp_path / "empty", None, {})
        with pytest.raises(RecordError, match="empty has no sampled step"):
            compare(empty, baseline)

    @pytest.mark.parametrize("which", ["baseline", "run", "reference"])
    def test_a_missing_run_is_named(self, tmp_path: Path, baseline: Path, bad: Path, which: str) -> None:
        paths = {"baseline": baseline, "run": bad, "reference": None} | {which: tmp_path / "missing"}
        with pytest.raises(RecordError, match="missing holds no run record"):
            compare(**paths)


class TestWhatIf:
    """Recipes that were measured in the run, or replayed from it, say whether they would have helped."""

    def tried(self, folder: Path) -> Path:
        record = RunRecordWriter(folder)
        record.open(FINGERPRINT)
        for step in STEPS:
            rows = broken(step)
            better = sample(step, [{**row, "recipe": "current-hybrid", "relative_error": 0.01} for row in rows])
            record.record(
                dataclasses.replace(
                    sample(step, rows), tables={**sample(step, rows).tables, "what_if": better.operand_columns}
                )
            )
        record.record_steps({step: {"loss": loss} for step, loss in rising().items()})
        record.close()
        return folder

    def test_the_verdict_says_what_they_would_have_done_to_the_culprit(self, tmp_path: Path, baseline: Path) -> None:
        found = compare(self.tried(tmp_path / "what_if"), baseline)
        assert "Under current-hybrid its relative error would be 0.01 instead of" in summarize(found)
        rows = found.list_what_if_metrics()
        assert set(rows["recipe"]) == {"current-hybrid"} and set(rows["relative_error"]) == {0.01}
        assert serialize_comparison(found)["what_if"] == rows.to_dicts()

    def test_without_them_nothing_is_said(self, baseline: Path, bad: Path) -> None:
        assert "Under " not in summarize(compare(bad, baseline))


class TestOrder:
    def test_the_culprit_leaves_the_good_runs_band_first_and_before_the_loss(self, baseline: Path, bad: Path) -> None:
        found = compare(bad, baseline)
        assert found.out_of_band.select("layer", "role").rows()[0] == CULPRIT
        assert set(found.out_of_band.select("layer", "role").rows()) == {CULPRIT}
        first, since = found.out_of_band["onset"][0], find_rise_above_baseline(found.run.loss, found.baseline.loss)
        assert since is not None and first < since
        sentence = f"is X of {CULPRIT[0]}, from step {first}, {since - first} steps before the loss:"
        assert f"The first tensor out of the baseline's band {sentence}" in summarize(found)

    def test_a_run_like_the_good_one_has_none(self, tmp_path: Path, baseline: Path) -> None:
        again = write(tmp_path / "again", healthy, falling())
        assert "No tensor leaves the baseline's band." in summarize(compare(again, baseline))


class TestWithoutLosses:
    """Records made from others' logs may have none."""

    def test_tensors_are_compared_and_nothing_is_said_of_the_loss(self, tmp_path: Path, baseline: Path) -> None:
        bad = write(tmp_path / "bad", broken, {})
        found = compare(bad, baseline)
        assert ranking(found)[0] == CULPRIT
        assert summarize(found).startswith(
            "Not both records have losses, so only tensors are compared. The first tensor out of"
        )
        assert " before the loss" not in summarize(found) and " The tensor that drifted farthest is" in summarize(found)

    def test_a_twin_without_losses(self, tmp_path: Path, baseline: Path, bad: Path) -> None:
        reference = write(tmp_path / "reference", broken, {})
        assert summarize(compare(bad, baseline, reference)).endswith("The reference run has too few losses to judge.")

    def test_records_without_a_metric_in_common(self, tmp_path: Path) -> None:
        none = dict.fromkeys(METRICS)
        runs = [write(tmp_path / name, lambda step: [{"layer": "a"} | none], {}) for name in ("a", "b")]
        assert summarize(compare(*runs)).endswith("No metric that both records have tells their tensors apart.")
