"""Compute logits of attention in float32: Q K^T, scaled and masked, for some rows of each head.

Fused kernels do not return their logits. So we compute a few rows again from the kernel's queries, keys and mask. We take
these from the arguments of Megatron's and Transformer Engine's attention modules, or of torch's operator. If the model
applies torch's softmax to its logits, we take rows of its logits instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...capture.backends.base import Args, Kwargs
from ...capture.operator_mode import OperatorMode, is_dtensor_call
from ...core.error_guard import leave_dispatch_modes, restore_dispatch_modes

#: number of rows of each head, spread over the sequence. The last row is included, because it attends to the most keys
ROWS = 16
#: largest number of logits of a call, unless a single row of each head already has more
_LOGITS = 1 << 22
#: names of the same argument in different kernels
_QUERY, _KEY, _MASK, _CAUSAL = ("query", "q"), ("key", "k"), ("attn_mask", "attn_bias"), ("is_causal",)


class AttentionWatcher(OperatorMode):
    """Watches one forward of an attention module."""

    def __init__(self, found: Callable[[torch.Tensor], None]) -> None:
        """
        Args:
            found: called with logits, float32 [batch, heads, rows, keys], -inf for keys that a row does not attend to.
        """
        super().__init__()
        self._found = found
        #: whether any logits were found, and the error if other logits could not be read
        self.seen = False
        self.failed: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` unchanged, after looking at its arguments."""
        if is_dtensor_call(types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__ if getattr(func, "namespace", "") == "aten" else ""
        if "softmax" in name and "backward" not in name:
            self._look(lambda: of_scores(args[0], args[1]))
        elif "scaled_dot_product" in name and "backward" not in name:
            self._look(lambda: of_operator(func, args, kwargs))
        return func(*args, **kwargs)

    def _look(self, logits: Callable[[], torch.Tensor | None]) -> None:
        modes = leave_dispatch_modes()
        try:
            if (found := logits()) is not None:
                self.seen = True
                self._found(found)
        except Exception as error:
            self.failed = error
        finally:
            restore_dispatch_modes(modes)


def of_scores(scores: Any, dim: int) -> torch.Tensor | None:
    """Return rows of a torch softmax's input, or None if the softmax is not over the keys of an attention.

    Args:
        scores: [..., heads, queries, keys]
    """
    if not isinstance(scores, torch.Tensor) or scores.dim() < 3 or dim not in (-1, scores.dim() - 1):
        return None
    rows = rows_of(scores.shape[-2], math.prod(scores.shape[:-2]) * scores.shape[-1])
    picked = scores[..., torch.tensor(rows, device=scores.device), :].float()
    return picked.reshape(-1, 1, *picked.shape[-2:])


def of_operator(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return logits of torch's attention operator, for any kernel. Return None if its queries or keys are not 4-D."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    q, k, mask, causal = (next((given[n] for n in names if n in given), None) for names in (_QUERY, _KEY, _MASK, _CAUSAL))
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor) or q.dim() != 4:
        return None
    scale = given.get("scale")
    return logits_of(q, k, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, bool(causal), mask)


def compute_attention_logits(module: nn.Module, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Return logits of an attention module of Megatron or Transformer Engine.

    Raises:
        LookupError: the call is of a kind that is not supported.
    """
    names = ("query", "key", "value", "attention_mask", "attn_mask_type")
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | {n.removesuffix("_layer"): v for n, v in kwargs.items()}
    q, k, mask = given.get("query"), given.get("key"), given.get("attention_mask")
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor) or q.dim() != 4:
        raise LookupError("its queries and keys are not tensors of four dimensions, as with packed sequences")
    kind = given.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
    told = str(getattr(kind, "name", kind)).lower()
    if told not in ("causal", "no_mask", "padding", "arbitrary", "padding_causal"):
        raise LookupError(f"its mask is {told}, which is not supported")
    if window := _window(module, given):
        raise LookupError(f"its attention is limited to a window of {window}")
    if _ranks_of_context(module) > 1:
        raise LookupError("ranks hold parts of its keys (context parallelism)")
    if any(given.get(name) is not None for name in ("attention_bias", "core_attention_bias", "packed_seq_params")):
        raise LookupError("it is called with a bias or with packed sequences")
    if (of_softmax := getattr(module, "softmax_type", "vanilla")) != "vanilla" or _config(module, "softmax_type") not in (
        None,
        "vanilla",
    ):
        raise LookupError(f"its softmax is {of_softmax}, which is not supported")
    scale = getattr(module, "softmax_scale", None)
    if not isinstance(scale, float):
        raise LookupError("its softmax_scale is not known")
    scale *= getattr(getattr(module, "scale_mask_softmax", None), "scale", None) or 1.0
    layout = str(given.get("qkv_format") or getattr(module, "qkv_format", "sbhd"))
    if layout not in ("sbhd", "bshd"):
        raise LookupError(f"the layout of its queries and keys is {layout}, which is not supported")
    q, k = (x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(1, 2) for x in (q, k))
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
        return logits_of(q, k, scale, "causal" in told, ~mask)  # true marks masked keys
    if "padding" in told or told == "arbitrary":
        raise LookupError("its mask is not a boolean tensor, which is the only kind supported")
    return logits_of(q, k, scale, "causal" in told, None)


def _window(module: nn.Module, given: Kwargs) -> Any:
    """Return the window of keys that a row attends to, or None for all keys."""
    window: Any = given.get("window_size") or getattr(module, "window_size", None)
    window = window or _config(module, "window_size")
    return window if window and tuple(window) not in ((-1, -1), (-1, 0)) else None


def _ranks_of_context(module: nn.Module) -> int:
    size = _config(module, "context_parallel_size")
    group: Any = getattr(module, "cp_group", None)
    of_group = group.size() if hasattr(group, "size") else 1
    return max(size if isinstance(size, int) else 1, of_group)


def _config(module: nn.Module, name: str) -> Any:
    return getattr(getattr(module, "config", None), name, None)


def rows_of(queries: int, logits: int) -> list[int]:
    """Return the indices of the rows to compute.

    Args:
        queries: number of rows.
        logits: number of logits in one row, summed over all heads.

    Example:
        >>> rows_of(100, 1000)[:3], rows_of(100, 1000)[-1], rows_of(8, 1000)
        ([6, 12, 18], 99, [0, 1, 2, 3, 4, 5, 6, 7])
    """
    n = max(1, min(ROWS, queries, _LOGITS // max(logits, 1)))
    return [(i + 1) * queries // n - (1 if i + 1 == n else 0) for i in range(n)] if n < queries else list(range(queries))


def logits_of(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the logits of some rows, float32 [batch, heads, rows, keys]. Keys that a row does not attend to have -inf.

    Args:
        q: [batch, heads, queries, features]
        k: [batch, heads or fewer, keys, features]
        causal: whether row i attends only to keys up to i.
        mask: broadcast to [batch, heads, queries, keys]. Floats are added to logits. Booleans mark the keys to attend to.
    """
    batch, heads, queries = q.shape[:3]
    keys = k.shape[2]
    rows = torch.tensor(rows_of(queries, batch * heads * keys), device=q.device)
    k = k.repeat_interleave(heads // k.shape[1], 1) if k.shape[1] != heads else k
    found = q[:, :, rows].double() @ k.double().transpose(-1, -2) * scale
    if causal:
        found = found.masked_fill(torch.arange(keys, device=q.device) > rows[:, None], -math.inf)
    if mask is not None:
        of_rows = mask.expand(*torch.broadcast_shapes(mask.shape, (1, 1, queries, keys)))[:, :, rows]
        found = found.masked_fill(~of_rows, -math.inf) if of_rows.dtype == torch.bool else found + of_rows.double()
    return found.float()


def zero_masked_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits with zeros for keys of zero weight, such as masked keys."""
    weights = _weights(logits)
    return torch.where(weights == 0, 0.0, logits)


def sum_attention_entropies(logits: torch.Tensor) -> torch.Tensor:
    """Return the number of rows, the sum of their entropies (nats), and the sum of the weights of the first key.

    The entropy of a row is that of its weights. The result is float64 [3].

    Args:
        logits: [batch, heads, rows, keys], -inf for keys that a row does not attend to.
    """
    weights = _weights(logits)
    entropies = torch.special.entr(weights).sum(-1)
    counts = entropies.isfinite() & (weights.sum(-1) > 0)
    of_rows = torch.where(counts, entropies, 0.0), torch.where(counts, weights[..., 0], 0.0)
    return torch.stack([counts.double().sum(), *(x.sum() for x in of_rows)])


def _weights(logits: torch.Tensor) -> torch.Tensor:
    """Return the weights in float64, with zeros in rows that attend to no key."""
    blind = (logits == -math.inf).all(-1, keepdim=True)
    return torch.where(blind, 0.0, logits.double().softmax(-1))
