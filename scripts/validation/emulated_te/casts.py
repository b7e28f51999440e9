"""What every emulated cast did, and which operand of which module it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

ROLES = {
    "X": ("scaling_fwd", 0),
    "W": ("scaling_fwd", 1),
    "Y": ("scaling_fwd", 2),
    "dY": ("scaling_bwd", 0),
    "dX": ("scaling_bwd", 1),
}
SLOTS = {"scaling_fwd": 3, "scaling_bwd": 2}
"""Quantizers a GEMM has; those of LayerNormMLP's second GEMM, or of the next expert, follow."""
ATTENTION_CASTS = [
    ("query", "key", "value"),
    ("probabilities",),
    ("context",),
    ("grad_context",),
    ("grad_scores",),
    ("grad_query", "grad_key", "grad_value"),
]
"""Roles of the casts of one call of attention in the order in which kernels make them; three roles: cast as one tensor."""


@dataclass(frozen=True, eq=False)
class Cast:
    """One tensor's way to FP8."""

    module: Any
    """The module whose quantizer it was; None for a quantizer of nobody's."""
    role: str
    gemm: int
    """1 for the second GEMM of LayerNormMLP, the expert in GroupedLinear, else 0."""
    quantizer: Any
    scale: torch.Tensor
    """float32, exact; the codes hold source * scale."""
    format: str
    codes: torch.Tensor
    source: torch.Tensor
    """What was cast: BF16 or FP32 as the kernel read it; FP32 where a norm or activation kernel casts its own result."""
    fused: bool
    """The cast was part of the kernel that computed the source, which has never been rounded to the tensor's own type."""
    recompute: bool
    """Within the second forward pass of a checkpoint."""
    in_backward: bool
    """Within a backward pass: gradients, recompute, and an X cast again because the module saved it in BF16."""
    usage: str = ""
    """Of a cast in blocks, whose copies are casts of their own: rowwise or columnwise; `scale` is then as it is kept, one a
    block, and `codes` a matrix."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, of the matrix as the codes are kept."""
    amax: torch.Tensor | None = None
    """float32 [1] or [rows]: the second level of NVFP4."""


CASTS: list[Cast] = []
MODULES: WeakSet[Any] = WeakSet()
"""Every module of Transformer Engine that holds quantizers."""


def slot_of(quantizer: Any) -> tuple[Any, str, int]:
    """The module, role and GEMM of a quantizer, by identity."""
    for module in list(MODULES):
        for index, key, owned in _quantizers(module):
            if owned is quantizer or any(
                getattr(owned, f"{usage}_quantizer", None) is quantizer for usage in ("rowwise", "columnwise")
            ):
                gemm, offset = divmod(index, SLOTS[key])
                return module, next(role for role, slot in ROLES.items() if slot == (key, offset)), gemm
    return None, "", 0


def _quantizers(module: Any) -> Iterator[tuple[int, str, Any]]:
    held = getattr(module, "quantizers", None) or {}
    for key in SLOTS:
        for index, quantizer in enumerate(held.get(key, ()) if isinstance(held, dict) else ()):
            yield index, key, quantizer
            for copy in ("rowwise_quantizer", "columnwise_quantizer"):  # of a HybridQuantizer
                yield index, key, getattr(quantizer, copy, None)
    # Parameters in FP8 and cached weights carry a quantizer of their own, at times a copy of the module's.
    cached = getattr(module, "_fp8_workspaces", {})
    for name, gemm in _weights(module).items():
        for tensor in (getattr(module, name, None), cached.get(name)):
            held_by_debug = getattr(tensor, "rowwise_gemm_tensor", tensor)
            if (quantizer := getattr(held_by_debug, "_quantizer", None)) is not None:
                yield SLOTS["scaling_fwd"] * gemm + 1, "scaling_fwd", quantizer


def _weights(module: Any) -> dict[str, int]:
    experts = {f"weight{i}": i for i in range(getattr(module, "num_gemms", 0))}
    return experts or {"weight": 0, "fc1_weight": 0, "fc2_weight": 1}


def casts_of(module: Any, role: str, gemm: int = 0) -> list[Cast]:
    """The casts of an operand since the log was last cleared, in order."""
    return [cast for cast in CASTS if (cast.module, cast.role, cast.gemm) == (module, role, gemm)]


def scales_of(module: Any, role: str, gemm: int = 0) -> list[float]:
    """The scales of those casts: float32 values, exact as Python floats."""
    return [float(cast.scale) for cast in casts_of(module, role, gemm)]
