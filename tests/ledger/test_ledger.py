"""The ledger of real models against closed formulas of their shapes, and against what a step was seen to multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from small_models.megatron import SEQUENCE, VOCABULARY, gpt, loss_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from vit import CLASSES, PATCHES, ViT

from nemo_fp8_debug import Emulation
from nemo_fp8_debug.capture.gemms import find_gemms
from nemo_fp8_debug.coverage.ledger import POSITION, Entry, Ledger
from nemo_fp8_debug.coverage.observer import ObservedCoverage, observe_coverage
from nemo_fp8_debug.coverage.scan import ledger_of

BATCH, TOKENS = 2, 16
ROWS = BATCH * TOKENS
H, F, LAYERS, HEADS, KV, V, E, K = 32, 48, 2, 4, 2, 64, 4, 2
D = H // HEADS
SMALL: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "vocab_size": V,
    "head_dim": D,
}


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-3)


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **options))


def gpt_oss() -> nn.Module:
    torch.manual_seed(0)
    options = {"num_local_experts": E, "num_experts_per_tok": K, "layer_types": ["full_attention"] * LAYERS}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SMALL, **options)).train()


def loss_of_tokens(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(V, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    loss: torch.Tensor = model(tokens, labels=tokens).loss
    return loss


def counted_step(model: nn.Module, loss: Any = loss_of_tokens) -> ObservedCoverage:
    with observe_coverage(model) as counted:
        loss(model).backward()
    assert not counted.not_counted
    return counted


def of_kind(ledger: Ledger, kind: str) -> list[Entry]:
    return [e for e in ledger.entries if e.kind == kind]


def by_status(ledger: Ledger) -> dict[str, float | None]:
    return ledger.compact()["multiply_adds_per_token"]


#: of a layer of both models, for each token: Q and output, K and V
PROJECTIONS = 2 * H * HEADS * D + 2 * H * KV * D


class TestLlama:
    LAYER = PROJECTIONS + 3 * H * F
    SCORES = LAYERS * BATCH * HEADS * TOKENS * TOKENS * 2 * D

    @pytest.mark.parametrize("tied", [False, True])
    def test_closed_formula(self, tied: bool) -> None:
        ledger = ledger_of([llama(tie_word_embeddings=tied)])
        assert ledger.forward() == close(LAYERS * self.LAYER + H * V)
        assert ledger.backward() == close(2 * (LAYERS * self.LAYER + H * V))
        assert ledger.share_not_observed() == 0

    def test_a_step_multiplies_what_the_ledger_says_and_the_scores(self) -> None:
        model = llama()
        ledger, counted = ledger_of([model]), counted_step(model)
        rotary = BATCH * D / 2 * TOKENS  # angles: a product with positions, outside of autograd
        assert counted.total("forward") == close(ROWS * ledger.forward() + self.SCORES + rotary)
        assert counted.total("backward") == close(ROWS * ledger.backward() + 2 * self.SCORES)
        assert counted.total("forward", r"mlp\.down_proj$") == close(ROWS * LAYERS * H * F)
        assert counted.total("backward", r"layers\.1\.self_attn$") == close(2 * self.SCORES / LAYERS)
        assert counted.total("backward", "^$") == 0
        assert counted.total("recompute") == close(self.SCORES / 2)  # fused attention makes its scores anew

    def test_torch_counts_the_same(self) -> None:
        model = llama()
        with FlopCounterMode(display=False) as theirs:
            loss_of_tokens(model).backward()
        # It does not know fused attention on a CPU.
        assert 2 * counted_step(model).total(operator="^b?mm$") == close(theirs.get_total_flops())

    def test_frozen_weights_have_no_wgrad(self) -> None:
        model = llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" not in name)
        ledger, counted = ledger_of([model]), counted_step(model)
        assert ledger.backward() == close(LAYERS * (2 * PROJECTIONS + 3 * H * F) + 2 * H * V)
        assert counted.total("backward") == close(ROWS * ledger.backward() + 2 * self.SCORES)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_checkpointed_forward_is_recompute(self, reentrant: bool) -> None:
        model = llama().train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        plain, counted = counted_step(llama()), counted_step(model)
        layers = LAYERS * ROWS * self.LAYER + self.SCORES
        # Torch stops a forward that is done again once it has what it needs: after all that is multiplied but one product.
        once_more = counted.total("recompute") - plain.total("recompute")
        assert layers - LAYERS * ROWS * H * F <= once_more <= layers * 1.001
        for passed in ("forward", "backward"):
            assert counted.total(passed) == plain.total(passed)
            assert counted.total(passed, r"mlp\.up_proj") == plain.total(passed, r"mlp\.up_proj")

    def test_layers_and_emulation_decide_the_status(self) -> None:
        model = llama()
        chosen = [g for g in find_gemms([model]) if "mlp" in g.name]
        layers, heads = LAYERS * 3 * H * F, LAYERS * PROJECTIONS + H * V
        assert by_status(ledger_of([model], chosen)) == {"observed": layers, "high precision": heads, "unknown": None}
        emulation = Emulation(model, "current")
        emulation.attach()
        found = by_status(ledger_of([model], chosen))
        emulation.detach()
        assert found["quantized and observed"] == layers
        assert found["quantized and not observed"] == heads

    def test_scores_and_functions_are_unknown_and_not_zero(self) -> None:
        told = ledger_of([llama()]).compact()["not_observed"]
        assert [why.split(",")[0] for why in told] == ["attention scores", "products of functions in forward code"]
        assert [of["multiply_adds_per_token"] for of in told.values()] == [None, None]

    def test_losses_and_gradients_stay_the_same(self) -> None:
        plain, observed = llama(), llama()
        loss = loss_of_tokens(plain)
        loss.backward()
        with observe_coverage(observed):
            again = loss_of_tokens(observed)
            again.backward()
        assert torch.equal(loss, again)
        for a, b in zip(plain.parameters(), observed.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in observed.modules())


class TestGptOss:
    def test_experts_of_three_dimensions(self) -> None:
        model = gpt_oss()
        ledger, counted = ledger_of([model]), counted_step(model)
        experts = LAYERS * K * (H * 2 * F + F * H)
        routers = LAYERS * H * E
        assert sum(e.forward or 0 for e in of_kind(ledger, "experts")) == close(experts)
        assert ledger.forward() == close(LAYERS * PROJECTIONS + H * V + experts + routers)
        assert ledger.share_not_observed() == close((experts + routers) / ledger.forward())
        assert counted.total("forward", r"mlp\.experts$") == close(ROWS * experts)
        assert counted.total("backward", r"mlp\.experts$") == close(2 * ROWS * experts)
        assert counted.total("forward", r"mlp\.router$") == close(ROWS * routers)
        scores = LAYERS * BATCH * HEADS * TOKENS * TOKENS * 2 * D
        assert counted.total("backward") == close(ROWS * ledger.backward() + 2 * scores)

    def test_the_reason_names_the_first(self) -> None:
        told = ledger_of([gpt_oss()]).compact()["not_observed"]
        reason = "experts in parameters of three dimensions"
        assert told[reason]["first"] == "model.layers.0.mlp.experts.gate_up_proj"

    def test_a_class_that_is_not_known_is_unknown(self) -> None:
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(E, H, F))

        (entry, _) = ledger_of([nn.Sequential(Experts())]).entries
        assert (entry.status, entry.multiply_adds, entry.shape) == ("unknown", None, (E, H, F))


class TestListsOfExperts:
    def test_qwen3_moe(self) -> None:
        options = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": F}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **options)).train()
        ledger, counted = ledger_of([model]), counted_step(model)
        assert ledger.forward() == close(LAYERS * (PROJECTIONS + H * E + K * 3 * H * F) + H * V)
        assert counted.total("forward", "experts") == close(ROWS * LAYERS * K * 3 * H * F)


class TestViT:
    W = ViT.WIDTH

    def test_multihead_attention_and_the_patches(self) -> None:
        model = ViT()
        ledger, counted = ledger_of([model]), counted_step(model, lambda m: m(torch.randn(BATCH, 3, 16, 16)).square().mean())
        w, tokens = self.W, PATCHES + 1
        layer, patch = 4 * w * w + 2 * w * 2 * w, 3 * 4 * 4 * w
        assert ledger.forward() == close(ViT.DEPTH * layer + w * CLASSES)
        assert ledger.forward(unit=POSITION) == patch
        assert ledger.share_not_observed() == close(ViT.DEPTH * 4 * w * w / ledger.forward())
        scores = ViT.DEPTH * BATCH * tokens * tokens * 2 * w
        head = BATCH * w * CLASSES  # of the class token alone
        linear = BATCH * tokens * ViT.DEPTH * layer
        assert counted.total("forward") == close(linear + head + scores + BATCH * PATCHES * patch)
        # The image needs no gradient, so that the patches have wgrad only.
        assert counted.total("backward") == close(2 * (linear + head + scores) + BATCH * PATCHES * patch)
        assert counted.total("forward", "self_attn", "mm") == close(BATCH * tokens * ViT.DEPTH * 4 * w * w)

    def test_kinds_and_reasons(self) -> None:
        ledger = ledger_of([ViT()])
        found = {e.kind: e.status for e in ledger.entries if e.multiply_adds is not None}
        assert found == {
            "linear": "observed",
            "head": "observed",
            "attention": "high precision",
            "convolution": "high precision",
        }
        assert [e.name for e in ledger.entries if e.kind == "other"] == ["model.positions", "*"]


@pytest.mark.usefixtures("megatron")
class TestMegatron:
    H, F, HEADS = 32, 64, 2
    LAYER = 4 * H * H + 2 * H * F
    #: Q K^T and scores times V
    SCORES = 2 * 2 * HEADS * SEQUENCE * SEQUENCE * 2 * (H // HEADS)

    @pytest.mark.parametrize("tied", [False, True])
    def test_gpt(self, tied: bool) -> None:
        model = gpt(tied=tied)
        ledger, counted = ledger_of([model]), counted_step(model, lambda m: loss_of(m, 0))
        rows = 2 * SEQUENCE
        assert ledger.forward() == close(2 * self.LAYER + self.H * VOCABULARY)
        assert ledger.share_not_observed() == 0
        assert counted.total("forward") == close(rows * ledger.forward() + self.SCORES)
        assert counted.total("backward") == close(rows * ledger.backward() + 2 * self.SCORES)
        assert counted.total("backward", "output_layer") == close(2 * rows * self.H * VOCABULARY)
        assert counted.total("forward", "core_attention") == self.SCORES

    def test_mixture_of_experts(self) -> None:
        model = gpt(experts=4)
        ledger, counted = ledger_of([model]), counted_step(model, lambda m: loss_of(m, 0))
        experts, routers, rows = 2 * 2 * 2 * self.H * self.F, 2 * self.H * 4, 2 * SEQUENCE
        assert sum(e.forward or 0 for e in of_kind(ledger, "experts")) == close(experts)
        assert ledger.forward() == close(2 * 4 * self.H**2 + experts + routers + self.H * VOCABULARY)
        assert ledger.share_not_observed() == close(routers / ledger.forward())
        assert counted.total("forward") == close(rows * ledger.forward() + self.SCORES)
        assert counted.total("backward") == close(rows * ledger.backward() + 2 * self.SCORES)
        assert counted.total("forward", r"experts.*linear_fc1$") == close(rows * experts / 2)

    def test_recompute(self) -> None:
        options = {"recompute_method": "uniform", "recompute_granularity": "full", "recompute_num_layers": 1}
        counted = counted_step(gpt(**options), lambda m: loss_of(m, 0))
        assert counted.total("recompute") == close(2 * SEQUENCE * 2 * self.LAYER + self.SCORES)
        assert counted.total("backward") == counted_step(gpt(), lambda m: loss_of(m, 0)).total("backward")

    def test_capacity_leaves_the_size_of_experts_unknown(self) -> None:
        model = gpt(experts=4, moe_expert_capacity_factor=1.0, moe_router_load_balancing_type="none")
        assert {e.multiply_adds for e in of_kind(ledger_of([model]), "experts")} == {None}
