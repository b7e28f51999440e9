"""The band of a tensor, and since when it is out, as the tab answers it: held against what `compare` says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from banded_runs import CHANCE, FAR, MOVED, NOT_QUANTIZED, ONSET, SELDOM, write_runs
from runs_of_depth import of_depth, write_of_depth
from tab import Tab

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.analysis.comparison.compare import Comparison, compare
from nemo_fp8_debug.analysis.comparison.onset import EVIDENCE, AlignedRunSamples, compute_band_limits
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable, select_common_tensors
from nemo_fp8_debug.record.dump_names import dumped_files
from nemo_fp8_debug.tensorboard_plugin.records import baseline


def band(baseline: pl.DataFrame, run: pl.DataFrame, layer: str, role: str, metric: str) -> pl.DataFrame:
    """What decides whether a tensor is out: step, found, expected (running median of the baseline), limit (above which it is
    out), at the run's steps."""
    evidence = next(e for e in EVIDENCE if e.metric == metric)
    rows = (MetricsTable.from_rows(run.filter(layer=layer, role=role)) for run in (baseline, run))
    pair = AlignedRunSamples(*(metrics.grid for metrics in select_common_tensors(*rows)))
    expected, found = pair.compute_medians_and_values(metric)
    limit = compute_band_limits(evidence, pair)
    columns = {"found": found, "expected": expected, "limit": limit}
    return pl.DataFrame({"step": pair.steps} | {name: values.reshape(-1) for name, values in columns.items()})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("banded")
    write_runs(folder)
    return folder


@pytest.fixture(scope="module")
def found(pair: Path) -> Comparison:
    return compare(pair / "bad", pair / "good")


@pytest.fixture(scope="module")
def tab(pair: Path) -> Tab:
    return Tab(pair)


def answer(tab: Tab, layer: str, role: str = "input", **runs: str) -> Any:
    return tab.json("band", layer=layer, role=role, **({"run": "bad", "baseline": "good"} | runs))


def check_onsets(tab: Tab, found: Comparison, **runs: str) -> dict[tuple[str, str], Any]:
    """Each tensor is out since the step and by the metrics that `compare` says, but for what chance may do alone."""
    both = pl.concat([found.out_of_band, found.experts_out_of_band])
    answers = {}
    of_all = pl.concat([found.tensors, found.experts]).select("layer", "role")
    for layer, role in of_all.filter(~pl.col("layer").str.contains("other.[0-9]{2}")).rows():
        told = answers[layer, role] = answer(tab, layer, role, **runs)
        rows = both.filter(layer=layer, role=role).to_dicts()
        if told["chance"] and not rows:
            continue
        first = {row["metric"]: row for row in reversed(rows)}
        assert (told["since"], told["metric"]) == ((rows[0]["onset"], rows[0]["metric"]) if rows else (None, None))
        for name, metric in told["metrics"].items():
            expected = first.get(name)
            wanted = (expected["onset"], expected["value"], expected["expected"]) if expected else (None, None, None)
            assert (metric["since"], metric["value"], metric["usual"]) == wanted
    return answers


def test_who_is_out_since_when_and_by_what_is_as_compare_says(tab: Tab, found: Comparison) -> None:
    answers = {layer: told for (layer, _), told in check_onsets(tab, found).items()}
    assert {layer: told["since"] for layer, told in answers.items() if told["since"] is not None} == {
        FAR: ONSET,
        CHANCE: ONSET,
        MOVED: ONSET,
    }
    assert [layer for layer, told in answers.items() if told["chance"]] == [CHANCE]
    never_three_in_a_row = answers[SELDOM]["metrics"]["underflow_pct"]
    assert never_three_in_a_row["counted"] == never_three_in_a_row["beyond"] > 3
    assert answers[MOVED]["metrics"]["scale_ratio_log2"]["value"] == -15.0


def test_what_chance_does_to_one_of_many_is_called_so(tab: Tab, pair: Path) -> None:
    assert compare(pair / "barely", pair / "good").out_of_band.is_empty()
    told = answer(tab, CHANCE, run="barely")
    assert (told["since"], told["chance"]) == (ONSET, True)


def test_it_is_so_of_runs_that_were_trained(logdir: Path) -> None:
    runs = {"run": "bad", "baseline": "baseline"}
    answers = check_onsets(Tab(logdir), compare(logdir / "bad", logdir / "baseline"), **runs)
    assert any(told["since"] is not None for told in answers.values())


@pytest.mark.parametrize("layer", [FAR, "noise", MOVED])
def test_the_band_is_what_onsets_are_judged_by(tab: Tab, found: Comparison, layer: str) -> None:
    told = answer(tab, layer)["metrics"]
    assert set(told) == {evidence.metric for evidence in EVIDENCE}
    for name, metric in told.items():
        rows = band(found.baseline.metrics.read_all_rows(), found.run.metrics.read_all_rows(), layer, "input", name)
        assert metric["step"] == rows["step"].to_list()
        assert metric["expected"] == pytest.approx(rows["expected"].to_list())
        assert metric["high"] == pytest.approx(rows["limit"].to_list())
        falls = name == "scale_ratio_log2"
        assert all((low is not None) == falls for low in metric["low"])
        assert metric["beyond"] >= metric["counted"]
    assert (told["underflow_pct"]["least"], told["underflow_pct"]["is_ratio"]) == (1.0, False)
    assert told["relative_error"]["is_ratio"] and told["relative_error"]["least"] >= 1.5
    assert told["scale_ratio_log2"]["low"][0] <= -6.0


def test_what_no_engine_quantizes_is_not_judged(tab: Tab) -> None:
    told = answer(tab, NOT_QUANTIZED)
    assert told["since"] is None and told["metrics"] == {} and "does not quantize" in told["why"]
    assert "not one of them" in answer(tab, FAR, "first_moment")["why"]


def test_a_tensor_that_a_run_lacks_is_named(tab: Tab) -> None:
    for runs in ({}, {"run": "good", "baseline": "bad"}):
        status, why = tab.error("band", **({"run": "bad", "baseline": "good"} | runs), layer="none", role="input")
        assert status == 404 and "'none'" in why


def test_since_when_the_loss_diverges(tab: Tab, found: Comparison) -> None:
    since = tab.json("divergence", run="bad", baseline="good")["since"]
    assert since == found.divergence_step and since is not None
    assert tab.json("divergence", run="bad")["since"] == found.run.loss.divergence_step
    assert tab.json("divergence", run="good", baseline="good")["since"] is None


def test_a_loss_that_was_not_recorded_is_told_from_one_that_is_not_a_number(tab: Tab) -> None:
    told = tab.json("loss", run="bad")
    losses = dict(zip(told["step"], told["loss"], strict=True))
    assert told["not_finite"] == {"loss": [100], "grad_norm": [], "lr": []}
    assert losses[100] is None and losses[101] is None and losses[102] is not None


def test_a_long_band_is_thinned_and_keeps_its_extremes(pair: Path, tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answer(tab, "noise")["metrics"]["relative_error"]
    monkeypatch.setattr(baseline, "_POINTS", 24)
    thin = answer(Tab(pair), "noise")["metrics"]["relative_error"]
    assert len(thin["step"]) <= 24 < len(whole["step"])
    assert (min(thin["high"]), max(thin["high"])) == (min(whole["high"]), max(whole["high"]))


def test_dumps_of_a_tensor_are_listed(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    options: dict[str, Any] = {"dump": ["0"], "dump_min_free_bytes": 0, "table_rows": 0, "on_error": "raise"}
    monitor = Monitor(model, str(tmp_path / "run"), interval=1, **options)
    for step in range(2):
        with monitor.step(step):
            model(torch.ones(8, 16)).sum().backward()
    monitor.close()
    tab = Tab(tmp_path)
    files = tab.json("dumps", run="run", layer="0", role="input")
    expected = [(step, name) for _, step, _, name in dumped_files(tmp_path / "run") if ".input.0." in name]
    assert [(file["step"], file["name"]) for file in files["files"]] == expected and files["count"] == len(expected) == 2
    assert all((tmp_path / "run" / name).exists() for _, name in expected)
    assert tab.json("dumps", run="run", layer="1", role="input") == {"count": 0, "files": []}


def test_bands_are_answered_without_torch() -> None:
    code = "import sys, nemo_fp8_debug.tensorboard_plugin.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_gradients_beside_another_depth_are_those_of_compare(tmp_path: Path) -> None:
    """Out by name alone, out beside the layer as far from the output too, and out in neither."""
    write_of_depth(tmp_path / "good", 2)
    write_of_depth(tmp_path / "bad", 4, extra={0: 20.0})
    found = compare(tmp_path / "bad", tmp_path / "good")
    assert found.out_of_band["layer"].to_list() == [of_depth(0)]
    told = check_onsets(Tab(tmp_path), found)
    assert len(told) == 2 and told[of_depth(1), "grad_output"]["metrics"]["outlier_log2"]["beyond"] > 0
