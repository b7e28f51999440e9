"""Weight gradients and optimizer states against float64 figures of the whole tensors, under DDP and FSDP2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from processes import run_script
from states_of_ranks import STEPS, WORLDS
from torch import nn

from nemo_fp8_debug import FP8DebugWarning, Monitor, diagnose, read_record
from nemo_fp8_debug.core.keys import ROLES, STATES


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    run_script(Path(__file__).with_name("states_of_ranks.py"), folder)
    return folder


@pytest.fixture(scope="module")
def trained_by_zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    run_script(Path(__file__).with_name("zero_states.py"), folder, DS_ACCELERATOR="cpu")
    return folder


def equal_the_oracle(run: Path) -> int:
    """How many rows there are, all of which must."""
    oracle = json.loads((run / "oracle.json").read_text())
    rows = read_record(str(run), "states").filter(recipe="current-hybrid")
    for row in rows.iter_rows(named=True):
        expected = oracle[f"{row['step']}/{row['layer']}/{row['role']}"]
        assert (row["n"], row["amax"]) == (expected["n"], expected["amax"])
        assert row["kurtosis"] == pytest.approx(expected["kurtosis"], rel=1e-6)
        assert row["scale_source"] == "not quantized" and row["dtype"] == "float32"
    assert len(rows) == len(oracle)
    return len(rows)


# Long tests rest on nemo_fp8_debug/distributed/*.py.
# Long tests rest on nemo_fp8_debug/observations/states/*.py.
@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_states_are_those_of_the_whole_tensors(trained: Path, kind: str, world: int) -> None:
    assert equal_the_oracle(trained / f"{kind}-{world}") == STEPS * 2 * 4


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_of_zero_are_those_of_the_whole_tensors(trained_by_zero: Path, stage: int, world: int) -> None:
    assert equal_the_oracle(trained_by_zero / f"zero-{stage}-{world}") == STEPS * 2 * 5


@pytest.mark.long
def test_what_zero_splits_is_no_copy(trained_by_zero: Path) -> None:
    found = read_record(str(trained_by_zero / "zero-1-2"), "replicas")
    assert set(found.filter(what="weight_gradient")["outcome"]) <= {"no copy"}


@pytest.mark.long
def test_of_flattened_parts_nothing_is_claimed(trained: Path) -> None:
    """Each rank has a part of FSDP1's flat parameter, of which others may have copies: neither whole nor apart."""
    assert read_record(str(trained / "fsdp1-2"), "states").is_empty()
    copies = read_record(str(trained / "fsdp1-2"), "replicas")
    assert "weight_gradient" not in copies["what"].to_list() and (copies["ranks_apart"].fill_null(0) == 0).all()


@pytest.mark.long
def test_what_bf16_would_do_is_told(trained: Path) -> None:
    rows = read_record(str(trained / "ddp-2"), "states").filter(recipe="bf16")
    assert len(rows) == STEPS * 2 * 4 and rows["relative_error"].is_between(5e-4, 4e-3).all()


@pytest.mark.long
def test_operands_and_states_are_kept_apart(trained: Path) -> None:
    for table in ("metrics", "what_if"):
        assert set(read_record(str(trained / "ddp-2"), table)["role"]) == set(ROLES)
    assert diagnose(str(trained / "ddp-2")).culprit is None


def test_a_master_weight_is_what_the_optimizer_steps_by(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8).bfloat16()
    for parameter in model.parameters():
        parameter.main_param = nn.Parameter(parameter.detach().float())  # type: ignore[attr-defined]
    masters = [parameter.main_param for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.5, momentum=0.9)
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise", states=tuple(STATES))
    with monitor.step(0):
        model(torch.randn(4, 16).bfloat16()).float().square().mean().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
    monitor.close()
    rows = read_record(str(tmp_path), "states")
    assert set(rows["role"]) == {"weight_gradient", "first_moment", "master_weight", "update"}
    amax = dict(rows.select("role", "amax").rows())
    assert amax["master_weight"] == masters[0].detach().abs().max().item()
    assert amax["first_moment"] == amax["weight_gradient"] == masters[0].grad.abs().max().item()
    assert amax["update"] == pytest.approx(0.5 * amax["first_moment"], rel=1e-4)


def test_nothing_is_looked_at_unless_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise").step(0):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert read_record(str(tmp_path), "states").is_empty()
    assert isinstance(read_record(str(tmp_path), "states"), pl.DataFrame)


def test_an_optimizer_whose_parameters_are_its_own_is_said_not_to_be_seen(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(16))])  # a flat copy of its own
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, states=("first_moment",))
    with pytest.warns(FP8DebugWarning, match="the optimizer's states were not observed"), monitor.step(0):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    monitor.close()


def test_an_optimizer_that_cannot_be_read_costs_the_states_and_not_the_run(tmp_path: Path) -> None:
    class Broken(torch.optim.SGD):
        @property
        def param_groups(self) -> Any:
            raise RuntimeError("not now")

        @param_groups.setter
        def param_groups(self, groups: Any) -> None: ...

        def add_param_group(self, group: Any) -> None: ...

        def step(self, closure: Any = None) -> None: ...

    model = nn.Linear(4, 4)
    optimizer = Broken(model.parameters(), lr=0.1)
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, states=("weight_gradient",))
    with pytest.warns(FP8DebugWarning, match="while looking at an optimizer's states"), monitor.step(0):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    monitor.close()
    assert len(read_record(str(tmp_path))) == 3
