"""Logs that Transformer Engine, nvdlfw_inspect and msProbe wrote, as a record: their metrics, and the command."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

import nvdlfw_run
import polars as pl
import pytest
import torch
from processes import run_script
from safetensors.torch import load_file
from tool_logs import FIRST_MONITOR, FIRST_RUN, ROLES, SECOND_MONITOR, TE, TE_EVENTS, TE_TEXT, table
from typer.testing import CliRunner

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.errors import FP8DebugWarning, RecordError
from nemo_fp8_debug.numerics.formats import E4M3, E5M2
from nemo_fp8_debug.numerics.metrics import compute_float32_moments, compute_metrics, quantization_sums_of_float32
from nemo_fp8_debug.record.imports import import_logs
from nemo_fp8_debug.record.reader import read_fingerprint, read_table_rows


class TestTransformerEngine:
    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        output = tmp_path_factory.mktemp("te")
        import_logs(TE, output)
        return output

    def test_rows_are_operands_under_our_names(self, run: Path) -> None:
        rows = read_table_rows(run, "metrics")
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
        (row,) = read_table_rows(run, "metrics", where=where).iter_rows(named=True)
        scale = torch.tensor([row["scale"]], dtype=torch.float32)
        sums = quantization_sums_of_float32(x, scale[0], E5M2 if tensor == "gradient" else E4M3)
        ours = {
            name: value.item() for name, value in compute_metrics(compute_float32_moments(x), sums, scale, scale).items()
        }
        assert row["underflow_pct"] == pytest.approx(ours["underflow_pct"], rel=1e-6)
        assert row["overflow_pct"] == pytest.approx(ours["overflow_pct"], rel=1e-6)
        assert row["amax"] == ours["amax"]
        assert row["dynamic_range_log2"] == pytest.approx(ours["dynamic_range_log2"], abs=1e-5)
        # Transformer Engine dequantizes and squares in BF16.
        assert row["mse"] == pytest.approx(ours["mse"], rel=0.02)

    def test_the_logs_show_what_the_metrics_are_for(self, run: Path) -> None:
        rows = read_table_rows(run, "metrics")
        assert rows["underflow_pct"].max() > 0.5
        assert rows["overflow_pct"].max() > 0.1

    def test_a_recipe_that_was_tried_beside_the_one_in_use_is_what_if(self, run: Path) -> None:
        rows = read_table_rows(run, "what_if")
        assert set(rows["recipe"]) == {"fp8_current_scaling"}
        assert len(rows) == 36
        assert rows["mse"].null_count() == 0
        assert rows["amax"].null_count() == 36

    def test_losses_stand_at_the_step_of_their_batch(self, run: Path) -> None:
        steps = read_table_rows(run, "steps")
        assert steps["step"].to_list() == [0, 1, 2]
        assert steps["loss"].null_count() == 0
        assert steps["time"].is_between(1.79e9, 1.80e9).all()

    def test_it_can_be_compared(self, run: Path) -> None:
        tensors = compare(run, run).tensors
        assert len(tensors) == 12
        assert set(tensors["drift_log2"]) == {0.0}

    def test_text_alone_has_what_four_decimals_tell(self, tmp_path: Path, run: Path) -> None:
        key = ["step", "layer", "role"]
        both = table(TE_TEXT, tmp_path / "text").join(read_table_rows(run, "metrics"), on=key, suffix="_exact")
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
        expected = read_table_rows(run, "metrics")
        key = ["step", "layer", "role"]
        assert metrics_.sort(key).equals(expected.sort(key))

    def test_the_log_of_features_is_not_taken_for_statistics(self, tmp_path: Path) -> None:
        with pytest.raises(RecordError, match=r"nvdlfw_inspect_statistics_logs/\*\.log or TensorBoard"):
            import_logs(TE / "nvdlfw_inspect_logs", tmp_path / "run")
        assert not (tmp_path / "run").exists()


class TestTwoRanks:
    """Logs written here by nvdlfw_inspect itself."""

    @pytest.fixture(scope="class")
    @classmethod
    def logs(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        rows = read_table_rows(tmp_path / "run", "metrics")
        assert rows["step"].to_list() == list(nvdlfw_run.STEPS)
        assert set(rows.select("layer", "role").iter_rows()) == {("decoder.layers.2.mlp.linear_fc1", "input")}
        for step, amax in rows.select("step", "amax").iter_rows():
            held = [nvdlfw_run.tensor(rank, step) for rank in range(2 if how == "reduced" else 1)]
            assert amax == pytest.approx(float(torch.cat(held).abs().max()), abs=6e-5)
        differ = [str(w.message) for w in caught if issubclass(w.category, FP8DebugWarning)]
        assert len(differ) == (how == "apart")
        assert any("of rank 1 that differ from rank 0's" in what for what in found.left_out) == (how == "apart")


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
                    amax[step, role] = max(amax.get((step, role), 0.0), tensor.abs().max().item())
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
        assert "other" not in set(read_table_rows(tmp_path / "run", "metrics")["layer"])
        assert any("files of ranks above 2" in what for what in found.left_out)

    def test_a_run_that_was_started_again(self, tmp_path: Path) -> None:
        logs = tmp_path / "logs"
        for name, digit in (("Nov21_19-33-23-rank0-ffffffff", "1"), ("Nov30_08-00-00-rank0-00000000", "9")):
            shutil.copytree(FIRST_RUN, logs / name)
            path = logs / name / "param_origin_0-1.csv"
            path.write_text(re.sub(r"^(0,fc1.weight,\d,)[^,]*,[^,]*", rf"\g<1>-{digit}.0,0.1", path.read_text(), flags=re.M))
        found = import_logs(logs, tmp_path / "run")
        rows = read_table_rows(tmp_path / "run", "metrics").filter(layer="fc1", role="weight", step=0)
        assert rows["amax"].to_list() == [9]
        assert any("written again" in what for what in found.left_out)
        assert set(read_table_rows(tmp_path / "run", "metrics").filter(role="input")["calls"]) == {2}

    def test_nan_is_counted_and_its_amax_absent(self, tmp_path: Path) -> None:
        logs = tmp_path / "rank_0"
        logs.mkdir()
        rows = ["-1,0,fc.input.0,forward,nan,nan,3.0", "-1,0,fc.input.0,forward,-2.0,1.0,0.0"]
        (logs / "module_step0-0.csv").write_text("\n".join(["vpp_stage,step,module_name,scope,min,max,nans", *rows, ""]))
        (row,) = table(tmp_path, tmp_path / "run").iter_rows(named=True)
        assert (row["nan"], row["amax"], row["calls"]) == (3, None, 2)

    def test_a_single_nan_of_a_monitored_run_is_named(self, tmp_path: Path) -> None:
        # Neither monitor counts infinities, so that count is null.
        shutil.copytree(SECOND_MONITOR, tmp_path / "logs")
        (path,) = (tmp_path / "logs" / "rank_0").glob("module_*.csv")
        row = re.compile(r"^(-1,1,fc2.grad_output.0,backward),.*$", re.MULTILINE)
        spoiled, count = row.subn(r"\1,nan,nan,1.0,nan", path.read_text(), count=1)
        path.write_text(spoiled)
        for name, source in (("bad", tmp_path / "logs"), ("good", SECOND_MONITOR)):
            import_logs(source, tmp_path / name)
        assert count == 1 and set(read_table_rows(tmp_path / "bad", "metrics")["inf"]) == {None}
        for baseline in (None, tmp_path / "good"):
            found = diagnose(tmp_path / "bad", baseline)
            assert found.cause == "nonfinite" and found.culprit is not None
            assert (found.culprit.tensor_name, found.culprit.since) == ("dY of fc2", 1)
            assert diagnose(tmp_path / "good", baseline).cause != "nonfinite"

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


class TestCommandLine:
    def run_cli(self, *arguments: object) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["import", *map(str, arguments)])
        return result.exit_code, result.stdout, result.stderr

    def test_says_what_is_in_the_record_and_what_is_not(self, tmp_path: Path) -> None:
        code, out, _ = self.run_cli(TE, tmp_path / "run")
        assert code == 0
        what = f"We imported 2 nvdlfw_inspect files into {tmp_path / 'run'}: 12 tensors at 3 steps (0 to 2), 3 losses."
        assert out.startswith(what)
        assert re.search(r"underflow \(%\) +36\n", out) and re.search(r"std: no metric has this definition +72\n", out)

    def test_importing_again_is_another_attempt(self, tmp_path: Path) -> None:
        for _ in range(2):
            assert self.run_cli(SECOND_MONITOR, tmp_path / "run")[0] == 0
        assert set(read_table_rows(tmp_path / "run", "metrics")["attempt"]) == {1}
        assert read_fingerprint(tmp_path / "run")["imported"]["tool"] == "msprobe"

    def test_what_cannot_be_imported_is_one_line(self, tmp_path: Path) -> None:
        code, out, err = self.run_cli(tmp_path, tmp_path / "run")
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {tmp_path} is not a log that can be imported, and contains no such log")
        assert err.count("\n") == 1

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("a file")
        code, _, err = self.run_cli(TE, tmp_path / "run")
        assert code == 1
        assert err.startswith("error: the run record cannot be written to")
