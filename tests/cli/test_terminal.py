"""What commands print: nothing is cut at any width, examples of `--help` run, and JSON stands alone."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner, Result

from nemo_fp8_debug import Monitor, diagnose
from nemo_fp8_debug.cli import COMMANDS, app, load_command
from nemo_fp8_debug.core.text import TENSOR, TableColumn, format_table
from nemo_fp8_debug.record.schema import STATUS

LOGS = Path(__file__).parents[1] / "record" / "logs" / "transformer_engine" / "nvdlfw_inspect_statistics_logs"
STEPS = 60


def run_cli(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env=environment)


NAMES = st.text("abcdefg.", min_size=1, max_size=60)
COLUMNS = (
    TableColumn("layer", "name"),
    TableColumn("tensor", "text"),
    TableColumn("share of values"),
    TableColumn("why", "text", rank=1),
)


@settings(max_examples=100, deadline=None)
@given(st.integers(40, 200), st.lists(st.tuples(NAMES, st.sampled_from("XWY"), NAMES, NAMES), min_size=1, max_size=4))
def test_a_table_keeps_to_its_width_and_cuts_no_number(width: int, rows: list[tuple[str, str, str, str]]) -> None:
    rows = [(layer, tensor, number[: width // 3], why) for layer, tensor, number, why in rows]
    found = format_table(COLUMNS, rows, width)
    assert max(map(len, [*found.heading, *itertools.chain(*found.rows)])) <= width
    for (layer, _, number, _), lines in zip(rows, found.rows, strict=True):
        assert number in lines[0]
        # A name is whole, broken into lines, without the beginning that all have, or without its middle.
        begin, _, end = lines[0].split()[0].removeprefix("…").partition("…")
        assert layer.removeprefix(found.beginning).startswith(begin) and (not end or layer.endswith(end))


@given(st.lists(st.text("ab.", min_size=1, max_size=30), min_size=1, max_size=4, unique=True))
def test_two_names_never_look_the_same(names: list[str]) -> None:
    found = format_table(
        [TableColumn("layer", "name"), TableColumn("why", "text")], [[name, "w" * 40] for name in names], 40
    )
    shown = {"".join(line[:20].split()[0] for line in lines if line[:20].strip()) for lines in found.rows}
    assert len(shown) == len(names)


def test_a_narrow_terminal_gets_the_columns_that_matter() -> None:
    columns = (
        *TENSOR,
        TableColumn("amax"),
        TableColumn("evidence", "text", rank=1),
        TableColumn("MSE", rank=2),
        TableColumn("empty"),
    )
    others = ("3.83", "its scale moved and its values did not", "0.1", "-")
    rows = [[tensor, f"decoder.layers.{i}.mlp.linear_fc1", *others] for i, tensor in enumerate("XW")]
    headings = {width: format_table(columns, rows, width).heading[0].split() for width in (40, 60, 100)}
    assert headings == {
        40: ["tensor", "layer", "amax"],
        60: ["tensor", "layer", "amax", "evidence"],
        100: ["tensor", "layer", "amax", "evidence", "MSE"],
    }
    assert format_table(columns, rows, 40).beginning == "decoder.layers."


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that examples name: runs, a checkpoint, a log, and a script that resumes training."""
    folder = tmp_path_factory.mktemp("examples")
    for run, seed in {"baseline": 0, "fp8": 0, "bf16": 0, "good_a": 1, "good_b": 2}.items():
        _train(folder / "runs" / run, scale=1e-4 if run == "fp8" else 1.0, seed=seed)
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


def _train(folder: Path, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
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
    assert "Without it, RUN is judged by the bands of healthy runs" in told
    assert "bands of healthy runs, used without a baseline" in " ".join((diagnose.__doc__ or "").split())


#: what each command prints something else for; `rescue` and a page that is served have tests of their own
VARIANTS = {
    "compare": (
        "runs/fp8 --baseline runs/baseline",
        "runs/fp8 --baseline runs/baseline --reference runs/bf16 --all",
        "runs/good_a --baseline runs/baseline",
    ),
    "diagnose": ("runs/fp8 --baseline runs/baseline", "runs/fp8", "runs/good_a --baseline runs/good_b"),
    "gate": (
        "runs/fp8 --baseline runs/baseline --max-gap 0.5%",
        "runs/good_a --baseline runs/baseline --max-gap 0.5%",
        "runs/fp8 runs/good_a --baseline runs/baseline --baseline runs/good_b --max-gap 0.001",
    ),
    "learn": ("runs/good_a runs/good_b --output learned_{width}.parquet",),
    "recommend": (
        "runs/fp8 --baseline runs/baseline",
        "runs/fp8 --relative-error 0.001",
        "runs/fp8 --operand decoder.layers.1.mlp.linear_fc2:X --relative-error 0.001 --output fix_{width}",
    ),
    "rescue": ("fix_{width}/plan.json -- true",),
    "control": ("runs/fp8 --interval 10 --steps 5", "runs/fp8"),
    "replay": ("runs/fp8 --recipe current --recipe current-e5m2",),
    "audit": ("checkpoints/step_1000",),
    "import": ("logs runs/imported_{width}",),
    "view": ("runs/baseline --export page_{width}",),
    "compact": ("runs/baseline --output runs/smaller_{width}",),
    "sql": ("runs/fp8",),
}


@pytest.mark.parametrize("width", [80, 120])
def test_every_command_prints_its_conclusion_then_tables_then_what_is_next(
    width: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pytest -s -k every_command tests/cli` prints what each one prints, to look at."""
    monkeypatch.chdir(place)
    assert set(VARIANTS) == set(COMMANDS)
    for command, variants in VARIANTS.items():
        for variant in variants:
            words = shlex.split(variant.format(width=width))
            result = run_cli(command, *words, COLUMNS=str(width))
            print(f"\n$ nemo-fp8-debug {command} {shlex.join(words)}    # {width} columns\n{result.output}")
            assert result.exit_code in ((0, 1, 3) if command == "gate" else (0,)), result.output
            lines = result.stdout.splitlines()
            if command != "sql":  # its output is a program
                assert max(map(len, lines)) <= width, max(lines, key=len)
                first = list(itertools.takewhile(str.strip, lines))
                told = " ".join(first)
                assert told[0].isupper() and told.rstrip().endswith(".") and len(first) <= 12 and "──" not in told, told
            last = result.output.rstrip().split("\n\n")[-1].splitlines()
            assert last[0].startswith("Next: ") and all(line.startswith(" " * 6) for line in last[1:]), last


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_a_sentence_and_names_no_type_of_python(command: str) -> None:
    told = run_cli(command, "--help", COLUMNS="80").output
    assert not re.search(r"<\w+|list\[|\bPath\b|<bool>|\{", told), told
    assert f"nemo-fp8-debug {command} " in told.split("Examples")[1]
    doc = (load_command(command)[0].__doc__ or "").split("\n\n")[0]
    assert doc.rstrip().endswith(".") and ". " not in " ".join(doc.split()), "its summary is one sentence"
    assert max(map(len, told.splitlines())) <= 80


def test_columns_are_obeyed_where_there_is_no_terminal(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for command in ("compare", "diagnose"):
        narrow = run_cli(command, "runs/fp8", "--baseline", "runs/baseline", COLUMNS="60").stdout
        assert max(map(len, narrow.splitlines())) <= 60 and "\x1b" not in narrow


def test_a_terminal_without_unicode_gets_plain_characters(place: Path) -> None:
    command = [sys.executable, "-c", "from nemo_fp8_debug.cli import app; app()", "compare", "fp8", "--baseline", "baseline"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    done = subprocess.run(command, cwd=place / "runs", env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "------" in done.stdout and "2^-13.5" in done.stdout, done.stderr


@pytest.mark.parametrize("command", [["diagnose"], ["compare"], ["recommend"], ["gate", "--max-gap", "0.5%"]])
def test_commands_read_runs_at_any_address(command: list[str], place: Path) -> None:
    memory = fsspec.filesystem("memory")
    for run in ("fp8", "baseline"):
        memory.put(str(place / "runs" / run), f"/{run}", recursive=True)
    name, *options = command
    local, remote = (
        CliRunner().invoke(app, [name, f"{folder}fp8", "--baseline", f"{folder}baseline", *options])
        for folder in (f"{place}/runs/", "memory://")
    )
    assert remote.exit_code == local.exit_code
    assert remote.output.splitlines()[0] == local.output.splitlines()[0]
