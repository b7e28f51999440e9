"""Backend for torch.nn.Linear and its subclasses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import linear
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .base import FrameworkBackend, explain_unsupported_forward, is_plain_tensor, read_raw_weight

#: modules whose replacement of `F.linear` multiplies the same operands: DeepSpeed's, which saves memory under ZeRO-3
_SAME_PRODUCT = ("deepspeed.runtime.zero.linear",)


def _foreign(module: nn.Module) -> str:
    """Return why the module may change or quantize its operands, or "" if it is a plain `nn.Linear`."""
    if why := explain_unsupported_forward(module, (nn.Linear,)) or explain_replaced_product():
        return why
    weight = read_raw_weight(module)
    if weight is not None and not is_plain_tensor(weight):
        return f"its weight is a {type(weight).__name__}, whose products may quantize"
    return ""


def explain_replaced_product() -> str:
    """Return why all linear layers may change or quantize their operands, or "" if torch's own functions multiply them."""
    if getattr(getattr(nn.Linear.forward, "__code__", None), "co_filename", "") != linear.__file__:
        return "`nn.Linear.forward` was replaced by a function that may change or quantize its operands"
    multiplies: Any = functional.linear
    if multiplies is not torch._C._nn.linear and getattr(multiplies, "__module__", "") not in _SAME_PRODUCT:
        return "`torch.nn.functional.linear` was replaced by a function that may change or quantize its operands"
    return ""


BACKEND = FrameworkBackend(
    name="torch.nn.Linear",
    # The output projection of MultiheadAttention is a Linear that is never called.
    owns=lambda module: isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear),
    input=lambda module, args, kwargs, part: args[0] if args else kwargs["input"],
    weight=lambda module, args, kwargs, part: read_raw_weight(module),
    output=lambda out: out[0] if isinstance(out, tuple) else out,
    foreign=_foreign,
    explain_replaced_product=explain_replaced_product,
)
