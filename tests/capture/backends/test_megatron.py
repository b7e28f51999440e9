"""Real megatron-core GPT layers: operands, names, recompute, tied embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from helpers import Samples
from small_models.megatron import SEQUENCE, VOCABULARY, gpt, loss_of

from nemo_fp8_debug import Monitor, compare
from nemo_fp8_debug.capture.gemms import find_gemms

KINDS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def sampled(model: torch.nn.Module, micro_batches: int = 2) -> Samples:
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, on_error="raise")
    with monitor.step(0):
        for seed in range(micro_batches):
            loss_of(model, seed).backward()
    return samples


@pytest.mark.usefixtures("megatron")
class TestMegatron:
    def test_every_gemm_of_the_layers_and_the_output_layer(self) -> None:
        rows = sampled(gpt()).rows(0)
        names = {f"decoder.layers.{i}.{kind}" for i in range(2) for kind in KINDS} | {"output_layer"}
        assert {layer for layer, _ in rows} == names
        assert len(rows) == 3 * len(names)
        assert {row["dtype"] for row in rows.values()} == {"bfloat16"}

    def test_the_weight_gradient_follows_from_what_was_captured(self) -> None:
        """dW = dY^T X, so X and dY are the operands of this very GEMM and not of a neighbor."""
        from nemo_fp8_debug.capture import operands

        model, taken = gpt(), {}
        original = operands.OperandAccumulator.add_tensor

        def keep(self: operands.OperandAccumulator, x: torch.Tensor, order: int, use: Any = None) -> None:
            taken.setdefault((self.gemm.name, self.role), []).append(x.detach().clone())
            original(self, x, order, use)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operands.OperandAccumulator, "add_tensor", keep)
            sampled(model)
        for gemm in find_gemms([model]):
            pairs = zip(taken[gemm.name, "input"], taken[gemm.name, "grad_output"], strict=True)
            expected = sum(dy.flatten(0, -2).t().float() @ x.flatten(0, -2).float() for x, dy in pairs)
            torch.testing.assert_close(
                gemm.module.weight.grad.float(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max()
            )

    def test_the_fingerprint_lists_risky_features_that_are_on(self) -> None:
        risky = {"recompute_granularity": "full", "tp_comm_overlap": True}
        options = {"recompute_method": "uniform", "recompute_num_layers": 1, "sequence_parallel": False}
        model = gpt(recompute_granularity="full", **options)
        model.config.tp_comm_overlap = True
        assert Monitor(model, recorders=[Samples()]).fingerprint["risky_features_on"] == risky
        assert Monitor(gpt(), recorders=[Samples()]).fingerprint["risky_features_on"] == {}

    def test_the_fingerprint_tells_every_option_that_bears_on_precision(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """compare names each in which two runs differ; an object has the same text in another run."""
        from megatron.core.quantization.quant_config import RecipeConfig

        modules = {"configs": {"bf16": {}}, "matchers": {"a": {"type": "glob", "pattern": "*fc1", "config": "bf16"}}}
        modules["matchers"]["a"]["enabled"] = True
        plain = {
            "fp4": "nvfp4",
            "fp4_of_a_later_release": True,
            "fp8_wgrad": False,
            "fp8_output_proj": True,
            "fp8_quantizer_factory": RecipeConfig.from_config_dict,
            "tp_only_amax_red": True,
            "moe_router_dtype": "fp32",
            "moe_dispatch_fwd_dtype": "mxfp8",
            "moe_combine_bwd_dtype": "bf16",
            "activation_func_fp8_input_store": True,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": torch.uint8,
            "exp_avg_sq_dtype": torch.float16,
            "main_grads_dtype": torch.bfloat16,
            "main_params_dtype": torch.float16,
        }
        monkeypatch.delenv("NVTE_FUSED_ATTN_USE_FAv2_BWD", raising=False)
        for name in ("baseline", "run", "again"):
            model = gpt()
            if name != "baseline":
                monkeypatch.setenv("NVTE_FUSED_ATTN_USE_FAv2_BWD", "1")
                vars(model.config).update(plain, quant_recipe=RecipeConfig.from_config_dict(modules))
            with (monitor := Monitor(model, tmp_path / name, table_rows=0)).step(0):
                loss_of(model, 0).backward()
            monitor.close()
        of_two = compare(tmp_path / "run", tmp_path / "baseline").differences()
        differing = {row["setting"]: row["run"] for row in of_two.filter(pl.col("telling")).iter_rows(named=True)}
        factory = f"{RecipeConfig.__module__}.RecipeConfig.from_config_dict"
        for option, value in (plain | {"fp8_quantizer_factory": factory}).items():
            assert differing.pop(f"backend_options.{option}") == str(value), option
        assert "*fc1" in differing.pop("backend_options.quant_recipe")
        assert differing.pop("recipe.fp8_engine").startswith("none: fp4 is configured but has no effect")
        assert differing == {"environment.NVTE_FUSED_ATTN_USE_FAv2_BWD": "1"}
        same = compare(tmp_path / "again", tmp_path / "run").differences()
        assert same.filter(pl.col("telling")).is_empty()

    @pytest.mark.parametrize(
        "options", [{"recompute_method": "uniform", "recompute_granularity": "full", "recompute_num_layers": 1}]
    )
    def test_recompute_counts_once(self, options: dict[str, Any]) -> None:
        assert sampled(gpt(**options)).rows(0) == sampled(gpt()).rows(0)

    def test_tied_output_layer_is_given_its_weight(self) -> None:
        model = gpt(tied=True)
        row = sampled(model).rows(0)["output_layer", "weight"]
        assert row["n"] == VOCABULARY * 32
        assert row["amax"] == model.shared_embedding_or_output_weight().abs().max().item()

    def test_experts_are_gemms_of_their_own(self) -> None:
        rows = sampled(gpt(experts=4)).rows(0)
        names = {layer for layer, _ in rows}
        assert {f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc2" for e in range(4)} <= names
        tokens = [rows[f"decoder.layers.0.mlp.experts.local_experts.{e}.linear_fc1", "input"]["n"] for e in range(4)]
        assert sum(tokens) == 2 * 2 * SEQUENCE * 32 * 2  # micro-batches, sequences, tokens, width, experts a token goes to

    def test_the_recipe_of_the_configuration_is_read(self) -> None:
        model = gpt()
        config = model.config
        config.fp8, config.fp8_margin, config.fp8_amax_history_len, config.fp8_amax_compute_algo = "e4m3", 1, 4, "max"
        samples = Samples()
        Monitor(model, recorders=[samples], interval=1)
        recipe = samples.fingerprint["recipe"]
        assert recipe["measured_against"] == "delayed-e4m3(margin=1,amax_history_len=4)"
        assert recipe["fp8_engine"] == "none: fp8 is configured but has no effect without Transformer Engine"
