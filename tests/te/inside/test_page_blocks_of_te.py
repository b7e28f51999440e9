"""Blocks of pages that need Transformer Engine run, in a process that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from emulated_te import te
from page_blocks import execute, find_block
from recommendations import BF16, recommendation
from test_megatron import DENSE, casts_by_name, gpt, train
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.analysis.recommendation.snippets.te_quantizers import make_quantizer_snippets
from nemo_fp8_debug.analysis.runs.run import Run

FC2 = "decoder.layers.1.mlp.linear_fc2"
LAYERS = {f"decoder.layers.{i}.{name}" for i in range(2) for name in DENSE}
pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `fix` with files for X of FC2 in BF16, of a run of the GPT."""
    monkeypatch.chdir(tmp_path)
    model, folder = gpt(), tmp_path / "fix"
    monitor = Monitor(model, "run", layers=["decoder.*"], interval=1, table_rows=0, on_error="raise")
    with monitor.step(0):
        train(model, steps=1)
    monitor.close()
    found = recommendation(Run.read("run"), {(FC2, "input"): BF16})
    (factory,), _ = make_quantizer_snippets(found, for_megatron=False)
    folder.mkdir()
    (folder / factory.name).write_text(factory.text)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def cast_inputs(model: nn.Module) -> set[str]:
    """The layers whose X the last step has cast."""
    return {layer for layer, role, _ in casts_by_name(model) if role == "X"}


@pytest.mark.usefixtures("fix")
def test_quantizers_of_single_operands() -> None:
    names: dict[str, Any] = {"model": gpt(fp8=None)}
    execute(find_block("python", "fix.md#transformer-engine"), names)
    with te.autocast(enabled=True, recipe=names["recipe"]):
        train(names["model"], steps=1)
    assert cast_inputs(names["model"]) == LAYERS - {FC2}
