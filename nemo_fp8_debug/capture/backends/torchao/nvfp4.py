"""How torchao's `NVFP4Linear` casts: its scales, and what cannot be told of its codes.

| product | operands |
|---|---|
| fprop | X 1x16, W 16x16, rounded to nearest |
| dgrad | dY 1x16, rounded stochastically; W 16x16, as in fprop |
| wgrad | dY and X by column after a random Hadamard transform; dY rounded stochastically |

Its kernels run on GPUs from compute capability 10.0 on only, so that nothing can be tried out elsewhere: releases of
which they were read are in a list.
"""

from __future__ import annotations

import sys
from typing import Any

from ....numerics.formats import E2M1
from ....numerics.nvfp4_scaling import TorchaoNVFP4Scaling
from ....numerics.recipe import Recipe
from ..base import ScaleInUse, UnknownCast
from .layers import check_attributes

#: releases of torchao whose kernels were read
RELEASES = ("0.18",)
#: attributes of a `NVFP4Linear` beside those of a Linear, and its buffers
OPTIONS = frozenset(("kernel_preference", "process_group", "world_size", "tensor_parallel_style", "_rht_sign_vector_tuple"))
BUFFERS = frozenset(("_sr_seed", "_rht_sign_vector"))


def nvfp4_cast(module: Any, role: str) -> ScaleInUse:
    """Of X in fprop and of W.

    Raises:
        UnknownCast: of dY, and where anything of the module is not known here.
    """
    version = str(getattr(sys.modules.get("torchao"), "__version__", ""))
    if ".".join(version.split(".")[:2]) not in RELEASES:
        raise UnknownCast(f"the kernels of its NVFP4Linear are those of torchao {version}, which were not read")
    check_attributes(module, OPTIONS)
    if strange := sorted(module._buffers.keys() - BUFFERS):
        raise UnknownCast(f"its NVFP4Linear has a buffer {strange[0]!r}, which is not known here")
    if getattr(module.kernel_preference, "name", None) != "TRITON":
        raise UnknownCast(f"kernel_preference={module.kernel_preference} of its NVFP4Linear is not known here")
    if module.process_group is not None:
        raise UnknownCast("its NVFP4Linear is split by tensor parallelism, and takes amaxes over the ranks")
    if role == "grad_output":
        raise UnknownCast("its NVFP4Linear rounds dY stochastically, so that its codes cannot be told")
    rule = TorchaoNVFP4Scaling()
    use = ScaleInUse(rule, E2M1, Recipe(rule), "engine")
    # The copy of X for wgrad is transformed before its cast, and not measured.
    return ScaleInUse(use.scale, use.format, use.recipe, use.source, {"wgrad": None}) if role == "input" else use
