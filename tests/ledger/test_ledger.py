"""The ledger of real models against closed formulas of their shapes, and against what torch counts in a step."""

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
    count_step,
    gpt_oss,
    llama,
    of_kind,
)
from torch import nn
from vit import CLASSES, PATCHES, ViT

from nemo_fp8_debug import Emulation, Monitor, read_record
from nemo_fp8_debug.capture.gemms import find_gemms
from nemo_fp8_debug.coverage.ledger import POSITION
from nemo_fp8_debug.coverage.scan import ledger_of

#: of a layer of both models, for each token: Q and output, K and V
PROJECTIONS = 2 * H * HEADS * D + 2 * H * KV * D


class TestLlama:
    LAYER = PROJECTIONS + 3 * H * F

    @pytest.mark.parametrize("tied", [False, True])
    def test_closed_formula(self, tied: bool) -> None:
        ledger = ledger_of([llama(tie_word_embeddings=tied)])
        assert ledger.forward() == close(LAYERS * self.LAYER + H * V)
        assert ledger.backward() == close(2 * (LAYERS * self.LAYER + H * V))
        assert ledger.share_not_observed() == 0

    def test_a_step_multiplies_what_the_ledger_says(self) -> None:
        model = llama()
        ledger = ledger_of([model])
        rotary = BATCH * D / 2 * TOKENS  # angles: a product with positions, outside of autograd
        assert count_step(model) == close(ROWS * (ledger.forward() + ledger.backward()) + rotary)
        assert count_step(model, module=r"mlp\.down_proj$") == close(3 * ROWS * LAYERS * H * F)

    def test_frozen_weights_have_no_wgrad(self) -> None:
        model = llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" not in name)
        ledger = ledger_of([model])
        assert ledger.backward() == close(LAYERS * (2 * PROJECTIONS + 3 * H * F) + 2 * H * V)
        assert count_step(model) == close(ROWS * (ledger.forward() + ledger.backward()))

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
        told = ledger_of([llama()]).summarize_coverage()["not_observed"]
        assert [why.split(",")[0] for why in told] == ["attention scores", "products of functions in forward code"]
        assert [of["multiply_adds_per_token"] for of in told.values()] == [None, None]


class TestGptOss:
    def test_experts_of_three_dimensions(self) -> None:
        model = gpt_oss()
        ledger = ledger_of([model])
        experts = LAYERS * K * (H * 2 * F + F * H)
        routers = LAYERS * H * E
        assert sum(e.forward or 0 for e in of_kind(ledger, "experts")) == close(experts)
        assert ledger.forward() == close(LAYERS * PROJECTIONS + H * V + experts + routers)
        assert ledger.share_not_observed() == close(routers / ledger.forward())
        scores = 3 * LAYERS * BATCH * HEADS * TOKENS * TOKENS * 2 * D
        angles = BATCH * D / 2 * TOKENS
        assert count_step(model) == close(ROWS * (ledger.forward() + ledger.backward()) + scores + angles)

    def test_the_reason_names_the_first(self) -> None:
        told = ledger_of([gpt_oss()]).summarize_coverage()["not_observed"]
        assert told["routers, which multiply in a function"]["first"] == "model.layers.0.mlp.router.weight"

    def test_a_class_that_is_not_known_is_unknown(self) -> None:
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(E, H, F))

        (entry, _) = ledger_of([nn.Sequential(Experts())]).entries
        assert (entry.status, entry.multiply_adds, entry.shape) == ("unknown", None, (E, H, F))
        assert entry.reason.startswith("parameters in an unknown class, which are observed if operators of torch")


class TestListsOfExperts:
    def test_qwen3_moe(self) -> None:
        options = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": F}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **options)).train()
        ledger = ledger_of([model])
        assert ledger.forward() == close(LAYERS * (PROJECTIONS + H * E + K * 3 * H * F) + H * V)
        assert count_step(model) == close(ROWS * (ledger.forward() + ledger.backward()))


class TestViT:
    W = ViT.WIDTH

    def test_multihead_attention_and_the_patches(self) -> None:
        model = ViT()
        ledger = ledger_of([model])
        w, tokens = self.W, PATCHES + 1
        layer, patch = 4 * w * w + 2 * w * 2 * w, 3 * 4 * 4 * w
        assert ledger.forward() == close(ViT.DEPTH * layer + w * CLASSES)
        assert ledger.forward(unit=POSITION) == patch
        assert ledger.share_not_observed() == 0
        linear = BATCH * tokens * ViT.DEPTH * layer
        head = BATCH * w * CLASSES  # of the class token alone
        # The image needs no gradient, so that the patches have wgrad only.
        patches = 2 * BATCH * PATCHES * patch
        counted = count_step(model, lambda m: m(torch.randn(BATCH, 3, 16, 16)).square().mean())
        assert counted == close(3 * (linear + head) + patches)

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
        ledger = ledger_of([model])
        experts = LAYERS * E * (H * 2 * F + F * H)
        assert sum(e.forward or 0 for e in of_kind(ledger, "experts")) == close(experts)
        assert count_step(model) == close(ROWS * (ledger.forward() + ledger.backward()))


class TestGPT2:
    def test_transformers_own_linear_class(self) -> None:
        config = transformers.GPT2Config(n_embd=H, n_layer=LAYERS, n_head=HEADS, vocab_size=V, n_positions=TOKENS)
        model = transformers.GPT2LMHeadModel(config).train()
        ledger = ledger_of([model])
        layers = LAYERS * 12 * H * H
        assert ledger.forward() == close(layers + H * V)
        assert ledger.share_not_observed() == 0
        scores = LAYERS * BATCH * HEADS * TOKENS * TOKENS * 2 * D
        assert count_step(model) == close(3 * (ROWS * (layers + H * V) + scores))


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
