"""What commands print: nothing is cut at any width, examples of `--help` run, and JSON stands alone."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner, Result

from nemo_fp8_debug import Monitor, diagnose
from nemo_fp8_debug.cli import COMMANDS, app, load_command
from nemo_fp8_debug.cli.listing import Column, filled, print_rows
from nemo_fp8_debug.record.schema import STATUS

LOGS = Path(__file__).parents[1] / "record" / "logs" / "transformer_engine" / "nvdlfw_inspect_statistics_logs"
STEPS = 60


def run_cli(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env=environment)


NAMES = st.text("abcdefg.", min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(st.integers(40, 200), st.lists(st.tuples(NAMES, st.sampled_from("XWY"), NAMES, NAMES), min_size=1, max_size=4))
def test_no_name_and_no_number_is_cut(width: int, rows: list[tuple[str, str, str, str]]) -> None:
    columns = (Column("layer", "name"), Column("tensor", "name"), Column("share of values"), Column("why", "text"))
    out = Console(width=width, file=io.StringIO(), record=True)
    print_rows(out, "Title", columns, rows)
    lines = out.export_text().splitlines()
    assert max(map(len, lines)) <= width
    # Whatever lies between pieces of a text that was folded is no part of it.
    shown = "".join("".join(lines).split()).translate(str.maketrans("", "", "│┃"))
    if "┏" not in shown:
        for layer, tensor, number, _ in rows:
            assert f"{tensor}of{layer}" in shown
            assert f"shareofvalues:{number}" in shown or number == "-"


@given(st.lists(st.text("ab ", min_size=1, max_size=50).filter(str.strip), max_size=6), st.integers(10, 60))
def test_lines_are_filled_and_lose_nothing(pieces: list[str], width: int) -> None:
    lines = list(filled(pieces, width))
    assert all(len(line) <= width for line in lines)
    assert "".join("".join(lines).split()).replace(";", "") == "".join("".join(pieces).split())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that examples name: runs, a checkpoint, a log, and a script that resumes training."""
    folder = tmp_path_factory.mktemp("examples")
    for run in ("baseline", "fp8", "bf16", "good_a", "good_b"):
        _train(folder / "runs" / run, scale=1e-4 if run == "fp8" else 1.0)
    (folder / "checkpoints" / "step_1000").mkdir(parents=True)
    save_file(
        {"model.layers.0.mlp.down_proj.weight": torch.randn(64, 64)},
        folder / "checkpoints" / "step_1000" / "model.safetensors",
    )
    shutil.copytree(LOGS, folder / "logs" / "nvdlfw_inspect_statistics_logs")
    status = folder / "runs" / "fp8" / STATUS
    status.write_text(json.dumps(json.loads(status.read_text()) | {"ended": None}))  # as that of a run that goes on
    (folder / "train.py").write_text("print('resumed')")
    return folder


def _train(folder: Path, scale: float) -> None:
    torch.manual_seed(0)
    blocks = [nn.ModuleDict({"mlp": nn.ModuleDict({"linear_fc2": nn.Linear(16, 16)})}) for _ in range(2)]
    model = nn.ModuleDict({"decoder": nn.ModuleDict({"layers": nn.ModuleList(blocks)})}).bfloat16()
    monitor = Monitor(model, str(folder), interval=4, recipe="delayed(amax_history_len=4)", table_rows=0, on_error="raise")
    for step in range(STEPS):
        with monitor.step(step) as report:
            x = torch.randn(8, 16, dtype=torch.bfloat16) * (scale if step > STEPS // 2 else 1.0)
            for block in blocks:
                x = block["mlp"]["linear_fc2"](x)
            loss = x.float().square().mean() + 1
            loss.backward()
            report(loss=loss)
    monitor.close()


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_help_run(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    told = run_cli(command, "--help", COLUMNS="200").output
    for example in load_command(command)[1]:
        assert f"nemo-fp8-debug {command} {example}" in told
        if command == "rescue":  # what its command prints is not its own
            operand = "decoder.layers.1.mlp.linear_fc2:X"
            run_cli("recommend", "runs/fp8", "--operand", operand, "--relative-error", "0.001", "--output", "fix")
            path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            called = ["nemo-fp8-debug", command, *shlex.split(example)]
            ended = subprocess.run(called, env=os.environ | path, capture_output=True, text=True)
            assert "resumed" in ended.stdout, ended.stderr
            continue
        if command == "view" and "--export" not in example:  # it serves until Ctrl+C
            path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            called = ["nemo-fp8-debug", command, *shlex.split(example)]
            with subprocess.Popen(called, env=os.environ | path, stdout=subprocess.PIPE, text=True) as serving:
                assert serving.stdout and " at http://" in serving.stdout.readline()
                serving.send_signal(signal.SIGINT)
            assert serving.returncode == 0
            continue
        result = run_cli(command, *shlex.split(example))
        assert result.exit_code in ((0, 1, 3) if command == "gate" else (0,)), result.output
        if "--json" in example:
            json.loads(result.stdout)


def test_help_of_diagnose_says_what_a_run_without_a_baseline_is_judged_by() -> None:
    told = " ".join(run_cli("diagnose", "--help", COLUMNS="200").output.replace("│", " ").split())
    assert "without it RUN is judged by bands of healthy runs" in told
    assert "judged by `bands`" in " ".join((diagnose.__doc__ or "").split())


def test_columns_are_obeyed_where_there_is_no_terminal(place: Path) -> None:
    for arguments in ([command, "fp8", "--baseline", "baseline"] for command in ("compare", "diagnose")):
        command, *rest = (str(place / "runs" / a) if a[0] != "-" and i else a for i, a in enumerate(arguments))
        narrow = run_cli(command, *rest, COLUMNS="60").stdout
        assert max(map(len, narrow.splitlines())) <= 60 and "\x1b" not in narrow
