"""Metrics recomputed from recorded histograms against those that the run recorded."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from small_models.megatron import gpt, loss_of
from test_emulate import attached
from torch import nn
from typer.testing import CliRunner, Result

from nemo_fp8_debug import ConfigError, FP8DebugWarning, Monitor, RecordError
from nemo_fp8_debug.analysis.replay.replay import replay
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.numerics.block_scaling import BlockRule
from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.record.dump import dumped_files, read_dump
from nemo_fp8_debug.record.reader import find_run, read_table
from nemo_fp8_debug.record.storage import Storage
from nemo_fp8_debug.record.writer import add_rows


def train(
    folder: Path,
    recipe: str | dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    start: int = 0,
    steps: int = 5,
    **more: Any,
) -> Storage:
    """Steps of two micro-batches whose scale changes from step to step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)
    monitor = Monitor(
        model, str(folder), interval=1, recipe=recipe, table_rows=0, on_error="raise", dump_min_free_bytes=0, **more
    )
    for step in range(start, start + steps):
        with monitor.step(step):
            for i in range(2):
                model((2.0 ** (step % 7) * (1 + i) * torch.randn(4, 16)).to(dtype)).float().square().mean().backward()
    monitor.close()
    return find_run(folder)


DELAYED = {"name": "delayed", "amax_history_len": 2, "margin": 1}


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
        run = find_run(tmp_path / name)
        assert_frame_equal(replay(run, source=source), read_table(run, "metrics"), check_row_order=False)
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
    assert_frame_equal(replay(run), read_table(run, "metrics"), check_exact=False, rel_tol=1e-12, check_row_order=False)


@pytest.mark.parametrize(
    "recipe",
    ["current", {"name": "current", "power_of_two": True}, {"name": "current", "fp8_format": "e5m2"}, DELAYED],
    ids=["current", "power of two", "e5m2", "delayed"],
)
def test_replay_under_another_recipe_is_what_a_run_under_it_records(tmp_path: Path, recipe: str | dict[str, Any]) -> None:
    """The runs do not quantize, so the same operands are measured under either recipe."""
    replayed = replay(train(tmp_path / "a", "delayed"), recipe)
    recorded = read_table(train(tmp_path / "b", recipe), "metrics")
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


def test_rounded_histograms_are_left_out(tmp_path: Path) -> None:
    assert replay(train(tmp_path, "current", torch.float32)).is_empty()


COUNTS = ["n", "nan", "inf"]
LOST = ["underflow_pct", "overflow_pct"]
OTHERS = ["current", "current-e5m2", "current-e4m3(power_of_two=True,epsilon=0.5)", "delayed(margin=2)", "delayed-e4m3"]


def of_same_rows(frame: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    keys = ["attempt", "step", "layer", "role"]
    return frame.join(rows.select(keys), on=keys, how="semi")


class TestDumps:
    """A dumped tensor, the histogram of it and what the run recorded are one and the same."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("recipe", ["current", DELAYED, "delayed-e4m3(amax_compute_algo=most_recent)"])
    def test_they_give_what_the_run_recorded(self, tmp_path: Path, recipe: Any, dtype: torch.dtype) -> None:
        run = train(tmp_path, recipe, dtype, dump=["0"])
        recorded = read_table(run, "metrics", where={"layer": "0"})
        replayed = replay(run, None, "dumps")
        assert len(replayed) == len(recorded) == 15
        exact = ["step", "role", *COUNTS, *LOST, "scale", "recipe", "format", "dtype", "scale_source", "calls"]
        order = ["step", "role"]
        assert replayed.select(exact).sort(order).equals(recorded.select(exact).sort(order))
        known = [
            f for f in METRICS if dtype != torch.float32 or f != "outlier_log2"
        ]  # its median is of the rounded histogram
        assert_frame_equal(replayed.sort(order).select(known), recorded.sort(order).select(known), rel_tol=1e-12)

    @pytest.mark.parametrize("recipe", ["current", DELAYED], ids=["current", "delayed"])
    @pytest.mark.parametrize("other", OTHERS)
    def test_they_give_what_histograms_give_under_any_recipe(self, tmp_path: Path, recipe: Any, other: str) -> None:
        run = train(tmp_path, recipe, dump=["2"])
        dumps = replay(run, other, "dumps")
        histograms = of_same_rows(replay(run, other), dumps)
        assert len(dumps) == 15
        assert_frame_equal(dumps, histograms, check_row_order=False, rel_tol=1e-12)
        counted = ["step", "role", *COUNTS, *LOST]
        assert dumps.select(counted).sort(counted).equals(histograms.select(counted).sort(counted))

    @pytest.mark.parametrize("other", OTHERS)
    def test_what_was_what_if_in_the_run_is_what_replay_gives(self, tmp_path: Path, other: str) -> None:
        run = train(tmp_path, DELAYED, what_if=[other])
        what_if, replayed = read_table(run, "what_if"), replay(run, other)
        assert_frame_equal(what_if, replayed.with_columns(nonfinite_order=pl.lit(None, pl.Int64)), check_row_order=False)

    @pytest.mark.usefixtures("megatron")
    def test_a_megatron_model_in_emulated_fp8(self, tmp_path: Path) -> None:
        model = gpt()
        emulation = attached(model, "delayed", ["layers.*"])
        monitor = Monitor(model, str(tmp_path), interval=1, dump=["layers.*"], dump_min_free_bytes=0, table_rows=0)
        for step in range(3):
            with monitor.step(step):
                for i in range(2):
                    loss_of(model, 2 * step + i).backward()
            emulation.end_step()
        monitor.close()
        recorded = read_table(tmp_path, "metrics").filter(pl.col("layer").str.contains("layers"))
        assert set(recorded["scale_source"]) == {"engine"}
        for source in ("histograms", "dumps"):
            found = of_same_rows(replay(tmp_path, None, source), recorded)
            exact = ["step", "layer", "role", *COUNTS, *LOST, "scale", "calls"]
            assert found.select(exact).sort(exact).equals(recorded.select(exact).sort(exact))
            assert_frame_equal(found, recorded, check_row_order=False, rel_tol=1e-12)

    def test_codes_in_a_dump_are_what_the_metrics_are_of(self, tmp_path: Path) -> None:
        """MSE, underflow and overflow from the codes and scales alone, in numpy."""
        run = train(tmp_path, DELAYED, dump=["0"])
        errors, lost, n = dict[tuple[int, str], float](), dict[tuple[int, str], int](), dict[tuple[int, str], int]()
        for *_, name in dumped_files(run):
            about, tensors = read_dump(run, name)
            key = about.step, about.role
            x = tensors["value"].double().numpy()
            q = tensors["codes"].float().double().numpy() / float(tensors["scale"])
            errors[key] = errors.get(key, 0) + float(((x - q) ** 2).sum())
            lost[key] = lost.get(key, 0) + int(((x != 0) & (q == 0)).sum())
            n[key] = n.get(key, 0) + x.size
        for row in read_table(run, "metrics", where={"layer": "0"}).to_dicts():
            key = row["step"], row["role"]
            assert row["n"] == n[key]
            if row["step"] == 0 and row["role"] != "weight":
                continue  # without a history the codes are scaled call by call, and the metrics as a whole
            assert row["mse"] == pytest.approx(errors[key] / n[key], rel=1e-12)
            assert row["underflow_pct"] == 100 * lost[key] / n[key]


BLOCKS = ["blockwise", "blockwise-hybrid(power_of_two=False)", "mxfp8", "mxfp8-hybrid", "nvfp4"]
DIRECT = [torch.bfloat16, torch.float16, torch.float32]


class TestBlocks:
    """Metrics under block recipes, which are measured as tensors pass: what_if, in use, and from dumps."""

    @pytest.mark.parametrize("dtype", DIRECT, ids=str)
    def test_what_was_what_if_is_what_dumps_give(self, tmp_path: Path, dtype: torch.dtype) -> None:
        run = train(tmp_path, DELAYED, dtype, what_if=[*BLOCKS, "bf16"], dump=["*"])
        what_if = read_table(run, "what_if")
        assert set(what_if["scale_source"]) == {"what-if"}
        for name in [*BLOCKS, "bf16"]:
            mine = what_if.filter(recipe=parse_recipe(name).name)
            assert len(mine) == 30
            replayed = replay(run, name, "dumps").with_columns(nonfinite_order=pl.lit(None, pl.Int64))
            if dtype == torch.float32:  # the run takes the median from a rounded histogram
                mine, replayed = (frame.drop("outlier_log2") for frame in (mine, replayed))
            assert_frame_equal(mine, replayed, check_row_order=False, rel_tol=1e-12)
            assert mine["scale"].null_count() == (0 if name == "bf16" else 30)

    @pytest.mark.parametrize("dtype", DIRECT, ids=str)
    @pytest.mark.parametrize("name", BLOCKS)
    def test_in_use_gives_the_metrics_that_weighing_gives(self, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
        run = train(tmp_path / "a", name, dtype, dump=["*"])
        recorded = read_table(run, "metrics")
        what_if = read_table(train(tmp_path / "b", "current", dtype, what_if=[name]), "what_if")
        assert recorded["scale"].null_count() == recorded["scale_ratio_log2"].null_count() == len(recorded) == 30
        assert recorded["mse"].null_count() == 0
        assert set(recorded["scale_source"]) == {"current"}
        columns = ["step", "layer", "role", "recipe", "format", "dtype", "calls", "scale", *COUNTS, *METRICS]
        assert recorded.select(columns).equals(what_if.select(columns))
        again = replay(run, None, "dumps")
        known = [c for c in columns if dtype != torch.float32 or c != "outlier_log2"]
        assert_frame_equal(again.select(known), recorded.select(known), check_row_order=False, rel_tol=1e-12)

    @pytest.mark.parametrize("name", BLOCKS)
    def test_metrics_are_of_the_codes_and_scales_of_each_tensor(self, tmp_path: Path, name: str) -> None:
        run = train(tmp_path, "current", what_if=[name], dump=["*"])
        recipe = parse_recipe(name)
        assert isinstance(recipe.scaling, BlockRule)
        errors, n = dict[tuple[Any, ...], float](), dict[tuple[Any, ...], int]()
        for _, step, _, file in dumped_files(run):
            about, tensors = read_dump(run, file)
            x, key = tensors["value"], (step, about.layer, about.role)
            q = recipe.scaling.quantize(x, about.role, recipe.format_of(about.role)).dequantize()
            errors[key] = errors.get(key, 0) + float((x.double() - q).square().sum())
            n[key] = n.get(key, 0) + x.numel()
        rows = read_table(run, "what_if").to_dicts()
        assert len(rows) == len(errors) == 30
        for row in rows:
            key = row["step"], row["layer"], row["role"]
            assert row["mse"] == pytest.approx(errors[key] / n[key], rel=1e-12)

    def test_bf16_costs_float32_something_and_bfloat16_nothing(self, tmp_path: Path) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            rows = read_table(train(tmp_path / str(dtype), "current", dtype, what_if=["bf16"]), "what_if")
            assert set(rows["format"]) == {"bf16"}
            assert ((rows["mse"] > 0) == (dtype == torch.float32)).all()
            assert (rows["relative_error"] < 2**-9).all()

    def test_histograms_know_nothing_of_blocks(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"replay from histograms.*\(dumps do\), takes .* not 'mxfp8-e4m3'"):
            replay(train(tmp_path / "a", "current"), "mxfp8")
        run = train(tmp_path / "b", "nvfp4")
        replayed, recorded = replay(run), read_table(run, "metrics")
        assert replayed["mse"].null_count() == len(recorded)
        assert_frame_equal(replayed.select("amax", "kurtosis"), recorded.select("amax", "kurtosis"), rel_tol=1e-12)
        of_weights = pl.col("role") == "weight"  # calls under a block recipe are one histogram
        current = read_table(train(tmp_path / "c", "current"), "metrics").filter(of_weights)
        assert_frame_equal(replay(run, "current").filter(of_weights).select(METRICS), current.select(METRICS), rel_tol=1e-12)


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


class TestAddedToTheRecord:
    def test_rows_of_each_recipe_once(self, tmp_path: Path) -> None:
        run = train(tmp_path, DELAYED)
        metrics = read_table(run, "metrics")
        for _ in range(2):
            result = cli(tmp_path, "--recipe", "current-e4m3", "--recipe", "delayed(margin=2)")
            assert result.exit_code == 0, result.output
        rows = read_table(run, "replayed")
        assert rows.group_by("recipe").len().sort("recipe").rows() == [
            ("current-e4m3", len(metrics)),
            ("delayed-hybrid(margin=2)", len(metrics)),
        ]
        assert set(rows["scale_source"]) == {"what-if"}
        assert_frame_equal(rows.filter(recipe="current-e4m3"), replay(run, "current-e4m3"), check_row_order=False)
        assert read_table(run, "metrics").equals(metrics)
        assert f"added {2 * len(metrics)} rows to the table `replayed` of {tmp_path}" in result.output

    def test_a_run_that_has_gone_on_since(self, tmp_path: Path) -> None:
        run = train(tmp_path, DELAYED)
        cli(tmp_path, "--recipe", "current")
        train(tmp_path, DELAYED, start=3)
        cli(tmp_path, "--recipe", "current")
        rows = read_table(run, "replayed")
        by_step = rows.group_by("step", maintain_order=True).agg(pl.col("attempt").unique(), pl.len()).rows()
        assert by_step == [(s, [0], 6) for s in range(3)] + [(s, [1], 6) for s in range(3, 8)]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--recipe", "fp7"], "unknown recipe 'fp7'"),
            (["--recipe", "current", "--source", "tensors"], "source is 'tensors'; use histograms or dumps"),
            (["--recipe", "current", "--source", "dumps"], "has no dumps to replay"),
            (["--recipe", "current", "--cluster", "slurm"], "cluster is 'slurm'; use ray"),
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
    def long(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Storage, pl.DataFrame]:
        run = train(tmp_path_factory.mktemp("long"), DELAYED, steps=20)
        steps = [replay_step(run, step) for step in range(20)]
        return run, pl.concat(steps)

    def test_processes(self, long: tuple[Storage, pl.DataFrame]) -> None:
        assert_frame_equal(replay(long[0], "current"), long[1])

    def test_a_ray_cluster(self, long: tuple[Storage, pl.DataFrame]) -> None:
        ray = pytest.importorskip("ray")
        ray.init(num_cpus=1, log_to_driver=False, include_dashboard=False)
        try:
            assert_frame_equal(replay(long[0], "current", cluster="ray"), long[1])
        finally:
            ray.shutdown()

    def test_a_dask_cluster(self, long: tuple[Storage, pl.DataFrame]) -> None:
        distributed = pytest.importorskip("distributed")
        with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
            assert_frame_equal(replay(long[0], "current", cluster=cluster.scheduler_address), long[1])


def replay_step(run: Storage, step: int) -> pl.DataFrame:
    """One step by itself, from a record that holds no other."""
    with tempfile.TemporaryDirectory() as folder:
        for table in ("metrics", "histograms"):
            rows = read_table(run, table, where={"step": step})
            add_rows(Storage(folder), table, rows)
        Storage(folder).create("attempt-0.json", b'{"schema_version": 2}')
        return replay(folder, "current")


def test_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no run record"):
        replay(tmp_path)
    with pytest.raises(ConfigError, match="unknown recipe 'fp7'"):
        replay(train(tmp_path, "current"), "fp7")
