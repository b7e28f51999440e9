"""Reports about what is kept over a restart: scales, masters, moments and weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from bug_reports.casts import pretrain
from bug_reports.kernels import cast
from bug_reports.model import GPT
from bug_reports.optimizers import MasterWeights
from bug_reports.report import Answer, register
from bug_reports.training import Training


class Resumed(Training):
    """A run that stops after step 79 and goes on from its checkpoint, into the same folder."""

    stop: ClassVar[int] = 80
    since = 80

    def run(self, folder: Path, steps: int | None = None) -> list[float]:
        last = self.steps if steps is None else steps
        stop = min(self.stop, last // 2)
        shutil.rmtree(folder, ignore_errors=True)
        self.attach()
        self.train(folder, 0, stop)
        saved = self.save_checkpoint()
        self.detach()
        self.attach()
        self.load_checkpoint(saved)
        self.train(folder, stop, last)
        self.detach()
        return self.losses

    def save_checkpoint(self) -> dict[str, Any]:
        """Return model, optimizer and FP8 state."""
        fp8 = self.emulation.state_dict() if self.emulation else None
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "fp8": fp8}

    def load_checkpoint(self, saved: dict[str, Any]) -> None:
        """Restore all of it."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.emulation:
            self.emulation.load_state_dict(saved["fp8"])


@register(
    "huggingface/finetrainers/issues/246 NVIDIA/TransformerEngine/issues/982 NVIDIA/TransformerEngine/issues/759",
    "2025-01",
    "After a resume without the FP8 state, scales restart at 1.",
    "the FP8 state is not in the checkpoint",
    Answer(
        "Scales of all blocks begin at 1 again at the resume, step 80: the FP8 state was not restored. No harm.",
        ("resumed_without_scales", "corrupted_scale", "underflow", "stale_scale"),
        ("layers.* dY", "layers.* X", "layers.* W"),
        steps=(76, 85),
    ),
    "none",
    new=False,
)
class ResumedWithoutFp8State(Resumed):
    """Small gradients, which are zero at a scale of 1 in the first step."""

    scale = 2.0**-9

    def finish_backward(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad.mul_(1 / self.scale)

    def load_checkpoint(self, saved: dict[str, Any]) -> None:
        if not self.faulty:
            return super().load_checkpoint(saved)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


@register(
    "huggingface/finetrainers/issues/246 NVIDIA/TransformerEngine/issues/982 NVIDIA/TransformerEngine/issues/759",
    "2025-01",
    "The same, but scales also stay at 1.",
    "the FP8 state is lost and never made again",
    Answer(
        "Scales of all blocks stay at 1 from the resume on, step 80: dY of all blocks becomes zero.",
        ("resumed_without_scales", "corrupted_scale", "underflow", "stale_scale"),
        ("layers.* dY",),
        steps=(76, 85),
    ),
    "harmful",
    new=False,
    variant=True,
)
class ResumedWithoutFp8StateForGood(ResumedWithoutFp8State):
    """A history that never fills again."""

    def update_scales(self) -> None:
        if not self.acts:
            super().update_scales()


@register(
    "NVIDIA/Megatron-LM/pull/4987 NVIDIA/Megatron-LM/pull/5470",
    "2026-05",
    "float32 masters start from weights that were rounded to FP8.",
    "masters begin at rounded weights",
    Answer("No harm, nothing wrong: weights begin at E4M3 values.", ("none",), steps=None),
    "none",
    new=False,
)
class MastersFromFp8(Training):
    """Weights of the blocks go through E4M3 once, before the first step."""

    recipe = "current"

    def build_model(self) -> nn.Module:
        model = GPT(self.seed)
        if self.faulty:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.startswith("layers.") and parameter.dim() == 2:
                        parameter.copy_(cast(parameter))
        return model


@register(
    "NovaSky-AI/SkyRL/pull/2149 databricks/megablocks/issues/80",
    "2026-09",
    "Weights are loaded without the optimizer, whose old masters overwrite them in the next step.",
    "stale masters overwrite weights that were loaded",
    Answer(
        "Loaded weights are lost in step 0: the loss jumps at step 1, when masters of the random start are copied back.",
        ("software", "step_size"),
        ("* W", "* step of W"),
        needs_tensor=False,
        steps=(0, 5),
    ),
    "harmful",
)
class StaleMasters(Training):
    """Fine-tuning in BF16 with float32 masters, from weights that are loaded after the optimizer is made."""

    recipe, learning_rate, steps = "", 5e-4, 120
    interval = 5

    def build_model(self) -> nn.Module:
        return GPT(self.seed).bfloat16()

    def build_optimizer(self) -> torch.optim.Optimizer:
        options = {"lr": self.learning_rate, "betas": self.betas, "weight_decay": self.weight_decay}
        return MasterWeights(list(self.model.parameters()), **options)

    def prepare_run(self) -> None:
        self.model.load_state_dict(pretrain(self.seed).state_dict())
        if not self.faulty:
            self.optimizer.reload_masters()


@register(
    "deepspeedai/DeepSpeed/pull/7786",
    "2026-01",
    "BF16 at ZeRO stage 0 neither saves nor loads the optimizer's state.",
    "moments and step counter are lost at a resume",
    Answer(
        "Moments of all parameters begin at zero again at the resume, step 80; the loss recovers.",
        ("none", "software", "step_size"),
        ("* m", "* v", "* step of W"),
        needs_tensor=False,
        steps=(76, 85),
        cannot_tell="default options record no moments",
    ),
    "none",
)
class MomentsLost(Resumed):
    """A resume with the model's weights alone."""

    recipe, betas = "", (0.9, 0.99)

    def load_checkpoint(self, saved: dict[str, Any]) -> None:
        stage, bf16 = 0, True
        has_state = stage > 0 or not bf16 if self.faulty else True
        self.model.load_state_dict(saved["model"])
        if has_state:
            self.optimizer.load_state_dict(saved["optimizer"])


@register(
    "pytorch/torchtitan/pull/4615",
    "2026-09",
    "A resume promotes BF16 moments to float32, so later steps are no longer rounded.",
    "moments change their type at a resume",
    Answer(
        "No harm, nothing wrong: from step 80 moments are held better than before.",
        ("none",),
        steps=None,
        cannot_tell="default options record no moments",
    ),
    "none",
)
class MomentsPromoted(Resumed):
    """AdamW in float32 whose moments are made BF16 once, when they are created."""

    recipe = ""

    def update_weights(self) -> dict[str, Any]:
        reported = super().update_weights()
        for state in self.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                if self.round_moments:
                    state[key].copy_(state[key].bfloat16())
        return reported

    round_moments = True

    def load_checkpoint(self, saved: dict[str, Any]) -> None:
        super().load_checkpoint(saved)
        # The hook that makes moments BF16 skips states that exist, and the loader casts them to the type of the weights.
        self.round_moments = not self.faulty
