"""Find how torchao's `NVFP4Linear` casts: its scales, and which codes cannot be determined.

| product | operands |
|---|---|
| fprop | X 1x16, W 16x16, rounded to nearest |
| dgrad | dY 1x16, rounded stochastically; W 16x16, as in fprop |
| wgrad | dY and X by column after a random Hadamard transform; dY rounded stochastically |

The kernels run only on GPUs with compute capability 10.0 or later, so we cannot try them on other devices. Instead we list
the releases whose kernels we have read.
"""

from __future__ import annotations

import sys
from typing import Any

from ....numerics.formats import E2M1
from ....numerics.nvfp4_scaling import TorchaoNVFP4Scaling
from ....numerics.recipe import Recipe
from ..base import CastInUse, UnknownCastError
from .layers import check_attributes

#: supported releases of torchao
RELEASES = ("0.18",)
#: attributes and buffers that a `NVFP4Linear` has and a Linear does not have
OPTIONS = frozenset(("kernel_preference", "process_group", "world_size", "tensor_parallel_style", "_rht_sign_vector_tuple"))
BUFFERS = frozenset(("_sr_seed", "_rht_sign_vector"))


def find_nvfp4_cast(module: Any, role: str) -> CastInUse:
    """Return the cast of X in fprop, or of W.

    Raises:
        UnknownCastError: `role` is dY, or a part of the module is not supported.
    """
    version = str(getattr(sys.modules.get("torchao"), "__version__", ""))
    if ".".join(version.split(".")[:2]) not in RELEASES:
        raise UnknownCastError(f"the NVFP4Linear of torchao {version} is not supported")
    check_attributes(module, OPTIONS)
    if strange := sorted(module._buffers.keys() - BUFFERS):
        raise UnknownCastError(f"its NVFP4Linear has an unsupported buffer {strange[0]!r}")
    if getattr(module.kernel_preference, "name", None) != "TRITON":
        raise UnknownCastError(f"unsupported value in its NVFP4Linear: kernel_preference={module.kernel_preference}")
    if module.process_group is not None:
        raise UnknownCastError("its NVFP4Linear is split by tensor parallelism, and reduces its amax over ranks")
    if role == "grad_output":
        raise UnknownCastError("its NVFP4Linear rounds dY stochastically, so its codes cannot be determined")
    rule = TorchaoNVFP4Scaling()
    use = CastInUse(rule, E2M1, Recipe(rule), "engine")
    # The copy of X for wgrad is transformed before its cast, and we do not measure it.
    return CastInUse(use.scale, use.format, use.recipe, use.source, {"wgrad": None}) if role == "input" else use
