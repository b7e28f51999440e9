"""Metrics recomputed from dumped tensors, also under block recipes, against those that the run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from replayed_runs import DELAYED, train
from small_models.megatron import gpt, loss_of
from test_emulate import attached

from nemo_fp8_debug import ConfigError, Monitor
from nemo_fp8_debug.analysis.replay.replay import replay
from nemo_fp8_debug.numerics.block_scaling import BlockScalingRule
from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.record.dump import dumped_files, read_dump
from nemo_fp8_debug.record.reader import read_table_rows

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
        recorded = read_table_rows(run, "metrics", where={"layer": "0"})
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
        what_if, replayed = read_table_rows(run, "what_if"), replay(run, other)
        replayed = replayed.drop("rounded").with_columns(nonfinite_order=pl.lit(None, pl.Int64))
        assert_frame_equal(what_if, replayed, check_row_order=False)

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
        recorded = read_table_rows(tmp_path, "metrics").filter(pl.col("layer").str.contains("layers"))
        assert set(recorded["scale_source"]) == {"engine"}
        for source in ("histograms", "dumps"):
            found = of_same_rows(replay(tmp_path, None, source), recorded).drop("rounded")
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
        for row in read_table_rows(run, "metrics", where={"layer": "0"}).to_dicts():
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
        what_if = read_table_rows(run, "what_if")
        assert set(what_if["scale_source"]) == {"what-if"}
        for name in [*BLOCKS, "bf16"]:
            mine = what_if.filter(recipe=parse_recipe(name).name)
            assert len(mine) == 30
            replayed = replay(run, name, "dumps").drop("rounded").with_columns(nonfinite_order=pl.lit(None, pl.Int64))
            if dtype == torch.float32:  # the run takes the median from a rounded histogram
                mine, replayed = (frame.drop("outlier_log2") for frame in (mine, replayed))
            assert_frame_equal(mine, replayed, check_row_order=False, rel_tol=1e-12)
            assert mine["scale"].null_count() == (0 if name == "bf16" else 30)

    @pytest.mark.parametrize("dtype", DIRECT, ids=str)
    @pytest.mark.parametrize("name", BLOCKS)
    def test_in_use_gives_the_metrics_that_weighing_gives(self, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
        run = train(tmp_path / "a", name, dtype, dump=["*"])
        recorded = read_table_rows(run, "metrics")
        what_if = read_table_rows(train(tmp_path / "b", "current", dtype, what_if=[name]), "what_if")
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
        assert isinstance(recipe.scaling, BlockScalingRule)
        errors, n = dict[tuple[Any, ...], float](), dict[tuple[Any, ...], int]()
        for _, step, _, file in dumped_files(run):
            about, tensors = read_dump(run, file)
            x, key = tensors["value"], (step, about.layer, about.role)
            q = recipe.scaling.quantize(x, about.role, recipe.get_format(about.role)).dequantize()
            errors[key] = errors.get(key, 0) + float((x.double() - q).square().sum())
            n[key] = n.get(key, 0) + x.numel()
        rows = read_table_rows(run, "what_if").to_dicts()
        assert len(rows) == len(errors) == 30
        for row in rows:
            key = row["step"], row["layer"], row["role"]
            assert row["mse"] == pytest.approx(errors[key] / n[key], rel=1e-12)

    def test_bf16_costs_float32_something_and_bfloat16_nothing(self, tmp_path: Path) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            rows = read_table_rows(train(tmp_path / str(dtype), "current", dtype, what_if=["bf16"]), "what_if")
            assert set(rows["format"]) == {"bf16"}
            assert ((rows["mse"] > 0) == (dtype == torch.float32)).all()
            assert (rows["relative_error"] < 2**-9).all()

    def test_histograms_know_nothing_of_blocks(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"replay from histograms.*\(dumps do\), takes .* not 'mxfp8-e4m3'"):
            replay(train(tmp_path / "a", "current"), "mxfp8")
        run = train(tmp_path / "b", "nvfp4")
        replayed, recorded = replay(run), read_table_rows(run, "metrics")
        assert replayed["mse"].null_count() == len(recorded)
        assert_frame_equal(replayed.select("amax", "kurtosis"), recorded.select("amax", "kurtosis"), rel_tol=1e-12)
        of_weights = pl.col("role") == "weight"  # calls under a block recipe are one histogram
        current = read_table_rows(train(tmp_path / "c", "current"), "metrics").filter(of_weights)
        assert_frame_equal(replay(run, "current").filter(of_weights).select(METRICS), current.select(METRICS), rel_tol=1e-12)
