"""Logits and loads of routers, against what the models themselves return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from small_models.megatron import gpt, loss_of
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_fp8_debug import Monitor, read_record

EXPERTS, CHOSEN, TOKENS = 8, 2, 32
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
    **{"num_key_value_heads": 2, "num_experts_per_tok": CHOSEN},
}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS)),
    "qwen3": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=16, head_dim=8)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=EXPERTS, head_dim=8)),
}


def monitored(model: nn.Module, folder: Path) -> Any:
    monitor = Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise", activations=("router",))
    ids = torch.randint(64, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    with monitor.step(0):
        out = model(input_ids=ids, labels=ids, output_router_logits=True)
        out.loss.backward()
    monitor.close()
    return out


def load_of(chosen: torch.Tensor) -> list[int]:
    return [int((chosen == expert).sum()) for expert in range(EXPERTS)]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_that_the_model_returns(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    out = monitored(MODELS[name](), tmp_path)
    rows = read_record(str(tmp_path), "activations").sort("layer").to_dicts()
    assert len(rows) == len(out.router_logits) == 2
    for row, logits in zip(rows, out.router_logits, strict=True):
        weights = logits.double().softmax(-1)
        if name == "gpt-oss":  # which returns the weights of those chosen
            load = load_of((logits > 0).nonzero()[:, 1])
        else:
            assert row["amax"] == logits.abs().max().item()
            assert row["entropy"] == pytest.approx(float(-(weights * weights.log()).sum(-1).mean()), rel=1e-9)
            load = load_of(logits.topk(CHOSEN, -1).indices)
        assert row["n"] == TOKENS * EXPERTS and row["rows"] == TOKENS
        assert row["load_ratio"] == pytest.approx(max(load) / (sum(load) / EXPERTS))
        assert row["idle_experts"] == load.count(0) and row["dropped_pct"] == 0
        assert row["loads"] == load


def test_a_router_that_limits_groups(tmp_path: Path) -> None:
    """The last choice over all experts counts, and not those within groups."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    config = DeepseekV3Config(
        **sizes,
        **{"qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1},
        **{"moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1},
    )
    model = DeepseekV3ForCausalLM(config)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    gate = model.model.layers[1].mlp.gate
    gate.register_forward_hook(
        lambda m, args, out: seen.append((args[0].detach().view(-1, 32).float() @ m.weight.detach().float().T, out[0]))
    )
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise", activations=("router",))
    ids = torch.randint(64, (2, TOKENS // 2))
    with monitor.step(0):
        model(input_ids=ids, labels=ids).loss.backward()
    monitor.close()
    (row,) = read_record(str(tmp_path), "activations").to_dicts()
    ((logits, chosen),) = seen
    assert row["layer"] == "model.layers.1.mlp.gate" and row["amax"] == pytest.approx(logits.abs().max().item())
    load = load_of(chosen)
    assert row["load_ratio"] == pytest.approx(max(load) / (sum(load) / EXPERTS))
    assert row["idle_experts"] == load.count(0)


def test_losses_are_bit_identical(tmp_path: Path) -> None:
    def loss_of(folder: Path | None) -> tuple[float, torch.Tensor]:
        torch.manual_seed(0)
        model = MODELS["qwen3"]()
        ids = torch.randint(64, (2, 16))
        every = ("norm", "router", "attention")
        monitor = folder and Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise", activations=every)
        if monitor:
            monitor.begin_step(0)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if monitor:
            monitor.end_step(loss=loss)
            monitor.close()
        return loss.item(), model.model.layers[0].mlp.gate.weight.grad

    (plain, gradient), (loss, found) = loss_of(None), loss_of(tmp_path)
    assert loss == plain and torch.equal(found, gradient)


@pytest.mark.usefixtures("megatron")
def test_tokens_that_megatron_drops(tmp_path: Path) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    dispatch = {"moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none"}
    model = gpt(experts=4, moe_expert_capacity_factor=0.5, **dispatch)
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    maps: list[torch.Tensor] = []
    for router in routers:
        router.register_forward_hook(lambda m, args, out: maps.append(out[1].clone()))
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise", activations=("router",))
    with monitor.step(0):
        loss_of(model, 0).backward()
    monitor.close()
    rows = read_record(str(tmp_path), "activations").filter(pl.col("role") == "router_logits").to_dicts()
    assert len(rows) == len(routers) == len(maps) > 0
    for row, given in zip(rows, maps, strict=True):
        asked = 2 * len(given)
        assert row["dropped_pct"] == pytest.approx(100 * (1 - int(given.sum()) / asked)) and row["dropped_pct"] > 0
        assert row["load_ratio"] == pytest.approx(int(given.sum(0).max()) * 4 / int(given.sum()))
        assert row["loads"] == given.sum(0).tolist()
