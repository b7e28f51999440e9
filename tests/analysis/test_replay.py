"""Metrics recomputed from recorded histograms against those that the run recorded; the table of them, and clusters."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from replayed_runs import DELAYED, train
from torch import nn
from typer.testing import CliRunner, Result

from nemo_fp8_debug import ConfigError, FP8DebugWarning, Monitor, RecordError
from nemo_fp8_debug.analysis.replay.replay import replay
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.record.reader import find_record, read_table_rows
from nemo_fp8_debug.record.storage import FolderStorage
from nemo_fp8_debug.record.writer import add_rows_to_table


@pytest.mark.parametrize("source", ["histograms", "dumps"])
def test_replayed_gradients_are_in_units_of_the_loss_too(tmp_path: Path, source: str) -> None:
    """Two runs, of which one multiplies its losses by 256 and divides them by 2."""
    replayed = {}
    for name, factor in (("plain", 1.0), ("scaled", 128.0)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
        monitor = Monitor(
            model, str(tmp_path / name), interval=1, table_rows=0, on_error="raise", dump=["*"], dump_min_free_bytes=0
        )
        with monitor.step(0):
            loss = model(torch.randn(4, 16).bfloat16()).float().square().mean()
            monitor.watch_loss(loss)
            (loss * factor).backward()
        monitor.close()
        run = find_record(tmp_path / name)
        assert_frame_equal(
            replay(run, source=source).drop("rounded"), read_table_rows(run, "metrics"), check_row_order=False
        )
        replayed[name] = replay(run, "current-e5m2", source).sort("layer", "role")
    plain, scaled = replayed["plain"], replayed["scaled"]
    gradients = pl.col("role") == "grad_output"
    assert scaled.select("unscaled_amax", "unscaled_amin", "unscaled_mse").equals(
        plain.select("unscaled_amax", "unscaled_amin", "unscaled_mse")
    )
    assert plain.filter(gradients)["unscaled_mse"].equals(plain.filter(gradients)["mse"].rename("unscaled_mse"))
    assert plain.filter(~gradients)["unscaled_mse"].null_count() == 4
    assert (scaled.filter(gradients)["mse"] == 128**2 * plain.filter(gradients)["mse"]).all()


@pytest.mark.parametrize("recipe", ["current", DELAYED], ids=["current", "delayed"])
def test_replay_under_the_scales_in_use_gives_the_record(tmp_path: Path, recipe: str | dict[str, Any]) -> None:
    run = train(tmp_path, recipe)
    assert_frame_equal(
        replay(run).drop("rounded"), read_table_rows(run, "metrics"), check_exact=False, rel_tol=1e-12, check_row_order=False
    )


@pytest.mark.parametrize(
    "recipe",
    ["current", {"name": "current", "power_of_two": True}, {"name": "current", "fp8_format": "e5m2"}, DELAYED],
    ids=["current", "power of two", "e5m2", "delayed"],
)
def test_replay_under_another_recipe_is_what_a_run_under_it_records(tmp_path: Path, recipe: str | dict[str, Any]) -> None:
    """The runs do not quantize, so the same operands are measured under either recipe."""
    replayed = replay(train(tmp_path / "a", "delayed"), recipe)
    recorded = read_table_rows(train(tmp_path / "b", recipe), "metrics")
    if recipe == DELAYED:
        # Without a history each micro-batch is replayed under the one scale that its histogram was recorded for.
        replayed, recorded = (frame.filter(pl.col("step") > 0) for frame in (replayed, recorded))
    else:
        # A history's scale holds for all micro-batches, which are recorded as one histogram: compare the weights.
        replayed, recorded = (frame.filter(pl.col("role") == "weight") for frame in (replayed, recorded))
    columns = ["step", "layer", "role", "recipe", "format", "n", "scale", *METRICS]
    assert_frame_equal(
        replayed.select(columns), recorded.select(columns), check_exact=False, rel_tol=1e-12, check_row_order=False
    )


@pytest.mark.parametrize("recipe", [None, "delayed(margin=1)", "current-e5m2"])
def test_of_float32_rows_are_those_of_its_dumps_to_bfloat16s_precision_and_marked(
    tmp_path: Path, recipe: str | None
) -> None:
    run = train(tmp_path, "current", torch.float32, dump=["*"])
    about, exact = (replay(run, recipe, source).sort("step", "layer", "role") for source in ("histograms", "dumps"))
    assert set(about["rounded"]) == {True} and set(exact["rounded"]) == {False} and len(about) == len(exact)
    columns = ["step", "layer", "role", "recipe", "relative_error", "amax"]
    assert_frame_equal(about.select(columns), exact.select(columns), check_exact=False, rel_tol=0.1)
    off = (about["underflow_pct"] - exact["underflow_pct"]).abs().max()
    assert isinstance(off, float) and off <= 1.0
    assert not about.equals(exact)


def test_a_rounded_histogram_cannot_tell_what_bf16_loses(tmp_path: Path) -> None:
    assert replay(train(tmp_path, "current", torch.float32), "bf16").is_empty()


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


class TestAddedToTheRecord:
    def test_rows_of_each_recipe_once(self, tmp_path: Path) -> None:
        run = train(tmp_path, DELAYED)
        metrics = read_table_rows(run, "metrics")
        for _ in range(2):
            result = cli(tmp_path, "--recipe", "current-e4m3", "--recipe", "delayed(margin=2)")
            assert result.exit_code == 0, result.output
        rows = read_table_rows(run, "replayed")
        assert rows.group_by("recipe").len().sort("recipe").rows() == [
            ("current-e4m3", len(metrics)),
            ("delayed-hybrid(margin=2)", len(metrics)),
        ]
        assert set(rows["scale_source"]) == {"what-if"}
        assert_frame_equal(rows.filter(recipe="current-e4m3"), replay(run, "current-e4m3"), check_row_order=False)
        assert read_table_rows(run, "metrics").equals(metrics)
        recipes = "current-e4m3, delayed-hybrid(margin=2)"
        assert result.stderr == f"replay adds rows under {recipes} to the table `replayed` of {tmp_path}.\n"
        assert f"We added {2 * len(metrics)} rows to the table `replayed` of {tmp_path}." in result.stdout.splitlines()[0]
        as_json = cli(tmp_path, "--recipe", "current-e4m3", "--json")
        assert json.loads(as_json.stdout) and as_json.stderr.splitlines()[0].startswith(
            "replay adds rows under current-e4m3"
        )

    def test_a_run_that_has_gone_on_since(self, tmp_path: Path) -> None:
        run = train(tmp_path, DELAYED)
        cli(tmp_path, "--recipe", "current")
        train(tmp_path, DELAYED, start=3)
        cli(tmp_path, "--recipe", "current")
        rows = read_table_rows(run, "replayed")
        by_step = rows.group_by("step", maintain_order=True).agg(pl.col("attempt").unique(), pl.len()).rows()
        assert by_step == [(s, [0], 6) for s in range(3)] + [(s, [1], 6) for s in range(3, 8)]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--recipe", "fp7"], "unknown recipe 'fp7'"),
            (["--recipe", "current", "--source", "tensors"], "--source 'tensors': expected histograms or dumps"),
            (["--recipe", "current", "--source", "dumps"], "has no dumps to replay"),
            (["--recipe", "current", "--cluster", "slurm"], "unknown cluster 'slurm'; use ray"),
        ],
    )
    def test_what_cannot_be_done_is_said_in_one_line(self, tmp_path: Path, arguments: list[str], message: str) -> None:
        train(tmp_path, "current")
        result = cli(tmp_path, *arguments)
        assert result.exit_code == 1
        assert message in result.stderr.splitlines()[-1]

    def test_a_damaged_histogram_is_named_and_the_rest_is_replayed(self, tmp_path: Path) -> None:
        run = train(tmp_path, "current")
        part = next((tmp_path / "histograms").glob("*step-00000002*"))
        part.write_bytes(part.read_bytes()[:-1])
        with pytest.warns(FP8DebugWarning, match=re.escape(f"{part} is left out")):
            assert replay(run, "current")["step"].unique().to_list() == [0, 1, 3, 4]


class TestInParallel:
    """The same rows in the same order, wherever they are computed."""

    @pytest.fixture(scope="class")
    @classmethod
    def long(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[FolderStorage, pl.DataFrame]:
        run = train(tmp_path_factory.mktemp("long"), DELAYED, steps=20)
        steps = [replay_step(run, step) for step in range(20)]
        return run, pl.concat(steps)

    def test_processes(self, long: tuple[FolderStorage, pl.DataFrame]) -> None:
        assert_frame_equal(replay(long[0], "current"), long[1])

    def test_a_ray_cluster(self, long: tuple[FolderStorage, pl.DataFrame]) -> None:
        ray = pytest.importorskip("ray")
        ray.init(num_cpus=1, log_to_driver=False, include_dashboard=False)
        try:
            assert_frame_equal(replay(long[0], "current", cluster="ray"), long[1])
        finally:
            ray.shutdown()

    def test_a_dask_cluster(self, long: tuple[FolderStorage, pl.DataFrame]) -> None:
        distributed = pytest.importorskip("distributed")
        with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
            assert_frame_equal(replay(long[0], "current", cluster=cluster.scheduler_address), long[1])


def replay_step(run: FolderStorage, step: int) -> pl.DataFrame:
    """One step by itself, from a record that holds no other."""
    with tempfile.TemporaryDirectory() as folder:
        for table in ("metrics", "histograms"):
            rows = read_table_rows(run, table, where={"step": step})
            add_rows_to_table(FolderStorage(folder), table, rows)
        FolderStorage(folder).create_file("attempt-0.json", b'{"schema_version": 2}')
        return replay(folder, "current")


def test_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no run record"):
        replay(tmp_path)
    with pytest.raises(ConfigError, match="unknown recipe 'fp7'"):
        replay(train(tmp_path, "current"), "fp7")
