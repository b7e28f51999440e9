"""What architectures.json says of transformers' architectures, and the script that wrote it on three of them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import architectures
import pytest
import torch
from architectures import ATTACHED, DIFFERENT, IDENTICAL, NO_GEMM, NOT_BUILT, RESULTS, examine, examine_apart
from torch import nn

from nemo_fp8_debug.capture import scan

FOUND = json.loads(RESULTS.read_text())


def test_no_architecture_trains_otherwise_or_makes_the_monitor_raise() -> None:
    outcomes = Counter(told["outcome"] for told in FOUND["architectures"].values())
    assert outcomes == FOUND["counts"] and outcomes.keys() <= {IDENTICAL, ATTACHED, NOT_BUILT, NO_GEMM}
    assert outcomes[IDENTICAL] >= 200 and outcomes[ATTACHED] >= 50 and outcomes.total() > 400
    assert all(told["why"] for told in FOUND["architectures"].values() if told["outcome"] != IDENTICAL)


@pytest.mark.parametrize("model_type", ["gpt_neox_japanese", "wav2vec2", "gpt_oss"])
def test_an_architecture_trains_the_same(model_type: str) -> None:
    found = examine_apart(model_type)
    assert found["outcome"] == FOUND["architectures"][model_type]["outcome"] == IDENTICAL and found["layers"] >= 9


def test_a_name_that_no_module_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def number(module: nn.Module) -> int | None:
        found: Any = getattr(module, "layer_number", None)
        return found if isinstance(found, int) else None

    monkeypatch.setattr(scan, "_read_megatron_number", number)
    told = examine("gpt_neox_japanese")
    assert told["outcome"] == DIFFERENT and "layers.-1." in told["why"] and "is recorded, and no module" in told["why"]


def test_a_random_number_that_is_taken_from_the_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures.Layers, "record", lambda self, sample: torch.rand(1))
    told = examine("gpt_neox_japanese")
    assert told["outcome"] == DIFFERENT and "tensors differ" in told["why"]
