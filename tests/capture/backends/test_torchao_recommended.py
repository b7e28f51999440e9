"""A recommendation for a run of torchao: its file loaded, a fresh model converted by torchao, and what it multiplies."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao_engine import RECIPES, multiplied
from typer.testing import CliRunner

from nemo_fp8_debug import Budget, Monitor, recommend
from nemo_fp8_debug.analysis.recommendation.recommend import Recommendation
from nemo_fp8_debug.analysis.recommendation.snippets import PLAN, write_snippets
from nemo_fp8_debug.analysis.recommendation.snippets.torchao import NAME
from nemo_fp8_debug.cli import app

SHOWN = {"input": "X", "weight": "W", "grad_output": "dY"}
#: products of two layers in the order of execution
ORDER = [("0", "fprop"), ("1", "fprop"), ("1", "dgrad"), ("1", "wgrad"), ("0", "dgrad"), ("0", "wgrad")]
OPERANDS = {"fprop": ("X", "W"), "dgrad": ("dY", "W"), "wgrad": ("dY", "X")}
ALL = {(layer, product) for layer, product in ORDER}


def plain() -> nn.Sequential:
    """Two layers that are converted and one that is not."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2)), nn.Linear(32, 7, bias=False)).bfloat16()


def converted(config: Float8LinearConfig) -> nn.Module:
    model: nn.Module = convert_to_float8_training(plain(), config=config, module_filter_fn=lambda m, name: name != "2")
    return model


def config_of(recipe: str) -> Float8LinearConfig:
    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, pad_inner_dim=True)


def batch() -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()


@pytest.fixture(scope="module", params=RECIPES)
def recorded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A recipe, and the record of a run under it."""
    model, folder = converted(config_of(request.param)), tmp_path_factory.mktemp("run")
    monitor = Monitor(model, folder, interval=1, table_rows=0, on_error="raise")
    for step in range(2):
        with monitor.step(step):
            model(batch()).float().square().sum().backward()
    monitor.close()
    return request.param, folder


def products(model: nn.Module) -> dict[tuple[str, str], list[tuple[str, Any]]]:
    """(layer, product) -> operand, and the type of its values in what torchao multiplies; of converted layers."""
    with multiplied() as seen:
        model(batch()).float().square().sum().backward()
    of_layers = [pair for pair in seen.pairs if 7 not in (*pair[0].shape, *pair[1].shape)]
    return {
        key: [(name, getattr(x, "_data", x).dtype) for name, x in zip(OPERANDS[key[1]], pair, strict=True)]
        for key, pair in zip(ORDER, of_layers, strict=True)
    }


def loaded(found: Recommendation, folder: Path) -> Any:
    """What the file says, as a script that imports it would see it."""
    assert [snippet.name for snippet in write_snippets(found, folder)] == [NAME]
    assert sorted(path.name for path in folder.iterdir()) == sorted((PLAN, NAME))
    return runpy.run_path(str(folder / NAME))


@pytest.mark.parametrize("role", list(SHOWN))
def test_one_operand_leaves_fp8_in_the_two_products_that_read_it(
    recorded: tuple[str, Path], role: str, tmp_path: Path
) -> None:
    recipe, run = recorded
    found = recommend(run, operands=[("1", role)], budget=Budget(0.0, 0.0, 0.0))
    assert found.plan.changes[0].recipe == "bf16"
    model = loaded(found, tmp_path / "fix")["convert"](plain())
    wgrad_too = recipe == "rowwise_with_gw_hp" and role == "weight"  # no product of the layer is left
    assert [isinstance(model[i], Float8Linear) for i in range(3)] == [True, not wgrad_too, False]
    assert model[0].config == config_of(recipe)
    before, after = products(converted(config_of(recipe))), products(model)
    left = {("1", product) for product, pair in OPERANDS.items() if SHOWN[role] in pair}
    assert {key for key, pair in after.items() if pair == before[key]} >= ALL - left
    assert all({dtype for _, dtype in after[key]} == {torch.bfloat16} for key in left)


def test_another_format_for_one_operand(tmp_path: Path) -> None:
    """dY in E4M3: X and W are what they were. X in E5M2 beside dY in E5M2 would be a product that no kernel has."""
    model, folder = converted(config_of("tensorwise")), tmp_path / "run"
    monitor = Monitor(model, folder, interval=1, table_rows=0, on_error="raise")
    for step in range(2):
        with monitor.step(step):
            model(batch()).float().square().sum().backward()
    monitor.close()
    found = recommend(folder, operands=[("1", "grad_output")], budget=Budget(0.03, 100.0, 100.0))
    assert found.plan.changes[0].recipe.startswith("current-e4m3")
    after, before = products(loaded(found, tmp_path / "fix")["convert"](plain())), products(model)
    expected = {key: [(n, torch.float8_e4m3fn if key[0] == "1" else d) for n, d in pair] for key, pair in before.items()}
    assert after == expected != before


def test_a_layer_without_fp8_is_not_converted(recorded: tuple[str, Path], tmp_path: Path) -> None:
    found = recommend(recorded[1], operands=[("1", role) for role in SHOWN], budget=Budget(0.0, 0.0, 0.0))
    file = loaded(found, tmp_path / "fix")
    model = file["convert"](plain())
    assert [isinstance(model[i], Float8Linear) for i in range(3)] == [True, False, False]
    with pytest.warns(UserWarning, match="the model has no '1', which"):
        file["convert"](nn.Sequential(nn.Linear(32, 32)))


def test_the_command_names_the_file_and_no_other_engines(recorded: tuple[str, Path], tmp_path: Path) -> None:
    arguments = [
        "recommend",
        str(recorded[1]),
        "--operand",
        "1:dY",
        "--relative-error",
        "0",
        "--output",
        str(tmp_path / "fix"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and NAME in result.stdout, result.output
    assert "Megatron" not in result.stdout and "Transformer Engine" not in result.stdout
