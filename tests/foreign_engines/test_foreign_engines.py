"""No cast of an engine that the project has never seen may pass for one that it has read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_engines import linear_subclasses, own_modules, torchao_like
from foreign_engines.claims import Claims, claims_of, params
from foreign_engines.witness import WITNESS
from torch import nn
from torchao.float8 import float8_linear, float8_scaling_utils
from torchao.float8.float8_training_tensor import GemmInputRole

LINEAR = linear_subclasses.ENGINES
MODULES = own_modules.ENGINES
TORCHAO = torchao_like.ENGINES

OF_MODULES = {
    "borrowed_linear": "the ledger counts a Linear that is never called as observed; only a warning says otherwise",
}


def _claims(engine: nn.Module, folder: Path) -> Claims:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), engine, nn.Linear(32, 32, bias=False)).bfloat16()

    def loss_of(step: int) -> torch.Tensor:
        out = model(torch.randn(64, 32).bfloat16() * (1 + step)).float()
        return (out * torch.randn(64, 32)).square().mean()

    return claims_of(model, folder, loss_of)


@pytest.mark.parametrize("engine", LINEAR)
def test_linear_layer_that_quantizes_in_its_forward(engine: str, tmp_path: Path) -> None:
    assert _claims(LINEAR[engine](), tmp_path).wrong == []


@pytest.mark.parametrize("engine", LINEAR)
def test_nobody_says_that_nothing_quantizes_it(engine: str, tmp_path: Path) -> None:
    assert _claims(LINEAR[engine](), tmp_path).nothing_quantizes == []


@pytest.mark.parametrize("engine", params(MODULES, OF_MODULES))
def test_module_that_multiplies_codes(engine: str, tmp_path: Path) -> None:
    assert _claims(MODULES[engine](), tmp_path).wrong == []


@pytest.mark.parametrize("engine", [name for name in TORCHAO if name != "other_rounding"])
def test_casts_beside_those_of_torchao(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _claims_of_torchao(engine, tmp_path, monkeypatch).wrong == []


def test_casts_of_torchao_that_change_between_two_monitors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        assert _claims_of_torchao("unpatched", tmp_path / "before", before).wrong == []
    assert _claims_of_torchao("other_rounding", tmp_path / "after", monkeypatch).wrong == []


def _claims_of_torchao(engine: str, folder: Path, patch: pytest.MonkeyPatch) -> Claims:
    made = TORCHAO[engine](patch)
    for module in (float8_linear, float8_scaling_utils):
        patch.setattr(module, "hp_tensor_to_float8_dynamic", _callable_by_others(module.hp_tensor_to_float8_dynamic))
    return _claims(made, folder)


def _callable_by_others(cast: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's cast, for callers that leave the role to its default too, of whom the witness is told nothing."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if "gemm_input_role" in kwargs or cast is torchao_like._cast:
            return cast(*args, **kwargs)
        step, WITNESS.step = WITNESS.step, -1
        try:
            return cast(*args, gemm_input_role=GemmInputRole.INPUT, **kwargs)
        finally:
            WITNESS.step = step

    return call
