"""A run that nothing quantizes says so wherever it is read, and names no engine that it does not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_models.megatron import gpt, loss_of
from torch import nn
from typer.testing import CliRunner

from nemo_fp8_debug import Emulation, Monitor, compare, diagnose, recommend
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.record.reader import find_record, read_table_rows

NOTHING = "Nothing in the run is quantized, so the metrics show what FP8 would do to it."
NOT_READ = "We could not read whether the run quantizes, so the metrics show what FP8 would do to it."
X = ("0", "input")


def loop(folder: Path, recipe: str = "auto", emulated: bool = False) -> Path:
    """A plain loop whose input has one value that leaves all others below what FP8 holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)).bfloat16()
    if emulated:
        Emulation(model, "current").attach()
    monitor = Monitor(model, folder, interval=1, recipe=recipe, table_rows=0, on_error="raise")
    for step in range(12):
        with monitor.step(step) as report:
            x = torch.randn(16, 32)
            x[0, 0] = 1e9
            loss = model(x.bfloat16()).float().tanh().square().mean()
            loss.backward()
            report(loss=loss)
    monitor.close()
    return folder


def said(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_command_says_that_nothing_is_quantized(tmp_path: Path) -> None:
    baseline, run = loop(tmp_path / "baseline"), loop(tmp_path / "run")
    assert list(compare(run, baseline).notes) == [NOTHING.replace("the run", "the baseline"), NOTHING]
    found = diagnose(run)
    assert list(found.notes) == [NOTHING] and not [f for f in found.findings if f.rule == "operand"]
    assert list(diagnose(run, baseline).notes).count(NOTHING) == 1
    for command in (("compare", run, "--baseline", baseline), ("diagnose", run), ("recommend", run)):
        assert NOTHING in said(*command), command


def test_recommend_writes_no_files_of_engines_that_are_not_there(tmp_path: Path) -> None:
    out = said("recommend", loop(tmp_path / "run"), "--output", tmp_path / "fix")
    assert "measured under" in out and "in use" not in out
    assert "FP8 coverage, share of the GEMMs' FLOPs, assuming that all measured GEMMs are quantized: 100% ->" in out
    assert [path.name for path in (tmp_path / "fix").iterdir()] == ["plan.json"]
    assert out.count("No engine configuration is written: nothing in the run is quantized.") == 1
    assert json.loads(said("recommend", tmp_path / "run", "--json"))["quantization"] == "high precision"


@pytest.mark.usefixtures("megatron")
def test_megatron_in_bf16_gets_the_plan_alone(tmp_path: Path) -> None:
    model = gpt()
    monitor = Monitor(model, tmp_path / "run", interval=1, table_rows=0)
    for step in range(2):
        with monitor.step(step):
            loss_of(model, step).backward()
    monitor.close()
    operand = "decoder.layers.0.mlp.linear_fc1:X"
    tight = ("--relative-error", "1e-9", "--operand", operand, "--output", tmp_path / "fix")
    said("recommend", tmp_path / "run", *tight)
    assert [path.name for path in (tmp_path / "fix").iterdir()] == ["plan.json"]


def test_a_recipe_asked_for_by_name_leaves_it_unknown(tmp_path: Path) -> None:
    """Such a monitor does not read what the run casts with: it may be FP8."""
    run = loop(tmp_path / "run", recipe="delayed", emulated=True)
    assert set(read_table_rows(find_record(run), "metrics")["scale_source"]) <= {"current", "emulated"}
    assert list(diagnose(run).notes) == [NOT_READ]
    why = "No engine configuration is written: the record does not say whether the run quantizes, and in which engine."
    # The first GEMM's outlier leaves no gradient, for which no recipe is recommended unless its operand is named.
    assert why in said("recommend", run, "--operand", "0:X", "--output", tmp_path / "fix")
    assert [path.name for path in (tmp_path / "fix").iterdir()] == ["plan.json"]


def test_a_run_that_quantizes_has_no_such_notice(tmp_path: Path) -> None:
    run = loop(tmp_path / "run", emulated=True)
    assert [note for note in diagnose(run).notes if "bands" not in note] == [] and recommend(
        run, operands=[X]
    ).is_run_quantized
    out = said("recommend", run, "--output", tmp_path / "fix")
    assert "in use" in out and "measured under" not in out and "if all that" not in out
    assert "the run emulates FP8 in layers that no engine quantizes (torch.nn.Linear)." in out
    assert [path.name for path in (tmp_path / "fix").iterdir()] == ["plan.json"]
