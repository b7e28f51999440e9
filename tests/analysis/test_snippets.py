"""Files of hosts, read by megatron-core's own parser and configuration, against the names of real modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recommendations import BF16, CURRENT, MARGIN, Ways, recommendation, run
from small_models.megatron import gpt

from nemo_fp8_debug.analysis.recommendation.recommend import BF16EndBlocks, Recommendation
from nemo_fp8_debug.analysis.recommendation.snippets import write_snippets
from nemo_fp8_debug.analysis.recommendation.snippets.megatron import (
    flags_of,
    make_global_options_snippet,
    make_module_recipes_snippet,
)
from nemo_fp8_debug.errors import ConfigError

pytestmark = pytest.mark.usefixtures("megatron")

FC1, FC2 = "decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"
ENDS = BF16EndBlocks(1, 2, 8, None)


def matched(found: Recommendation, model: torch.nn.Module, folder: Path) -> dict[str, dict[str, Any]]:
    """The modules that Megatron gives a recipe of their own, and which."""
    from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe

    snippet = make_module_recipes_snippet(found)
    assert snippet
    (folder / snippet.name).write_text(snippet.text)
    recipe = load_quantization_recipe(str(folder / snippet.name))
    configs = {name: get_quant_config_or_none(name, recipe) for name, _ in model.named_modules()}
    return {name: config.config["training_recipe"] for name, config in configs.items() if config}


class TestModules:
    @pytest.mark.parametrize(
        ("ways", "expected"),
        [
            ({"input": BF16}, {}),
            ({"input": CURRENT}, {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"}),
            ({"weight": MARGIN}, {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"}),
            ({"input": CURRENT, "weight": BF16}, {}),
            (
                {"input": CURRENT, "grad_output": [("format", "current-e4m3")]},
                {"fp8_quantization_recipe": "tensorwise", "fp8_format": "e4m3"},
            ),
            ({"input": [("format", "current-e5m2"), *BF16]}, {}),
            ({"input": [("block", "mxfp8-e4m3"), *BF16]}, {"fp8_quantization_recipe": "mxfp8", "fp8_format": "hybrid"}),
            (
                {"grad_output": [("block", "blockwise-e4m3"), *BF16]},
                {"fp8_quantization_recipe": "blockwise", "fp8_format": "e4m3"},
            ),
        ],
    )
    def test_one_module_gets_what_all_its_operands_can_do_with(
        self, tmp_path: Path, ways: dict[str, Ways], expected: dict[str, str]
    ) -> None:
        found = recommendation(run(), {(FC2, role): these for role, these in ways.items()})
        assert matched(found, gpt(), tmp_path) == {FC2: expected}

    def test_experts_of_a_layer(self, tmp_path: Path) -> None:
        name = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc2"
        model = gpt(experts=2)
        for layer in (name.format("*"), name.format(1)):
            found = recommendation(run(), {(layer, "input"): BF16})
            assert matched(found, model, tmp_path).keys() == {name.format(0), name.format(1)}

    def test_a_group_of_experts_is_one_module(self) -> None:
        found = make_module_recipes_snippet(
            recommendation(run(), {("decoder.layers.1.mlp.experts.linear_fc2.*", "input"): BF16})
        )
        assert found and list(yaml.safe_load(found.text)["matchers"]) == ["decoder.layers.1.mlp.experts.linear_fc2"]

    @pytest.mark.parametrize(("virtual", "place"), [(None, 2), (2, 0)])
    def test_stages_of_a_pipeline_number_their_blocks_anew(self, virtual: int | None, place: int) -> None:
        host = {"num_layers": 8, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": virtual}
        found = make_module_recipes_snippet(
            recommendation(run(**host), {("decoder.layers.6.mlp.linear_fc2", "input"): BF16})
        )
        assert found and list(yaml.safe_load(found.text)["matchers"]) == [f"decoder.layers.{place}.mlp.linear_fc2"]
        assert "in every part" in found.coarser[-1]


class TestOptionsOfTheRun:
    @pytest.mark.parametrize(
        ("ways", "ends", "expected"),
        [
            (
                MARGIN,
                None,
                {"fp8_recipe": "delayed", "fp8_margin": 1, "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
            ),
            (CURRENT, None, {"fp8_recipe": "tensorwise"}),
            (MARGIN, ENDS, {"fp8_recipe": "tensorwise"}),
            (BF16, ENDS, {"fp8_recipe": "tensorwise"}),
        ],
    )
    def test_megatron_takes_them(self, ways: Ways, ends: BF16EndBlocks | None, expected: dict[str, Any]) -> None:
        from megatron.core.transformer import TransformerConfig

        snippet = make_global_options_snippet(
            recommendation(run(), {("decoder.layers.3.mlp.linear_fc1", "input"): ways}, ends)
        )
        assert snippet
        values = yaml.safe_load(snippet.text)
        of_ends = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2}
        assert values == {"fp8": "hybrid"} | expected | (of_ends if ends else {})
        config = TransformerConfig(num_layers=8, hidden_size=32, num_attention_heads=2, **values)
        assert {name: getattr(config, name) for name in values} == values
        assert " ".join(flags_of(values)) in " ".join(snippet.text.replace("\n# ", " ").split())

    def test_megatron_refuses_ends_under_delayed_scaling(self) -> None:
        from megatron.core.transformer import TransformerConfig

        with pytest.raises(ValueError, match="Delayed scaling does not support"):
            TransformerConfig(
                num_layers=8,
                hidden_size=32,
                num_attention_heads=2,
                fp8="hybrid",
                fp8_recipe="delayed",
                first_last_layers_bf16=True,
            )

    def test_what_they_cannot_do_is_said(self) -> None:
        snippet = make_global_options_snippet(recommendation(run(), {(FC2, "input"): BF16}))
        assert snippet
        assert yaml.safe_load(snippet.text) == {}
        assert snippet.coarser == (
            f"X of {FC2}: no option of the whole run can do this. Recipes of modules can; see the other files.",
        )


def test_nothing_is_written_where_a_file_exists(tmp_path: Path) -> None:
    found = recommendation(run(), {(FC2, "input"): BF16, (FC1, "weight"): MARGIN})
    names = {snippet.name for snippet in write_snippets(found, tmp_path / "a")}
    assert {path.name for path in (tmp_path / "a").iterdir()} == {*names, "plan.json"}
    (tmp_path / "b").mkdir()
    (tmp_path / "b/transformer_config.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"transformer_config.yaml exists"):
        write_snippets(found, tmp_path / "b")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["transformer_config.yaml"]
