"""Megatron-core GPT in FP8 on the modules of Transformer Engine, its attention included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_te import CASTS, Cast, scales_of

pytestmark = pytest.mark.usefixtures("megatron")

SEQUENCE, VOCABULARY, WIDTH = 16, 64, 32
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DENSE = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def gpt(experts: int | None = None, **options: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    if experts:
        options |= {"num_moe_experts": experts, "moe_router_topk": 2, "moe_grouped_gemm": True}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        ffn_hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        **({"fp8": "hybrid", "fp8_recipe": "delayed"} | options),
    )
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=bool(experts))
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE).bfloat16()


def train(model: Any, steps: int = 2, micro_batches: int = 2) -> list[float]:
    """The losses; the log keeps the casts of the last step."""
    losses = []
    for step in range(steps):
        CASTS.clear()
        model.zero_grad()
        model.set_is_first_microbatch()  # as Megatron's schedules do
        for number in range(micro_batches):
            seed = torch.Generator().manual_seed(step * micro_batches + number)
            tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=seed)
            positions = torch.arange(SEQUENCE).expand(2, SEQUENCE)
            loss = model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
            loss.backward()
            losses.append(loss.item())
    return losses


def casts_by_name(model: Any) -> dict[tuple[str, str, int], list[Cast]]:
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[tuple[str, str, int], list[Cast]] = {}
    for cast in CASTS:
        found.setdefault((names[id(cast.module)], cast.role, cast.gemm), []).append(cast)
    return found


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_every_gemm_of_the_layers_is_cast(recipe: str) -> None:
    model = gpt(fp8_recipe=recipe)
    losses = train(model)
    found = casts_by_name(model)
    layers = [f"decoder.layers.{i}.{name}" for i in range(2) for name in DENSE]
    assert found.keys() == {(layer, role, 0) for layer in layers for role in ("X", "W", "dY")}
    for (name, role, _), casts in found.items():
        again = [cast for cast in casts if cast.in_backward] if role != "dY" else []
        first = [cast for cast in casts if cast not in again]
        assert len(first) == (1 if role == "W" else 2)
        # Megatron has linear_proj save its BF16 input, except under delayed scaling, whose scales move meanwhile.
        assert len(again) == 2 * (recipe == "tensorwise" and role == "X" and name.endswith("linear_proj"))
        assert all(a.scale == f.scale and torch.equal(a.codes, f.codes) for a, f in zip(again, first, strict=False))
        assert {cast.format for cast in casts} == {"e5m2" if role == "dY" else "e4m3"}
        normed = role == "X" and name.rsplit(".", 1)[1] in ("linear_qkv", "linear_fc1")
        assert {cast.fused for cast in casts} == {normed and recipe == "delayed"}
        assert all(cast.scale != 1 for cast in casts)
    gradient = model.decoder.layers[0].mlp.linear_fc1.weight.grad.float()
    plain = gpt(fp8=None)
    assert losses == pytest.approx(train(plain), rel=0.02)
    expected = plain.decoder.layers[0].mlp.linear_fc1.weight.grad.float()
    assert 1e-3 < (gradient - expected).norm() / expected.norm() < 0.2
    assert not CASTS


def test_full_recompute_casts_twice_with_the_same_scales() -> None:
    plain, recomputed = gpt(), gpt(**FULL_RECOMPUTE)
    expected_losses, expected = train(plain), None
    expected = {key: [float(c.scale) for c in casts] for key, casts in casts_by_name(plain).items()}
    assert train(recomputed) == expected_losses
    found = casts_by_name(recomputed)
    for key, casts in found.items():
        first, again = ([float(c.scale) for c in casts if c.recompute is second] for second in (False, True))
        assert first == expected[key]
        assert again == (first if key[1] == "X" else [])
    assert found.keys() == expected.keys()


def test_experts() -> None:
    model = gpt(experts=4)
    train(model, micro_batches=1)
    found = casts_by_name(model)
    for layer in range(2):
        for name in ("linear_fc1", "linear_fc2"):
            grouped = f"decoder.layers.{layer}.mlp.experts.{name}"
            sources = [cast.source for e in range(4) for cast in found.get((grouped, "X", e), [])]
            assert sum(int(x.any(-1).sum()) for x in sources) == 2 * SEQUENCE * 2  # the rest pads to 16 rows
            assert all(x.shape[0] % 16 == 0 for x in sources)
            assert [len(found[grouped, "W", e]) for e in range(4)] == [1] * 4
            assert {e for e in range(4) if (grouped, "X", e) in found} == {
                e for e in range(4) if (grouped, "dY", e) in found
            }
            module = model.get_submodule(grouped)
            assert all(torch.equal(found[grouped, "W", e][0].source, getattr(module, f"weight{e}")) for e in range(4))
            assert all(scale != 1 for e in range(4) for scale in scales_of(module, "W", e))
