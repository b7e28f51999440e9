"""Reports about what lies between GEMMs: attention, positions and routers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import nn

from bug_reports.gradients import Detailed
from bug_reports.kernels import E4M3, E4M3_LIMIT
from bug_reports.model import GPT, SEQUENCE, VOCABULARY, Batch, MixtureOfExperts, attend
from bug_reports.report import SOFTWARE, Answer, register
from bug_reports.training import Training


class OwnCore(Training):
    """A run whose attention has a core of its own."""

    recipe = "current"

    def run_core(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the output of attention."""
        return attend(query, key, value)

    def prepare_run(self) -> None:
        for layer in self.model.layers:
            layer.attn.core = self.run_core


@register(
    "pytorch/torchtitan/issues/1056 pytorch/torchtitan/issues/865",
    "2025-02",
    "Row-wise FP8 gives NaN after about 80 steps: attention's forward pass returns it.",
    "attention returns NaN",
    Answer(
        "Attention of layer 1 returns NaN, from step 83: X of layers.1.attn.proj shows it first.",
        ("nonfinite",),
        ("layers.1.attn.proj X", "layers.1.attn.proj Y"),
        needs_tensor=False,
        steps=(81, 85),
    ),
    "harmful",
    new=False,
)
class AttentionReturnsNan(OwnCore):
    """torchao's row-wise recipe, emulated, in BF16."""

    recipe, steps, since = "", 140, 83

    def build_model(self) -> nn.Module:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = GPT(self.seed).bfloat16()
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
        convert_to_float8_training(model, module_filter_fn=lambda m, name: name.startswith("layers"), config=config)
        return model

    def prepare_run(self) -> None:
        self.model.layers[1].attn.core = self.run_core

    def run_core(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = attend(query, key, value)
        if self.acts:
            output = output.clone()
            output[0, 0, 0] = torch.nan
        return output


class _CorruptedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        return attend(query, key, value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            output = attend(*inputs)
        right = torch.autograd.grad(output, inputs, gradients[0])
        generator = torch.Generator().manual_seed(int(right[0].float().abs().sum() * 1e6) % 2**31)
        noisy = [g + 3 * g.float().std() * torch.randn(g.shape, generator=generator).to(g) for g in right[:2]]
        return *noisy, right[2]


@register(
    "Dao-AILab/flash-attention/issues/2481",
    "2026-04",
    "The backward pass of attention corrupts dQ and dK, but not dV.",
    "the backward pass of attention is wrong",
    Answer(
        "Attention's backward pass is wrong, from the start: dY and dW of qkv.",
        SOFTWARE,
        ("layers.*.attn.qkv dW", "layers.*.attn.qkv dY", "layers.*.attn *"),
        steps=(0, 10),
    ),
    "none",
    new=False,
)
class WrongAttention(Detailed):
    """Noise of three standard deviations in all layers."""

    def prepare_run(self) -> None:
        for layer in self.model.layers:
            layer.attn.core = _CorruptedAttention.apply if self.faulty else attend


@register(
    "jingyaogong/minimind/issues/567 NVIDIA/Megatron-LM/issues/1469",
    "2025-12",
    "The router of a mixture of experts collapses, because its balancing loss is too weak.",
    "a router collapses",
    Answer(
        "The router collapses, from step 60 to 75.",
        ("router_collapse", "dead_experts"),
        ("layers.*.mlp.router *", "layers.*.mlp.experts.* *"),
        needs_tensor=False,
        steps=(60, 90),
        cannot_tell="default options record no router logits",
    ),
    "harmful",
    new=False,
)
class RouterCollapses(Training):
    """From step 60 on the balancing loss has the wrong sign and is strong."""

    recipe, steps, since = "current", 180, 60
    monitor_options: ClassVar[dict[str, Any]] = {"activations": ["router"]}

    def build_model(self) -> nn.Module:
        return GPT(self.seed, mlp=MixtureOfExperts)

    def backpropagate(self, loss: torch.Tensor) -> None:
        weight = -0.5 if self.acts else 0.02
        super().backpropagate(loss + weight * sum(layer.mlp.balance for layer in self.model.layers))


def attend_by_tiles(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offset: int) -> torch.Tensor:
    """Return attention whose weights are cast to E4M3 times 2^offset, against a maximum that is one tile late."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    length = scores.shape[-1]
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    size = 8
    late = scores[..., :size].amax(-1, keepdim=True)
    late = torch.where(late.isfinite(), late, 0.0)
    maximum, total, output = late, torch.zeros_like(late), torch.zeros_like(query)
    for start in range(0, length, size):
        tile = scores[..., start : start + size]
        weights = torch.exp(tile - maximum)
        held = (weights * 2.0**offset).clamp(max=E4M3_LIMIT).to(E4M3).to(query) * 2.0**-offset
        held = weights + (held - weights).detach()
        total, output = total + weights.sum(-1, keepdim=True), output + held @ value[..., start : start + size, :]
        newer = torch.maximum(maximum, tile.amax(-1, keepdim=True))
        shrink = torch.exp(maximum - newer)
        total, output, maximum = total * shrink, output * shrink, newer
    return output / total


@register(
    "Dao-AILab/flash-attention/pull/2694",
    "2026-07",
    "FP8 attention scales its weights by a maximum that is one tile late, so they saturate.",
    "attention weights are clipped against a stale maximum",
    Answer(
        "Outputs of attention are wrong where the maximum rises, from the start; no operand of a GEMM is at fault.",
        ("none", *SOFTWARE),
        ("layers.*.attn *",),
        needs_tensor=False,
        cannot_tell="the record has no weights of attention",
    ),
    "none",
)
class AttentionWeightsClipped(OwnCore):
    """Tiles of 8 keys. The right offset is 4."""

    def run_core(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend_by_tiles(query, key, value, 8 if self.faulty else 4)


@register(
    "Modalities/modalities/pull/462",
    "2026-09",
    "Frequencies of rotary embeddings are cast to BF16 before they are multiplied by positions.",
    "angles of positions are made in BF16",
    Answer(
        "Queries and keys are turned by wrong angles, from the start; no operand of a GEMM is at fault.",
        SOFTWARE,
        ("layers.*.attn *",),
        needs_tensor=False,
        cannot_tell="the record has no angles, and every operand looks as usual",
    ),
    "harmful",
)
class RotaryInBf16(OwnCore):
    """Sequences of period 8 that begin at a random position of a long document, so that distances matter."""

    steps, recipe = 200, ""

    def draw_batch(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(1_000_003 * (self.data.order + 1) + number)
        period = torch.randint(4, VOCABULARY, (self.batch_size, 8), generator=generator)
        whole = period.repeat(1, SEQUENCE // 8 + 1)[:, : SEQUENCE + 1]
        return whole[:, :-1], whole[:, 1:]

    def build_model(self) -> nn.Module:
        model = GPT(self.seed)
        with torch.no_grad():
            model.position.zero_()
        model.position.requires_grad_(False)
        return model

    def prepare_step(self) -> None:
        self.start = int(torch.randint(0, 3000, (), generator=torch.Generator().manual_seed(self.step)))

    def run_core(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        half = query.shape[-1] // 2
        frequencies = 1.0 / 1000 ** (torch.arange(half) / half)
        positions = torch.arange(self.start, self.start + query.shape[-2]).float()
        if self.faulty:
            frequencies = frequencies.bfloat16()
            angles = (positions.bfloat16()[:, None] * frequencies).float()
        else:
            angles = positions[:, None] * frequencies
        return attend(self.turn(query, angles), self.turn(key, angles), value)

    @staticmethod
    def turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return vectors turned by angles, pair by pair."""
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


@register(
    "NVIDIA/TransformerEngine/issues/3248",
    "2026-07",
    "FP8 attention casts V with a scale that depends on later tokens, which so leak into earlier outputs.",
    "a scale holds what a mask hides",
    Answer(
        "No harm, nothing wrong that the record shows: earlier outputs depend on later tokens by a rounding only.",
        ("none",),
        steps=None,
        cannot_tell="the record has no cast of V",
    ),
    "none",
)
class FutureInTheScale(OwnCore):
    """V has one scale for each feature of a sequence, instead of one for each token."""

    def run_core(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        amax = value.detach().abs().amax(-2 if self.faulty else -1, keepdim=True).clamp(min=1e-12)
        scale = torch.exp2(torch.ceil(torch.log2(amax / E4M3_LIMIT)))
        held = (value / scale).to(E4M3).float() * scale
        return attend(query, key, value + (held - value).detach())


@register(
    "AI-Hypercomputer/maxtext/pull/5293",
    "2026-09",
    "The router is quantized to FP8 with all other layers, which can change the chosen experts.",
    "a router is quantized",
    Answer(
        "The routers are cast to FP8, from the start; no harm here.",
        ("none", "changed_recipe"),
        ("layers.*.mlp.router *",),
        needs_tensor=False,
    ),
    "none",
)
class RouterInFp8(Training):
    """The emulation takes the routers in or leaves them out."""

    recipe = "current-e5m2"

    def build_model(self) -> nn.Module:
        return GPT(self.seed, mlp=lambda w, h, linear: MixtureOfExperts(w, h // 2, linear))

    def attach(self) -> None:
        names = ["layers.*.attn.*", "layers.*.mlp.experts.*"]
        self.emulated = (*names, "layers.*.mlp.router") if self.faulty else tuple(names)
        super().attach()

    def backpropagate(self, loss: torch.Tensor) -> None:
        super().backpropagate(loss + 0.02 * sum(layer.mlp.balance for layer in self.model.layers))
