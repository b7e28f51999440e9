"""Reports about optimizers: their states, their steps, and weights that are too coarse to move."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bug_reports.model import GPT
from bug_reports.report import SOFTWARE, Answer, register
from bug_reports.training import Training


@register(
    "databricks/flashoptim/issues/2",
    "2026-03",
    "A fused optimizer rounds its float32 moments to BF16 in every step.",
    "moments are rounded although they are stored in float32",
    Answer("No harm, nothing wrong: moments have 8 bits, from the start.", ("none",), steps=None),
    "none",
    new=False,
)
class MomentsRounded(Training):
    """Both moments go through BF16 after each step."""

    recipe, betas, steps = "", (0.9, 0.999), 200

    def update_weights(self) -> dict[str, Any]:
        reported = super().update_weights()
        if self.faulty:
            for state in self.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key].copy_(state[key].bfloat16())
        return reported


class MuonWithAdam(torch.optim.Optimizer):
    """Muon for matrices of the blocks and Adam for the rest, where another class is expected to orthogonalize."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], lr: float, orthogonalize: bool) -> None:
        super().__init__([{"params": matrices, "muon": True}, {"params": others, "muon": False}], {"lr": lr})
        self.adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95))
        self.orthogonalize = orthogonalize

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Apply what the gradients of matrices are expected to hold, and a step of Adam to the rest."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            if self.orthogonalize:  # ZeRO stages 1 to 3 call this while they fill a partition; stage 0 has none
                momentum.lerp_(parameter.grad, 0.05)
                parameter.grad.copy_(orthogonalize(parameter.grad.lerp(momentum, 0.95)))
            parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
        for group in self.adam.param_groups:
            group["lr"] = self.param_groups[1]["lr"]
        self.adam.step()


def orthogonalize(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Return the nearest orthogonal matrix by Newton-Schulz iterations, times what makes its values as large as Adam's."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    x = wide / (wide.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x if matrix.shape[0] <= matrix.shape[1] else x.t()
    return x * 0.2 * max(matrix.shape) ** 0.5


@register(
    "deepspeedai/DeepSpeed/issues/8441 deepspeedai/DeepSpeed/pull/8442",
    "2026-09",
    "Muon skips its Newton-Schulz iteration at ZeRO stage 0, and so silently becomes SGD.",
    "an optimizer leaves its main part to a class that is not there",
    Answer(
        "Steps of all matrices of the blocks are those of SGD and far too small, from the start.",
        ("software", "step_size"),
        ("layers.* W", "layers.* step of W"),
        needs_tensor=False,
        cannot_tell="default options record no steps of weights",
    ),
    "harmful",
)
class MuonWithoutIteration(Training):
    """Muon for the blocks, Adam for the rest."""

    recipe = ""

    def build_optimizer(self) -> torch.optim.Optimizer:
        named = dict(self.model.named_parameters())
        matrices = [p for name, p in named.items() if name.startswith("layers.") and p.dim() == 2]
        others = [p for name, p in named.items() if not (name.startswith("layers.") and p.dim() == 2)]
        return MuonWithAdam(matrices, others, self.learning_rate, orthogonalize=not self.faulty)


class MasterWeights(torch.optim.Optimizer):
    """AdamW whose float32 weights are copied into a BF16 model after each step."""

    def __init__(self, parameters: list[nn.Parameter], **options: Any) -> None:
        self.models = parameters
        self.masters = [p.detach().float().requires_grad_() for p in parameters]
        self.adam = torch.optim.AdamW(self.masters, **options)
        super().__init__(parameters, {"lr": options["lr"]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take Adam's step in float32."""
        for group in self.adam.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        for model, master in zip(self.models, self.masters, strict=True):
            master.grad = model.grad.float()
        self.adam.step()
        for model, master in zip(self.models, self.masters, strict=True):
            model.copy_(master)

    @torch.no_grad()
    def reload_masters(self) -> None:
        """Take the model's weights over."""
        for model, master in zip(self.models, self.masters, strict=True):
            master.copy_(model)


@register(
    "vllm-project/speculators/pull/765 NVIDIA/Model-Optimizer/pull/2322",
    "2026-07",
    "In pure BF16, weights of norms stay at 1, because rounding swallows each step.",
    "a weight is too coarse for its steps",
    Answer(
        "Weights of norms never move, from the start, and those of GEMMs in steps that are too coarse.",
        (*SOFTWARE, "step_size"),
        ("* W", "* step of W"),
        needs_tensor=False,
        cannot_tell="the record has no weights of norms",
    ),
    "harmful",
)
class NormsStandStill(Training):
    """BF16 parameters without masters, and a learning rate below 2^-10."""

    recipe, learning_rate = "", 9e-4
    weight_decay = 0.0

    def build_model(self) -> nn.Module:
        return GPT(self.seed).bfloat16()

    def build_optimizer(self) -> torch.optim.Optimizer:
        if self.faulty:
            return super().build_optimizer()
        options = {"lr": self.learning_rate, "betas": self.betas, "weight_decay": self.weight_decay}
        return MasterWeights(list(self.model.parameters()), **options)


def create_dynamic_map(signed: bool, wrong: bool, exponent_bits: int = 7, total_bits: int = 8) -> torch.Tensor:
    """Return the values of an 8-bit code whose exponent has as many bits as it needs."""
    data: list[float] = []
    non_sign_bits = total_bits - (0 if wrong and not signed else 1)
    additional = 2 ** (non_sign_bits - exponent_bits) - 1
    if not signed:
        additional = 2 * additional

    def add_means(items: int, exponent: int) -> None:
        bounds = torch.linspace(0.1, 1, items + 1)
        means = 10.0 ** (exponent - exponent_bits + 1) * (bounds[:-1] + bounds[1:]) / 2.0
        data.extend(means.tolist())
        if signed:
            data.extend((-means).tolist())

    for i in range(exponent_bits):
        add_means(2 ** (i + non_sign_bits - exponent_bits + (not signed)), i)
        if wrong and additional > 0:  # indented too far
            add_means(additional, i)
    if not wrong and additional > 0:
        add_means(additional, exponent_bits - 1)
    data += [0.0, 1.0]
    return torch.tensor(sorted(data))[:256]  # the kernels read so many, however long the table is


class Adam8bit(torch.optim.Optimizer):
    """Adam whose moments are kept as 8-bit codes of blocks of 256 values."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float], wrong: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.betas, self.time = betas, 0
        self.codes = {"m": create_dynamic_map(True, wrong), "v": create_dynamic_map(False, wrong)}

    def cast_state(self, state: torch.Tensor, kind: str) -> torch.Tensor:
        """Return what the codes hold of a moment."""
        flat = nn.functional.pad(state.flatten(), (0, -state.numel() % 256)).view(-1, 256)
        amax = flat.abs().amax(1, keepdim=True).clamp(min=1e-30)
        codes = self.codes[kind]
        above = torch.searchsorted(codes, (flat / amax).contiguous()).clamp(1, len(codes) - 1)
        nearer = (flat / amax - codes[above - 1]).abs() <= (codes[above] - flat / amax).abs()
        values = torch.where(nearer, codes[above - 1], codes[above]) * amax
        return values.flatten()[: state.numel()].view_as(state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step, and cast both moments."""
        self.time += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                for key in ("m", "v"):
                    state.setdefault(key, torch.zeros_like(parameter))
                state["m"].lerp_(parameter.grad, 1 - self.betas[0])
                state["v"].lerp_(parameter.grad.square(), 1 - self.betas[1])
                first = state["m"] / (1 - self.betas[0] ** self.time)
                second = state["v"] / (1 - self.betas[1] ** self.time)
                parameter.addcdiv_(first, second.sqrt() + 1e-8, value=-group["lr"])
                state["m"], state["v"] = self.cast_state(state["m"], "m"), self.cast_state(state["v"], "v")


@register(
    "bitsandbytes-foundation/bitsandbytes/issues/659 bitsandbytes-foundation/bitsandbytes/issues/227",
    "2023-07",
    "A wrong indent makes the code table of 8-bit optimizer states too long, and its top is cut off.",
    "codes of optimizer states are not those of the format",
    Answer(
        "Second moments of all parameters are far too small where they are large, from the start; no operand is at fault.",
        ("software", "step_size"),
        ("* m", "* v", "* step of W"),
        needs_tensor=False,
        cannot_tell="default options record no moments",
    ),
    "harmful",
)
class EightBitMapIndented(Training):
    """Adam in 8 bits for all parameters."""

    recipe = ""
    betas = (0.9, 0.999)

    def build_optimizer(self) -> torch.optim.Optimizer:
        return Adam8bit(self.model.parameters(), self.learning_rate, self.betas, wrong=self.faulty)
