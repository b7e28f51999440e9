"""torch.nn.Linear and its subclasses."""

from __future__ import annotations

from torch import nn

from .base import Host, raw_weight

HOST = Host(
    name="torch.nn.Linear",
    gemm_classes=lambda: (nn.Linear,),
    input=lambda module, args, kwargs: args[0] if args else kwargs["input"],
    weight=lambda module, args, kwargs: raw_weight(module),
    output=lambda out: out,
)
