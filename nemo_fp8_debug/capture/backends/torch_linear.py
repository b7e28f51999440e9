"""Backend for torch.nn.Linear and its subclasses."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .base import FrameworkBackend, explain_unsupported_forward, is_plain_tensor, read_raw_weight


def _foreign(module: nn.Module) -> str:
    """Return why the module may change or quantize its operands, or "" if it is a plain `nn.Linear`."""
    if why := explain_unsupported_forward(module, (nn.Linear,)):
        return why
    weight = read_raw_weight(module)
    if weight is not None and not is_plain_tensor(weight):
        return f"its weight is a {type(weight).__name__}, whose products may quantize"
    return ""


BACKEND = FrameworkBackend(
    name="torch.nn.Linear",
    # The output projection of MultiheadAttention is a Linear that is never called.
    owns=lambda module: isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear),
    input=lambda module, args, kwargs, part: args[0] if args else kwargs["input"],
    weight=lambda module, args, kwargs, part: read_raw_weight(module),
    output=lambda out: out[0] if isinstance(out, tuple) else out,
    foreign=_foreign,
)
