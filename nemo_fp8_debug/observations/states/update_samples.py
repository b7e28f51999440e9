"""Some rows and columns of a weight and of its moments around a step of Adam, and what is wrong with that step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...capture.operand_stats import OperandStats
from ...capture.tensors import is_dtensor
from ...numerics.adam import UPDATE_SUMS, Adam, AdamValues, update_sums
from ...numerics.gemm_error import spread
from .table import UPDATE_METRICS

#: exact and quantized dW of the first call of a layer, the same rows and columns; None: not known
Products = Callable[[str], tuple[torch.Tensor, torch.Tensor] | None]
_OPTIONS = ("amsgrad", "maximize")


def adam_of(optimizer: Any, parameter: Any) -> Adam | None:
    """The rule that an optimizer has stepped a parameter by; None: it is none of those that are known.

    Known are torch's Adam and AdamW, those of torchao, and Transformer Engine's FusedAdam.
    """
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    decoupled = _is_decoupled(optimizer, group or {})
    if group is None or decoupled is None or any(group.get(name) for name in _OPTIONS):
        return None
    step = optimizer.state.get(parameter, {}).get("step", group.get("step"))
    if step is None:
        return None
    one, two = (float(beta) for beta in group["betas"])
    step = step if group.get("bias_correction", True) else None
    return Adam(group["lr"], (one, two), group["eps"], group["weight_decay"], decoupled, step)


def _is_decoupled(optimizer: Any, group: Any) -> bool | None:
    """Whether weight decay is apart from the gradient; None: it is no Adam that is known."""
    kinds = {(base.__module__.partition(".")[0], base.__name__) for base in type(optimizer).__mro__}
    if ("torch", "AdamW") in kinds:
        return True
    if ("torch", "Adam") in kinds:
        return bool(group.get("decoupled_weight_decay", False))
    if ("torchao", "_AdamBase") in kinds:
        return bool(optimizer.is_adamw)
    return bool(optimizer.adam_w_mode) if ("transformer_engine", "FusedAdam") in kinds else None


class UpdateSample:
    """A step of one weight, begun when its optimizer is about to take it."""

    def __init__(self, rows: int, step: int, weight: Any, first: Any, second: Any, gradient: Any) -> None:
        """
        Args:
            rows: and as many columns, that are looked at.
            step: of the run, which decides where they lie.
            weight: what the optimizer steps by, a matrix.
            first, second: its moments, as numbers; None: they begin with zero.
            gradient: that it steps by.

        Raises:
            LookupError: ranks have parts of them, or they are no matrices of one shape.
        """
        self._k, self._step, self._shape = rows, step, tuple(weight.shape)
        self._before = self._held(weight, first, second)
        self._gradient = self._picked(gradient)

    def sums(
        self, adam: Adam, weight: Any, first: Any, second: Any, products: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """As `update_sums`, once the step is taken."""
        after = self._held(weight, first, second)
        return update_sums(adam, self._before, after, self._gradient, products, weight.dtype == torch.float32)

    def _held(self, weight: Any, first: Any, second: Any) -> AdamValues:
        picked = self._picked(weight)
        return AdamValues(picked, *(torch.zeros_like(picked) if x is None else self._picked(x) for x in (first, second)))

    def _picked(self, x: Any) -> torch.Tensor:
        if is_dtensor(x) or not isinstance(x, torch.Tensor) or tuple(x.shape) != self._shape or x.dim() != 2:
            raise LookupError("they are no matrices of one shape")
        rows, columns = (spread(n, self._k, x.device, self._step, bool(i)) for i, n in enumerate(x.shape))
        return x.detach().index_select(0, rows).index_select(1, columns).double()


def update_columns(stats: Sequence[OperandStats]) -> dict[str, dict[str, float | None]]:
    """Return `UPDATE_METRICS` of the weights whose steps were compared with exact ones, by layer."""
    known = [(s.key[0], s.further) for s in stats if s.key[1] == "update" and s.further is not None and s.further[0] > 0]
    return {layer: of_update(sums) for layer, sums in known}


def of_update(sums: torch.Tensor) -> dict[str, float | None]:
    """The errors of a step, as parts of the norm of the exact one.

    Args:
        sums: float64, as `numerics.adam.UPDATE_SUMS`.

    Example:
        >>> found = of_update(torch.tensor([9.0, 4.0, 1.0, 1.0, 1.0, 0.0, 100.0, 1.0, 1.0], dtype=torch.float64))
        >>> found["update_error"], found["error_of_first_moment"]
        (0.2, 0.1)
    """
    of = dict(zip(UPDATE_SUMS, sums.tolist(), strict=True))
    parts = [of[f"{name}_error2"] for name in ("weight_gradient", "first_moment", "second_moment", "weight")]
    errors: list[float | None] = [(x / of["update2"]) ** 0.5 if of["update2"] else None for x in (of["error2"], *parts)]
    if of["parts_with_gradient"] < of["parts"]:
        errors[1] = None
    return dict(zip(UPDATE_METRICS, errors, strict=True))
