"""Each block of code in README, CONTRIBUTING and the pages runs, and what a page shows is what comes out.

    REGENERATE=1 .venv/bin/python -m pytest tests/docs/test_page_blocks.py tests/adapters/lightning/test_nemo.py

writes what comes out into the pages.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import demo
import duckdb
import pytest
import torch
from packaging.requirements import Requirement
from page_blocks import BLOCKS, ROOT, check_text, commands, find_block, parse_options, wrapped
from page_names import (
    CHECKS,
    NAMES,
    WIDTH,
    Layers,
    go_on,
    make_runs,
    monitor_experts,
    record_run,
    run_block,
    write_benchmark_runs,
)
from processes import run_script
from safetensors.torch import save_file
from tensorboard import default, program
from typer.main import get_command
from typer.testing import CliRunner

from nemo_fp8_debug import Monitor, compare, diagnose
from nemo_fp8_debug.analysis.story.summary import summarize
from nemo_fp8_debug.cli import COMMANDS, app
from nemo_fp8_debug.options.control_file import ControlSettings
from nemo_fp8_debug.plan.plan import Plan
from nemo_fp8_debug.record.schema import SCHEMAS

pytestmark = pytest.mark.filterwarnings("ignore")

#: Python that needs another process, and the file that runs it there
IN_NEMO, IN_TE = "tests/adapters/lightning/nemo_runs.py", "tests/te/inside/test_page_blocks_of_te.py"
ELSEWHERE = {
    "README.md": IN_NEMO,
    "attach.md#nemo-2x-and-any-lightning-trainer": IN_NEMO,
    "attach.md#nemo-2x-and-any-lightning-trainer, 2": IN_NEMO,
    "index.md": IN_NEMO,
    "fix.md#transformer-engine": IN_TE,
}
#: Python that any process of its own can run, and its environment
ALONE = {"attach.md#deepspeed": {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}}
PYTHON = {block.name: block for block in BLOCKS if block.language in ("python", "pycon")}
HERE = [name for name in PYTHON if name not in (*ELSEWHERE, *ALONE)]
SH = {block.name: block for block in BLOCKS if block.language == "sh"}
CONTROL, LEARN = "commands.md#change-a-run-while-it-goes-on", "gate.md#runs-without-a-baseline"
RECORDS = ROOT / "scripts/validation/main_job/records"
LOGS = ROOT / "tests/record/logs/transformer_engine/nvdlfw_inspect_statistics_logs"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snippets") / "runs"
    make_runs(folder)
    return folder


@pytest.fixture
def place(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `runs/`, which is the current one."""
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestPython:
    @pytest.mark.usefixtures("megatron", "place")
    @pytest.mark.parametrize("name", HERE)
    def test_runs(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        run_block(PYTHON[name])
        assert [record.message for record in caplog.records if record.name.startswith("nemo_fp8_debug")] == []

    @pytest.mark.usefixtures("place")
    def test_what_is_not_observed_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        monitor_experts()
        told = [line for line in capsys.readouterr().out.splitlines() if "are not observed" in line]
        check_text(find_block("text", "attach.md#what-is-not-observed"), wrapped(told[0]))

    @pytest.mark.usefixtures("place")
    @pytest.mark.parametrize("name", [*ALONE])
    def test_runs_in_a_process_of_its_own(self, name: str) -> None:
        run = "from page_blocks import *; from page_names import *; run_block(find_block('python', sys.argv[1]))"
        run_script("-c", f"import sys; {run}", name, **ALONE[name])

    def test_languages_are_known_and_each_block_is_run(self) -> None:
        languages = ("python", "pycon", "sh", "text", "yaml", "json", "mermaid")
        assert [block.place for block in BLOCKS if block.language not in languages] == []
        assert {*ELSEWHERE} | {*ALONE} | {*NAMES} | {*CHECKS} <= {*PYTHON}
        assert [name for name, file in ELSEWHERE.items() if f'"{name}"' not in (ROOT / file).read_text()] == []


class TestCommands:
    """Each command of a block of `sh` runs here, or its options are parsed."""

    @pytest.mark.usefixtures("place")
    @pytest.mark.parametrize("name", [*SH])
    def test_runs(self, name: str) -> None:
        self.prepare(SH[name].section)
        for words in commands(SH[name]):
            self.run(words)

    def prepare(self, section: str) -> None:
        """Make what commands of a section name beside the runs of all."""
        if section == "commands.md#audit-a-checkpoint":
            Path("CHECKPOINT").mkdir()
            save_file({"model.layers.0.mlp.down_proj.weight": torch.randn(64, 64)}, "CHECKPOINT/model.safetensors")
        if section == CONTROL:
            go_on(Path("runs/a/fp8_debug"))
        if section == "commands.md#import-logs-of-other-tools":
            shutil.rmtree("runs/bad")
            shutil.copytree(LOGS, "runs/bad/tensor_inspect/nvdlfw_inspect_statistics_logs")
        if section == "gate.md":
            write_benchmark_runs(Path("runs"), GATED)
        if section == "gate.md#judge-a-recipe":
            for name in "abc":
                shutil.copytree(f"runs/seed_{'abc'.index(name) + 1}", f"bf16_{name}")
                record_run(Path(f"fp8_{name}"), seed=10 + "abc".index(name))
        if section == LEARN:
            write_benchmark_runs(Path("runs"), LEARNED)
        if section in ("diagnose.md", "fix.md"):
            replace_runs(Path("runs"), DIAGNOSED)

    def run(self, words: list[str]) -> str:
        for between in ("&&", "|", ">"):
            if between in words:
                at = words.index(between)
                told = self.run(words[:at])
                return self.after(between, words[at + 1 :], told)
        name, *arguments = words
        while re.fullmatch(r"[A-Z_]+=.*", name):  # PYTHON=python3.12 scripts/demo.sh
            name, *arguments = arguments
        if name == "nemo-fp8-debug":
            return self.of_package(arguments)
        if name == "export":
            for folder in arguments[0].partition("=")[2].split(":"):
                assert (ROOT / folder).is_dir(), folder
        elif name in (".venv/bin/python", "python") and arguments[0] == "-m":
            assert parse_options(*arguments) if arguments[2:] else importlib.util.find_spec(arguments[1])
        elif name == "python":
            assert (ROOT / arguments[0]).exists() and arguments[0] in ("recipes/nemo_gpt.py",), arguments  # see IN_NEMO
        elif name == "tensorboard":
            program.TensorBoard(plugins=default.get_static_plugins()).configure(["tensorboard", *arguments])
        elif name == "pip":
            self.pip(arguments)
        else:
            self.of_repository(name, arguments)
        return ""

    def after(self, between: str, words: list[str], told: str) -> str:
        if between == "|":
            assert words[0] == "duckdb"
            duckdb.connect(words[1]).execute(told)
        elif between == ">":
            Path(words[0]).write_text(told)
        else:
            return self.run(words)
        return ""

    def of_package(self, words: list[str]) -> str:
        words = [each for word in words for each in (sorted(map(str, Path().glob(word))) if "_*" in word else [word])]
        # These take long, or go on until somebody ends them: tests/cli/test_terminal.py runs them.
        if words[0] in ("rescue", "view") or "--html" in words:
            command = get_command(app)
            context = command.make_context("nemo-fp8-debug", [words[0]], resilient_parsing=True)
            command.get_command(context, words[0]).make_context(words[0], words[1:], parent=context)  # type: ignore[attr-defined]
            if "--" in words:
                self.wrapped(words[words.index("--") + 1 :])
            return ""
        words = [word.removeprefix("s3://") for word in words]  # folders stand for the bucket
        if words[:2] == ["sql", "bucket/a"]:
            words[1] = "runs/a"
        result = CliRunner().invoke(app, words)
        assert result.exit_code in ((0, 1, 3) if words[0] == "gate" else (0,)), result.output
        return result.stdout

    def wrapped(self, words: list[str]) -> None:
        if words[1] != "train.py":  # the reader's own
            self.run(words)

    def pip(self, words: list[str]) -> None:
        wanted = words[1:]
        assert words[0] == "install" and len(wanted) == 1
        if wanted != ["."]:
            extras = importlib.metadata.metadata("nemo_fp8_debug").get_all("Provides-Extra")
            assert Requirement(wanted[0]).extras <= {*extras}  # type: ignore[misc]

    def of_repository(self, name: str, arguments: list[str]) -> None:
        """A script that takes minutes, or installs: it is there, and so are the files that it is given."""
        assert os.access(ROOT / name, os.X_OK), name
        if name == "scripts/validation/gpu/run.sh":
            assert parse_options("-m", "gpu", *arguments)
        elif name.startswith(".venv/bin/"):
            assert name.removeprefix(".venv/bin/") in ("ruff", "mypy") and name in (ROOT / "scripts/lint.sh").read_text()
        else:
            assert name in ("scripts/demo.sh", "scripts/test.sh", "scripts/benchmarks/peers/run.sh"), name
            assert all((ROOT / word).exists() for word in arguments if "/" in word)


#: clean runs of the benchmark: an FP8 run beside one with the same batches, and healthy runs of a class
GATED = {"fp8": ("gpt-000", "deep"), "bf16": ("gpt-000", "deep-near")}
LEARNED = {
    f"good_{part}_{name}": (part, name)
    for part in ("gpt-000", "gpt-002")
    for name in ("a", "b", "deep", "a-near", "b-near", "deep-near")
}
LEARNED |= {"new": ("gpt-100", "a")}
#: a run that a stale scale of one operand harmed, and the same run without the fault
DIAGNOSED = {"bad": ("gpt-302", "0-stale"), "baseline": ("gpt-302", "a-near")}


def replace_runs(folder: Path, made: dict[str, tuple[str, str]]) -> None:
    """Write runs of the benchmark in the place of those that are there."""
    for name in made:
        shutil.rmtree(folder / name)
    write_benchmark_runs(folder, made)


class TestOutput:
    """What a page shows is what comes out."""

    @pytest.fixture
    def demo_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        shutil.copytree(RECORDS, tmp_path / "runs/demo")
        monkeypatch.chdir(tmp_path)
        return Path("runs/demo")

    def test_of_the_demo(self, demo_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo, "free_port", lambda wanted: wanted)
        (demo_runs / "stuck_scale/checkpoints/step_80").mkdir(parents=True)
        verdicts = demo.diagnose_runs(demo_runs)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            demo.report(demo_runs, verdicts, demo.advise(demo_runs, verdicts["stuck_scale"], 40))
        shown = printed.getvalue().strip().replace(f"{Path(sys.executable).parent}/", ".venv/bin/")
        check_text(find_block("text", "start.md#the-demo"), shown)

    @pytest.mark.parametrize(("section", "made"), [("gate.md", GATED), (LEARN, LEARNED)])
    def test_of_benchmark_runs(self, section: str, made: dict[str, Any], place: Path) -> None:
        write_benchmark_runs(Path("runs"), made)
        words = commands(SH[section])[0]
        told = TestCommands().run(words).splitlines()
        shown = slice(0, 1)
        check_text(find_block("text", section), "\n".join(told[shown]))

    def test_of_a_comparison(self) -> None:
        found = compare(*(RECORDS / name for name in ("stuck_scale", "baseline")))
        check_text(find_block("text", "compare.md"), wrapped(summarize(found)))

    def test_of_a_stuck_scale(self, place: Path) -> None:
        replace_runs(Path("runs"), DIAGNOSED)
        check_text(find_block("text", "diagnose.md"), wrapped(diagnose("runs/bad", "runs/baseline").verdict()))
        TestCommands().run(["nemo-fp8-debug", "recommend", "runs/bad", "--baseline", "runs/baseline", "--output", "fix"])
        (shown,), (made,) = (
            json.loads(text)["changes"] for text in (find_block("json", "fix.md").text, Path("fix/plan.json").read_text())
        )
        assert shown == {name: made[name] for name in shown}

    def test_of_dumps(self, place: Path) -> None:
        record_run(Path("dumped"), range(120, 121), dump=["layers.3.*"])
        found = min(Path("dumped/fp8_debug/tensors").rglob("*.input.*"))
        check_text(
            find_block("text", "commands.md#dump-tensors"),
            str(found.relative_to("dumped/fp8_debug")),
            r"[0-9a-f]{8}(?=\.safe)",
        )

    def test_of_a_control_file(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model = Layers()
        monitor = Monitor(model, "runs/controlled", interval=100, on_error="raise")
        for step in range(101):
            with monitor.step(step):
                model(torch.ones(1, WIDTH)).sum().backward()
            if step == 0:
                Path("runs/controlled/control.yaml").write_text("interval: 50\nlayers: [layers.3.*]\n")
        monitor.close()
        told = [line for line in capsys.readouterr().out.splitlines() if "control.yaml" in line]
        check_text(find_block("text", CONTROL), "\n".join(told))

    def test_of_a_wrong_kernel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(ROOT / "tests/analysis")
        from test_wrong_product import trained

        told = diagnose(trained(tmp_path, "factor")).verdict()
        check_text(find_block("text", "verify.md"), wrapped(told), r"\d+(\.\d+)?")

    @pytest.mark.usefixtures("megatron")  # for its group of one process
    def test_of_a_wrong_sum(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(ROOT / "tests/distributed")
        from wrong_reductions import run

        run(0, 1, tmp_path / "run", "hand", "twice")
        told = diagnose(tmp_path / "run").verdict().partition(" Next:")[0]
        check_text(find_block("text", "verify.md#sums-of-gradients"), wrapped(told), r"\d+(\.\d+)?")


def shape(path: str) -> str:
    """A path of a record without its numbers and checksums."""
    return re.sub(r"\d{8}|[0-9a-f]{8}(?=\.)", "#", path)


class TestFiles:
    """Files that a page describes are as the product writes or reads them."""

    def test_all_commands_are_listed(self) -> None:
        listed = (ROOT / "docs/commands.md").read_text().partition("\n## ")[0]
        assert {*re.findall(r"`(\w+)`", " ".join(re.findall(r"(?m)^\| ([^|]*) \|", listed)))} == {*COMMANDS}

    def test_names_of_a_record(self, place: Path) -> None:
        record = Path("runs/a/fp8_debug")
        (record / "control.yaml").write_text("")
        apart = {shape(str(path.relative_to(record))) for path in record.rglob("*.*")}
        CliRunner().invoke(app, ["compact", "runs/a"])
        there = apart | {shape(str(path.relative_to(record))) for path in record.rglob("*.*")}
        block = find_block("text", "record.md#files")
        described = {name for line in block.text.splitlines() for name in re.split(", ", re.split("  +", line)[0])}
        tables = {name.rstrip("/").partition("/")[0] for name in described}
        assert tables == {*SCHEMAS, "tensors", "attempt-0.json", "control.yaml", "status.json"}
        for name in described:
            pattern = re.escape(shape(name)).replace(r"\.\.\.", ".*")
            assert name.endswith("/") or any(re.fullmatch(pattern, each) for each in there), name

    def test_options_of_megatron(self) -> None:
        """Megatron-LM's own parser needs Transformer Engine: tests/te/test_recommended_recipes.py asks it."""
        option, file = find_block("text", "fix.md#megatron-lm").text.split()
        arguments = Path(sys.prefix) / "bridge/megatron/training/arguments.py"
        assert f"'{option}'" in arguments.read_text() and file.startswith("fix/")

    def test_control_file_and_plan_can_be_read(self, tmp_path: Path) -> None:
        for block in [block for block in BLOCKS if block.language in ("yaml", "json")]:
            if block.section == CONTROL:
                assert ControlSettings.parse(block.text).steps
            elif block.page.name == "fix.md":
                (tmp_path / "plan.json").write_text(block.text)
                assert Plan.load(tmp_path / "plan.json").changes
            else:
                assert block.section == "record.md#what-training-waited-for"

    def test_what_training_waited_for(self, place: Path) -> None:
        block = find_block("json", "record.md#what-training-waited-for")
        shown = json.loads(f"{{{block.text}}}")["waited"]
        assert shown.keys() == json.loads(Path("runs/a/fp8_debug/status.json").read_text())["waited"].keys()
