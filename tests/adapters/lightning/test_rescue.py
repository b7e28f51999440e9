"""Plans through callbacks, through the environment, and through the command that sets it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import finished
from small_models.lightning import Module, fit
from torch import nn
from typer.testing import CliRunner

from nemo_fp8_debug import ConfigError, FP8DebugCallback, FP8EmulationCallback, FP8PlanCallback, apply_plan
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.plan.plan import PLAN, TAKEN, Change, Plan
from nemo_fp8_debug.record.reader import find_record, read_table_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step"),
]
FIRST, SECOND = Plan((Change("layers.0", "bf16"),)), Plan((Change("layers.2", "current-e5m2", ("input",)),))


def saved(folder: Path, plan: Plan, name: str = "plan.json") -> str:
    plan.save(folder / name)
    return str(folder / name)


def casts(folder: Path, *interventions: Any) -> dict[tuple[str, str], str]:
    """What cast each operand in the last step of a short run."""
    fit(folder, [FP8DebugCallback(interval=1, table_rows=0, on_error="raise"), *interventions])
    rows = read_table_rows(find_record(folder), "metrics").filter(step=5)
    columns = rows.select("layer", "role", "scale_source", "recipe").rows()
    return {(layer, role): recipe if source == "engine" else source for layer, role, source, recipe in columns}


def expected(**changed: str) -> dict[tuple[str, str], str]:
    roles = ("input", "weight", "grad_output")
    plain = {(layer, role): "delayed-hybrid" for layer in ("layers.0", "layers.2") for role in roles}
    return plain | {(f"layers.{key[1]}", role): recipe for key, recipe in changed.items() for role in roles}


def test_a_plan_reaches_emulation_by_either_callback(tmp_path: Path) -> None:
    path, in_bf16 = saved(tmp_path, FIRST), expected(_0="not quantized")
    assert casts(tmp_path / "a", FP8EmulationCallback("delayed", plan=path)) == in_bf16
    assert casts(tmp_path / "b", FP8EmulationCallback("delayed"), FP8PlanCallback(path)) == in_bf16
    assert casts(tmp_path / "c", FP8PlanCallback(), FP8EmulationCallback("delayed")) == expected()


def test_the_plan_of_a_rescue_goes_before_the_callbacks_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLAN, saved(tmp_path, SECOND))
    monkeypatch.setenv(TAKEN, str(tmp_path / "taken"))
    found = casts(tmp_path / "run", FP8EmulationCallback("delayed", plan=FIRST))
    assert found == expected() | {("layers.2", "input"): "current-e5m2"}
    assert (tmp_path / "taken").exists()


def test_plans_that_cannot_be_applied_are_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        FP8PlanCallback(tmp_path / "none.json")
    elsewhere = Plan((Change("layers.0", "bf16"), Change("layers.7", "bf16")))
    with pytest.raises(
        ConfigError,
        match=r"'layers\.7' in the plan is not a GEMM that this run quantizes; the GEMMs .* are: 'layers\.0', 'l",
    ):
        fit(tmp_path / "a", [FP8EmulationCallback(plan=elsewhere)])
    with pytest.raises(ConfigError, match=r"the GEMMs that Transformer Engine runs are: none"):
        fit(tmp_path / "b", [FP8PlanCallback(FIRST)])
    with pytest.raises(ConfigError, match="not a GEMM that Transformer Engine runs"):
        apply_plan(nn.Linear(2, 2), FIRST)
    # A run in BF16 has nothing that a rescue could change, and must not go on as if it had been.
    monkeypatch.setenv(PLAN, saved(tmp_path, FIRST))
    module = Module()
    weights = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ConfigError, match="not a GEMM that Transformer Engine runs"):
        fit(tmp_path / "c", [FP8DebugCallback(interval=1)], module=module)
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))


class TestCommand:
    def rescue(self, plan: str, *command: str) -> subprocess.CompletedProcess[str]:
        start = [sys.executable, "-c", "from nemo_fp8_debug.cli import app; app()", "rescue", plan, "--", *command]
        return finished(*start)

    def test_the_command_gets_the_plan_and_its_status_comes_back(self, tmp_path: Path) -> None:
        read = "from nemo_fp8_debug.plan.plan import read_plan_in_force as plan"
        script = f"import sys; {read}; print(plan().changes[0].layer, sys.argv[1:]); sys.exit(3)"
        done = self.rescue(saved(tmp_path, FIRST), sys.executable, "-c", script, "--steps", "4")
        assert done.returncode == 3, done.stderr
        lines = done.stdout.splitlines()
        assert ["layers.0", "X,", "W,", "dY", "bf16"] in [line.split() for line in lines]
        assert lines.index("layers.0 ['--steps', '4']") == len(lines) - 3 and "status 3" in lines[-1]
        assert "applied the plan" not in done.stderr

    def test_a_command_that_does_not_look_at_the_plan_is_told_of(self, tmp_path: Path) -> None:
        done = self.rescue(saved(tmp_path, FIRST), sys.executable, "-c", "pass")
        assert done.returncode == 0
        assert "no process on this host applied the plan" in done.stderr

    def test_a_name_of_a_plan_cannot_steer_the_terminal(self, tmp_path: Path) -> None:
        plan = saved(tmp_path, Plan((Change("\x1b]0;pwned\x07[bold]", "bf16"),)))
        result = CliRunner().invoke(app, ["rescue", plan, "--", "true"])
        assert "\\x1b]0;pwned\\x07[bold]  X, W, dY  bf16\n" in result.stdout and "\x1b" not in result.stdout

    def test_signals_are_given_back(self, tmp_path: Path) -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert CliRunner().invoke(app, ["rescue", saved(tmp_path, FIRST), "--", "true"]).exit_code == 0
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    def test_what_cannot_be_run_is_refused(self, tmp_path: Path) -> None:
        path, empty = saved(tmp_path, FIRST), saved(tmp_path, Plan(), "empty.json")
        for arguments, message in (
            ([path, "--", str(tmp_path / "nothing")], "cannot run"),
            ([empty, "--", "true"], "has no changes"),
            ([str(tmp_path / "none.json"), "--", "true"], "cannot be read"),
        ):
            result = CliRunner().invoke(app, ["rescue", *arguments])
            assert result.exit_code == 1
            assert message in result.stderr.replace("\n", " ")


RANK = """
import sys, torch, torch.distributed as dist
from torch import nn
from nemo_fp8_debug import ConfigError
from nemo_fp8_debug.capture.gemms import find_gemms
from nemo_fp8_debug.interventions.emulate import check_changes_name_gemms
from nemo_fp8_debug.plan.plan import Change, Plan
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
stage = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
check_changes_name_gemms(Plan((Change("stage0", "bf16"), Change("stage1", "bf16"))), find_gemms([stage]), "of this run")
try:
    check_changes_name_gemms(Plan((Change("stage1", "bf16"), Change("stage2", "bf16"))), find_gemms([stage]), "of this run")
except ConfigError as error:
    print(error)
dist.barrier()
"""


def test_layers_of_another_rank_are_known_and_those_of_none_refused_on_all(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = [sys.executable, "-W", "ignore", "-c", RANK]
    with ThreadPoolExecutor() as pool:
        ranks = list(pool.map(lambda rank: finished(*start, rank, port), range(2)))
    for rank, done in enumerate(ranks):
        assert done.returncode == 0
        assert (
            done.stdout.strip()
            == f"'stage2' in the plan is not a GEMM of this run; the GEMMs of this run are: 'stage{rank}'"
        )
