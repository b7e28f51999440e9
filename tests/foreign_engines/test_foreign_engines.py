"""No cast of an engine that the project has never seen may pass for one that it has read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_engines import linear_subclasses, own_modules, torchao_like
from foreign_engines.claims import Claims, claims_of, finding, params
from foreign_engines.witness import WITNESS
from torch import nn
from torchao.float8 import float8_linear, float8_scaling_utils
from torchao.float8.float8_training_tensor import GemmInputRole

LINEAR = linear_subclasses.ENGINES
MODULES = own_modules.ENGINES
TORCHAO = torchao_like.ENGINES

NAMED_NOWHERE = {
    "replaced_forward": "rows say 'current', and the ledger asks for the forward of the class, not of the object",
    "weight_subclass": "rows say 'current', and the ledger does not ask of what class the weight of a torch.nn.Linear is",
}
SAID_TO_BE_BF16 = dict.fromkeys(LINEAR, "a linear layer that nobody reads passes for one that nothing quantizes")
OF_MODULES = {
    "buffer_of_codes": "the ledger looks at parameters, and not at matrices in buffers",
    "borrowed_linear": "the ledger counts a Linear that is never called as observed; only a warning says otherwise",
}
OF_TORCHAO = {
    "other_rounding_in_product": "the trial asks the function of the cast, and not the product that is said to call it",
    "large_tensors_only": "the trial is of tensors of at most 15 values",
    "from_second_step": "the trial is made once in a process",
    "replaced_forward": "the class of the module is looked at, and not whether the object has a forward of its own",
}


def _claims(engine: nn.Module, folder: Path) -> Claims:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), engine, nn.Linear(32, 32, bias=False)).bfloat16()

    def loss_of(step: int) -> torch.Tensor:
        out = model(torch.randn(64, 32).bfloat16() * (1 + step)).float()
        return (out * torch.randn(64, 32)).square().mean()

    return claims_of(model, folder, loss_of)


@pytest.mark.parametrize("engine", params(LINEAR, NAMED_NOWHERE))
def test_linear_layer_that_quantizes_in_its_forward(engine: str, tmp_path: Path) -> None:
    assert _claims(LINEAR[engine](), tmp_path).wrong == []


@pytest.mark.parametrize("engine", params(LINEAR, SAID_TO_BE_BF16))
def test_nobody_says_that_nothing_quantizes_it(engine: str, tmp_path: Path) -> None:
    assert _claims(LINEAR[engine](), tmp_path).nothing_quantizes == []


@pytest.mark.parametrize("engine", params(MODULES, OF_MODULES))
def test_module_that_multiplies_codes(engine: str, tmp_path: Path) -> None:
    assert _claims(MODULES[engine](), tmp_path).wrong == []


@pytest.mark.parametrize("engine", params([name for name in TORCHAO if name != "other_rounding"], OF_TORCHAO))
def test_casts_beside_those_of_torchao(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _claims_of_torchao(engine, tmp_path, monkeypatch).wrong == []


@finding("the answer of the trial is kept for the process, and not for the run")
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
