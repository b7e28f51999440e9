"""Good and bad records side by side: the culprit, the verdict, the losses, and records that cannot be read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from samples import FINGERPRINT, sample
from typer.testing import CliRunner, Result

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.comparison.comparison import Comparison
from nemo_fp8_debug.analysis.comparison.summary import summarize, to_json
from nemo_fp8_debug.analysis.runs.loss import LossCurve
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.errors import RecordError
from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.record.writer import RunRecord

STEPS = range(0, 200, 20)
CULPRIT = ("decoder.layers.1.mlp.linear_fc2", "input")
VANISHING = ("decoder.layers.0.mlp.linear_fc1", "grad_output")
STEADY = ("decoder.layers.0.self_attention.linear_qkv", "weight")

#: a tensor that FP8 holds without error, as one of powers of two, and one of zeros
EXACT, NO_ERROR = ("exact", "weight"), {"mse": 0.0, "relative_error": 0.0, "underflow_pct": 0.0, "sqnr_db": None}
ZERO, OF_ZEROS = ("zero", "grad_output"), NO_ERROR | {"relative_error": None, "cosine": None, "amin": None, "amax": 0.0}

Rows = Callable[[int], list[dict[str, Any]]]
Losses = Mapping[int, float]


def row(tensor: tuple[str, str], **metrics: Any) -> dict[str, Any]:
    layer, role = tensor
    return {"layer": layer, "gemm": layer.rpartition(".")[2], "role": role, **metrics}


def healthy(step: int) -> list[dict[str, Any]]:
    return [row(VANISHING, mse=1e-10), row(STEADY), row(CULPRIT, mse=1e-5)]


def broken(step: int) -> list[dict[str, Any]]:
    """One tensor underflows more and more; behind it, a gradient vanishes, with what its quantization costs."""
    grown = step / max(STEPS)
    return [
        row(VANISHING, mse=1e-10 * 10 ** (-4 * grown), underflow_pct=0.1 + 90 * grown, relative_error=0.026 + 0.9 * grown),
        row(STEADY),
        row(CULPRIT, mse=1e-5 * 10 ** (3 * grown), underflow_pct=0.1 + 30 * grown, relative_error=0.026 + 0.3 * grown),
    ]


def all_nan(step: int) -> list[dict[str, Any]]:
    """What is left to say of a step whose tensors hold nothing but NaN."""
    return [healthy_row | dict.fromkeys(METRICS) | {"n": 0, "nan": 4096} for healthy_row in healthy(step)]


def falling(n: int = 200) -> dict[int, float]:
    """A loss that falls from 5 towards 2, with 1% of noise."""
    noise = np.random.default_rng(0).normal(0, 0.01, n)
    return {i: float((2 + 3 * np.exp(-i / 30)) * (1 + noise[i])) for i in range(n)}


def rising(since: int = 120) -> dict[int, float]:
    """The same, until it rises without return."""
    return {i: loss + max(0, i - since) * 0.05 for i, loss in falling().items()}


def write(folder: Path, rows: Rows | None, losses: Losses, steps: Sequence[int] = STEPS) -> Path:
    record = RunRecord(folder)
    record.open(FINGERPRINT)
    for step in steps if rows else ():
        record.record(sample(step, rows(step)))
    record.record_steps({step: {"loss": loss} for step, loss in losses.items()})
    record.close()
    return folder


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return write(tmp_path / "baseline", healthy, falling())


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return write(tmp_path / "bad", broken, rising())


def ranking(found: Comparison) -> list[tuple[str, str]]:
    return list(zip(found.tensors["layer"], found.tensors["role"], strict=True))


class TestRanking:
    def test_the_culprit_comes_before_the_gradient_that_vanishes_behind_it(self, baseline: Path, bad: Path) -> None:
        found = ranking(compare(baseline, bad))
        assert found[0] == CULPRIT
        assert found[1:] in ([STEADY, VANISHING], [VANISHING, STEADY])

    def test_a_vanishing_gradient_does_not_count_as_drift(self, baseline: Path, bad: Path) -> None:
        drift = {(r["layer"], r["role"]): r["drift_log2"] for r in compare(baseline, bad).tensors.iter_rows(named=True)}
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
        assert compare(baseline, bad).tensors["drift_log2"].to_list() == [pytest.approx(drift)]

    @pytest.mark.parametrize("metric", ["overflow_pct", "relative_error"])
    def test_other_harm_than_underflow_counts_too(self, tmp_path: Path, baseline: Path, metric: str) -> None:
        def harmed(step: int) -> list[dict[str, Any]]:
            return [row(VANISHING, mse=1e-10), row(STEADY), row(CULPRIT, **{"mse": 1e-3, metric: 0.5})]

        assert ranking(compare(baseline, write(tmp_path / "bad", harmed, rising())))[0] == CULPRIT

    def test_only_the_later_half_counts(self, tmp_path: Path, baseline: Path) -> None:
        def warming_up(step: int) -> list[dict[str, Any]]:
            return healthy(step) if step >= 100 else broken(max(STEPS))

        found = compare(baseline, write(tmp_path / "bad", warming_up, falling()))
        assert found.tensors["drift_log2"].to_list() == [0, 0, 0]

    def test_only_steps_that_both_runs_sampled_count(self, tmp_path: Path, baseline: Path) -> None:
        def broken_in_between(step: int) -> list[dict[str, Any]]:
            return healthy(step) if step in STEPS else broken(max(STEPS))

        bad = write(tmp_path / "bad", broken_in_between, falling(), steps=range(0, 200, 5))
        assert compare(baseline, bad).tensors["drift_log2"].to_list() == [0, 0, 0]

    def test_a_tensor_that_fp8_holds_exactly_does_not_drift(self, tmp_path: Path) -> None:
        def both(rows: Rows) -> Rows:
            return lambda step: [row(EXACT, **NO_ERROR), row(ZERO, **OF_ZEROS), *rows(step)]

        baseline = write(tmp_path / "baseline", both(healthy), falling())
        bad = write(tmp_path / "bad", both(broken), rising())
        found = compare(baseline, bad)
        assert ranking(found)[0] == CULPRIT
        assert {r["drift_log2"] for r in found.tensors.to_dicts() if r["layer"] in ("exact", "zero")} <= {0, None}


class TestVerdict:
    def test_names_the_culprit_and_the_step(self, baseline: Path, bad: Path) -> None:
        found = compare(baseline, bad)
        verdict = summarize(found)
        assert f"X of {CULPRIT[0]}" in verdict
        assert VANISHING[0] not in verdict
        assert f"rises for good from step {found.run.loss.diverged_at}" in verdict

    def test_of_a_tensor_that_fp8_holds_exactly_has_no_nan(self, tmp_path: Path) -> None:
        run = write(tmp_path / "run", lambda step: [row(EXACT, **NO_ERROR)], falling())
        assert "nan" not in summarize(compare(run, run))

    def test_says_so_where_the_loss_does_not_leave(self, tmp_path: Path, baseline: Path) -> None:
        found = compare(baseline, write(tmp_path / "bad", broken, falling()))
        assert "loss follows the baseline's" in summarize(found)

    def test_tells_a_slower_fall_from_a_rise(self, tmp_path: Path, baseline: Path) -> None:
        slower = {i: loss * 1.3 for i, loss in falling().items()}
        verdict = summarize(compare(baseline, write(tmp_path / "bad", broken, slower)))
        assert "stays above the baseline's from step 0" in verdict
        assert "does not rise above its own minimum" in verdict

    def test_a_twin_that_holds_puts_the_blame_on_the_difference(self, tmp_path: Path, baseline: Path, bad: Path) -> None:
        verdict = summarize(compare(baseline, bad, write(tmp_path / "reference", None, falling())))
        assert "The reference run does not diverge" in verdict

    def test_a_twin_that_diverges_too_acquits_fp8(self, tmp_path: Path, baseline: Path, bad: Path) -> None:
        verdict = summarize(compare(baseline, bad, write(tmp_path / "reference", None, rising(100))))
        assert "The reference run's loss diverges too" in verdict
        assert "FP8 is not the only cause" in verdict

    def test_a_twin_of_a_run_that_did_not_diverge_has_nothing_to_tell(self, tmp_path: Path, baseline: Path) -> None:
        verdict = summarize(compare(baseline, write(tmp_path / "bad", healthy, falling()), baseline))
        assert "reference run tells nothing more" in verdict

    def test_a_run_that_ended_in_nan_everywhere_has_a_verdict(self, tmp_path: Path, baseline: Path) -> None:
        losses = {i: loss if i < 100 else float("nan") for i, loss in falling().items()}
        bad = write(tmp_path / "bad", lambda step: healthy(step) if step < 100 else all_nan(step), losses)
        assert "rises for good from step 100" in summarize(compare(baseline, bad))


def curve(losses: npt.ArrayLike) -> LossCurve:
    values = np.asarray(losses, np.float64)
    return LossCurve.of(pl.DataFrame({"step": np.arange(len(values)), "loss": values}))


class TestLossCurve:
    def test_a_clean_run_did_not_diverge(self) -> None:
        assert curve(list(falling().values())).diverged_at is None

    @pytest.mark.parametrize("n", [50, 100, 1000])
    def test_noise_is_no_divergence(self, n: int) -> None:
        """3% of noise, as small batches have, on a loss that has long stopped to fall."""
        runs = [curve(2 * (1 + np.random.default_rng(seed).normal(0, 0.03, n))) for seed in range(20)]
        assert [run.diverged_at for run in runs if run.diverged_at is not None] == []

    @pytest.mark.parametrize("n", [50, 100, 1000])
    def test_noise_does_not_set_two_runs_apart(self, n: int) -> None:
        runs = [curve(2 * (1 + np.random.default_rng(seed).normal(0, 0.03, n))) for seed in range(21)]
        apart = [b.above(a) for a, b in itertools.pairwise(runs)]
        assert [step for step in apart if step is not None] == []

    @pytest.mark.parametrize("at", [0, 60, 198, 199])
    def test_a_lone_spike_is_not_counted(self, at: int) -> None:
        losses = np.array(list(falling().values()))
        losses[at] = 50
        assert curve(losses).diverged_at is None

    @pytest.mark.parametrize("since", [60, 120, 180])
    def test_a_divergence_is_found_near_its_step(self, since: int) -> None:
        losses = np.array(list(falling().values()))
        losses[since:] += 1
        assert curve(losses).diverged_at == pytest.approx(since, abs=2)

    def test_steps_are_those_of_the_table(self) -> None:
        table = pl.DataFrame({"step": [30, 10, 20, 40, 50, 60], "loss": [1.0, 2.0, 1.5, 9.0, 9.0, 9.0]})
        assert LossCurve.of(table).diverged_at == 40

    def test_the_later_row_of_a_step_counts(self) -> None:
        table = pl.DataFrame({"step": [0, 1, 1], "loss": [1.0, 7.0, 3.0]})
        assert LossCurve.of(table).losses.tolist() == [1, 3]

    @pytest.mark.parametrize("gone", [np.nan, np.inf])
    def test_a_loss_that_is_no_longer_a_number_diverged(self, gone: float) -> None:
        losses = np.array(list(falling().values()))
        losses[90:] = gone
        found = curve(losses)
        assert found.diverged_at == pytest.approx(90, abs=2)
        # A running median of a falling loss with infinities in its window turns a little early.
        assert found.above(curve(list(falling().values()))) == pytest.approx(90, abs=4)
        assert found.lowest is not None
        assert found.lowest[1] < 3

    def test_a_lone_nan_is_not_counted(self) -> None:
        losses = np.array(list(falling().values()))
        losses[90] = np.nan
        assert curve(losses).diverged_at is None

    def test_no_losses(self) -> None:
        none = curve([])
        assert (none.final, none.lowest, none.diverged_at) == (None, None, None)
        assert none.above(curve([1.0])) is None
        assert curve([1.0]).above(none) is None

    def test_a_single_loss(self) -> None:
        one = curve([3.0])
        assert (one.final, one.lowest, one.diverged_at) == (3, (0, 3), None)
        assert one.above(one) is None
        assert one.above(curve([2.0])) is None  # one step is not "for good"

    def test_above_compares_at_the_same_step(self) -> None:
        fast, slow = curve(np.linspace(5, 1, 100)), curve(np.linspace(5, 3, 100))
        assert slow.above(fast) == pytest.approx(5, abs=5)  # where they are 2% apart
        assert fast.above(slow) is None

    def test_above_compares_runs_that_logged_other_steps(self) -> None:
        def every_tenth(losses: Losses) -> LossCurve:
            return LossCurve.of(pl.DataFrame({"step": range(0, 200, 10), "loss": [losses[i] for i in range(0, 200, 10)]}))

        fine, coarse = curve(list(falling().values())), every_tenth(falling())
        assert coarse.above(fine) is fine.above(coarse) is None
        assert curve(list(rising().values())).above(coarse) == pytest.approx(123, abs=5)
        assert every_tenth(rising()).above(fine) == pytest.approx(125, abs=10)


class TestRefused:
    def test_no_step_in_common(self, tmp_path: Path, baseline: Path) -> None:
        late = write(tmp_path / "late", broken, rising(), steps=range(1005, 1100, 20))
        with pytest.raises(RecordError, match="no sampled step and tensor in common") as error:
            compare(baseline, late)
        assert "has steps 0 to 180" in str(error.value)
        assert "has steps 1005 to 1085" in str(error.value)

    def test_no_layer_in_common(self, tmp_path: Path, baseline: Path) -> None:
        other = write(tmp_path / "other", lambda step: [row(("fc", "input"))], rising())
        with pytest.raises(RecordError, match="layers such as fc"):
            compare(baseline, other)

    def test_a_run_without_samples(self, tmp_path: Path, baseline: Path) -> None:
        empty = write(tmp_path / "empty", None, {})
        with pytest.raises(RecordError, match="empty has no sampled step"):
            compare(baseline, empty)

    @pytest.mark.parametrize("which", ["baseline", "run", "reference"])
    def test_a_missing_run_is_named(self, tmp_path: Path, baseline: Path, bad: Path, which: str) -> None:
        paths = {"baseline": baseline, "run": bad, "reference": None} | {which: tmp_path / "missing"}
        with pytest.raises(RecordError, match="missing holds no run record"):
            compare(**paths)


class TestWhatIf:
    """Recipes that were measured in the run, or replayed from it, say whether they would have helped."""

    def tried(self, folder: Path) -> Path:
        record = RunRecord(folder)
        record.open(FINGERPRINT)
        for step in STEPS:
            rows = broken(step)
            better = sample(step, [{**row, "recipe": "current-hybrid", "relative_error": 0.01} for row in rows])
            record.record(dataclasses.replace(sample(step, rows), what_if=better.columns))
        record.record_steps({step: {"loss": loss} for step, loss in rising().items()})
        record.close()
        return folder

    def test_the_verdict_says_what_they_would_have_done_to_the_culprit(self, tmp_path: Path, baseline: Path) -> None:
        found = compare(baseline, self.tried(tmp_path / "what_if"))
        assert "Under current-hybrid its relative error would be 0.01 instead of" in summarize(found)
        rows = found.what_if()
        assert set(rows["recipe"]) == {"current-hybrid"} and set(rows["relative_error"]) == {0.01}
        assert to_json(found)["what_if"] == rows.to_dicts()

    def test_without_them_nothing_is_said(self, baseline: Path, bad: Path) -> None:
        assert "Under " not in summarize(compare(baseline, bad))


class TestOrder:
    def test_the_culprit_leaves_the_good_runs_band_first_and_before_the_loss(self, baseline: Path, bad: Path) -> None:
        found = compare(baseline, bad)
        assert found.out_of_band.select("layer", "role").rows()[0] == CULPRIT
        assert set(found.out_of_band.select("layer", "role").rows()) == {CULPRIT}
        first, since = found.out_of_band["onset"][0], found.run.loss.above(found.baseline.loss)
        assert since is not None and first < since
        sentence = f"is X of {CULPRIT[0]}, from step {first}, {since - first} steps before the loss:"
        assert f"The first tensor out of the baseline's band {sentence}" in summarize(found)

    def test_a_run_like_the_good_one_has_none(self, tmp_path: Path, baseline: Path) -> None:
        again = write(tmp_path / "again", healthy, falling())
        assert "No tensor leaves the baseline's band." in summarize(compare(baseline, again))


class TestWithoutLosses:
    """Records made from others' logs may have none."""

    def test_tensors_are_compared_and_nothing_is_said_of_the_loss(self, tmp_path: Path, baseline: Path) -> None:
        bad = write(tmp_path / "bad", broken, {})
        found = compare(baseline, bad)
        assert ranking(found)[0] == CULPRIT
        assert summarize(found).startswith(
            "Not both records have losses, so only tensors are compared. The first tensor out of"
        )
        assert " before the loss" not in summarize(found) and " The tensor that drifted farthest is" in summarize(found)

    def test_a_twin_without_losses(self, tmp_path: Path, baseline: Path, bad: Path) -> None:
        reference = write(tmp_path / "reference", broken, {})
        assert summarize(compare(baseline, bad, reference)).endswith(
            "The reference run's record has no losses, so it tells nothing."
        )

    def test_records_without_a_metric_in_common(self, tmp_path: Path) -> None:
        none = dict.fromkeys(METRICS)
        runs = [write(tmp_path / name, lambda step: [{"layer": "a"} | none], {}) for name in ("a", "b")]
        assert summarize(compare(*runs)).endswith("No metric that both records have tells their tensors apart.")


def run_cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def tables_of(result: Result) -> list[list[str]]:
    """The lines that name layers: of the ranking, and of the order in which tensors left the band."""
    parts = result.output.partition("Order in which")
    return [[line for line in part.splitlines() if "decoder.layers" in line and "│" in line] for part in parts[::2]]


def strict_json(text: str) -> Any:
    """Parse as other languages do: NaN and Infinity are not valid JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


class TestCommandLine:
    def test_prints_losses_ranking_and_verdict(self, baseline: Path, bad: Path) -> None:
        result = run_cli(baseline, bad)
        assert result.exit_code == 0
        ranked, left = tables_of(result)
        assert CULPRIT[0] in ranked[0]
        assert len(ranked) == 3
        assert "0.1 ->" in ranked[0]
        found = compare(baseline, bad)
        assert (
            len(left) == len(found.out_of_band) and CULPRIT[0] in left[0] and str(found.out_of_band["onset"][0]) in left[0]
        )
        assert result.output.splitlines()[-1] == summarize(compare(baseline, bad))

    def test_lists_no_more_tensors_than_asked(self, baseline: Path, bad: Path) -> None:
        result = run_cli(baseline, bad, "--top", 1)
        assert [len(table) for table in tables_of(result)] == [1, 1]

    def test_json_holds_everything(self, tmp_path: Path, baseline: Path, bad: Path) -> None:
        reference = write(tmp_path / "reference", None, falling())
        result = run_cli(baseline, bad, "--reference", reference, "--json", "--top", 1)
        assert result.exit_code == 0
        assert strict_json(result.stdout) == json.loads(json.dumps(to_json(compare(baseline, bad, reference))))
        found = strict_json(result.stdout)
        assert set(found["runs"]) == {"baseline", "run", "reference"}
        assert len(found["tensors"]) == 3
        assert found["tensors"][0]["layer"] == CULPRIT[0]

    def test_json_of_a_loss_that_is_no_longer_a_number(self, tmp_path: Path, baseline: Path) -> None:
        losses = {i: loss if i < 100 else float("nan") for i, loss in falling().items()}
        bad = write(tmp_path / "bad", broken, losses)
        assert strict_json(run_cli(baseline, bad, "--json").stdout)["runs"]["run"]["diverged_at"] == 100

    @pytest.mark.parametrize("in_bad", [NO_ERROR, {}], ids=["in both runs", "in the baseline"])
    def test_json_of_a_tensor_that_fp8_holds_exactly(self, tmp_path: Path, in_bad: dict[str, Any]) -> None:
        baseline = write(tmp_path / "baseline", lambda step: [row(EXACT, **NO_ERROR)], falling())
        bad = write(tmp_path / "bad", lambda step: [row(EXACT, **in_bad)], falling())
        assert len(strict_json(run_cli(baseline, bad, "--json").stdout)["tensors"]) == 1

    @pytest.mark.parametrize("name", ["missing", "runs [bf16]", "runs [/a]"])
    def test_a_missing_run_is_an_error_in_one_line(self, tmp_path: Path, baseline: Path, name: str) -> None:
        result = run_cli(baseline, tmp_path / name)
        assert isinstance(result.exception, SystemExit)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr == f"error: {tmp_path / name} holds no run record (a folder with attempt-0.json)\n"

    def test_a_damaged_part_is_a_warning_in_one_line_and_the_rest_is_compared(self, baseline: Path, bad: Path) -> None:
        part = next((bad / "metrics").iterdir())
        part.write_bytes(part.read_bytes()[:-50])
        result = run_cli(baseline, bad)
        assert result.exit_code == 0
        assert result.stderr.startswith(f"warning: {part} is left out, it cannot be read")
        assert result.stderr.count("\n") == 1
        assert "The tensor that drifted farthest is" in result.stdout


class TestMistakes:
    def test_runs_that_were_swapped_are_asked_about(self, baseline: Path, bad: Path) -> None:
        assert compare(bad, baseline).notes[0].endswith("were the two swapped?")
        assert not any("swapped" in note for note in compare(baseline, bad).notes)

    def test_the_same_run_twice_is_said(self, baseline: Path) -> None:
        assert compare(baseline, baseline).notes[0] == "Both runs are the same record."

    def test_what_would_steer_a_terminal_is_shown_and_no_name_becomes_an_emoji(self, tmp_path: Path) -> None:
        def odd(step: int) -> list[dict[str, Any]]:
            return [row(("a\x1b]0;pwned\x07[bold]:dog:", "input"))]

        paths = [write(tmp_path / name, odd, falling()) for name in ("a", "b")]
        result = run_cli(*paths)
        assert "\x1b" not in result.output and "\x07" not in result.output
        assert r"a\x1b]0;pwned\x07[bold]:dog:" in result.output

    def test_a_record_of_another_schema_is_refused_in_one_line(self, baseline: Path, bad: Path) -> None:
        for part in (bad / "metrics").iterdir():
            pl.DataFrame({"a": [1]}).write_parquet(part)
        fingerprint = json.loads((bad / "attempt-0.json").read_text())
        (bad / "attempt-0.json").write_text(json.dumps(fingerprint | {"schema_version": 99}))
        result = run_cli(baseline, bad)
        assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
        assert "schema version 99" in result.stderr
