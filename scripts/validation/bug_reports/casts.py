"""Reports about casts: a wrong format, a wrong limit, a copy that is not what it should be, a scale that is left out."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from bug_reports.kernels import (
    E2M1_VALUES,
    E4M3,
    E5M2,
    E5M2_LIMIT,
    Kernels,
    OwnLinear,
    cast,
    cast_blocks,
    cast_to_codes,
    find_amax,
    find_block_scales,
    scale_back,
)
from bug_reports.model import GPT, Batch, GatedMLP, PlainMLP
from bug_reports.report import SOFTWARE, Answer, register
from bug_reports.training import Training

VERIFIED = {"verify_rows": 16}


class OwnKernels(Training):
    """A run whose linear layers of the blocks have kernels of their own."""

    recipe = ""

    def build_kernels(self) -> Kernels:
        """Return the kernels of all linear layers."""
        return Kernels()

    def build_model(self) -> nn.Module:
        kernels = self.build_kernels()
        return GPT(self.seed, linear=lambda inputs, outputs: OwnLinear(inputs, outputs, kernels))


class E5m2ReadAsE4m3(Kernels):
    """Kernels whose backward reads the bytes of E5M2 gradients as E4M3."""

    def cast_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        scale = E5M2_LIMIT / find_amax(dy)
        return (dy * scale).to(E5M2).view(torch.uint8).view(E4M3).float() / scale


@register(
    "NVIDIA/TransformerEngine/issues/3342",
    "2026-08",
    "A fused MLP reads gradients that were cast to E5M2 as if they were E4M3.",
    "bytes of one FP8 format are read as another",
    Answer(
        "Gradients of the MLPs are about 2^-7 of what they should be, from the start.",
        (*SOFTWARE, "multiplier"),
        ("layers.*.mlp.* dY", "layers.*.mlp.* dX", "layers.*.mlp.* dW"),
    ),
    "harmful",
    new=False,
)
class FormatsMixedUp(Training):
    """The MLPs of all layers have the wrong kernels, from the start."""

    recipe = ""

    def build_model(self) -> nn.Module:
        kernels = E5m2ReadAsE4m3() if self.faulty else Kernels()

        def build_mlp(width: int, hidden: int, linear: Any) -> nn.Module:
            return GatedMLP(width, hidden, lambda inputs, outputs: OwnLinear(inputs, outputs, kernels))

        return GPT(self.seed, mlp=build_mlp)


class ScalesRoundedLate(Kernels):
    """Kernels that round scales up to powers of two after the codes were made with the exact ones."""

    def __init__(self, faulty: bool) -> None:
        self.faulty = faulty

    def cast_late(self, x: torch.Tensor) -> torch.Tensor:
        """Return codes of the exact scales, times the rounded ones."""
        scales = find_block_scales(x)
        codes = cast_to_codes(x, scales)
        rounded = torch.exp2(torch.ceil(torch.log2(scales))) if self.faulty else scales
        return scale_back(codes, rounded)

    def cast_operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cast_late(x), self.cast_late(w)

    def cast_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        return cast_blocks(dy)


@register(
    "huggingface/transformers/issues/47030",
    "2026-07",
    "Scales are rounded up to powers of two, but values are not cast again.",
    "scales are changed after the codes",
    Answer(
        "Products of the FP8 linear layers are 1.9 times too large, from the start.",
        ("wrong_product", "software"),
        ("layers.* Y", "layers.* dX", "layers.* dW"),
        needs_tensor=False,
    ),
    "harmful",
    new=False,
)
class ScalesInflated(OwnKernels):
    """Own block-scaled layers in BF16, with every option that the answer needs."""

    learning_rate = 2e-3
    monitor_options: ClassVar[dict[str, Any]] = {**VERIFIED, "states": ["weight_gradient", "first_moment", "update"]}

    def build_model(self) -> nn.Module:
        kernels = ScalesRoundedLate(self.faulty)
        linear = lambda inputs, outputs: OwnLinear(inputs, outputs, kernels)  # noqa: E731
        return GPT(self.seed, layers=3, mlp=PlainMLP, linear=linear).bfloat16()


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, wrong: bool) -> torch.Tensor:
        ctx.save_for_backward(*(t.to(E4M3).float() if wrong else t for t in (gate, up)))
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        share = torch.sigmoid(gate)
        return gradients[0] * up * (share + gate * share * (1 - share)), gradients[0] * gate * share, None


class StoringMLP(GatedMLP):
    """SwiGLU that stores its input in FP8 for the backward pass."""

    wrong = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(_Stored.apply(self.gate_proj(x), self.up_proj(x), self.wrong))
        return output


@register(
    "NVIDIA/Megatron-LM/pull/1751",
    "2025-08",
    "The input of an activation is stored for backward in FP8 without a scale.",
    "what backward reads is cast without a scale",
    Answer("No harm: the stored values are too small to be held, and the model learns all the same.", ("none",), steps=None),
    "none",
    new=False,
)
class StoredWithoutScale(Training):
    """The values that are stored are about 2^-8 of the usual ones."""

    def build_model(self) -> nn.Module:
        model = GPT(self.seed, mlp=StoringMLP)
        for layer in model.layers:
            layer.mlp.wrong = self.faulty
            with torch.no_grad():
                layer.mlp.up_proj.weight.mul_(2.0**-9)
                layer.mlp.down_proj.weight.mul_(2.0**9)
        return model


class LoRA(nn.Module):
    """A frozen layer and its adapter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.a, self.b = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(x) + self.b(self.a(x))
        return output


class ZeroCopy(TorchDispatchMode):
    """Multiply by zeros wherever dY is multiplied by a frozen weight, as a kernel that reads an empty copy does."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.addresses = {weight.data_ptr() for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and args[1].data_ptr() in self.addresses and args[1].stride(1) == 1:
            args = (args[0], torch.zeros_like(args[1]))
        return func(*args, **(kwargs or {}))


@register(
    "modelscope/mcore-bridge/issues/125",
    "2026-06",
    "After FP8 weights are loaded, the copy for dgrad is still all zeros.",
    "the transposed copy of a weight is never filled",
    Answer(
        "dX of the frozen layers is zero, from the start; the first in a backward pass is layers.1.mlp.down_proj.base.",
        (*SOFTWARE, "dead"),
        ("layers.*.base dX", "layers.* dY"),
    ),
    "harmful",
    new=False,
)
class TransposedCopyZero(Training):
    """LoRA over frozen weights. `verify_rows` is on because the answer is a product."""

    recipe = ""
    monitor_options: ClassVar[dict[str, Any]] = VERIFIED

    def build_model(self) -> nn.Module:
        model = GPT(self.seed, linear=LoRA)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".a." in name or ".b." in name or "norm" in name or name.startswith("lm_head"))
            if name.endswith("b.weight"):
                nn.init.zeros_(parameter)
        self.frozen: list[torch.Tensor] = [m.base.weight for m in model.modules() if isinstance(m, LoRA)]
        return model

    def backpropagate(self, loss: torch.Tensor) -> None:
        if not self.faulty:
            return super().backpropagate(loss)
        with ZeroCopy(self.frozen):
            super().backpropagate(loss)


@register(
    "AMD-AGI/Primus/pull/982",
    "2026-08",
    "Late in MXFP4 training, weights oscillate between neighboring codes.",
    "weights oscillate between two codes",
    Answer(
        "A gap of less than 2%: four bits cost that much, and no tensor is at fault.",
        ("none",),
        steps=None,
        cannot_tell="a gap below 2% is what FP4 costs, and which part oscillation has is not recorded",
    ),
    "none",
    new=False,
)
class FourBitOscillation(Training):
    """NVFP4 of all operands, and a small learning rate from the middle on, against high precision."""

    steps = 300

    def attach(self) -> None:
        self.recipe = "nvfp4" if self.faulty else ""
        super().attach()

    def rate_at(self, step: int) -> float:
        return super().rate_at(step) * (1.0 if step < 150 else 0.1)


class LimitOfOtherFormat(Kernels):
    """Kernels of a GPU whose E4M3 ends at 240, which scale weights to 448."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def cast_operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cast_to_240(x, 240.0), self.cast_to_240(w, self.limit)

    @staticmethod
    def cast_to_240(x: torch.Tensor, limit: float) -> torch.Tensor:
        """Return what the format holds, which saturates."""
        scale = limit / find_amax(x)
        return (x * scale).clamp(-240.0, 240.0).to(torch.float8_e4m3fnuz).float() / scale


@register(
    "ROCm/TransformerEngine/pull/485",
    "2026-03",
    "Weights initialized in FP8 are scaled to 448, but the GPU's format ends at 240.",
    "the scale is made for the limit of another format",
    Answer(
        "W of all blocks is clipped at 54% of its largest value, from the start; too few values for harm.",
        ("none", "clipping", "wrong_product"),
        ("layers.* W", "layers.* Y"),
        needs_tensor=False,
        cannot_tell="the record does not know the casts of a layer's own kernels",
    ),
    "none",
)
class LimitFromOtherFormat(OwnKernels):
    """Weights are clipped in every step."""

    def build_kernels(self) -> Kernels:
        return LimitOfOtherFormat(448.0 if self.faulty else 240.0)


class NoFloor(Kernels):
    """Kernels whose block scale is amax / 448, which divides zero by zero in a block of zeros."""

    def __init__(self, floor: float) -> None:
        self.floor = floor

    def cast_operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x.unflatten(-1, (-1, 32))
        scales = (blocks.abs().amax(-1, keepdim=True) / 448.0).clamp(min=self.floor)
        codes = (blocks / scales).to(E4M3).float()
        return (codes * scales).flatten(-2), cast_blocks(w)


@register(
    "huggingface/kernels-community/issues/681 huggingface/kernels-community/pull/680 THUDM/slime/pull/2256",
    "2026-04",
    "The cast of activations divides by amax without a floor, so a block of zeros becomes NaN.",
    "zero divided by the zero scale of an empty block",
    Answer(
        "layers.0.attn.proj returns NaN from step 60, when the first batch is padded: its X has blocks of zeros.",
        ("nonfinite",),
        ("layers.0.attn.proj *", "layers.0.mlp.gate_proj X", "layers.0.mlp.up_proj X"),
        steps=(60, 65),
    ),
    "harmful",
)
class ZeroBlocks(OwnKernels):
    """From step 60 on, batches hold padding, for which attention returns zeros."""

    since = 60

    def build_kernels(self) -> Kernels:
        return NoFloor(0.0 if self.faulty else 1e-12)

    def prepare_run(self) -> None:
        for layer in self.model.layers:
            core = layer.attn.core
            layer.attn.core = lambda q, k, v, core=core: self.clear_padding(core(q, k, v))

    def clear_padding(self, output: torch.Tensor) -> torch.Tensor:
        """Return zeros at padded positions, as attention over sequences of different lengths does."""
        if self.step < self.since:
            return output
        return torch.cat([output[..., :-4, :], torch.zeros_like(output[..., -4:, :])], -2)

    def draw_batch(self, number: int) -> Batch:
        tokens, labels = super().draw_batch(number)
        if self.step >= self.since:
            labels = torch.cat([labels[:, :-4], torch.full_like(labels[:, -4:], -100)], 1)
        return tokens, labels


class TileTranspose(Kernels):
    """Block-scaled kernels whose transposed tile keeps a quarter of its rows in the old order."""

    def __init__(self, faulty: bool) -> None:
        self.faulty = faulty

    def cast_operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cast_blocks(x), cast_blocks(w)

    def multiply_to_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return dy @ self.transpose_tiles(w).t()

    def transpose_tiles(self, w: torch.Tensor, size: int = 32) -> torch.Tensor:
        """Return W transposed tile by tile."""
        tiles = w.unflatten(0, (-1, size)).unflatten(2, (-1, size)).transpose(1, 2)
        turned = tiles.transpose(-1, -2).clone()
        if self.faulty:  # the layout of the last quarter is converted for 32-bit words, and bytes stay where they were
            turned[:, :, 3 * size // 4 :] = tiles[:, :, 3 * size // 4 :]
        return turned.permute(1, 2, 0, 3).reshape(w.shape[1], w.shape[0])


@register(
    "mlc-ai/pith-train/pull/74",
    "2026-07",
    "The cast kernel's transpose puts a quarter of each tile in the wrong place.",
    "a transposed tile holds values in the wrong place",
    Answer(
        "dX of all linear layers of the blocks is wrong, from the start.",
        SOFTWARE,
        ("layers.* dX",),
        needs_tensor=False,
    ),
    "harmful",
)
class TransposedTiles(OwnKernels):
    """dX of every block-scaled layer. `verify_rows` is on because the answer is a product."""

    monitor_options: ClassVar[dict[str, Any]] = VERIFIED

    def build_kernels(self) -> Kernels:
        return TileTranspose(self.faulty)


class HalfWritten(Kernels):
    """Kernels that write the transposed copy of W into memory from a pool, with the bounds of rows and columns swapped."""

    def __init__(self, faulty: bool) -> None:
        self.faulty = faulty
        # What an allocator returns: bytes of whatever was there before.
        self.pool = torch.randint(0, 256, (64 * 192,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))

    def multiply_to_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows, columns = w.shape
        scale = 448.0 / find_amax(w)
        codes = (w * scale).to(E4M3).view(torch.uint8)
        out = self.pool[: w.numel()].view(columns, rows)
        if self.faulty:  # the mask compares the rows of the copy with those of W
            rows_of_copy, columns_of_copy = min(columns, rows), min(rows, columns)
        else:
            rows_of_copy, columns_of_copy = columns, rows
        out[:rows_of_copy, :columns_of_copy] = codes.t()[:rows_of_copy, :columns_of_copy]
        return dy @ (out.view(E4M3).float() / scale).t()


@register(
    "pytorch/ao/pull/1516",
    "2025-01",
    "The store mask of the transposed copy swaps rows and columns, so a part is never written.",
    "part of a copy is memory that nobody wrote",
    Answer(
        "dX of layers that are not square is NaN, from the start; dY of layers.1.mlp.gate_proj and up_proj shows it first.",
        ("nonfinite",),
        ("layers.1.mlp.down_proj dX", "layers.1.mlp.gate_proj dY", "layers.1.mlp.up_proj dY"),
        steps=(0, 0),
    ),
    "harmful",
)
class HalfWrittenCopy(OwnKernels):
    """dX of every layer that is not square."""

    def build_kernels(self) -> Kernels:
        return HalfWritten(self.faulty)


class AutocastFlags:
    """What two libraries know of the context: one quantizes to FP8, the other to FP4."""

    def __init__(self, faulty: bool) -> None:
        self.faulty, self.te_fp8, self.turbo_fp4 = faulty, True, True

    def is_pinned(self, module: str) -> bool:
        """Return True if a BF16 pin of a module holds."""
        # The override decides from one library's flag; the right one asks both.
        quantized = self.te_fp8 if self.faulty else self.te_fp8 or self.turbo_fp4
        holds = quantized and module.endswith(("qkv", "proj")) and ".attn." in module
        if module.endswith("qkv"):
            self.te_fp8 = False  # leaving the nested override of QKV resets the flag
        if module.endswith("down_proj"):
            self.te_fp8 = True  # the next layer enters anew
        return holds


@register(
    "AMD-AGI/Primus/pull/1127",
    "2026-09",
    "The output projection of attention is pinned to BF16, but runs in FP4.",
    "a module's own precision is lost in a nested context",
    Answer(
        "Operands of attn.proj are cast to FP4 although they are pinned to BF16, from the start; no harm.",
        ("none", "changed_recipe"),
        ("layers.*.attn.proj *",),
        needs_tensor=False,
    ),
    "none",
)
class PinDropped(Training):
    """NVFP4 of the MLPs; the projection joins them if the pin is dropped."""

    recipe = "nvfp4"

    def attach(self) -> None:
        flags = AutocastFlags(self.faulty)
        order = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        names = [f"layers.{layer}.{name}" for layer in range(2) for name in order]
        self.emulated = tuple(name for name in names if not flags.is_pinned(name))
        super().attach()


class PowerOfTwoScales(Kernels):
    """Kernels whose block scales are powers of two on GPUs that can hold any."""

    def __init__(self, faulty: bool) -> None:
        self.faulty = faulty

    def cast_scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return block-scaled values."""
        scales = find_block_scales(x)
        scales = torch.exp2(torch.ceil(torch.log2(scales))) if self.faulty else scales
        return scale_back(cast_to_codes(x, scales), scales)

    def cast_operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cast_scaled(x), self.cast_scaled(w)

    def cast_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        return self.cast_scaled(dy)


@register(
    "PrimeIntellect-ai/prime-rl/pull/3112",
    "2026-07",
    "Power-of-two scales, which only newer GPUs need, also make Hopper's casts coarser.",
    "scales are rounded where the hardware does not ask for it",
    Answer(
        "No harm to the loss, nothing wrong: casts are a little coarser from the start.",
        ("none",),
        steps=None,
        cannot_tell="the record does not know the casts of a layer's own kernels",
    ),
    "none",
)
class CoarseScales(OwnKernels):
    """All operands of all blocks."""

    def build_kernels(self) -> Kernels:
        return PowerOfTwoScales(self.faulty)


class SameNoise(Kernels):
    """MXFP4 gradients that are rounded by chance, with a seed that is zero in every launch."""

    def __init__(self, faulty: bool) -> None:
        self.faulty, self.launches = faulty, 0

    def cast_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        self.launches += 1
        generator = torch.Generator().manual_seed(0 if self.faulty else self.launches)
        blocks = dy.unflatten(-1, (-1, 32))
        scales = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30))) - 2)
        magnitude = (blocks / scales).abs().clamp(max=6.0)
        above = torch.searchsorted(E2M1_VALUES, magnitude).clamp(1, 7)
        low, high = E2M1_VALUES[above - 1], E2M1_VALUES[above]
        up = torch.rand(magnitude.shape, generator=generator) < (magnitude - low) / (high - low)
        return (torch.where(up, high, low) * blocks.sign() * scales).flatten(-2)

    def cast_operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cast_blocks(x), cast(w)


@register(
    "AMD-AGI/Primus-Turbo/pull/365",
    "2026-06",
    "The seed of stochastic rounding can be zero in every launch, so all gradients get the same noise.",
    "rounding by chance draws the same numbers again and again",
    Answer(
        "No harm, nothing wrong: over these few steps the same noise is as good as fresh noise.",
        ("none",),
        steps=None,
        cannot_tell="the record does not know the casts of a layer's own kernels",
    ),
    "none",
)
class SameRoundingNoise(OwnKernels):
    """dY of all blocks."""

    def build_kernels(self) -> Kernels:
        return SameNoise(self.faulty)


@register(
    "unslothai/unsloth/pull/6978",
    "2026-07",
    "Loading a checkpoint drops scales of some FP8 weights, so raw codes serve as weights.",
    "codes are used without their scales",
    Answer(
        "W of mlp.gate_proj is hundreds of times too large, from the start, because its scale was dropped at loading.",
        ("software", "outlier", "changed_recipe"),
        ("layers.*.mlp.gate_proj W",),
    ),
    "harmful",
)
class ScaleDroppedAtLoading(Training):
    """Fine-tuning over a frozen base in block-scaled FP8 whose gate_proj is not known to be quantized."""

    recipe = "current"
    learning_rate = 3e-4

    def build_model(self) -> nn.Module:
        model = pretrain(self.seed)
        checkpoint: dict[str, torch.Tensor] = {}
        for name, weight in model.state_dict().items():
            if name.startswith("layers.") and weight.dim() == 2:
                scales = find_block_scales(weight)
                checkpoint[name], checkpoint[f"{name}_scale_inv"] = cast_to_codes(weight, scales), scales
        converted = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        if self.faulty:  # the list of converted modules lacks those of a nested block
            converted = [name for name in converted if not name.endswith("gate_proj")]
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.requires_grad_(name not in checkpoint)
                if name in checkpoint:
                    scale_key = f"{name}_scale_inv"
                    known = name.removesuffix(".weight") in converted
                    weight.copy_(scale_back(checkpoint[name], checkpoint[scale_key]) if known else checkpoint[name])
        return model


def pretrain(seed: int, steps: int = 120, order: int = 40) -> GPT:
    """Return a model that was trained without a monitor on data of its own."""
    from bug_reports.model import Data

    model, data = GPT(seed), Data(order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(steps):
        tokens, labels = data.draw(step)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return model
