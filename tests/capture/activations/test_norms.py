"""Inputs and outputs of norms, against tensors that other hooks keep."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import polars as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from nemo_fp8_debug import FP8DebugWarning, Monitor, compare, diagnose, read_record
from nemo_fp8_debug.cli import app

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def in_use(folder: Path) -> pl.DataFrame:
    return read_record(str(folder), "activations").filter(pl.col("scale_source") != "what-if")


def monitor_of(model: nn.Module, folder: Path, *activations: str) -> Monitor:
    options = {"interval": 1, "table_rows": 0, "what_if": ["current-e4m3"], "on_error": "raise"}
    return Monitor(model, str(folder), activations=activations or ("norm",), **options)


def largest_channel(x: torch.Tensor) -> tuple[int, float]:
    sizes = x.double().flatten(0, -2).square().mean(0).sqrt()
    return int(sizes.argmax()), float(sizes.max() / sizes.square().quantile(0.5).sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_norms_are_given_and_return(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2)).to(dtype)
    kept: dict[tuple[str, str], list[torch.Tensor]] = {}

    def keep(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        kept.setdefault((name, "norm_input"), []).append(x.detach().clone())
        kept.setdefault((name, "norm_output"), []).append(y.detach().clone())

    for path, module in model.named_modules():
        if path.endswith("norm"):
            module.register_forward_hook(lambda m, args, out, path=path: keep(path, args[0], out))
    monitor = monitor_of(model, tmp_path)
    with monitor.step(0):
        for _ in range(2):  # micro-batches
            ids = torch.randint(64, (2, 16))
            model(input_ids=ids, labels=ids).loss.backward()
    monitor.close()
    rows = {(row["layer"], row["role"]): row for row in in_use(tmp_path).to_dicts()}
    assert set(rows) == set(kept) and len(rows) == 2 * 5
    for key, tensors in kept.items():
        x, row = torch.cat(tensors), rows[key]
        assert (row["n"], row["rows"], row["calls"]) == (x.numel(), x.numel() / 32, 2)
        assert row["amax"] == x.abs().max().item()
        channel, ratio = largest_channel(x)
        assert (row["channel"], row["channel_ratio"]) == (channel, pytest.approx(ratio, rel=1e-9))
    tried = read_record(str(tmp_path), "activations", where={"scale_source": "what-if"})
    assert len(tried) == len(rows) and set(tried["recipe"]) == {"current-e4m3"}
    histograms = read_record(str(tmp_path), "activation_histograms")
    counted: Counter[tuple[str, str]] = Counter()
    for row in histograms.to_dicts():
        counted[row["layer"], row["role"]] += sum(row["counts"])
    assert counted == {key: sum(x.numel() for x in tensors) for key, tensors in kept.items()}
    assert set(read_record(str(tmp_path))["role"]) == {"input", "weight", "grad_output"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_that_is_done_again_counts_once(tmp_path: Path, reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda h: self.fc(self.norm(h)), x, use_reentrant=reentrant)

    model = Block()
    monitor = monitor_of(model, tmp_path)
    with monitor.step(0):
        model(torch.randn(8, 32, requires_grad=True)).sum().backward()
    monitor.close()
    assert in_use(tmp_path).select("role", "n", "calls").rows() == [("norm_input", 256, 1), ("norm_output", 256, 1)]


def test_a_norm_that_returns_something_else_is_said(tmp_path: Path) -> None:
    class SumNorm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square().sum(-1)

    model = nn.Sequential(nn.Linear(8, 8), SumNorm())
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, activations=("norm",))
    with (
        pytest.warns(FP8DebugWarning, match="output of 1 is missing .* its output has shape .4,., and its input .4, 8."),
        monitor.step(0),
    ):
        model(torch.randn(4, 8)).sum().backward()
    monitor.close()
    assert in_use(tmp_path).select("layer", "role").rows() == [("1", "norm_input")]


def test_what_a_model_does_not_have_is_said(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with pytest.warns(FP8DebugWarning, match="activations includes 'norm', but the model has no supported module"):
        monitor_of(model, tmp_path).close()


def test_nan_in_the_residual_stream_is_counted(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    monitor = monitor_of(model, tmp_path)
    with monitor.step(0):
        x = torch.randn(4, 8)
        x[1, 2] = float("nan")
        model(x).sum().backward()
    monitor.close()
    row = in_use(tmp_path).filter(role="norm_input").row(0, named=True)
    assert (row["nan"], row["channel_ratio"]) == (8, None)


class TestTwoRuns:
    @staticmethod
    def trained(folder: Path, outlier: float = 1.0, lost: bool = False) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
        monitor = monitor_of(model, folder)
        for step in range(4):
            with torch.no_grad():
                model[0].bias[3] = float("nan") if lost and step == 2 else outlier
            with monitor.step(step):
                model(torch.randn(32, 8)).square().mean().backward()
        monitor.close()
        return folder

    def test_a_channel_that_stands_out_comes_first(self, tmp_path: Path) -> None:
        found = compare(
            self.trained(tmp_path / "run", outlier=64.0), self.trained(tmp_path / "baseline")
        ).feature_comparisons["activations"]
        first = found.filter(metric="channel_ratio").row(0, named=True)
        assert (first["layer"], first["tensor"]) == ("1", "input") and first["ratio_log2"] > 4
        told = CliRunner().invoke(app, ["compare", str(tmp_path / "run"), "--baseline", str(tmp_path / "baseline")]).output
        assert "Tensors between GEMMs" in told

    def test_nan_that_comes_up_between_gemms_is_named(self, tmp_path: Path) -> None:
        told = diagnose(self.trained(tmp_path / "run", lost=True), self.trained(tmp_path / "baseline"))
        assert (told.cause, told.culprit and told.culprit.tensor_name) == ("nonfinite", "input of 1")
        assert told.culprit and told.culprit.since == 2
