"""What users read of the ledger: at the start of a run, in its fingerprint, from compare and from diagnose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Samples
from torch import nn
from vit import ViT

from nemo_fp8_debug import Monitor, compare, diagnose
from nemo_fp8_debug.core.coverage_text import describe_unobserved


def recorded(folder: Path, model: nn.Module, shape: tuple[int, ...], layers: list[str] | None = None) -> Path:
    torch.manual_seed(0)
    monitor = Monitor(model, folder, interval=1, table_rows=1, on_error="raise", layers=layers)
    for step in range(8):
        with monitor.step(step):
            model(torch.randn(shape)).square().mean().backward()
    monitor.close()
    return folder


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


class TestRuns:
    def test_a_model_that_is_not_all_observed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        layers = ["linear1", "linear2", "head"]
        runs = [recorded(tmp_path / name, ViT(), (2, 3, 16, 16), layers) for name in ("a", "b")]
        said = "49.0% of the multiply-adds per token in known modules are not observed: left out by the option layers (4, "
        assert f"nemo_fp8_debug: {said}" in capsys.readouterr().out
        assert any(said in note for note in compare(*runs).notes)
        assert any(note.startswith(said) for note in diagnose(runs[0]).notes)

    def test_a_model_that_is(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        runs = [recorded(tmp_path / name, linear(), (4, 8)) for name in ("a", "b")]
        lines = capsys.readouterr().out.splitlines()
        assert "nemo_fp8_debug: all of the multiply-adds per token in known modules are observed" in lines
        assert not [note for note in (*compare(*runs).notes, *diagnose(runs[0]).notes) if "multiply-adds" in note]

    def test_the_fingerprint_has_totals_and_first_names(self) -> None:
        found = Monitor(ViT(), recorders=[Samples()], layers=["head"]).fingerprint["coverage"]
        assert found["share_not_observed"] == pytest.approx(1 - 320 / (2 * 8 * 32 * 32 + 320))
        left = found["not_observed"]["left out by the option layers"]
        assert left == {"count": 8, "first": "encoder.layers.0.linear1", "multiply_adds_per_token": 2 * 8 * 32 * 32}
        assert found["layers_of_unknown_size"] == {"convolution": 1}

    def test_roles_that_are_left_out_are_said(self) -> None:
        found = Monitor(linear(), recorders=[Samples()], roles=["input"]).fingerprint["coverage"]
        assert found["partly_observed"]["operands not observed: weight, grad_output"]["count"] == 2

    def test_a_linear_layer_with_a_forward_of_its_own(self) -> None:
        class Scaled(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.linear(x, self.weight * 1.5)

        found = Monitor(nn.Sequential(Scaled(4, 4)), recorders=[Samples()]).fingerprint["coverage"]
        (reason,) = found["partly_observed"]
        assert reason == "its class has a forward of its own, which may change or quantize its operands"


@pytest.mark.parametrize(
    "coverage", [None, {}, "x", {"share_not_observed": "x", "not_observed": 3}, {"not_observed": {"a": 1}}]
)
def test_sections_of_other_records_are_no_fault(coverage: Any) -> None:
    assert isinstance(describe_unobserved(coverage, above=0.05), str)
