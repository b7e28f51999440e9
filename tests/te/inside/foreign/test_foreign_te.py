"""No cast of a Transformer Engine that the project has never seen may pass for one that it has read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import environment
import handed_in
import patched_release
import pytest
import renamed_classes
import torch
from emulated_te import te
from foreign_engines.claims import Claims, claims_of
from te_release import Engine
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

VARIABLES = [name for name in environment.ENGINES if name != "invented_variable"]


def _claims(make: Callable[[pytest.MonkeyPatch], Engine], folder: Path, patch: pytest.MonkeyPatch) -> Claims:
    torch.manual_seed(0)
    engine = make(patch)

    def loss_of(step: int) -> torch.Tensor:
        x = (torch.randn(48, 32) * (1 + step)).bfloat16().requires_grad_()
        with te.autocast(enabled=True, recipe=engine.recipe) if engine.recipe else nullcontext():
            out = engine.model(x)
        return (out.float() * torch.randn(48, 32)).square().sum() * (1 + step)

    return claims_of(engine.model, folder, loss_of)


@pytest.mark.parametrize("engine", patched_release.ENGINES)
def test_later_release(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _claims(patched_release.ENGINES[engine], tmp_path, monkeypatch).wrong == []


@pytest.mark.parametrize("engine", renamed_classes.ENGINES)
def test_other_names(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _claims(renamed_classes.ENGINES[engine], tmp_path, monkeypatch).wrong == []


@pytest.mark.parametrize("engine", VARIABLES)
def test_variable_of_the_environment(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _claims(environment.ENGINES[engine], tmp_path, monkeypatch).wrong == []


def test_variable_that_is_set_between_two_monitors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        assert _claims(patched_release.unpatched, tmp_path / "before", before).wrong == []
    FP8GlobalStateManager.reset()
    assert _claims(environment.invented_variable, tmp_path / "after", monkeypatch).wrong == []


@pytest.mark.parametrize("engine", handed_in.ENGINES)
def test_quantizer_handed_in(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _claims(handed_in.ENGINES[engine], tmp_path, monkeypatch).wrong == []
