"""What loggers keep of a run, read from their own files, against the record; and that training does not feel them."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from processes import run_script
from samples import sample
from torch import nn

from nemo_fp8_debug import Config, ConfigError, FP8DebugWarning, Monitor
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.scalars import LayerMap, SampleSummarizer

SAMPLED = [0, 5, 10, 15, 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logged")


@pytest.fixture(scope="module")
def logged(folder: Path) -> dict[str, Any]:
    (folder / "comet").mkdir()
    offline = {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_DIR": str(folder)}
    run_script(Path(__file__).with_name("logged_runs.py"), folder, COMET_OFFLINE_DIRECTORY=str(folder / "comet"), **offline)
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return answer


def expected(record: Path) -> dict[str, dict[int, float]]:
    """The scalars that docs/loggers.md lists, by name and step, from the record's tables."""
    found: dict[str, dict[int, float]] = {}
    metrics = read_table_rows(record, "metrics")
    for (step, role), rows in metrics.group_by("step", "role"):
        for metric in ("underflow_pct", "overflow_pct", "relative_error", "scale_ratio_log2"):
            if values := rows[metric].drop_nulls().to_list():
                found.setdefault(f"fp8/{metric}/{role}/worst", {})[step] = max(values, key=abs)
                found.setdefault(f"fp8/{metric}/{role}/median", {})[step] = statistics.median(values)
    for name in ("nan", "inf"):
        counts = metrics.group_by("step").agg(pl.col(name).sum())
        found[f"fp8/{name}_count"] = dict(zip(counts["step"], counts[name], strict=True))
    checked = read_table_rows(record, "verification")
    worst = checked.group_by("step").agg(pl.col("error_over_bound").max(), (pl.col("outcome") == "beyond").sum())
    found["fp8/verification/error_over_bound/worst"] = dict(zip(worst["step"], worst["error_over_bound"], strict=True))
    found["fp8/verification/wrong_products"] = dict(zip(worst["step"], worst["outcome"], strict=True))
    return found | {"fp8/coverage_pct": dict.fromkeys(SAMPLED, 100.0)}


def expected_of_steps(record: Path) -> dict[str, dict[int, float]]:
    steps = read_table_rows(record, "steps")
    return {f"fp8/{name}": dict(zip(steps["step"], steps[name], strict=True)) for name in ("loss", "lr")}


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Scalars of rows of a W&B history, or of a table, by name and our step."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("fp8/") and name != "fp8/step" and not name.startswith("fp8/layers"):
                found.setdefault(name, {})[row["fp8/step"]] = value
    return found


def assert_same(found: dict[str, dict[int, float]], want: dict[str, dict[int, float]]) -> None:
    assert sorted(found) == sorted(want)
    for name, values in want.items():
        assert found[name] == pytest.approx(values, rel=1e-12), name


def worst_tensors(record: Path) -> dict[str, str]:
    """Those of the last sampled step by relative error, by name."""
    rows = read_table_rows(record, "metrics").filter(pl.col("step") == SAMPLED[-1]).sort("relative_error")
    return {
        f"fp8/worst_tensor/relative_error/{role}": rows.filter(pl.col("role") == role)["layer"][-1]
        for role in ("input", "weight", "grad_output")
    }


# Long tests rest on nemo_fp8_debug/record/loggers/*.py.
# Long tests rest on nemo_fp8_debug/adapters/lightning/callback.py.
@pytest.mark.long
def test_losses_are_the_same_with_loggers_and_with_one_that_hangs(logged: dict[str, Any]) -> None:
    losses = logged["losses"]
    assert losses["with"] == losses["joined"] == losses["hanging"] == losses["without"]


@pytest.mark.long
def test_training_calls_nothing_of_the_libraries(logged: dict[str, Any]) -> None:
    assert logged["called"] == []
    assert logged["threads"] == ["nemo_fp8_debug Hangs"]


@pytest.mark.long
class TestRunsOfOurs:
    def test_wandb(self, logged: dict[str, Any], folder: Path) -> None:
        found, record = logged["own"]["wandb"], folder / "own"
        assert_same(by_name(found["history"]), expected(record) | early(record) | expected_of_steps(record))
        assert found["metrics"]["fp8/*"] == "fp8/step"
        assert found["summary"].items() >= worst_tensors(record).items()
        assert found["summary"]["fp8/loss"] == pytest.approx(read_table_rows(record, "steps")["loss"][-1], rel=1e-12)
        assert found["config"]["fp8_debug"]["sampled"]["interval"] == 5
        tables = {row["fp8/step"]: row["fp8/layers/nrows"] for row in found["history"] if "fp8/layers/nrows" in row}
        assert tables == {0: 2, 20: 2}
        assert "fp8_report" in found["artifacts"]
        assert found["exit"] == 0

    def test_mlflow(self, logged: dict[str, Any], folder: Path) -> None:
        found, record = logged["own"]["mlflow"], folder / "own"
        metrics = {name: dict(points) for name, points in found["metrics"].items()}
        assert_same(metrics, expected(record) | early(record) | expected_of_steps(record))
        assert found["tags"].items() >= worst_tensors(record).items()
        assert found["artifacts"] == ["fp8/fingerprint.json", "fp8/fp8_compared_with_baseline.html", "fp8/layers"]
        assert found["status"] == "FINISHED"

    def test_comet(self, logged: dict[str, Any], folder: Path) -> None:
        found, record, metrics = logged["own"]["comet"], folder / "own", dict[str, dict[int, float]]()
        for name, step, value in found["metrics"]:
            if name.startswith("fp8/"):
                metrics.setdefault(name, {})[step] = value
        assert_same(metrics, expected(record) | early(record) | expected_of_steps(record))
        assert found["others"].items() >= worst_tensors(record).items()
        maps = [f"fp8_layers_step_{step:09d}.csv" for step in (0, 20)]
        assert {"fp8_fingerprint.json", "fp8_compared_with_baseline.html", *maps} <= set(found["files"])


def early(record: Path) -> dict[str, dict[int, float]]:
    """The early warning's score: nothing of these runs, whose operands have no scale that is off and lose nothing."""
    limits = {"input": (8.0, 3.0, 3.0), "weight": (4.0, 2.0, 3.0), "grad_output": (25.0, 3.0, 8.0)}
    names, times = ("underflow_pct", "overflow_pct", "scale_ratio_log2"), dict[tuple[int, str, str], float]()
    for row in read_table_rows(record, "metrics").iter_rows(named=True):
        of_limits = [abs(row[name]) / limit for name, limit in zip(names, limits[row["role"]], strict=True)]
        times[row["step"], row["layer"], row["role"]] = max(of_limits)
    counted, scores = SAMPLED[2:], dict[int, float]()
    for i, step in enumerate(counted):
        before = counted[i - 1] if i else None
        of_step = {key: value for key, value in times.items() if key[0] == step}
        both = [max(min(v, times.get((before or -1, *key[1:]), 0.0)), v / 3) for key, v in of_step.items()]
        scores[step] = max(both)
    return {"fp8/early_warning": scores} if max(times.values()) > 0 else {}


@pytest.mark.long
class TestRunsOfTheUser:
    def test_are_joined_and_stay_open(self, logged: dict[str, Any]) -> None:
        assert logged["open"] == [True, True, True, 7]
        assert logged["joined_status"] == "RUNNING"

    def test_wandb_keeps_the_rows_of_the_user(self, logged: dict[str, Any], folder: Path) -> None:
        """Logged with `step=`, the last one after the monitor had closed; samples beyond these rows are in a table."""
        history, losses = logged["joined"]["wandb"]["history"], logged["losses"]["joined"]
        assert [(row["_step"], row["loss"]) for row in history] == [(i, pytest.approx(losses[i])) for i in range(11)]
        assert history[10]["final"] == 1
        tables = logged["joined"]["without_a_row"]
        in_rows = [row for row in history if "fp8/nan_count" in row]
        assert sorted(row["fp8/step"] for row in [*in_rows, *tables]) == SAMPLED
        found, want = by_name([*in_rows, *tables]), expected(folder / "joined")
        assert_same({name: found[name] for name in want}, want)

    def test_the_others_keep_their_steps(self, logged: dict[str, Any], folder: Path) -> None:
        losses, want = logged["losses"]["joined"], expected(folder / "joined") | early(folder / "joined")
        of_mlflow = {name: dict(map(tuple, of)) for name, of in logged["joined"]["mlflow"]["metrics"].items()}
        assert [of_mlflow["loss"][step] for step in range(21)] == pytest.approx(losses)
        assert_same({name: of for name, of in of_mlflow.items() if name != "loss"}, want)
        points, of_comet = logged["joined"]["comet"]["metrics"], dict[str, dict[int, float]]()
        assert {step for name, step, _ in points if name == "loss"} == {7}
        for name, step, value in points:
            if name.startswith("fp8/"):
                of_comet.setdefault(name, {})[step] = value
        assert_same(of_comet, want)


@pytest.mark.long
def test_loggers_of_a_trainer_get_the_summary_beside_what_they_log(logged: dict[str, Any]) -> None:
    found = logged["trainer"]
    assert found["open"]
    losses = [(row["trainer/global_step"], row["train_loss"]) for row in found["wandb"]["history"] if "train_loss" in row]
    assert losses == [(step, step + 1) for step in range(6)]
    rows = [
        *found["wandb"]["history"],
        *found["without_a_row"],
    ]  # a sample may come when the trainer has logged its last row
    assert [row["fp8/step"] for row in rows if "fp8/nan_count" in row] == [0, 2, 4]
    assert found["mlflow"]["metrics"]["train_loss"] == [[step, step + 1] for step in range(6)]
    assert [step for step, _ in found["mlflow"]["metrics"]["fp8/nan_count"]] == [0, 2, 4]
    of_comet = found["comet"]["metrics"]
    assert sorted((step, value) for name, step, value in of_comet if name == "train_loss") == [(i, i + 1) for i in range(6)]
    assert [step for name, step, _ in of_comet if name == "fp8/nan_count"] == [0, 2, 4]


class Kept:
    """A logger with Lightning's method, which may be called from another thread."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.threads: set[int] = set()

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows[step] = metrics
        self.threads.add(threading.get_ident())


class Breaks:
    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        raise SystemExit("no space left")


def train(folder: Path, moves_to: Path | None = None, **options: Any) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    monitor = Monitor(model, folder, interval=2, table_rows=0, on_error="warn", **options)
    if moves_to is not None:
        os.chdir(moves_to)
    for step in range(5):
        with monitor.step(step) as report:
            loss = model(torch.randn(4, 8)).square().sum()
            loss.backward()
            report(loss=loss)
    monitor.close()


def test_at_most_60_scalars_unless_every_tensor_is_asked_for(tmp_path: Path) -> None:
    few, all_of_them = Kept(), Kept()
    train(tmp_path / "few", loggers=[few])
    train(tmp_path / "all", loggers=[all_of_them], log_every_tensor=True)
    assert sorted(few.rows) == sorted(all_of_them.rows) == [0, 2, 4]
    assert 20 < len(set().union(*few.rows.values())) <= 60
    assert len(all_of_them.rows[4]) > 90 * 10
    assert threading.get_ident() not in few.threads


def test_a_logger_that_raises_costs_a_warning_and_nothing_else(tmp_path: Path) -> None:
    kept = Kept()
    with pytest.warns(FP8DebugWarning, match="the logger Breaks failed, and data it received is lost: SystemExit") as told:
        train(tmp_path, loggers=[Breaks(), kept])
    assert sum("Breaks" in str(w.message) for w in told) == 1
    assert sorted(kept.rows) == [0, 2, 4]
    assert len(read_table_rows(tmp_path, "steps")) == 5


@pytest.mark.parametrize(
    "value, told",
    [
        ("wandb", "it takes a list"),
        (["wandbb"], r"unknown logger 'wandbb' \(did you mean 'wandb'\?\)"),
        ([{"wandb": "project"}], "settings of the logger 'wandb' are 'project'"),
        ([3], "3 is not a logger"),
    ],
)
def test_what_is_no_logger_is_refused_at_once(value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Config(loggers=value)


@pytest.mark.parametrize("name, package", [("wandb", "wandb"), ("mlflow", "mlflow"), ("comet", "comet_ml")])
def test_a_missing_package_is_told_before_the_first_step(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"pip install 'nemo-fp8-debug\[{name}\]'"):
        Monitor(nn.Linear(4, 4), tmp_path / "run", loggers=[name])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("uri", ["file:", "path", None])
def test_mlflow_keeps_a_run_in_files(uri: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a URI, by a path and without either, as installed: without a database, and without a word to MLflow before."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)  # as if it were not installed
    place = tmp_path / "mlruns"
    choice: Any = {"mlflow": {"tracking_uri": "file:./mlruns" if uri == "file:" else str(place)}} if uri else "mlflow"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    train(tmp_path / "run", loggers=[choice], moves_to=elsewhere)
    (kept,) = place.glob("*/*/metrics/fp8/loss")
    found = {int(step): float(value) for _, value, step in map(str.split, kept.read_text().splitlines())}
    steps = read_table_rows(tmp_path / "run", "steps")
    assert found == pytest.approx(dict(zip(steps["step"], steps["loss"], strict=True)), rel=1e-6) and len(found) == 5
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ


@pytest.mark.parametrize("how", ["settings", "environment"])
def test_mlflow_in_a_database_that_it_cannot_open_is_refused_before_the_first_step(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)  # as if it were not installed
    uri = "sqlite:///runs.db"
    if how == "environment":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    choice: Any = {"mlflow": {"tracking_uri": uri}} if how == "settings" else "mlflow"
    with pytest.raises(
        ConfigError, match=r"^MLflow cannot open its sqlite tracking URI without SQLAlchemy\. Run pip install"
    ):
        Monitor(nn.Linear(4, 4), tmp_path / "run", loggers=[choice])
    assert not (tmp_path / "run").exists()


def test_an_object_that_is_no_logger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="object is not a supported logger"):
        Monitor(nn.Linear(4, 4), tmp_path / "run", loggers=[object()])


class TestOverview:
    def test_early_warning_is_that_of_the_trigger(self) -> None:
        """Times 8%, the limit of X: what both samples show, or a third of what this one does."""
        overview = SampleSummarizer()
        found = [overview.summarize_sample(sample(i, [{"underflow_pct": u}])) for i, u in enumerate([90, 90, 16, 24, 80])]
        scores = [of.scalars.get("early_warning") for of in found]
        assert scores == [None, None, pytest.approx(2 / 3), 2, pytest.approx(10 / 3)]
        assert found[3].texts["worst_tensor/early_warning"] == "X of decoder.layers.0.mlp.linear_fc1"

    def test_nothing_that_is_not_finite(self) -> None:
        rows = [{"layer": f"layers.{i}", "relative_error": e, "nan": 3} for i, e in enumerate([math.nan, None, math.inf])]
        found = SampleSummarizer().summarize_sample(sample(0, rows))
        assert "relative_error/input/worst" not in found.scalars
        assert found.scalars["nan_count"] == 9

    def test_experts_are_one_row_of_the_map(self) -> None:
        experts = [f"layers.0.mlp.experts.local_experts.{i}.linear_fc1" for i in ("*", 0, 1)]
        rows = [{"layer": layer, "underflow_pct": float(i)} for i, layer in enumerate([*experts, "layers.0.proj"])]
        shown = LayerMap.from_sample(sample(4, rows))
        assert shown.header[:4] == ("layer", "X underflow_pct", "W underflow_pct", "dY underflow_pct")
        assert [row[:3] for row in shown.rows] == [[experts[0], 0.0, None], ["layers.0.proj", 3.0, None]]
