"""Logs that Transformer Engine, nvdlfw_inspect and msProbe wrote, as a record: their metrics, and damage of every kind."""

from __future__ import annotations

import math
import re
import shutil
import warnings
from pathlib import Path

import nvdlfw_run
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_script
from safetensors.torch import load_file
from typer.testing import CliRunner

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.errors import FP8DebugWarning, RecordError
from nemo_fp8_debug.numerics.formats import E4M3, E5M2
from nemo_fp8_debug.numerics.metrics import metrics_of, moments_of_float32, quantization_sums_of_float32
from nemo_fp8_debug.record.imports import import_logs
from nemo_fp8_debug.record.reader import read_fingerprint, read_table

LOGS = Path(__file__).parent / "logs"
TE = LOGS / "transformer_engine"
TE_TEXT = TE / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log"
(TE_EVENTS,) = (TE / "tensorboard").iterdir()
FIRST_MONITOR = LOGS / "msprobe" / "monitor"
SECOND_MONITOR = LOGS / "msprobe" / "monitor_v2"
(FIRST_RUN,) = FIRST_MONITOR.iterdir()

ROLES = {"activation": "input", "weight": "weight", "gradient": "grad_output"}


def table(source: Path, output: Path, name: str = "metrics") -> pl.DataFrame:
    import_logs(source, output)
    return read_table(output, name)


def line(name: str, value: object, step: int = 0) -> str:
    return f"2026-11-21 11:33:55,123 - INFO - {name} \t\t\t\t iteration={step:06d} \t\t\t\t value={value}\n"


def text_log(folder: Path, *lines: str, rank: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"nvdlfw_inspect_globalrank-{rank}.log"
    path.write_text("".join(lines))
    return path


class TestTransformerEngine:
    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        output = tmp_path_factory.mktemp("te")
        import_logs(TE, output)
        return output

    def test_rows_are_operands_under_our_names(self, run: Path) -> None:
        rows = read_table(run, "metrics")
        layers = {f"decoder.layers.{i}.mlp.linear_fc{j}" for i in (0, 1) for j in (1, 2)}
        expected = {(step, layer, role) for step in range(3) for layer in layers for role in ROLES.values()}
        assert set(rows.select("step", "layer", "role").iter_rows()) == expected
        assert len(rows) == len(expected)
        assert set(rows["gemm"]) == {"linear_fc1", "linear_fc2"}
        assert set(rows["recipe"]) == {"fp8_delayed_scaling"}
        assert set(rows["scale_source"]) == {"nvdlfw_inspect"}

    @pytest.mark.parametrize("dumped", sorted(load_file(TE / "operands_of_step_2.safetensors")))
    def test_metrics_are_those_of_the_tensors(self, run: Path, dumped: str) -> None:
        """Against our own metrics of the tensors that Transformer Engine dumped, under the scale that it logged."""
        x = load_file(TE / "operands_of_step_2.safetensors")[dumped].float()
        number, gemm, tensor = re.fullmatch(r"model_module_decoder_layers_(\d)_mlp_(linear_fc\d)_(\w+)", dumped).groups()
        where = {"step": 2, "layer": f"decoder.layers.{int(number) - 1}.mlp.{gemm}", "role": ROLES[tensor]}
        (row,) = read_table(run, "metrics", where=where).iter_rows(named=True)
        scale = torch.tensor([row["scale"]], dtype=torch.float32)
        sums = quantization_sums_of_float32(x, scale[0], E5M2 if tensor == "gradient" else E4M3)
        ours = {name: value.item() for name, value in metrics_of(moments_of_float32(x), sums, scale, scale).items()}
        assert row["underflow_pct"] == pytest.approx(ours["underflow_pct"], rel=1e-6)
        assert row["overflow_pct"] == pytest.approx(ours["overflow_pct"], rel=1e-6)
        assert row["amax"] == ours["amax"]
        assert row["dynamic_range_log2"] == pytest.approx(ours["dynamic_range_log2"], abs=1e-5)
        # Transformer Engine dequantizes and squares in BF16.
        assert row["mse"] == pytest.approx(ours["mse"], rel=0.02)

    def test_the_logs_show_what_the_metrics_are_for(self, run: Path) -> None:
        rows = read_table(run, "metrics")
        assert rows["underflow_pct"].max() > 0.5
        assert rows["overflow_pct"].max() > 0.1

    def test_a_recipe_that_was_tried_beside_the_one_in_use_is_what_if(self, run: Path) -> None:
        rows = read_table(run, "what_if")
        assert set(rows["recipe"]) == {"fp8_current_scaling"}
        assert len(rows) == 36
        assert rows["mse"].null_count() == 0
        assert rows["amax"].null_count() == 36

    def test_losses_stand_at_the_step_of_their_batch(self, run: Path) -> None:
        steps = read_table(run, "steps")
        assert steps["step"].to_list() == [0, 1, 2]
        assert steps["loss"].null_count() == 0
        assert steps["time"].is_between(1.79e9, 1.80e9).all()

    def test_it_can_be_compared(self, run: Path) -> None:
        tensors = compare(run, run).tensors
        assert len(tensors) == 12
        assert set(tensors["drift_log2"]) == {0.0}

    def test_text_alone_has_what_four_decimals_tell(self, tmp_path: Path, run: Path) -> None:
        key = ["step", "layer", "role"]
        both = table(TE_TEXT, tmp_path / "text").join(read_table(run, "metrics"), on=key, suffix="_exact")
        assert len(both) == 36
        for metric, absolute in {
            "underflow_pct": True,
            "overflow_pct": True,
            "amax": False,
            "mse": False,
            "scale": False,
        }.items():
            known = both.filter(pl.col(metric).is_not_null())
            error = (known[metric] - known[f"{metric}_exact"]).abs()
            assert len(known) > 5
            assert (error / (1 if absolute else known[f"{metric}_exact"])).max() < (6e-5 if absolute else 0.12)
        unknown = both.filter(pl.col("mse").is_null())
        assert 0 < len(unknown) < 36
        assert unknown["mse_exact"].max() < 6e-4

    def test_an_event_file_alone(self, tmp_path: Path, run: Path) -> None:
        metrics_ = table(TE_EVENTS, tmp_path / "events")
        expected = read_table(run, "metrics")
        key = ["step", "layer", "role"]
        assert metrics_.sort(key).equals(expected.sort(key))

    def test_the_log_of_features_is_not_taken_for_statistics(self, tmp_path: Path) -> None:
        with pytest.raises(RecordError, match=r"nvdlfw_inspect_statistics_logs/\*\.log or TensorBoard"):
            import_logs(TE / "nvdlfw_inspect_logs", tmp_path / "run")
        assert not (tmp_path / "run").exists()


class TestTwoRanks:
    """Logs written here by nvdlfw_inspect itself."""

    @pytest.fixture(scope="class")
    def logs(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("logs")
        run_script(nvdlfw_run.__file__, folder)
        return folder

    @pytest.mark.parametrize("how", nvdlfw_run.RANKS)
    def test_one_copy_of_what_all_ranks_have(self, tmp_path: Path, logs: Path, how: str) -> None:
        folder = logs / how
        assert len(list(folder.glob("nvdlfw_inspect_statistics_logs/*.log"))) == 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = import_logs(folder, tmp_path / "run")
        rows = read_table(tmp_path / "run", "metrics")
        assert rows["step"].to_list() == list(nvdlfw_run.STEPS)
        assert set(rows.select("layer", "role").iter_rows()) == {("decoder.layers.2.mlp.linear_fc1", "input")}
        for step, amax in rows.select("step", "amax").iter_rows():
            held = [nvdlfw_run.tensor(rank, step) for rank in range(2 if how == "reduced" else 1)]
            assert amax == pytest.approx(float(torch.cat(held).abs().max()), abs=6e-5)
        differ = [str(w.message) for w in caught if issubclass(w.category, FP8DebugWarning)]
        assert len(differ) == (how == "apart")
        assert any("of rank 1 that differ from rank 0's" in what for what in found.left_out) == (how == "apart")


class TestWhatAStatisticIs:
    X = "decoder.layers.0.mlp.linear_fc1_activation"

    def row(self, tmp_path: Path, *lines: str) -> dict[str, object]:
        (row,) = table(text_log(tmp_path / "logs", *lines), tmp_path / "run").iter_rows(named=True)
        return row

    def test_underflow_without_a_sign_of_the_release_is_left_out(self, tmp_path: Path) -> None:
        log = text_log(tmp_path / "logs", line(f"{self.X}_cur_amax", "2.0000"), line(f"{self.X}_underflows%", "3.0000"))
        found = import_logs(log, tmp_path / "run")
        assert read_table(tmp_path / "run", "metrics")["underflow_pct"].to_list() == [None]
        assert any("share of zeros in Transformer Engine 2.4 to 2.6" in what for what in found.left_out)

    @pytest.mark.parametrize("newer", ["mse", "overflows%", "scale_inv_min", "fp8_current_scaling_underflows%"])
    def test_underflow_beside_what_only_newer_releases_have(self, tmp_path: Path, newer: str) -> None:
        row = self.row(tmp_path, line(f"{self.X}_underflows%", "3.0000"), line(f"{self.X}_{newer}", "1.0000"))
        assert row["underflow_pct"] == 3

    def test_underflow_below_zero_discredits_all(self, tmp_path: Path) -> None:
        prefix = f"{self.X}_fp8_delayed_scaling_"
        lines = [line(f"{prefix}underflows%", value, step) for step, value in enumerate(("3.0000", "-0.1000"))]
        metrics_ = table(text_log(tmp_path / "logs", *lines, line(f"{prefix}mse", "1.0000")), tmp_path / "run")
        assert metrics_["underflow_pct"].to_list() == [None]

    def test_overflow_tells_that_delayed_scaling_was_in_use(self, tmp_path: Path) -> None:
        row = self.row(tmp_path, line(f"{self.X}_overflows%", "1.0000"), line(f"{self.X}_fp8_current_scaling_mse", "1.0000"))
        assert (row["recipe"], row["overflow_pct"], row["mse"]) == ("fp8_delayed_scaling", 1, None)

    def test_the_only_recipe_is_the_one_in_use(self, tmp_path: Path) -> None:
        row = self.row(tmp_path, line(f"{self.X}_mxfp8_mse", "1.0000"), line(f"{self.X}_cur_amax", "2.0000"))
        assert (row["recipe"], row["mse"], row["amax"]) == ("mxfp8", 1, 2)

    def test_several_recipes_none_of_which_need_be_in_use(self, tmp_path: Path) -> None:
        names = ("mxfp8_mse", "fp8_block_scaling_mse", "cur_amax")
        row = self.row(tmp_path, *(line(f"{self.X}_{name}", "1.0000") for name in names))
        assert (row["recipe"], row["mse"], row["amax"]) == (None, None, 1)
        assert set(read_table(tmp_path / "run", "what_if")["recipe"]) == {"mxfp8", "fp8_block_scaling"}

    @pytest.mark.parametrize(
        ("recipe", "low", "high", "scale"),
        [
            ("fp8_delayed_scaling", "0.0500", "0.0500", 20),
            ("fp8_delayed_scaling", "0.0500", "0.0600", None),
            ("fp8_delayed_scaling", "0.0001", "0.0001", None),
            ("fp8_delayed_scaling", "0.0000", "0.0000", None),
            ("fp8_block_scaling", "0.0500", "0.0500", None),
        ],
        ids=["one", "several", "too few digits", "no digit", "of blocks"],
    )
    def test_a_scale_is_one_that_all_values_were_cast_with(
        self, tmp_path: Path, recipe: str, low: str, high: str, scale: float | None
    ) -> None:
        row = self.row(
            tmp_path,
            line(f"{self.X}_{recipe}_scale_inv_min", low),
            line(f"{self.X}_{recipe}_scale_inv_max", high),
            line(f"{self.X}_{recipe}_underflows%", "0.0000"),
        )
        assert row["scale"] == (scale and pytest.approx(scale))
        assert row["underflow_pct"] == 0

    @pytest.mark.parametrize(
        ("name", "layer"),
        [
            ("model.decoder.layers.4.mlp.linear_fc1", "decoder.layers.3.mlp.linear_fc1"),
            ("model._orig_mod.module.layers.4.fc", "layers.4.fc"),
            ("model.model.layers.4.self_attn.q_proj", "model.layers.4.self_attn.q_proj"),
            ("a_weight_b", "a_weight_b"),
        ],
        ids=["Megatron", "wrapped", "Hugging Face", "a tensor's name in a layer's"],
    )
    def test_layers_have_our_names(self, tmp_path: Path, name: str, layer: str) -> None:
        assert self.row(tmp_path, line(f"{name}_activation_cur_amax", "1.0000"))["layer"] == layer

    def test_layers_that_are_counted_from_0_stay(self, tmp_path: Path) -> None:
        lines = [line(f"decoder.layers.{i}.mlp.linear_fc1_weight_cur_amax", "1.0000") for i in (0, 7)]
        layers = table(text_log(tmp_path / "logs", *lines), tmp_path / "run")["layer"]
        assert set(layers) == {"decoder.layers.0.mlp.linear_fc1", "decoder.layers.7.mlp.linear_fc1"}

    @pytest.mark.parametrize(
        "name", ["fc_output_max", "fc_wgrad_cur_amax", "fc_activation_std", "fc_weight_mxfp8_mse_columnwise"]
    )
    def test_what_no_metric_is_defined_as_is_named(self, tmp_path: Path, name: str) -> None:
        found = import_logs(
            text_log(tmp_path / "logs", line(f"{self.X}_cur_amax", "1.0000"), line(name, "1.0000")), tmp_path / "run"
        )
        assert sum(found.left_out.values()) == 1
        assert len(read_table(tmp_path / "run", "metrics")) == 1

    def test_a_step_that_is_logged_again_counts_as_it_was_logged_last(self, tmp_path: Path) -> None:
        log = text_log(tmp_path / "logs", *(line(f"{self.X}_cur_amax", value) for value in ("1.0000", "2.0000")))
        assert table(log, tmp_path / "run")["amax"].to_list() == [2]


class TestMsProbe:
    def test_both_monitors_tell_the_same_of_the_same_run(self, tmp_path: Path) -> None:
        key = ["step", "layer", "role"]
        first, second = table(FIRST_MONITOR, tmp_path / "first"), table(SECOND_MONITOR, tmp_path / "second")
        both = first.join(second, on=key, suffix="_2").filter(pl.col("layer").is_in(["fc1", "fc2"]))
        assert set(both.select(key).iter_rows()) == {
            (step, layer, role) for step in range(3) for layer in ("fc1", "fc2") for role in ROLES.values()
        }
        assert (both["amax"] - both["amax_2"]).abs().max() < 6e-7
        assert set(both["nan"]) == set(both["nan_2"]) == {0}
        assert set(both["dtype"]) == {"float32"}
        micro_batches = {role: set(rows["calls"]) for (role,), rows in both.group_by("role")}
        assert micro_batches == {"input": {2}, "grad_output": {2}, "weight": {1}}

    def test_metrics_are_those_of_the_tensors(self, tmp_path: Path) -> None:
        """Against the run that was monitored, done again."""
        amax: dict[tuple[int, str], float] = {}
        torch.manual_seed(0)
        fc1, norm, fc2 = torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
        optimizer = torch.optim.SGD([*fc1.parameters(), *norm.parameters(), *fc2.parameters()], lr=0.1)
        for step in range(3):
            amax[step, "weight"] = float(fc2.weight.detach().abs().max())
            for _ in range(2):
                x = norm(fc1(torch.randn(8, 16))).relu()
                y = fc2(x)
                y.retain_grad()
                y.square().mean().backward()
                for role, tensor in (("input", x), ("grad_output", y.grad)):
                    amax[step, role] = max(amax.get((step, role), 0.0), float(tensor.abs().max()))
            optimizer.step()
            optimizer.zero_grad()
        rows = table(SECOND_MONITOR, tmp_path / "run").filter(layer="fc2")
        assert {(step, role): value for step, role, value in rows.select("step", "role", "amax").iter_rows()} == (
            pytest.approx(amax, rel=1e-5)
        )

    def test_the_lowest_rank_is_taken(self, tmp_path: Path) -> None:
        logs = tmp_path / "logs"
        shutil.copytree(SECOND_MONITOR, logs)
        (logs / "rank_0").rename(logs / "rank_2")
        shutil.copytree(logs / "rank_2", logs / "rank_10")
        for path in (logs / "rank_10").iterdir():
            path.write_text(path.read_text().replace("fc1", "other"))
        found = import_logs(logs, tmp_path / "run")
        assert "other" not in set(read_table(tmp_path / "run", "metrics")["layer"])
        assert any("files of ranks above 2" in what for what in found.left_out)

    def test_a_run_that_was_started_again(self, tmp_path: Path) -> None:
        logs = tmp_path / "logs"
        for name, digit in (("Nov21_19-33-23-rank0-ffffffff", "1"), ("Nov30_08-00-00-rank0-00000000", "9")):
            shutil.copytree(FIRST_RUN, logs / name)
            path = logs / name / "param_origin_0-1.csv"
            path.write_text(re.sub(r"^(0,fc1.weight,\d,)[^,]*,[^,]*", rf"\g<1>-{digit}.0,0.1", path.read_text(), flags=re.M))
        found = import_logs(logs, tmp_path / "run")
        rows = read_table(tmp_path / "run", "metrics").filter(layer="fc1", role="weight", step=0)
        assert rows["amax"].to_list() == [9]
        assert any("written again" in what for what in found.left_out)
        assert set(read_table(tmp_path / "run", "metrics").filter(role="input")["calls"]) == {2}

    def test_nan_is_counted_and_its_amax_absent(self, tmp_path: Path) -> None:
        logs = tmp_path / "rank_0"
        logs.mkdir()
        rows = ["-1,0,fc.input.0,forward,nan,nan,3.0", "-1,0,fc.input.0,forward,-2.0,1.0,0.0"]
        (logs / "module_step0-0.csv").write_text("\n".join(["vpp_stage,step,module_name,scope,min,max,nans", *rows, ""]))
        (row,) = table(tmp_path, tmp_path / "run").iter_rows(named=True)
        assert (row["nan"], row["amax"], row["calls"]) == (3, None, 2)

    @pytest.mark.parametrize(
        ("low", "high", "amax"),
        [("-0.2", "0.1", 0.2), ("0.0", "0.0", None), ("-3e-06", "1e-06", None), ("-3.217e-08", "0.0", 3.217e-8)],
        ids=["short", "rounded to 0", "one digit left", "written with more decimals"],
    )
    def test_the_first_monitor_rounds(self, tmp_path: Path, low: str, high: str, amax: float | None) -> None:
        rows = ["vpp_stage,name,step,micro_step,min,max,nans", f"0,fc.input,0,0,{low},{high},0", ""]
        (tmp_path / "actv_0-0.csv").write_text("\n".join(rows))
        assert table(tmp_path, tmp_path / "run")["amax"].to_list() == [amax]

    def test_chunks_of_a_virtual_pipeline_stay_apart(self, tmp_path: Path) -> None:
        rows = [f"{i},0,{i}:module.decoder.layers.0.fc.input.0,forward,-2.0,1.0" for i in (0, 1)]
        (tmp_path / "module.csv").write_text("\n".join(["vpp_stage,step,module_name,scope,min,max", *rows, ""]))
        assert set(table(tmp_path, tmp_path / "run")["layer"]) == {"decoder.layers.0.fc", "chunk1.decoder.layers.0.fc"}


def warned(source: Path, output: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import_logs(source, output)
    return [str(w.message) for w in caught if issubclass(w.category, FP8DebugWarning)]


class TestDamagedLogs:
    def test_a_text_log_that_breaks_off(self, tmp_path: Path) -> None:
        log = text_log(tmp_path / "logs", TE_TEXT.read_text()[:-3])
        lines = TE_TEXT.read_text().count("\n")
        (warning,) = warned(log, tmp_path / "run")
        assert f"{log}, line {lines}: the line is cut off" in warning
        assert len(read_table(tmp_path / "run", "metrics")) == 36

    def test_foreign_lines_and_bytes(self, tmp_path: Path) -> None:
        log = tmp_path / "nvdlfw_inspect_globalrank-0.log"
        content = TE_TEXT.read_bytes().splitlines(keepends=True)
        content.insert(3, b"Traceback (most recent call last):\n")
        content.insert(7, b"\xff\xfe\x00 value=1.0\n")
        content.insert(9, line("fc_weight_cur_amax", "1e5").encode())
        log.write_bytes(b"".join(content))
        (warning,) = warned(log, tmp_path / "run")
        assert f"{log}, line 4, and 2 more lines: it is not a statistic; left out" in warning
        assert len(read_table(tmp_path / "run", "metrics")) == 36

    @pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
    def test_values_that_are_no_numbers_are_absent(self, tmp_path: Path, value: str) -> None:
        log = text_log(tmp_path / "logs", line("fc_weight_cur_amax", value), line("fc_weight_dynamic_range", "3.0000"))
        (row,) = table(log, tmp_path / "run").iter_rows(named=True)
        assert (row["amax"], row["dynamic_range_log2"]) == (None, 3)

    def test_an_event_file_that_breaks_off(self, tmp_path: Path) -> None:
        events = tmp_path / TE_EVENTS.name
        events.write_bytes(TE_EVENTS.read_bytes()[: TE_EVENTS.stat().st_size // 2])
        (warning,) = warned(events, tmp_path / "run")
        assert f"{events} is damaged or cut off before byte" in warning
        assert 0 < len(read_table(tmp_path / "run", "metrics")) < 36

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ("-1,0,fc.input.0,forw", "it has 4 columns, not 7"),
            ("-1,0,fc.input.0,forward,low,1.0,0", "could not convert"),
            ("-1,-3,fc.input.0,forward,0.0,1.0,0", "step -3"),
            (f"-1,{10**30},fc.input.0,forward,0.0,1.0,0", f"step {10**30}"),
            ("-1,0,fc.input.0,forward,0.0,1.0,1e300", "1e[+]300 NaNs"),
            ("-1,0,\x00,forward,0.0,1.0,0", ""),
            ('"' + "x" * 200_000, "field larger|columns"),
        ],
    )
    def test_a_row_that_is_none(self, tmp_path: Path, row: str, reason: str) -> None:
        path = tmp_path / "rank_0" / "module_step0-9.csv"
        path.parent.mkdir()
        header, good = "vpp_stage,step,module_name,scope,min,max,nans", "-1,1,fc.input.0,forward,-2.0,1.0,0.0"
        path.write_text("\n".join([header, row, good, ""]))
        messages = warned(tmp_path, tmp_path / "run")
        assert read_table(tmp_path / "run", "metrics")["step"].to_list() == [1]
        if reason:
            (message,) = messages
            assert f"{path}, line 2: " in message
            assert re.search(reason, message)

    def test_a_csv_that_breaks_off(self, tmp_path: Path) -> None:
        logs = tmp_path / "rank_0"
        shutil.copytree(SECOND_MONITOR / "rank_0", logs)
        path = logs / "module_step0-2.csv"
        path.write_bytes(path.read_bytes()[:-8])
        (warning,) = warned(logs, tmp_path / "run")
        assert f"{path}, line {path.read_text().count(chr(10)) + 1}: the line is cut off" in warning

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_any_damage_costs_no_more_than_what_it_hits(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        source = data.draw(st.sampled_from([TE_TEXT, TE_EVENTS, SECOND_MONITOR / "rank_0" / "module_step0-2.csv"]))
        content = bytearray(source.read_bytes())
        for _ in range(data.draw(st.integers(1, 5))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
        folder = tmp_path_factory.mktemp("damaged")
        (folder / source.name).write_bytes(bytes(content))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FP8DebugWarning)
            try:
                import_logs(folder / source.name, folder / "run")
            except RecordError as error:
                assert str(folder) in str(error)
            else:
                rows = read_table(folder / "run", "metrics")
                assert len(rows) > 0
                assert all(v is None or math.isfinite(v) for metric in ("amax", "mse", "scale") for v in rows[metric])


class TestRefused:
    @pytest.mark.parametrize("content", [b"", b"\x00" * 1000, b"step,loss\n1,2.0\n", b"hello\n"])
    @pytest.mark.parametrize("name", ["a.log", "a.csv", "events.out.tfevents.1.a", "a.bin"])
    def test_nothing_that_can_be_read(self, tmp_path: Path, name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecordError, match="is not a log that can be imported, and holds none") as error:
            import_logs(tmp_path / name, tmp_path / "run")
        assert str(tmp_path / name) in str(error.value)
        assert "vpp_stage" in str(error.value)
        assert not (tmp_path / "run").exists()

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(RecordError, match="missing does not exist"):
            import_logs(tmp_path / "missing", tmp_path / "run")

    def test_logs_of_two_tools(self, tmp_path: Path) -> None:
        with pytest.raises(
            RecordError, match=r"holds logs of 2 tools: nvdlfw_inspect .*, msprobe .*; name the folder of one"
        ):
            import_logs(LOGS, tmp_path / "run")

    def test_a_log_without_a_metric(self, tmp_path: Path) -> None:
        log = text_log(tmp_path / "logs", line("fc_output_std", "1.0000"))
        with pytest.raises(RecordError, match=r"no metric that can be imported .*output: no operand of a GEMM \(1\)"):
            import_logs(log, tmp_path / "run")


class TestCommandLine:
    def run_cli(self, *arguments: object) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["import", *map(str, arguments)])
        return result.exit_code, result.stdout, result.stderr

    def test_says_what_is_in_the_record_and_what_is_not(self, tmp_path: Path) -> None:
        code, out, _ = self.run_cli(TE, tmp_path / "run")
        assert code == 0
        assert f"Imported 2 nvdlfw_inspect files into {tmp_path / 'run'}" in out
        assert "steps    3, 0 to 2" in out
        assert "tensors  12" in out
        assert "underflow_pct 36" in out
        assert "losses   3" in out
        assert "72  std: no metric is defined so" in out

    def test_importing_again_is_another_attempt(self, tmp_path: Path) -> None:
        for _ in range(2):
            assert self.run_cli(SECOND_MONITOR, tmp_path / "run")[0] == 0
        assert set(read_table(tmp_path / "run", "metrics")["attempt"]) == {1}
        assert read_fingerprint(tmp_path / "run")["imported"]["tool"] == "msprobe"

    def test_what_cannot_be_imported_is_one_line(self, tmp_path: Path) -> None:
        code, out, err = self.run_cli(tmp_path, tmp_path / "run")
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {tmp_path} is not a log that can be imported, and holds none")
        assert err.count("\n") == 1

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("a file")
        code, _, err = self.run_cli(TE, tmp_path / "run")
        assert code == 1
        assert err.startswith("error: the run record cannot be written to")
