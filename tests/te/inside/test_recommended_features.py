"""Recommended changes as Transformer Engine's debug tools obey them: the file loaded, the GPT trained, its casts read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as nvdlfw
import pytest
import torch
from recommendations import recommendation
from test_megatron import DENSE, casts_by_name, gpt, train
from transformer_engine.debug.features import api as transformer_engine_features

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.analysis.recommendation.flops import OPERANDS
from nemo_fp8_debug.analysis.recommendation.recommend import Recommendation
from nemo_fp8_debug.analysis.recommendation.snippets.te_debug import features
from nemo_fp8_debug.analysis.runs.run import Run

pytestmark = pytest.mark.usefixtures("megatron", "fresh_session")

FC2 = "decoder.layers.1.mlp.linear_fc2"
LAYERS = [f"decoder.layers.{i}.{name}" for i in range(2) for name in DENSE]
SHOWN = {"input": "X", "weight": "W", "grad_output": "dY"}
TENSORS = {"input": "activation", "weight": "weight", "grad_output": "gradient"}


@pytest.fixture(scope="module")
def run(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A record of the GPT in delayed scaling."""
    folder, model = tmp_path_factory.mktemp("run"), gpt()
    monitor = Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise")
    with monitor.step(0):
        train(model, steps=1)
    monitor.close()
    return Run.read(folder)


def changed(run: Run, **changes: tuple[str, str]) -> Recommendation:
    """A recommendation for FC2: role -> (kind, recipe)."""
    return recommendation(run, {(FC2, role): [change] for role, change in changes.items()})


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[[Recommendation], Any]:
    """A GPT that is inspected by the file of a recommendation."""

    def load(found: Recommendation) -> Any:
        snippet = features(found)
        assert snippet
        path = tmp_path / snippet.name
        path.write_text(snippet.text)
        nvdlfw.initialize(
            str(path), feature_dirs=[str(Path(transformer_engine_features.__file__).parent)], log_dir=str(tmp_path)
        )
        model = gpt()
        nvdlfw.infer_and_assign_layer_names(model)
        return model

    return load


def in_high_precision(model: Any) -> set[tuple[str, str]]:
    """(layer, GEMM) that are not multiplied in FP8, as the tools answer for each layer."""
    names = {name: module.name for name, module in model.named_modules() if name in LAYERS}
    assert len(names) == len(LAYERS)
    ask = nvdlfw.transformer_engine.fp8_gemm_enabled
    answers = {(n, gemm): ask(layer_name=given, gemm=gemm, iteration=0) for n, given in names.items() for gemm in OPERANDS}
    return {key for key, answer in answers.items() if not (answer[0] if isinstance(answer, tuple) else answer)}


def enabled_for(model: Any) -> set[tuple[str, str, str]]:
    """(layer, GEMM, role) of operands that a feature casts."""
    ask, found = nvdlfw.transformer_engine.modify_tensor_enabled, set()
    for name, module in model.named_modules():
        for gemm, pair in OPERANDS.items() if name in LAYERS else ():
            for role in pair:
                answer = ask(layer_name=module.name, gemm=gemm, tensor_name=TENSORS[role], iteration=0)
                if answer[0] if isinstance(answer, tuple) else answer:
                    found.add((name, gemm, role))
    return found


@pytest.mark.parametrize("role", list(SHOWN))
def test_bf16_for_an_operand_is_for_the_two_gemms_that_read_it(run: Run, loaded: Any, role: str) -> None:
    model = loaded(changed(run, **{role: ("bf16", "bf16")}))
    assert in_high_precision(model) == {(FC2, gemm) for gemm, pair in OPERANDS.items() if role in pair}
    train(model, steps=1)
    cast = {(layer, shown) for layer, shown, _ in casts_by_name(model)}
    assert cast == {(layer, shown) for layer in LAYERS for shown in SHOWN.values()} - {(FC2, SHOWN[role])}


def test_current_scaling_for_an_operand_and_no_other(run: Run, loaded: Any) -> None:
    model = loaded(changed(run, weight=("current", "current-hybrid")))
    assert not in_high_precision(model)
    assert enabled_for(model) == {(FC2, "fprop", "weight"), (FC2, "dgrad", "weight")}


def test_an_operand_rescaled_beside_one_in_bf16_takes_the_module_along(run: Run, loaded: Any) -> None:
    model = loaded(changed(run, input=("current", "current-hybrid"), weight=("bf16", "bf16")))
    assert in_high_precision(model) == {(FC2, gemm) for gemm in OPERANDS} and not enabled_for(model)


def test_another_format_is_faked_in_all_gemms_of_the_module(run: Run, loaded: Any) -> None:
    model = loaded(changed(run, input=("format", "current-e5m2"), weight=("bf16", "bf16")))
    assert in_high_precision(model) == {(FC2, gemm) for gemm in OPERANDS}
    pairs = {(gemm, role) for gemm, pair in OPERANDS.items() for role in pair if role != "weight"}
    assert enabled_for(model) == {(FC2, *pair) for pair in pairs}
    layer = next(module.name for name, module in model.named_modules() if name == FC2)
    with pytest.raises(AssertionError, match="Must be a GPU tensor"):  # accepted the configuration, and looked at the tensor
        nvdlfw.transformer_engine.modify_tensor(
            layer_name=layer,
            gemm="wgrad",
            tensor_name="activation",
            tensor=torch.ones(2),
            iteration=0,
            default_quantizer=None,
        )
