"""Which modules are GEMMs, what they are called, and how patterns choose among them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPTNeoXJapaneseConfig, GPTNeoXJapaneseForCausalLM

from nemo_fp8_debug import ConfigError
from nemo_fp8_debug.capture.gemms import drop_end_layers, find_gemms, require_matching_gemms
from nemo_fp8_debug.core.layer_names import compile_layer_patterns

NAMES = [
    "decoder.layers.3.mlp.linear_fc1",
    "decoder.layers.3.self_attention.linear_qkv",
    "decoder.layers.31.mlp.linear_fc1",
    "output_layer",
]


class Wrapper(nn.Module):
    """As DistributedDataParallel and Float16Module wrap: one child called `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("decoder.layers.3.*", [0, 1]),
        ("layers.3", [0, 1]),
        ("linear_fc1", [0, 2]),
        ("*fc1", [0, 2]),
        ("output_layer", [3]),
        ("re:layers\\.3\\d", [2]),
        ("re:qkv$", [1]),
        ("layer", []),
        ("decoder.layers.[0-3].mlp.*", [0]),
    ],
)
def test_pattern(pattern: str, matched: list[int]) -> None:
    test = compile_layer_patterns([pattern])
    assert [i for i, name in enumerate(NAMES) if test(name)] == matched


def test_bad_regular_expression_is_named() -> None:
    with pytest.raises(ConfigError, match=r"re:layers\.\(.*not a regular expression"):
        compile_layer_patterns(["re:layers.("])


def test_wrappers_leave_no_trace_in_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    plain = [g.name for g in find_gemms([model])]
    assert plain == ["0", "1.0"]
    assert [g.name for g in find_gemms([Wrapper(Wrapper(model))])] == plain
    compiled = torch.compile(model, backend="eager")
    assert [g.name for g in find_gemms([compiled])] == plain


def test_chunks_of_a_pipeline_get_global_layer_numbers() -> None:
    class Layer(nn.Module):
        __module__ = "megatron.core.transformer.transformer_layer"

        def __init__(self, layer_number: int) -> None:
            super().__init__()
            self.layer_number = layer_number
            self.linear = nn.Linear(2, 2)

    def chunk(first: int) -> nn.Module:
        block = nn.Module()
        block.decoder = nn.Module()
        block.decoder.layers = nn.ModuleList([Layer(first), Layer(first + 1)])
        return Wrapper(block)

    chunks = nn.ModuleList([chunk(1), chunk(5)])
    expected = [f"decoder.layers.{i}.linear" for i in (0, 1, 4, 5)]
    assert [g.name for g in find_gemms(list(chunks))] == expected
    assert [g.name for g in find_gemms([chunks])] == expected


def test_layer_numbers_of_others_are_not_megatrons() -> None:
    """GPTNeoXJapanese numbers its layers from 0."""
    config = GPTNeoXJapaneseConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = GPTNeoXJapaneseForCausalLM(config)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert "gpt_neox_japanese.layers.1.mlp.dense_h_to_4h" in linears
    assert [g.name for g in find_gemms([model])] == linears


def test_a_shared_module_is_one_gemm() -> None:
    linear = nn.Linear(2, 2)
    assert len(find_gemms([nn.Sequential(linear, nn.ReLU(), linear)])) == 1


def test_no_match_lists_what_there_is() -> None:
    gemms = find_gemms([nn.Sequential(nn.Linear(2, 2))])
    with pytest.raises(ConfigError, match=r"no GEMM layer matches \['linear_fc9'\]; the model has '0'"):
        require_matching_gemms(gemms, ["linear_fc9"])


def test_model_without_gemm() -> None:
    with pytest.raises(ConfigError, match="no supported GEMM layer"):
        require_matching_gemms(find_gemms([nn.Conv2d(1, 1, 1)]), None)


def test_without_ends() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(4)])
    model.head = nn.Linear(2, 2)
    gemms = find_gemms([model])
    assert [g.name for g in drop_end_layers(gemms, 1, 2)] == ["layers.1.0", "head"]
    with pytest.raises(ConfigError, match="none of 4"):
        drop_end_layers([g for g in gemms if g.name != "head"], 2, 2)
