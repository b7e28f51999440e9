"""Logits of attention: Q K^T, scaled and masked, of some rows of each head, in float32.

Fused kernels keep their logits to themselves. So those of a few rows are computed again, from the queries, keys and mask
that the kernel is given: arguments of the attentions of Megatron and Transformer Engine, or of torch's operator. Where a
softmax of torch is applied to logits, rows of those are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...capture.backends.base import Args, Kwargs
from ...capture.operator_mode import OperatorMode, over_dtensors
from ...core.error_guard import enter_again, leave_modes

#: rows of each head, spread over the sequence; the last one, which sees the most keys, among them
ROWS = 16
#: logits of a call, at the most, as long as each head has a row
_LOGITS = 1 << 22
#: names that kernels have for the same
_QUERY, _KEY, _MASK, _CAUSAL = ("query", "q"), ("key", "k"), ("attn_mask", "attn_bias"), ("is_causal",)


class Scores(OperatorMode):
    """Sees one forward of an attention."""

    def __init__(self, found: Callable[[torch.Tensor], None]) -> None:
        """
        Args:
            found: gets logits, float32 [batch, heads, rows, keys], -inf where a row does not see a key.
        """
        super().__init__()
        self._found = found
        #: whether any were found, and what went wrong with others
        self.seen = False
        self.failed: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func` as it is."""
        if over_dtensors(types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__ if getattr(func, "namespace", "") == "aten" else ""
        if "softmax" in name and "backward" not in name:
            self._look(lambda: of_scores(args[0], args[1]))
        elif "scaled_dot_product" in name and "backward" not in name:
            self._look(lambda: of_operator(func, args, kwargs))
        return func(*args, **kwargs)

    def _look(self, logits: Callable[[], torch.Tensor | None]) -> None:
        modes = leave_modes()
        try:
            if (found := logits()) is not None:
                self.seen = True
                self._found(found)
        except Exception as error:
            self.failed = error
        finally:
            enter_again(modes)


def of_scores(scores: Any, dim: int) -> torch.Tensor | None:
    """Rows of what a softmax of torch is given; None: it is not over the keys of an attention.

    Args:
        scores: [..., heads, queries, keys]
    """
    if not isinstance(scores, torch.Tensor) or scores.dim() < 3 or dim not in (-1, scores.dim() - 1):
        return None
    rows = rows_of(scores.shape[-2], math.prod(scores.shape[:-2]) * scores.shape[-1])
    picked = scores[..., torch.tensor(rows, device=scores.device), :].float()
    return picked.reshape(-1, 1, *picked.shape[-2:])


def of_operator(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Of torch's operator for attention, whichever kernel it is."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    q, k, mask, causal = (next((given[n] for n in names if n in given), None) for names in (_QUERY, _KEY, _MASK, _CAUSAL))
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor) or q.dim() != 4:
        return None
    scale = given.get("scale")
    return logits_of(q, k, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, bool(causal), mask)


def of_module(module: nn.Module, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Of an attention of Megatron's or Transformer Engine's.

    Raises:
        LookupError: it is called in a way that is not read here.
    """
    names = ("query", "key", "value", "attention_mask", "attn_mask_type")
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | {n.removesuffix("_layer"): v for n, v in kwargs.items()}
    q, k, mask = given.get("query"), given.get("key"), given.get("attention_mask")
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor) or q.dim() != 4:
        raise LookupError("its queries and keys are no tensors of four dimensions, as those of packed sequences")
    kind = given.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
    told = str(getattr(kind, "name", kind)).lower()
    if told not in ("causal", "no_mask", "padding", "arbitrary", "padding_causal"):
        raise LookupError(f"its mask is {told}, which is not read here")
    if window := _window(module, given):
        raise LookupError(f"it is limited to a window of {window}")
    if _ranks_of_context(module) > 1:
        raise LookupError("ranks have parts of its keys (context parallelism)")
    if any(given.get(name) is not None for name in ("attention_bias", "core_attention_bias", "packed_seq_params")):
        raise LookupError("a bias or a packing of sequences is given to it")
    if (of_softmax := getattr(module, "softmax_type", "vanilla")) != "vanilla" or _config(module, "softmax_type") not in (
        None,
        "vanilla",
    ):
        raise LookupError(f"its softmax is {of_softmax}, which is not read here")
    scale = getattr(module, "softmax_scale", None)
    if not isinstance(scale, float):
        raise LookupError("it does not tell its scale")
    scale *= getattr(getattr(module, "scale_mask_softmax", None), "scale", None) or 1.0
    layout = str(given.get("qkv_format") or getattr(module, "qkv_format", "sbhd"))
    if layout not in ("sbhd", "bshd"):
        raise LookupError(f"its queries and keys lie as {layout}")
    q, k = (x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(1, 2) for x in (q, k))
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
        return logits_of(q, k, scale, "causal" in told, ~mask)  # true is what is masked
    if "padding" in told or told == "arbitrary":
        raise LookupError("its mask is given in a way that is not read here")
    return logits_of(q, k, scale, "causal" in told, None)


def _window(module: nn.Module, given: Kwargs) -> Any:
    """Of keys that a row sees, if that is limited."""
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
    """Which rows are looked at.

    Args:
        queries: how many there are.
        logits: of a row of each head.

    Example:
        >>> rows_of(100, 1000)[:3], rows_of(100, 1000)[-1], rows_of(8, 1000)
        ([6, 12, 18], 99, [0, 1, 2, 3, 4, 5, 6, 7])
    """
    n = max(1, min(ROWS, queries, _LOGITS // max(logits, 1)))
    return [(i + 1) * queries // n - (1 if i + 1 == n else 0) for i in range(n)] if n < queries else list(range(queries))


def logits_of(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, mask: torch.Tensor | None) -> torch.Tensor:
    """float32 [batch, heads, rows, keys] of some rows, -inf where a row does not see a key.

    Args:
        q: [batch, heads, queries, features]
        k: [batch, heads or fewer, keys, features]
        causal: whether row i sees keys up to i.
        mask: as broadcast to [batch, heads, queries, keys]: what is added, or where keys are seen.
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


def seen_logits(logits: torch.Tensor) -> torch.Tensor:
    """With zeros where a row gives a key no weight, as where it does not see it."""
    weights = _weights(logits)
    return torch.where(weights == 0, 0.0, logits)


def attention_sums(logits: torch.Tensor) -> torch.Tensor:
    """float64 [3]: rows, and the sums over them of the entropy of their weights (nats) and of the weight of the first key.

    Args:
        logits: [batch, heads, rows, keys], -inf where a row does not see a key.
    """
    weights = _weights(logits)
    entropies = torch.special.entr(weights).sum(-1)
    counts = entropies.isfinite() & (weights.sum(-1) > 0)
    of_rows = torch.where(counts, entropies, 0.0), torch.where(counts, weights[..., 0], 0.0)
    return torch.stack([counts.double().sum(), *(x.sum() for x in of_rows)])


def _weights(logits: torch.Tensor) -> torch.Tensor:
    """float64; zeros in rows that see nothing."""
    blind = (logits == -math.inf).all(-1, keepdim=True)
    return torch.where(blind, 0.0, logits.double().softmax(-1))
