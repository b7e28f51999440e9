"""Reports about scales: fixed ones, stale ones, and scales that are read with codes of another moment or another rank."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from bug_reports.casts import OwnKernels
from bug_reports.kernels import (
    E4M3,
    E4M3_LIMIT,
    E5M2,
    Kernels,
    OwnLinear,
    cast,
    cast_to_codes,
    find_amax,
    find_block_scales,
    scale_back,
)
from bug_reports.model import GPT
from bug_reports.report import SOFTWARE, Answer, register
from bug_reports.training import Training


class FixedScales(Kernels):
    """Kernels of an FP8 head whose scales are numbers in the source."""

    def __init__(self, x: float, w: float, dy: float) -> None:
        self.x, self.w, self.dy = x, w, dy

    def cast_operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        clipped = [(t / s).clamp(-E4M3_LIMIT, E4M3_LIMIT).to(E4M3).float() * s for t, s in ((x, self.x), (w, self.w))]
        return clipped[0], clipped[1]

    def cast_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        return (dy / self.dy).to(E5M2).float() * self.dy


@register(
    "KellerJordan/modded-nanogpt/pull/175 KellerJordan/modded-nanogpt/pull/172",
    "2025-12",
    "The FP8 head has fixed scales, which another change made unfit.",
    "scales are constants: weights outgrow theirs",
    Answer(
        "No harm: weights of the head outgrow their fixed scale and are clipped, and the loss is the same.",
        ("none", "clipping"),
        ("lm_head W",),
        needs_tensor=False,
        steps=(0, 200),
        cannot_tell="the record does not know the casts of a layer's own kernels",
    ),
    "none",
    new=False,
)
class FixedHeadScales(Training):
    """The scale of W is too small for weights that grow."""

    recipe, steps, weight_decay = "", 200, 0.0
    right: ClassVar[tuple[float, float, float]] = (10 / 448, 4 / 448, 1 / 57344)
    wrong: ClassVar[tuple[float, float, float]] = (10 / 448, 0.3 / 448, 1 / 57344)

    def build_model(self) -> nn.Module:
        kernels = FixedScales(*(self.wrong if self.faulty else self.right))
        return GPT(self.seed, head=lambda inputs, outputs: OwnLinear(inputs, outputs, kernels))


@register(
    "KellerJordan/modded-nanogpt/pull/175 KellerJordan/modded-nanogpt/pull/172",
    "2025-12",
    "The same, but the gradient's scale is far too coarse.",
    "scales are constants: gradients become zero",
    Answer(
        "dY of the head becomes zero in its cast, from the start.",
        ("underflow", *SOFTWARE),
        ("lm_head dY", "lm_head dX", "lm_head dW"),
        cannot_tell="the record does not know the casts of a layer's own kernels",
    ),
    "harmful",
    new=False,
    variant=True,
)
class CoarseHeadScales(FixedHeadScales):
    """All but the largest values of dY are lost."""

    wrong = (10 / 448, 4 / 448, 64.0)


@register(
    "NVIDIA/TransformerEngine/pull/3284 AMD-AGI/Primus/pull/548",
    "2026-07",
    "Under recompute, delayed scales are never updated and stay at 1.",
    "scales are never updated",
    Answer(
        "Scales stay at 1, from the start: dY of all blocks is far below what E5M2 holds.",
        ("stale_scale", "underflow"),
        ("layers.* dY", "layers.* X", "layers.* W"),
    ),
    "none",
    new=False,
)
class ScalesStayOne(Training):
    """As reported. Values are near 1, so that scales of 1 hardly hurt."""

    def update_scales(self) -> None:
        if not self.acts:
            return super().update_scales()
        for state in self.emulation.states.values():
            state.amax.zero_()


@register(
    "NVIDIA/TransformerEngine/pull/3284 AMD-AGI/Primus/pull/548",
    "2026-07",
    "The same, but with the small gradients of a loss averaged over many tokens.",
    "scales are never updated and gradients are small",
    Answer(
        "Scales stay at 1, from the start: dY of all blocks becomes zero.",
        ("stale_scale", "underflow"),
        ("layers.* dY",),
    ),
    "harmful",
    new=False,
    variant=True,
)
class SmallGradientsAtScaleOne(ScalesStayOne):
    """dY is 2^-9 of what it was."""

    scale = 2.0**-9

    def finish_backward(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad.mul_(1 / self.scale)


class CachedLinear(nn.Linear):
    """A linear layer that keeps FP8 codes of its weight for a number of steps."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.step, self.every, self.cached_at = 0, 1, -1
        self.codes: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.codes is None or (self.step % self.every == 0 and self.cached_at != self.step):
            self.codes, self.cached_at = cast(self.weight.detach()), self.step
        return functional.linear(x, self.weight + (self.codes - self.weight).detach())


@register(
    "NVIDIA/TransformerEngine/issues/2852",
    "2026-04",
    "Caching FP8 weights over micro-batches changes the training curve.",
    "cached codes of weights go stale",
    Answer(
        "Layers of the blocks multiply by W of up to 7 steps ago, from step 60.",
        SOFTWARE,
        ("layers.* Y", "layers.* W"),
        needs_tensor=False,
        steps=(55, 75),
        cannot_tell="default options record W itself and not the copy that is multiplied",
    ),
    "harmful",
    new=False,
)
class CachedWeightsGoStale(Training):
    """The cache is refreshed every 8th step only."""

    recipe, since = "", 60

    def build_model(self) -> nn.Module:
        return GPT(self.seed, linear=CachedLinear)

    def prepare_step(self) -> None:
        for module in self.model.modules():
            if isinstance(module, CachedLinear):
                module.step, module.every = self.step, 8 if self.acts else 1


class DelayedWeight(Kernels):
    """Kernels of one layer that cache FP8 codes of W in the first micro-batch, and delayed scales."""

    def __init__(self, faulty: bool) -> None:
        self.faulty = faulty
        self.scale, self.inverse = torch.ones(()), torch.ones(())
        self.history: list[float] = []
        self.codes: torch.Tensor | None = None
        self.first = True

    def cast_operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.first:
            self.codes = (w * self.scale).clamp(-E4M3_LIMIT, E4M3_LIMIT).to(E4M3).float()
            self.inverse = 1 / self.scale
            self.history = [*self.history, float(find_amax(w))][-16:]
        values = self.codes * self.inverse
        # Leaving the context moves scales on. The inverse belongs to codes that exist, so it must wait for the next cast.
        self.scale = torch.tensor(E4M3_LIMIT / max(self.history))
        if self.faulty:
            self.inverse = 1 / self.scale
        return cast(x), values


@register(
    "NVIDIA/TransformerEngine/issues/1047",
    "2024-07",
    "Later micro-batches read cached FP8 weights with the inverse of a newer scale.",
    "the inverse of a newer scale is read with older codes",
    Answer(
        "Y of all blocks is wrong in the second and later micro-batches of step 0, and hardly afterwards. No harm.",
        ("none", *SOFTWARE),
        ("layers.* Y", "layers.* W"),
        needs_tensor=False,
        steps=(0, 5),
        cannot_tell="it lasts for one step, and default options record no products",
    ),
    "none",
)
class InverseScaleMovesOn(OwnKernels):
    """Four micro-batches; each layer has a scale of its own, which begins at 1."""

    micro_batches, batch_size = 4, 6

    def build_model(self) -> nn.Module:
        self.kernels: list[DelayedWeight] = []

        def build_linear(inputs: int, outputs: int) -> nn.Module:
            self.kernels.append(DelayedWeight(self.faulty))
            return OwnLinear(inputs, outputs, self.kernels[-1])

        return GPT(self.seed, linear=build_linear)

    def compute_loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for kernels in self.kernels:
            kernels.first = self.micro_batch == 0
        return super().compute_loss(tokens, labels)


class TurnedScales(Kernels):
    """Block-scaled kernels that pass the scales of X to the product for dW in the orientation of the forward pass."""

    def __init__(self, faulty: bool) -> None:
        self.faulty = faulty

    def multiply_to_dw(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        scales = find_block_scales(x)
        codes = cast_to_codes(x, scales)
        if self.faulty:  # the library reads the same memory column by column
            scales = scales.reshape(scales.shape[1], scales.shape[0]).t()
        return dy.t() @ scale_back(codes, scales)


@register(
    "pytorch/ao/pull/4229",
    "2026-04",
    "In blockwise FP8, the scales of X have the wrong orientation in wgrad.",
    "block scales are paired with other blocks",
    Answer(
        "dW of all layers of the blocks is made of X with the scales of other blocks, from the start; hardly any harm.",
        ("none", *SOFTWARE),
        ("layers.* dW",),
        needs_tensor=False,
        cannot_tell="the run may follow the good one, and the check knows the products of a layer's own kernels roughly",
    ),
    "none",
)
class ScalesTurned(OwnKernels):
    """dW of every block-scaled layer. `verify_rows` is on because the answer is a product."""

    monitor_options: ClassVar[dict[str, Any]] = {"verify_rows": 16}

    def build_kernels(self) -> Kernels:
        return TurnedScales(self.faulty)


class GatheredInput(Kernels):
    """Kernels of one of two tensor-parallel ranks: X is gathered in FP8 from the sequence-parallel halves of both."""

    def __init__(self, reduced: bool) -> None:
        self.reduced = reduced
        self.histories: tuple[list[float], list[float]] = ([], [])

    def cast_operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sequences = x.view(-1, 32, x.shape[-1])
        halves = sequences[:, :16], sequences[:, 16:]
        amaxes = [max(history) if history else float(find_amax(x)) for history in self.histories]
        for history, half in zip(self.histories, halves, strict=True):
            history.append(float(find_amax(half)))
            del history[:-16]
        if self.reduced:
            amaxes = [max(amaxes)] * 2
        codes = [
            (half * (E4M3_LIMIT / amax)).clamp(-E4M3_LIMIT, E4M3_LIMIT).to(E4M3).float()
            for half, amax in zip(halves, amaxes, strict=True)
        ]
        # The gathered codes have one inverse scale, which is that of the rank itself.
        return torch.cat(codes, 1).view_as(x) * (amaxes[0] / E4M3_LIMIT), cast(w)


@register(
    "NVIDIA/Megatron-LM/pull/442",
    "2023-08",
    "amax is not reduced over tensor-parallel ranks, so their scales drift apart.",
    "codes of another rank are read with this rank's scale",
    Answer(
        "X of qkv, gate_proj and up_proj is wrong for the other rank's half of the sequence, from the start; no harm here.",
        ("none", *SOFTWARE),
        ("layers.* X", "layers.* Y"),
        needs_tensor=False,
        cannot_tell="both runs record X before the cast, and the loss need not differ by much",
    ),
    "none",
)
class RanksScaleApart(OwnKernels):
    """The layers whose X is gathered have a history for each half."""

    def build_model(self) -> nn.Module:
        model = GPT(self.seed)
        for layer in model.layers:
            for parent, name in ((layer.attn, "qkv"), (layer.mlp, "gate_proj"), (layer.mlp, "up_proj")):
                old = getattr(parent, name)
                new = OwnLinear(old.in_features, old.out_features, GatheredInput(reduced=not self.faulty))
                new.weight = old.weight
                setattr(parent, name, new)
        return model


class SharedBuffer:
    """Memory that holds gradients in backward and parameters on their way from the optimizer to the model."""

    def __init__(self, masters: list[torch.Tensor]) -> None:
        self.masters = masters
        self.memory = [torch.zeros_like(master) for master in masters]

    def stage_parameters(self) -> None:
        """Copy the optimizer's parameters into the buffer."""
        for memory, master in zip(self.memory, self.masters, strict=True):
            memory.copy_(master)

    def gather_parameters(self, parameters: list[torch.Tensor]) -> None:
        """Copy the buffer into the model and clear it for gradients."""
        with torch.no_grad():
            for memory, parameter in zip(self.memory, parameters, strict=True):
                parameter.copy_(memory)
                memory.zero_()


class BufferedTraining(Training):
    """A run in BF16 whose parameters pass through the buffer of the gradients, as under MXFP8 with gathered parameters."""

    recipe = ""

    def build_optimizer(self) -> torch.optim.Optimizer:
        self.parameters = [p for name, p in self.model.named_parameters() if name.startswith("layers.") and p.dim() == 2]
        masters = [p.detach().clone().requires_grad_() for p in self.parameters]
        self.buffer = SharedBuffer(masters)
        chosen = {id(p) for p in self.parameters}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        return torch.optim.AdamW(
            [*masters, *others], lr=self.learning_rate, betas=self.betas, weight_decay=self.weight_decay
        )

    def finish_backward(self) -> None:
        for parameter, memory, master in zip(self.parameters, self.buffer.memory, self.buffer.masters, strict=True):
            memory.add_(parameter.grad)
            parameter.grad = memory.clone()
            master.grad = parameter.grad

    def clear_gradients(self) -> None:
        self.model.zero_grad()
        super().clear_gradients()


@register(
    "NVIDIA-NeMo/Megatron-Bridge/pull/3076",
    "2026-04",
    "After the warm-up of CUDA graphs, parameters are once gathered from a cleared buffer.",
    "weights are zero for one iteration",
    Answer(
        "W of all blocks is zero in step 20, for one step; no harm afterwards.",
        ("dead", "software"),
        ("layers.* W",),
        steps=(20, 20),
    ),
    "none",
)
class ZeroWeightsOnce(BufferedTraining):
    """Steps up to 19 are the warm-up, in which hooks copy; from step 20 on the graph gathers from the buffer."""

    since = 20

    def prepare_step(self) -> None:
        hooks = not self.faulty or self.step != self.since  # hooks are off in the first iteration of the main loop
        for memory in self.buffer.memory:
            memory.zero_()
        if hooks:
            self.buffer.stage_parameters()
        self.buffer.gather_parameters(self.parameters)


@register(
    "NVIDIA/Megatron-LM/pull/5487 NVIDIA/Megatron-LM/pull/5464",
    "2026-06",
    "After an evaluation, parameters that were staged in the gradient buffer are not cleared from it.",
    "gradients are added to parameters that were left in their buffer",
    Answer(
        "dW of all blocks is W itself in step 40, and again after each evaluation.",
        (*SOFTWARE, "multiplier"),
        ("layers.* dW",),
        needs_tensor=False,
        steps=(40, 45),
        cannot_tell="default options record no dW, and the loss need not differ by much",
    ),
    "none",
)
class GradientsOnTopOfParameters(BufferedTraining):
    """An evaluation every 40 steps."""

    def prepare_step(self) -> None:
        evaluated = self.step > 0 and self.step % 40 == 0
        for memory in self.buffer.memory:
            memory.zero_()
        self.buffer.stage_parameters()
        if evaluated:
            self.buffer.gather_parameters(self.parameters)  # for the evaluation, whose end leaves a flag behind
            self.buffer.stage_parameters()
        already_gathered = evaluated and self.faulty
        if not already_gathered:
            self.buffer.gather_parameters(self.parameters)
