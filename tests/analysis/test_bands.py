"""Bands of healthy runs: what is beyond them, what they do not know, the file, the command, and those of the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from diagnosed_runs import CULPRIT, LAYERS, ONSET, N, trending, write
from fault_injection.judge import bands_without, learned_from
from typer.testing import CliRunner

from nemo_fp8_debug.analysis.bands.bands import FEWEST, SHIPPED, HealthyBands, choose_bands, judge_by_bands, shipped
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.errors import RecordError

RATES = {i: 1e-3 * min(1.0, (i + 1) / 20) for i in range(N)}


def healthy(seed: int, **always: Any) -> Any:
    """Metrics of X with noise of their own."""

    def change(step: int) -> Mapping[str, Any]:
        noise = np.random.default_rng([seed, step]).normal(0, 0.05)
        return {"outlier_log2": 3.0 + noise, "underflow_pct": 0.2 + abs(noise), **always}

    return change


@pytest.fixture(scope="module")
def healthy_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("healthy")
    return [write(folder / str(seed), healthy(seed), culprit=LAYERS, lr=RATES) for seed in range(FEWEST)]


@pytest.fixture(scope="module")
def bands(healthy_runs: list[Path]) -> HealthyBands:
    return HealthyBands.learn(map(Run.read, healthy_runs))


def late(step: int, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**healthy(99)(step), **(metrics if step >= ONSET else {})}


class TestJudged:
    def test_another_healthy_run_is_within_them_and_is_told_so(self, tmp_path: Path, bands: HealthyBands) -> None:
        run = write(tmp_path / "run", healthy(99), culprit=LAYERS, lr=RATES)
        found = diagnose(run, bands=bands)
        assert (found.cause, found.confidence, found.culprit) == ("none", None, None)
        assert f"Bands of {FEWEST} healthy runs replace the baseline for 12 of 12 operands" in " ".join(found.notes)

    @pytest.mark.parametrize(
        "metrics",
        [
            {"outlier_log2": 12.0, "underflow_pct": 2.0},
            {"underflow_pct": 3.0},
            {"scale_ratio_log2": 2.5},
            {"scale_ratio_log2": -12.0},
            {"relative_error": 0.12},
        ],
    )
    def test_what_no_healthy_run_did_is_named(self, tmp_path: Path, bands: HealthyBands, metrics: dict[str, float]) -> None:
        run = write(tmp_path / "run", lambda step: late(step, metrics))
        found = diagnose(run, bands=bands)
        assert found.culprit and (found.culprit.layer, found.culprit.since) == (CULPRIT, ONSET)
        assert found.confidence != "low"

    def test_from_the_first_sample_on_too(self, tmp_path: Path, bands: HealthyBands) -> None:
        run = write(tmp_path / "run", healthy(99, outlier_log2=12.0, underflow_pct=2.0), lr=RATES)
        assert diagnose(run, bands=bands).culprit is not None and diagnose(run).culprit is None

    def test_an_outlier_that_costs_no_values_is_none(self, tmp_path: Path, bands: HealthyBands) -> None:
        run = write(tmp_path / "run", lambda step: late(step, {"outlier_log2": 12.0}))
        assert judge_by_bands(Run.read(run), bands).beyond.is_empty()

    @pytest.mark.parametrize(("off", "beyond"), [(-0.5, False), (2.5, True)])
    def test_a_scale_that_clips_nothing_is_within_bands_of_smaller_ones(
        self, tmp_path: Path, bands: HealthyBands, off: float, beyond: bool
    ) -> None:
        """As files of earlier releases have them."""
        too_large = (pl.col("metric") == "scale_ratio_log2") & (pl.col("sign") == 1)
        kept = (pl.when(too_large).then(-3.0).otherwise(name).alias(name) for name in ("median", "lasting"))
        smaller = replace(bands, table=bands.table.with_columns(kept))
        run = Run.read(write(tmp_path / "run", lambda step: late(step, {"scale_ratio_log2": off})))
        assert judge_by_bands(run, smaller).beyond.is_empty() != beyond

    def test_a_trend_within_them_is_no_hint(self, tmp_path: Path) -> None:
        runs = [write(tmp_path / str(i), trending, culprit=LAYERS, lr=RATES) for i in range(FEWEST)]
        found = diagnose(write(tmp_path / "run", trending, lr=RATES), bands=HealthyBands.learn(map(Run.read, runs)))
        assert found.cause == "none" and not [f for f in found.findings if f.rule == "operand"]


class TestCoverage:
    @pytest.mark.parametrize("other", [{"recipe": "mxfp8-e4m3"}, {"n": 1 << 20}, {"n": 16}])
    def test_other_recipes_and_sizes_are_not_judged(
        self, tmp_path: Path, bands: HealthyBands, other: dict[str, Any]
    ) -> None:
        change = healthy(99, underflow_pct=3.0, **other)
        run = write(tmp_path / "run", change, culprit=LAYERS, changed="weight", lr=RATES)
        found = judge_by_bands(Run.read(run), bands)
        assert not (found.covered["role"] == "weight").any() and found.beyond.is_empty() and not found.is_mostly_covered

    def test_names_that_do_not_tell_what_a_gemm_is_for_are_not_judged(self, tmp_path: Path, bands: HealthyBands) -> None:
        run = write(tmp_path / "run", healthy(99), layers=["adapter.one", "adapter.two"])
        found = judge_by_bands(Run.read(run), bands)
        assert (len(found.covered), found.operands) == (0, 6)
        assert "no bands were learned for operands with" in " ".join(diagnose(run, bands=bands).notes)

    def test_fewer_runs_than_six_are_no_band(self, healthy_runs: list[Path], tmp_path: Path) -> None:
        few = HealthyBands.learn(map(Run.read, healthy_runs[:-1]))
        assert judge_by_bands(Run.read(write(tmp_path / "run", healthy(99), lr=RATES)), few).covered.is_empty()

    def test_those_of_the_package_are_for_models_of_the_same_class(self, tmp_path: Path, bands: HealthyBands) -> None:
        run = Run.read(write(tmp_path / "run"))
        known = shipped()
        assert known and choose_bands(run, None) is None and choose_bands(run, bands) is bands
        run.fingerprint["model"] = {"class": known.families[0]}
        assert choose_bands(run, None) is known
        assert "no bands were learned from healthy runs" in " ".join(diagnose(tmp_path / "run").notes)


class TestFile:
    def test_comes_back_as_it_was(self, tmp_path: Path, bands: HealthyBands) -> None:
        bands.write(tmp_path / "bands.parquet")
        again = HealthyBands.read(tmp_path / "bands.parquet")
        assert again.table.equals(bands.table.select(again.table.columns), null_equal=True)
        assert (again.runs, again.families) == (bands.runs, bands.families)

    @pytest.mark.parametrize("content", [b"", b"PAR1PAR1", b"{}", None])
    def test_a_foreign_file_is_one_line(self, tmp_path: Path, content: bytes | None) -> None:
        path = tmp_path / "bands.parquet"
        if content is None:
            pl.DataFrame({"step": [1]}).write_parquet(path)
        else:
            path.write_bytes(content)
        with pytest.raises(RecordError, match="contains no bands of healthy runs"):
            HealthyBands.read(path)
        with pytest.raises(RecordError, match="there is no file"):
            HealthyBands.read(tmp_path / "missing.parquet")

    def test_no_runs_teach_nothing(self) -> None:
        with pytest.raises(RecordError, match="no runs to learn from"):
            HealthyBands.learn([])


class TestCommand:
    def test_learns_and_diagnose_judges_by_it(self, tmp_path: Path, healthy_runs: list[Path]) -> None:
        output, run = tmp_path / "bands.parquet", write(tmp_path / "run", lambda step: late(step, {"underflow_pct": 3.0}))
        learned = CliRunner().invoke(app, ["learn", *map(str, healthy_runs), "--output", str(output)])
        assert learned.exit_code == 0 and f"{FEWEST} runs of" in learned.stdout, learned.output
        told = CliRunner().invoke(app, ["diagnose", str(run), "--bands", str(output), "--json"])
        assert json.loads(told.stdout)["culprit"]["layer"] == CULPRIT
        again = CliRunner().invoke(app, ["learn", str(run), "--output", str(output)])
        assert again.exit_code == 1 and "is not overwritten" in again.stderr

    def test_says_what_too_few_runs_are_not_enough_for(self, tmp_path: Path, healthy_runs: list[Path]) -> None:
        learned = CliRunner().invoke(app, ["learn", str(healthy_runs[0]), "--output", str(tmp_path / "b.parquet")])
        assert learned.exit_code == 0 and f"come from fewer than {FEWEST} runs" in learned.stdout

    @pytest.mark.parametrize("given", ["missing.parquet", "."])
    def test_bands_that_are_none_are_one_line(self, tmp_path: Path, given: str) -> None:
        run = write(tmp_path / "run")
        told = CliRunner().invoke(app, ["diagnose", str(run), "--bands", str(tmp_path / given)])
        assert told.exit_code == 1 and told.stderr.count("\n") == 1


# Long tests rest on nemo_fp8_debug/analysis/bands/*.py.
@pytest.mark.long
def test_those_of_the_package_are_learned_from_the_runs_that_set_thresholds() -> None:
    fresh, kept = bands_without(None), HealthyBands.read(SHIPPED)
    assert kept.runs == fresh.runs == len(learned_from()) >= 70 and kept.families == fresh.families
    numbers, names = ["median", "lasting"], ["purpose", "role", "recipe", "part", "phase", "metric", "sign"]
    assert fresh.table.select(names).equals(kept.table.select(names).cast(fresh.table.select(names).schema))
    assert np.allclose(fresh.table.select(numbers).to_numpy(), kept.table.select(numbers).to_numpy(), equal_nan=True)
