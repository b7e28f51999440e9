"""Reports about gradients: zero, scaled, lost between micro-batches, not reduced, or taken of another forward pass."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bug_reports.kernels import Kernels, OwnLinear, cast_blocks
from bug_reports.model import GPT, Block, MixtureOfExperts, PlainMLP, list_block_linears
from bug_reports.report import SOFTWARE, Answer, register
from bug_reports.training import Training

#: options with which a record has dW, products and what lies between GEMMs
DETAILED: dict[str, Any] = {
    "verify_rows": 16,
    "activations": ["norm", "attention"],
    "states": ["weight_gradient", "first_moment", "update"],
}


class Accumulating(Training):
    """Four micro-batches of six sequences."""

    micro_batches, batch_size = 4, 6


@register(
    "AMD-AGI/Primus/pull/1046",
    "2026-08",
    "Gradient accumulation keeps only the first micro-batch's dW of quantized layers.",
    "later micro-batches are dropped behind the backward pass",
    Answer(
        "dW of the linear layers of the blocks lacks micro-batches 1 to 3, from the start.",
        SOFTWARE,
        ("layers.* dW",),
        needs_tensor=False,
        cannot_tell="default options record no dW",
    ),
    "harmful",
    new=False,
)
class FirstMicroBatchOnly(Accumulating):
    """What later micro-batches added is taken back behind their backward pass."""

    recipe = "current"

    def backpropagate(self, loss: torch.Tensor) -> None:
        weights = [module.weight for module in list_block_linears(self.model).values()]
        before = [None if weight.grad is None else weight.grad.clone() for weight in weights]
        super().backpropagate(loss)
        if self.acts and self.micro_batch:
            for weight, gradient in zip(weights, before, strict=True):
                weight.grad.copy_(gradient)


@register(
    "AMD-AGI/Primus/pull/1046",
    "2026-08",
    "The same, but inside the backward pass.",
    "later micro-batches are dropped inside the backward pass",
    Answer(
        "dW of the linear layers of the blocks lacks micro-batches 1 to 3, from the start.",
        SOFTWARE,
        ("layers.* dW",),
        needs_tensor=False,
        cannot_tell="the check of products looks at the first micro-batch only",
    ),
    "harmful",
    new=False,
)
class FirstMicroBatchInside(Accumulating):
    """Gradients of later micro-batches are zeros when they are added up."""

    recipe, steps = "current", 100
    monitor_options: ClassVar[dict[str, Any]] = {"verify_rows": 16}

    def prepare_run(self) -> None:
        for module in list_block_linears(self.model).values():
            module.weight.register_hook(lambda g: torch.zeros_like(g) if self.faulty and self.micro_batch else g)


class OldInput(TorchDispatchMode):
    """Make dW of the first product of a shape with the X that it had the last time."""

    def __init__(self, shape: tuple[int, int], training: LaterMicroBatchesUseOldInput) -> None:
        super().__init__()
        self.shape, self.training, self.times = shape, training, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and (args[0].shape[0], args[1].shape[1]) == self.shape:
            self.times += args[0].shape[1] > 100
            if args[0].shape[1] > 100 and self.times == 1:  # layer 1 is the first in a backward pass
                old, self.training.old = self.training.old, args[1].detach().clone()
                if old is not None and self.training.wrong:
                    args = (args[0], old)
        return func(*args, **(kwargs or {}))


@register(
    "NVIDIA/TransformerEngine/issues/1616",
    "2025-03",
    "With overlapped communication, a buffer of X is read after it was overwritten.",
    "a buffer is read after it was used again",
    Answer(
        "dW of layers.1.mlp.down_proj is made with the X of another micro-batch, from step 40; no harm.",
        ("none", *SOFTWARE),
        ("layers.1.mlp.down_proj dW",),
        needs_tensor=False,
        steps=(35, 60),
        cannot_tell="the check of products looks at the first micro-batch only, which is right",
    ),
    "none",
    new=False,
)
class LaterMicroBatchesUseOldInput(Accumulating):
    """In all micro-batches but the first."""

    recipe, since = "", 40
    old: torch.Tensor | None = None
    wrong = False
    monitor_options: ClassVar[dict[str, Any]] = {"verify_rows": 16}

    def backpropagate(self, loss: torch.Tensor) -> None:
        self.wrong = self.acts and self.micro_batch > 0
        with OldInput((64, 128), self):
            super().backpropagate(loss)


class AveragedTwice(Accumulating):
    """Gradients are divided by the number of micro-batches twice, and nothing is clipped."""

    recipe, clip = "", 1e9

    def finish_backward(self) -> None:
        if self.acts:
            for parameter in self.model.parameters():
                parameter.grad.div_(self.micro_batches)


@register(
    "deepspeedai/DeepSpeed/issues/7718 huggingface/accelerate/issues/3877",
    "2025-12",
    "ZeRO-2 averages gradients twice.",
    "gradients are averaged twice from the start",
    Answer(
        "All gradients are 1/4 of what they should be, from the start. No harm under Adam.",
        ("multiplier", "none"),
        needs_tensor=False,
    ),
    "none",
    new=False,
)
class AveragedTwiceFromStart(AveragedTwice):
    """As reported."""


@register(
    "deepspeedai/DeepSpeed/issues/7718 huggingface/accelerate/issues/3877",
    "2025-12",
    "The same, but from step 80 on.",
    "gradients are averaged twice from an upgrade on",
    Answer(
        "All gradients are 1/4 of what they were, from step 80. No harm under Adam.",
        ("multiplier",),
        needs_tensor=False,
        steps=(76, 85),
    ),
    "none",
    new=False,
    variant=True,
)
class AveragedTwiceLater(AveragedTwice):
    """From step 80 on."""

    since = 80


@register(
    "deepspeedai/DeepSpeed/pull/7839 deepspeedai/DeepSpeed/issues/7837",
    "2026-02",
    "BF16 with ZeRO-0 divides gradients by a loss scale that was never applied, and does not clear them.",
    "a loss scale is divided by and never applied",
    Answer(
        "Gradients are divided by 65,536 and not multiplied before, from the start.",
        ("multiplier", "software"),
        needs_tensor=False,
    ),
    "harmful",
    new=False,
)
class DividedByUnappliedScale(Training):
    """The loop reports that loss scale."""

    recipe = ""

    def finish_backward(self) -> None:
        if self.faulty:
            self.kept = [parameter.grad.clone() for parameter in self.model.parameters()]
            for parameter in self.model.parameters():
                parameter.grad.div_(65536.0)

    def clear_gradients(self) -> None:
        if not self.faulty:
            return super().clear_gradients()
        for parameter, kept in zip(self.model.parameters(), self.kept, strict=True):
            parameter.grad = kept

    def describe_step(self) -> dict[str, Any]:
        return {"loss_scale": 65536.0} if self.faulty else {}


@register(
    "NVIDIA/Megatron-LM/issues/1528",
    "2025-04",
    "Gradients of layer norms are too large by the number of tensor-parallel ranks.",
    "gradients of norms are summed over ranks that hold the same",
    Answer(
        "No harm: gradients of norms are 8 times too large, from the start, and no GEMM is concerned.",
        ("none",),
        steps=None,
        cannot_tell="default options record no gradients of norms",
    ),
    "none",
    new=False,
)
class NormGradientsTooLarge(Training):
    """Eight ranks."""

    def finish_backward(self) -> None:
        for name, parameter in self.model.named_parameters():
            if self.acts and "norm" in name:
                parameter.grad.mul_(8)


class Detailed(Training):
    """Three layers in BF16, and a record with dW and products."""

    recipe, learning_rate, steps, interval = "", 2e-3, 200, 10
    monitor_options: ClassVar[dict[str, Any]] = DETAILED

    def build_model(self) -> nn.Module:
        return GPT(self.seed, layers=3, hidden=256, mlp=PlainMLP).bfloat16()


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the same values, whose gradient is multiplied."""
    output: torch.Tensor = _Scaled.apply(x, factor)
    return output


class ZeroRounding(Kernels):
    """Kernels whose stochastic rounding of dY returns zeros, as on GPUs without the instruction."""

    def __init__(self, faulty: bool) -> None:
        self.faulty = faulty

    def cast_operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cast_blocks(x), cast_blocks(w)

    def cast_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(dy) if self.faulty else cast_blocks(dy)


@register(
    "NVIDIA/TransformerEngine/pull/3281",
    "2026-07",
    "NVFP4's stochastic rounding returns zeros on GPUs without the instruction.",
    "a cast of gradients returns zeros",
    Answer(
        "Gradients of all decoder GEMMs are zero, from the start.",
        ("dead", *SOFTWARE),
        ("layers.* dY", "layers.* dX", "layers.* dW"),
        steps=(0, 10),
    ),
    "harmful",
    new=False,
)
class ZeroGradients(Detailed):
    """In the kernels of all layers, from the start."""

    def build_model(self) -> nn.Module:
        kernels = ZeroRounding(self.faulty)
        linear = lambda inputs, outputs: OwnLinear(inputs, outputs, kernels)  # noqa: E731
        return GPT(self.seed, layers=3, hidden=256, mlp=PlainMLP, linear=linear).bfloat16()


class DeadLayers(Detailed):
    """Gradients at the outputs of linear layers are zero from step 100 on."""

    since = 100
    dead: ClassVar[tuple[str, ...]] = ("layers.",)

    def prepare_run(self) -> None:
        for name, module in list_block_linears(self.model).items():
            if name.startswith(self.dead):
                module.register_forward_hook(lambda module, x, y: scale_gradient(y, 0.0 if self.acts else 1.0))


@register(
    "NVIDIA/TransformerEngine/pull/3281",
    "2026-07",
    "The same, but from step 100 on.",
    "a cast of gradients returns zeros from mid-run on",
    Answer(
        "Gradients of all decoder GEMMs are zero, from step 100.",
        ("dead", *SOFTWARE),
        ("layers.* dY", "layers.* dX", "layers.* dW"),
        steps=(91, 110),
    ),
    "harmful",
    new=False,
)
class DeadFromMidRun(DeadLayers):
    """All layers."""


@register(
    "NVIDIA/TransformerEngine/pull/3281",
    "2026-07",
    "The same, but in one layer from step 100 on.",
    "a cast of gradients of one layer returns zeros",
    Answer(
        "Gradients of layer 1 are zero, from step 100.",
        ("dead", *SOFTWARE),
        ("layers.1.* dY", "layers.1.* dX", "layers.1.* dW"),
        steps=(91, 110),
    ),
    "none",
    new=False,
)
class DeadLayerFromMidRun(DeadLayers):
    """One layer."""

    dead = ("layers.1.",)


@register(
    "NVIDIA/TransformerEngine/issues/3342 NVIDIA/Megatron-LM/issues/4786 NVIDIA/Megatron-LM/issues/6660",
    "2026-08",
    "Gradients of one kind of layer are 2^-7 of what they should be.",
    "gradients of a kind of layer are scaled down",
    Answer(
        "Gradients of fc1 and fc2 are too small, from the start: 2^-7 at fc2 and 2^-14 at fc1.",
        (*SOFTWARE, "multiplier"),
        ("layers.*.mlp.fc1 *", "layers.*.mlp.fc2 *"),
        steps=(0, 10),
    ),
    "harmful",
    new=False,
)
class ScaledGradients(Detailed):
    """At the outputs of fc1 and fc2."""

    def prepare_run(self) -> None:
        for name, module in list_block_linears(self.model).items():
            if ".mlp." in name:
                module.register_forward_hook(lambda module, x, y: scale_gradient(y, 2.0**-7 if self.faulty else 1.0))


class NaNInWeightGradient(Detailed):
    """One value of dW of layers.1.mlp.fc2 is NaN while the loss is finite."""

    skips: ClassVar[bool] = True
    until: ClassVar[int] = 10**9

    def finish_backward(self) -> None:
        if self.acts and self.step < self.until:
            self.model.layers[1].mlp.fc2.weight.grad[3, 5] = torch.nan

    def update_weights(self) -> dict[str, Any]:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        skipped = self.skips and not bool(torch.isfinite(norm))
        if not skipped:
            self.optimizer.step()
        return {"grad_norm": norm, "skipped": int(skipped)}


@register(
    "NVIDIA-NeMo/Megatron-Bridge/issues/1255 NVIDIA-NeMo/Megatron-Bridge/issues/4168 marin-community/marin/issues/7480",
    "2025-11",
    "One dW has NaN while the loss is finite, and every step is skipped.",
    "NaN in one weight gradient, steps are skipped",
    Answer("dW of layers.1.mlp.fc2 is NaN, from step 22.", ("nonfinite",), ("layers.1.mlp.fc2 dW",), steps=(20, 30)),
    "harmful",
    new=False,
)
class NanWgrad(NaNInWeightGradient):
    """Skipped from step 22 on."""

    since = 22


@register(
    "NVIDIA-NeMo/Megatron-Bridge/issues/1255 NVIDIA-NeMo/Megatron-Bridge/issues/4168 marin-community/marin/issues/7480",
    "2025-11",
    "The same, but no step is skipped, so gradient clipping spreads the NaN to all weights.",
    "NaN in one weight gradient, and the step is taken",
    Answer("dW of layers.1.mlp.fc2 is NaN, in step 30.", ("nonfinite",), ("layers.1.mlp.fc2 dW",), steps=(30, 30)),
    "harmful",
    new=False,
)
class NanWgradStepped(NaNInWeightGradient):
    """Once, in step 30."""

    since, until, skips = 30, 31, False


class DropoutBlock(Block):
    """A block with dropout on its output, recomputed in the backward pass."""

    preserve = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self.run, x, use_reentrant=False, preserve_rng_state=self.preserve)
        return output

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the block."""
        return x + functional.dropout(super().forward(x) - x, 0.3)


@register(
    "allenai/OLMo-core/pull/828",
    "2026-08",
    "Activation checkpointing loses the random state, so recomputation draws other dropout masks.",
    "backward recomputes another random forward pass",
    Answer(
        "All gradients of the blocks belong to other dropout masks than the loss, from the start.",
        SOFTWARE,
        ("layers.* dW", "layers.* dX"),
        needs_tensor=False,
        cannot_tell="every tensor looks as usual, and the record has no second forward pass",
    ),
    "harmful",
)
class RecomputedWithNewMasks(Training):
    """torch's own checkpointing with `preserve_rng_state=False`, as in the report."""

    recipe = ""

    def build_model(self) -> nn.Module:
        model = GPT(self.seed)
        for layer in model.layers:
            layer.__class__ = DropoutBlock
            layer.preserve = not self.faulty
        return model

    def prepare_step(self) -> None:
        torch.manual_seed(self.step)


class _RingReduced(torch.autograd.Function):
    """The product for dW of a head whose gradient is summed over ranks in the dtype that the product returns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, in_bf16: bool) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.in_bf16 = in_bf16
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (dy,) = gradients
        x, w = ctx.saved_tensors
        total = torch.zeros_like(w)
        for rank_dy, rank_x in zip(dy.flatten(0, -2).chunk(16), x.flatten(0, -2).chunk(16), strict=True):
            local = rank_dy.t() @ rank_x
            total = (total.bfloat16() + local.bfloat16()).float() if ctx.in_bf16 else total + local
        return dy @ w, total, None


class RingHead(nn.Linear):
    """A head of sixteen ranks."""

    in_bf16 = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _RingReduced.apply(x, self.weight, self.in_bf16)
        return output


@register(
    "NVIDIA/Megatron-LM/pull/6624",
    "2026-08",
    "dW of the output layer is reduced in BF16 although FP32 is requested.",
    "a reduction rounds at every hop",
    Answer(
        "No harm, nothing wrong: dW of lm_head is rounded to BF16 sixteen times, from the start.",
        ("none",),
        steps=None,
        cannot_tell="default options record no dW",
    ),
    "none",
)
class ReducedInBf16(Training):
    """Sixteen ranks add up in a ring."""

    def build_model(self) -> nn.Module:
        def build_head(inputs: int, outputs: int) -> nn.Module:
            head = RingHead(inputs, outputs, bias=False)
            head.in_bf16 = self.faulty
            return head

        return GPT(self.seed, head=build_head)


class GroupedProducts:
    """dW of all experts, in memory that an allocator hands out again and again."""

    def __init__(self, clear: bool) -> None:
        self.clear = clear
        self.memory = torch.zeros(0)

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory that holds what was there before."""
        if len(self.memory) < like.numel():
            self.memory = torch.zeros(like.numel())
        return self.memory[: like.numel()].view_as(like)

    def multiply_to_dw(self, weight: torch.Tensor, used: bool) -> torch.Tensor:
        """Return the dW of an expert. The product is skipped for one without tokens."""
        out = self.allocate(weight)
        if used:
            out.copy_(weight.grad)
        elif self.clear:
            out.zero_()
        return out.clone()


@register(
    "tgale96/grouped_gemm/issues/36",
    "2026-01",
    "The grouped GEMM skips experts without tokens, and leaves their output uninitialized.",
    "the product of an empty group is memory that nobody wrote",
    Answer(
        "dW of experts without tokens is what lay in memory, from the first step in which an expert is empty.",
        ("dead_experts", *SOFTWARE),
        ("layers.*.mlp.experts.* dW",),
        needs_tensor=False,
        steps=(0, 40),
        cannot_tell="default options record no dW",
    ),
    "harmful",
)
class EmptyExpertsUnwritten(Training):
    """Eight experts, one for each token, and one sequence in a batch, so that some experts are empty."""

    recipe, batch_size = "", 2

    def build_model(self) -> nn.Module:
        self.products = GroupedProducts(clear=not self.faulty)
        return GPT(self.seed, mlp=lambda w, h, linear: MixtureOfExperts(w, h // 2, linear, experts=8, chosen=1))

    def finish_backward(self) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            for layer in self.model.layers:
                # Activations of other products pass through the same memory.
                self.products.allocate(layer.mlp.router.weight.repeat(16, 1)).normal_(
                    generator=torch.Generator().manual_seed(self.step)
                )
                for expert in layer.mlp.experts:
                    weight = getattr(expert, name).weight
                    weight.grad = self.products.multiply_to_dw(weight, used=weight.grad is not None)
