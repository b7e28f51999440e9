"""What is not known of torchao is labeled unknown, and named in one warning."""

from __future__ import annotations

import enum
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Samples
from torch import nn
from torchao.float8.config import CastConfig, Float8GemmConfig, Float8LinearConfig
from torchao_engine import configured, layer_of, operands

from nemo_fp8_debug import FP8DebugWarning, Monitor
from nemo_fp8_debug.capture.backends.base import UnknownCastError
from nemo_fp8_debug.capture.backends.torchao.casts import CASTS, find_cast


def said(record: pytest.WarningsRecorder) -> list[str]:
    return [str(warning.message) for warning in record if issubclass(warning.category, FP8DebugWarning)]


def changed(config: Float8LinearConfig, **fields: Any) -> Float8LinearConfig:
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    return config


class Later(enum.Enum):
    """What a later release may have."""

    BLOCKWISE = "blockwise"


UNKNOWN = {
    "a field": (
        lambda c: changed(c, amax_history_len=16),
        "Float8LinearConfig has an unsupported field 'amax_history_len'",
    ),
    "a field of a cast": (
        lambda c: changed(c, cast_config_input=changed(CastConfig(target_dtype=torch.float8_e4m3fn), static_scale=1.0)),
        "its CastConfig has an unsupported field 'static_scale'",
    ),
    "a field of a GEMM": (
        lambda c: changed(c, gemm_config_grad_input=changed(Float8GemmConfig(), fp8_output=True)),
        "its Float8GemmConfig has an unsupported field 'fp8_output'",
    ),
    "a class of a cast": (
        lambda c: changed(c, cast_config_grad_output_for_grad_weight=SimpleNamespace()),
        "its cast_config_grad_output_for_grad_weight is a types.SimpleNamespace",
    ),
    "a granularity": (
        lambda c: changed(c, cast_config_weight=changed(CastConfig(), scaling_granularity=Later.BLOCKWISE)),
        "cast_config_weight.scaling_granularity=Later.BLOCKWISE",
    ),
    "a format": (
        lambda c: changed(c, cast_config_input=changed(CastConfig(), target_dtype=torch.float8_e4m3fnuz)),
        "in its Float8LinearConfig: cast_config_input.target_dtype=torch.float8_e4m3fnuz",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_of_a_configuration_is_named_once_and_labeled_unknown(case: str) -> None:
    change, named = UNKNOWN[case]
    module = layer_of("rowwise", operands(5, 16, 32, torch.bfloat16))[0]
    module.config = change(configured("rowwise"))
    with pytest.raises(UnknownCastError, match="(?=.*supported).*" + re.escape(named)):
        for role in CASTS:
            find_cast(module, role)


def test_a_run_with_an_unknown_field_warns_once_and_is_labeled_unknown(recwarn: pytest.WarningsRecorder) -> None:
    given = operands(5, 16, 32, torch.bfloat16)
    model = nn.Sequential(*(layer_of("rowwise", given | {"weight": torch.randn(16, 16).bfloat16()})[0] for _ in range(3)))
    for module in model:
        module.config = changed(configured("rowwise"), tile=(128, 128))
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, output_rows=4)
    for step in range(3):
        with monitor.step(step):
            model(given["input"]).sum().backward()
    monitor.close()
    [warned] = said(recwarn)
    assert "Float8LinearConfig has an unsupported field 'tile'" in warned and "'unknown'" in warned
    rows = samples.rows(2)
    assert len(rows) == 9
    assert {(row["scale_source"], row["recipe"]) for row in rows.values()} == {("unknown", "current-hybrid")}


def test_a_release_that_casts_otherwise_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration may be the same; torchao's epsilon stands for its arithmetic."""
    from nemo_fp8_debug.capture.backends.torchao.trial import find_cast_difference

    module = layer_of("tensorwise", operands(5, 16, 32, torch.bfloat16))[0]
    monkeypatch.setattr("torchao.float8.float8_utils.EPS", 1.0)
    find_cast_difference.cache_clear()
    with pytest.raises(UnknownCastError, match=r"unsupported torchao version: .*scales of CurrentScaling"):
        find_cast(module, "input")
    find_cast_difference.cache_clear()
    monkeypatch.undo()
    assert find_cast(module, "input").source == "engine"
