"""What each statistic of nvdlfw_inspect's text log is taken for."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from processes import run_script
from tool_logs import line, table, text_log

from nemo_fp8_debug.record.imports import import_logs
from nemo_fp8_debug.record.reader import read_fingerprint, read_table_rows


class TestWhatAStatisticIs:
    X = "decoder.layers.0.mlp.linear_fc1_activation"

    def row(self, tmp_path: Path, *lines: str) -> dict[str, object]:
        (row,) = table(text_log(tmp_path / "logs", *lines), tmp_path / "run").iter_rows(named=True)
        return row

    def test_underflow_without_a_sign_of_the_release_is_left_out(self, tmp_path: Path) -> None:
        log = text_log(tmp_path / "logs", line(f"{self.X}_cur_amax", "2.0000"), line(f"{self.X}_underflows%", "3.0000"))
        found = import_logs(log, tmp_path / "run")
        assert read_table_rows(tmp_path / "run", "metrics")["underflow_pct"].to_list() == [None]
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
        assert set(read_table_rows(tmp_path / "run", "what_if")["recipe"]) == {"mxfp8", "fp8_block_scaling"}

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

    @pytest.mark.parametrize("which", ["both logs", "statistics alone"])
    def test_layers_of_a_model_other_than_megatrons(self, tmp_path: Path, which: str) -> None:
        """As nvdlfw_inspect itself names them: by `layer_number`, or else by their index."""
        run_script(Path(__file__).with_name("nvdlfw_names.py"), tmp_path / "logs")
        source = tmp_path / "logs" / ("nvdlfw_inspect_statistics_logs" if which == "statistics alone" else "")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = import_logs(source, tmp_path / "run")
        layers = set(read_table_rows(tmp_path / "run", "metrics")["layer"])
        assert "by_index.2.fc" in layers and "whole.0.fc" in layers and "whole.2.fc" in layers
        notes = [note.partition(" keep ")[0] for note in found.notes]
        assert read_fingerprint(tmp_path / "run")["imported"]["notes"] == found.notes
        assert sorted(str(w.message).partition(" keep ")[0] for w in caught) == sorted(f"nemo_fp8_debug: {n}" for n in notes)
        if which == "both logs":
            assert "layers.1.self_attention.qkv" in layers and not notes
        else:
            assert "layers.2.self_attention.qkv" in layers
            assert notes == ["The layers of by_index", "The layers of layers"]

    @pytest.mark.parametrize(
        "name", ["fc_output_max", "fc_wgrad_cur_amax", "fc_activation_std", "fc_weight_mxfp8_mse_columnwise"]
    )
    def test_what_no_metric_is_defined_as_is_named(self, tmp_path: Path, name: str) -> None:
        found = import_logs(
            text_log(tmp_path / "logs", line(f"{self.X}_cur_amax", "1.0000"), line(name, "1.0000")), tmp_path / "run"
        )
        assert sum(found.left_out.values()) == 1
        assert len(read_table_rows(tmp_path / "run", "metrics")) == 1

    def test_a_step_that_is_logged_again_counts_as_it_was_logged_last(self, tmp_path: Path) -> None:
        log = text_log(tmp_path / "logs", *(line(f"{self.X}_cur_amax", value) for value in ("1.0000", "2.0000")))
        assert table(log, tmp_path / "run")["amax"].to_list() == [2]
