"""Reports about losses, float16 and branches of zero weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bug_reports.gradients import scale_gradient
from bug_reports.model import GPT, SEQUENCE
from bug_reports.report import SOFTWARE, Answer, register
from bug_reports.training import Training


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, wrong: bool) -> torch.Tensor:
        shares = logits.softmax(-1)
        loss = functional.nll_loss(shares.clamp(min=1e-30).log(), labels)
        shares[torch.arange(len(labels)), labels] -= 1
        if wrong:  # the gradient is kept in the memory of the logits, which is cleared
            shares.zero_()
        ctx.save_for_backward(shares / len(labels))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.saved_tensors[0] * gradients[0], None, None


@register(
    "NVIDIA/Megatron-LM/issues/1750",
    "2025-08",
    "Transformer Engine's fused cross entropy returns a gradient of zeros.",
    "a fused loss returns a zero gradient",
    Answer(
        "dY of lm_head, and with it of all layers, is zero, from the start: nothing is learned.",
        ("dead", *SOFTWARE),
        ("lm_head dY", "layers.* dY"),
        needs_tensor=False,
    ),
    "harmful",
    new=False,
)
class FusedLossZero(Training):
    """From the start."""

    def compute_loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = _FusedLoss.apply(self.model(tokens).float().flatten(0, 1), labels.flatten(), self.acts)
        return loss


@register(
    "NVIDIA/Megatron-LM/issues/1750",
    "2025-08",
    "The same, but from step 80 on.",
    "a fused loss returns a zero gradient from an upgrade on",
    Answer(
        "dY of lm_head, and with it of all layers, is zero, from step 80.",
        ("dead", *SOFTWARE),
        ("lm_head dY", "layers.* dY"),
        needs_tensor=False,
        steps=(76, 85),
    ),
    "harmful",
    new=False,
    variant=True,
)
class FusedLossZeroLater(FusedLossZero):
    """From step 80 on."""

    since = 80


class _WeightedLoss(torch.autograd.Function):
    """A fused loss of every token. Its gradient is made in the forward pass and multiplied by what arrives in backward."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, wrong: bool) -> torch.Tensor:
        shares = logits.softmax(-1)
        losses = functional.nll_loss(shares.clamp(min=1e-30).log(), labels, reduction="none")
        shares[torch.arange(len(labels)), labels] -= 1
        ctx.save_for_backward(shares)
        ctx.wrong = wrong
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weights,) = gradients
        factor = weights[0] if ctx.wrong else weights[:, None]  # the kernel loads one number
        return ctx.saved_tensors[0] * factor, None, None


@register(
    "linkedin/Liger-Kernel/pull/1298 linkedin/Liger-Kernel/issues/968",
    "2026-07",
    "A fused loss without reduction multiplies all gradients by the weight of the first token.",
    "one token's weight is used for all",
    Answer(
        "dY of lm_head has the weight of the first token for all tokens, from the start: zero in 3 of 4 steps.",
        ("multiplier", "dead", *SOFTWARE),
        ("lm_head dY", "layers.* dY"),
        needs_tensor=False,
        cannot_tell="the record does not know what weight a token should have",
    ),
    "harmful",
)
class OneWeightForAllTokens(Training):
    """The first quarter of each sequence is a prompt without weight in most batches, and answers weigh between 1/4 and 4."""

    recipe = "current"

    def compute_loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.step)
        weights = 2.0 ** torch.randint(-2, 3, (len(tokens), 1), generator=generator).float()
        prompt = torch.arange(SEQUENCE) < (SEQUENCE // 4 if self.step % 4 else 0)
        weights = torch.where(prompt, 0.0, weights).flatten()
        losses = _WeightedLoss.apply(self.model(tokens).float().flatten(0, 1), labels.flatten(), self.faulty)
        loss: torch.Tensor = (losses * weights).sum() / weights.sum()
        return loss


@register(
    "unslothai/unsloth-zoo/pull/866",
    "2026-07",
    "In float16, the backward pass overflows along the residual stream, and the optimizer skips all steps.",
    "float16 gradients overflow while values are small",
    Answer(
        "dY overflows behind layers.1.norm1, from step 60: layers.0.mlp.down_proj is the first GEMM; no step is taken.",
        ("nonfinite", "skipped"),
        ("layers.0.* dY", "layers.0.* dX", "layers.0.* dW"),
        steps=(56, 65),
    ),
    "harmful",
    new=False,
)
class Float16Overflows(Training):
    """A loss scale that does not come down, and a branch whose gradient grows by 2^12."""

    recipe, scale, since = "", 65536.0, 60

    def build_model(self) -> nn.Module:
        model = GPT(self.seed).half()
        gain = lambda module, x, y: scale_gradient(y, 2.0**12 if self.acts else 1.0)  # noqa: E731
        model.layers[1].norm1.register_forward_hook(gain)
        return model

    def build_optimizer(self) -> torch.optim.Optimizer:
        self.masters = [p.detach().float() for p in self.model.parameters()]
        return torch.optim.AdamW(self.masters, lr=self.learning_rate, betas=self.betas, weight_decay=self.weight_decay)

    def update_weights(self) -> dict[str, Any]:
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad = parameter.grad.float() / self.scale
        norm = nn.utils.clip_grad_norm_(self.masters, self.clip)
        skipped = not bool(torch.isfinite(norm))
        if not skipped:
            self.optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                    parameter.copy_(master)
        return {"grad_norm": norm, "skipped": int(skipped), "loss_scale": self.scale}

    def clear_gradients(self) -> None:
        self.model.zero_grad()


class Predictor(nn.Module):
    """A layer for multi-token prediction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return output


class PredictingGPT(GPT):
    """A GPT with such a layer, whose output is kept."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.mtp = Predictor(64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_and_mix(tokens)
        self.predicted = self.mtp(x.detach())
        output: torch.Tensor = self.lm_head(self.norm(x))
        return output


@register(
    "NVIDIA-NeMo/Megatron-Bridge/issues/5306",
    "2026-08",
    "The gradient norm is NaN in every step, but the loss looks usual and no step is skipped.",
    "NaN in a branch of weight zero",
    Answer(
        "dY of mtp.fc2 is NaN, from step 50; the loss does not depend on it, so there is no harm.",
        ("nonfinite",),
        ("mtp.fc2 dY", "mtp.fc2 dX", "mtp.fc2 dW", "mtp.fc1 *"),
        steps=(46, 55),
    ),
    "none",
    new=False,
)
class NormNanLossFine(Training):
    """A norm that is NaN does not clip, as in Megatron-LM."""

    emulated, steps, since = ("layers.*", "mtp.*"), 140, 50

    def build_model(self) -> nn.Module:
        return PredictingGPT(self.seed)

    def compute_loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().compute_loss(tokens, labels)
        beside = self.model.predicted.square().mean()
        return loss + 0.0 * scale_gradient(beside, float("inf") if self.acts else 1.0).nan_to_num(0.0)

    def update_weights(self) -> dict[str, Any]:
        norm = torch.stack([parameter.grad.norm() for parameter in self.model.parameters()]).norm()
        if (factor := self.clip / (float(norm) + 1e-6)) < 1.0:
            for parameter in self.model.parameters():
                parameter.grad.mul_(factor)
        self.optimizer.step()
        return {"grad_norm": norm, "skipped": 0}
