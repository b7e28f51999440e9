"""torch.nn.Linear and its subclasses."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .base import Backend, raw_weight

BACKEND = Backend(
    name="torch.nn.Linear",
    # The output projection of MultiheadAttention is a Linear that is never called.
    owns=lambda module: isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear),
    input=lambda module, args, kwargs, part: args[0] if args else kwargs["input"],
    weight=lambda module, args, kwargs, part: raw_weight(module),
    output=lambda out: out[0] if isinstance(out, tuple) else out,
)
