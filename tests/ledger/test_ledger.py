"""The ledger of real models against closed formulas of their shapes, and against what a step was seen to multiply."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers
from ledger_models import (
    BATCH,
    HEADS,
    KV,
    LAYERS,
    ROWS,
    SMALL,
    TOKENS,
    D,
    E,
    F,
    H,
    K,
    V,
    by_status,
    close,
    counted_step,
    gpt_oss,
    llama,
    loss_of_tokens,
    of_kind,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from vit import CLASSES, PATCHES, ViT

from nemo_fp8_debug import Emulation, Monitor, read_record
from nemo_fp8_debug.capture.gemms import find_gemms
from nemo_fp8_debug.coverage.ledger import POSITION
from nemo_fp8_debug.coverage.observer import observe_coverage
from nemo_fp8_debug.coverage.scan import ledger_of

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
        assert ledger.share_not_observed() == close(routers / ledger.forward())
        assert counted.total("forward", r"mlp\.experts$") == close(ROWS * experts)
        assert counted.total("backward", r"mlp\.experts$") == close(2 * ROWS * experts)
        assert counted.total("forward", r"mlp\.router$") == close(ROWS * routers)
        scores = LAYERS * BATCH * HEADS * TOKENS * TOKENS * 2 * D
        assert counted.total("backward") == close(ROWS * ledger.backward() + 2 * scores)

    def test_the_reason_names_the_first(self) -> None:
        told = ledger_of([gpt_oss()]).compact()["not_observed"]
        assert told["routers, which multiply in a function"]["first"] == "model.layers.0.mlp.router.weight"

    def test_a_class_that_is_not_known_is_unknown(self) -> None:
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(E, H, F))

        (entry, _) = ledger_of([nn.Sequential(Experts())]).entries
        assert (entry.status, entry.multiply_adds, entry.shape) == ("unknown", None, (E, H, F))
        assert entry.reason.startswith("parameters in a class that is not known, which are observed if operators of torch")


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
        assert ledger.share_not_observed() == 0
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
            "attention": "observed",
            "convolution": "high precision",
        }
        assert [e.name for e in ledger.entries if e.kind == "other"] == ["model.positions", "*"]


class TestLlama4:
    def test_its_experts_meet_every_token(self) -> None:
        """Tokens are given once to each expert, with a zero for those that are not for it."""
        options = {
            "num_local_experts": E,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": F,
            "attn_implementation": "sdpa",
        }
        config = transformers.Llama4TextConfig(**(SMALL | options), interleave_moe_layer_step=1)
        model = transformers.Llama4ForCausalLM(config).train()
        ledger, counted = ledger_of([model]), counted_step(model)
        experts = LAYERS * E * (H * 2 * F + F * H)
        assert sum(e.forward or 0 for e in of_kind(ledger, "experts")) == close(experts)
        assert counted.total("forward", r"experts$") == close(ROWS * experts)
        assert counted.total("backward", r"experts$") == close(2 * ROWS * experts)


class TestGPT2:
    def test_transformers_own_linear_class(self) -> None:
        config = transformers.GPT2Config(n_embd=H, n_layer=LAYERS, n_head=HEADS, vocab_size=V, n_positions=TOKENS)
        model = transformers.GPT2LMHeadModel(config).train()
        ledger, counted = ledger_of([model]), counted_step(model)
        layers = LAYERS * 12 * H * H
        assert ledger.forward() == close(layers + H * V)
        assert ledger.share_not_observed() == 0
        assert counted.total("backward", r"attn\.|mlp|lm_head") == close(2 * ROWS * (layers + H * V))


class TestComputedWeights:
    @pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm])
    def test_a_convolution_has_the_shape_of_the_weight_that_it_computes(self, norm: Callable[..., nn.Module]) -> None:
        for of in (nn.Conv1d(6, 4, 3, groups=2), nn.ConvTranspose1d(6, 4, 3, groups=2), nn.Conv2d(2, 4, (3, 5))):
            shape = tuple(of.weight.shape)
            (found,) = of_kind(ledger_of([nn.Sequential(norm(of))]), "convolution")
            size = None if isinstance(of, nn.ConvTranspose1d) else math.prod(shape)
            assert (found.name, found.shape, found.multiply_adds, found.status) == ("0", shape, size, "unknown")

    def test_wav2vec2_is_recorded(self, tmp_path: Path) -> None:
        sizes = {"conv_dim": (H, H), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_conv_pos_embeddings": 4}
        config = transformers.Wav2Vec2Config(**SMALL, **sizes, num_conv_pos_embedding_groups=2, layerdrop=0.0)
        model = transformers.Wav2Vec2Model(config)
        monitor = Monitor(model, str(tmp_path), interval=1, on_error="raise", table_rows=0)
        with closing(monitor), monitor.step(0):
            model(torch.randn(1, 400)).last_hidden_state.square().mean().backward()
        linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        assert set(read_record(str(tmp_path), "metrics")["layer"]) == linears


class TestPrecision:
    def test_a_class_of_tensors_that_may_quantize_is_unknown(self) -> None:
        """As torchao's, which replace the parameters of a module and change what its products do."""

        class Quantizing(torch.Tensor):
            pass

        model = gpt_oss()
        experts = model.get_submodule("model.layers.0.mlp.experts")
        experts.down_proj = nn.Parameter(experts.down_proj.detach().as_subclass(Quantizing))
        found = {e.first: e.status for e in of_kind(ledger_of([model]), "experts")}
        assert found["model.layers.0.mlp.experts.down_proj"] == "unknown"
        assert found["model.layers.1.mlp.experts.down_proj"] == "observed"
