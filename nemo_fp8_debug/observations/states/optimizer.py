"""Observe weight gradients and optimizer states around a step, and some rows and columns of a weight and its moments.

An optimizer updates parameters of the model or, in mixed precision, float32 copies of them, whole or a rank's part
(Megatron's `main_param`). We use the unclipped gradient of `capture/weight_gradients.py`. If that gradient is unknown, as
with DeepSpeed's ZeRO, we use the gradient that the optimizer uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ...capture.backends.base import make_unquantized_cast
from ...capture.dispatcher import EventDispatcher
from ...capture.gemms import Gemm
from ...capture.operand_stats import OperandStats
from ...capture.operands import OperandAccumulator, UncastAccumulator
from ...capture.optimizer_weights import OptimizerWeight, list_optimizer_weights
from ...capture.tensors import is_dtensor
from ...capture.weight_gradients import WeightGradient
from ...core.keys import STATES, Key
from ...numerics.adam import UPDATE_SUMS, Adam, AdamValues, compute_update_sums
from ...numerics.gemm_error import sample_indices
from ...numerics.recipe import Recipe
from .table import UPDATE_METRICS

#: returns the exact and the quantized dW of a layer's first call, in the same rows and columns, or None if unknown
Products = Callable[[str], tuple[torch.Tensor, torch.Tensor] | None]
_OPTIONS = ("amsgrad", "maximize")


def adam_of(optimizer: Any, parameter: Any) -> Adam | None:
    """Return Adam's rule for an optimizer's step of a parameter, or None if the optimizer is not supported.

    Supported are Adam and AdamW of torch and torchao, and Transformer Engine's FusedAdam.
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
    """Return whether weight decay is separate from the gradient, or None if the optimizer is not a supported Adam."""
    kinds = {(base.__module__.partition(".")[0], base.__name__) for base in type(optimizer).__mro__}
    if ("torch", "AdamW") in kinds:
        return True
    if ("torch", "Adam") in kinds:
        return bool(group.get("decoupled_weight_decay", False))
    if ("torchao", "_AdamBase") in kinds:
        return bool(optimizer.is_adamw)
    return bool(optimizer.adam_w_mode) if ("transformer_engine", "FusedAdam") in kinds else None


class UpdateSample:
    """A step of one weight. Create this object before the optimizer's step."""

    def __init__(self, rows: int, step: int, weight: Any, first: Any, second: Any, gradient: Any) -> None:
        """
        Args:
            rows: number of rows, and of columns, to compare.
            step: step of the run, which determines the positions of these rows and columns.
            weight: weight that the optimizer updates, a matrix.
            first, second: decoded moments, or None if they start at zero.
            gradient: gradient of the optimizer's step.

        Raises:
            LookupError: each rank has only a part of the tensors, or the tensors are not matrices of one shape.
        """
        self._k, self._step, self._shape = rows, step, tuple(weight.shape)
        self._before = self._held(weight, first, second)
        self._gradient = self._picked(gradient)

    def compute_update_sums(
        self, adam: Adam, weight: Any, first: Any, second: Any, products: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Return the result of `compute_update_sums`. Call this after the optimizer's step."""
        after = self._held(weight, first, second)
        return compute_update_sums(adam, self._before, after, self._gradient, products, weight.dtype == torch.float32)

    def _held(self, weight: Any, first: Any, second: Any) -> AdamValues:
        picked = self._picked(weight)
        return AdamValues(picked, *(torch.zeros_like(picked) if x is None else self._picked(x) for x in (first, second)))

    def _picked(self, x: Any) -> torch.Tensor:
        if is_dtensor(x) or not isinstance(x, torch.Tensor) or tuple(x.shape) != self._shape or x.dim() != 2:
            raise LookupError("weight, moments and gradient are not matrices of one shape")
        rows, columns = (sample_indices(n, self._k, x.device, self._step, bool(i)) for i, n in enumerate(x.shape))
        return x.detach().index_select(0, rows).index_select(1, columns).double()


def make_update_columns(stats: Sequence[OperandStats]) -> dict[str, dict[str, float | None]]:
    """Return `UPDATE_METRICS` of the weights whose steps were compared with exact ones, by layer."""
    known = [(s.key[0], s.further) for s in stats if s.key[1] == "update" and s.further is not None and s.further[0] > 0]
    return {layer: of_update(sums) for layer, sums in known}


def of_update(sums: torch.Tensor) -> dict[str, float | None]:
    """Return the errors of a step relative to the norm of the exact step.

    Args:
        sums: float64, in the order of `numerics.adam.UPDATE_SUMS`.

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


#: names of each state in optimizers; the first existing name counts
_NAMES = {
    "first_moment": ("exp_avg", "momentum_buffer"),
    "second_moment": ("exp_avg_sq",),
    "master_weight": ("master_param", "master_params", "master_weight"),
}


_LOOKING = "while looking at an optimizer's states"
_GRADIENT = "weight_gradient"
#: errors for states that are split over ranks or are not matrices. We do not compare steps of such weights
_NOT_WHOLE = (LookupError, TypeError)


def make_state_operands(
    gemms: Sequence[Gemm],
    roles: Sequence[str],
    what_if: Sequence[Recipe],
    counts: Callable[[Gemm], Callable[[torch.Tensor], bool]],
) -> dict[Key, OperandAccumulator]:
    """Return the operands that count the states of weights, by (layer, role).

    Args:
        roles: roles in `STATES`.
        what_if: other recipes to measure states under.
        counts: returns for a GEMM a test whether this rank counts a tensor in its weight's layout.
    """
    return {
        (gemm.name, role): UncastAccumulator(gemm, role, make_unquantized_cast(role), what_if, counts(gemm))
        for gemm in gemms
        for role in STATES
        if role in roles
    }


class StateCapture:
    """Observes the steps of all optimizers in one sampled step."""

    def __init__(
        self,
        operands: MutableMapping[Key, OperandAccumulator],
        guard: Callable[[str], AbstractContextManager[None]],
        rows: int,
        step: int,
        products: Products,
    ) -> None:
        """
        Args:
            operands: include the result of `make_state_operands`.
            guard: returns a context that keeps an exception out of the training loop.
            rows: number of rows and columns of each weight to compare with exact steps, or 0 for no comparison.
            step: sampled step, which determines the rows.
            products: returns dW by layer, if known.
        """
        self._operands, self._guard, self._rows, self._step, self._products = operands, guard, rows, step, products
        self._samples: dict[str, UpdateSample] = {}
        self._gemms = {name: operand.gemm for (name, role), operand in operands.items() if role in STATES}
        self._seen: set[Key] = set()
        #: weights before the step, by layer
        self._earlier: dict[str, Any] = {}
        self._stepped = False

    def subscribe(self, dispatcher: EventDispatcher) -> None:
        """Observe optimizers from now on."""
        dispatcher.watch_optimizer(partial(self._guard, _LOOKING), self._before, self._after)

    @property
    def has_no_optimizer_step(self) -> bool:
        """True if no optimizer updated any of the weights."""
        return bool(self._gemms) and not self._stepped

    def count_gradients(self, found: Sequence[WeightGradient]) -> None:
        """Count gradients, replacing earlier gradients of the same weights."""
        for names, x in found:
            for key in [(name, _GRADIENT) for name in names if (name, _GRADIENT) in self._operands]:
                self._operands[key] = _counted_anew(self._operands[key])
                if x is not None:
                    with self._guard(_LOOKING):
                        self._operands[key].add_tensor(x, 0)

    def _before(self, optimizer: Any) -> None:
        for stepped in list_optimizer_weights(optimizer, self._gemms):
            self._stepped = True
            key = stepped.name, _GRADIENT
            if key in self._operands:
                known, apart = self._operands[key], getattr(optimizer, "use_decoupled_grad", False)
                if apart and known.calls:  # `.grad` was counted, but the optimizer uses another gradient
                    known = self._operands[key] = _counted_anew(known)
                if not known.calls and not known.copies:
                    self._take(*key, stepped.select_weight_values(_gradient(optimizer, stepped.parameter)))
            if self._wants(stepped.name, "update"):
                self._earlier[stepped.name] = stepped.select_weight_values(stepped.parameter).detach().clone()
                self._begin_sample(stepped, optimizer)

    def _after(self, optimizer: Any) -> None:
        for stepped in list_optimizer_weights(optimizer, self._gemms):
            for role in _NAMES:
                self._take_state(stepped, role, optimizer)
            now = stepped.select_weight_values(stepped.parameter).detach()
            if stepped.parameter is not stepped.weight:
                self._take(stepped.name, "master_weight", now)
            if (earlier := self._earlier.pop(stepped.name, None)) is not None:
                self._take(stepped.name, "update", now.float() - earlier.float())
                self._end_sample(stepped, optimizer)

    def _begin_sample(self, stepped: OptimizerWeight, optimizer: Any) -> None:
        gradient = _gradient(optimizer, stepped.parameter)
        if self._rows and stepped.place is None and gradient is not None:
            with self._guard(_LOOKING), contextlib.suppress(*_NOT_WHOLE):
                held = _held(stepped, optimizer)
                self._samples[stepped.name] = UpdateSample(self._rows, self._step, *held, gradient)

    def _end_sample(self, stepped: OptimizerWeight, optimizer: Any) -> None:
        sample, operand = self._samples.pop(stepped.name, None), self._operands[stepped.name, "update"]
        adam = adam_of(optimizer, stepped.parameter) if sample else None
        if sample and adam and operand.calls:  # otherwise another rank counts the step
            with self._guard(_LOOKING), contextlib.suppress(*_NOT_WHOLE):
                held = _held(stepped, optimizer)
                operand.add_call_sums(sample.compute_update_sums(adam, *held, self._products(stepped.name)))

    def _take_state(self, stepped: OptimizerWeight, role: str, optimizer: Any) -> None:
        state = optimizer.state.get(stepped.parameter, {})
        name = next((name for name in _NAMES[role] if name in state), None)
        if name is not None and self._wants(stepped.name, role):
            with self._guard(_LOOKING):
                self._take(
                    stepped.name,
                    role,
                    stepped.select_weight_values(_decoded(state[name], optimizer, stepped.parameter, name)),
                )

    def _wants(self, name: str, role: str) -> bool:
        return (name, role) in self._operands and (name, role) not in self._seen

    def _take(self, name: str, role: str, x: Any) -> None:
        if isinstance(x, torch.Tensor) and self._wants(name, role):
            with self._guard(_LOOKING):
                self._seen.add((name, role))
                self._operands[name, role].add_tensor(x, 0)


def _counted_anew(operand: OperandAccumulator) -> OperandAccumulator:
    return type(operand)(operand.gemm, operand.role, operand.in_use, operand.what_if, operand.is_counted)


def _gradient(optimizer: Any, parameter: Any) -> Any:
    """Return the gradient of an optimizer's step. Transformer Engine's FusedAdam can keep it separate from `.grad`."""
    return getattr(parameter, "decoupled_grad" if getattr(optimizer, "use_decoupled_grad", False) else "grad", None)


def _held(stepped: OptimizerWeight, optimizer: Any) -> tuple[Any, Any, Any]:
    """Return the weight that an optimizer adds to, and its decoded moments. Missing moments are None."""
    parameter, found = stepped.parameter, dict[str, Any]()
    state = optimizer.state.get(parameter, {})
    for role, names in _NAMES.items():
        name = next((name for name in names if name in state), None)
        found[role] = None if name is None else _decoded(state[name], optimizer, parameter, name)
    weight = found["master_weight"]
    return parameter if weight is None else weight, found["first_moment"], found["second_moment"]


def _decoded(x: Any, optimizer: Any, parameter: Any, name: str) -> Any:
    """Return a decoded state. torchao's and Transformer Engine's optimizers store states in fewer bits, or scaled.

    Raises:
        TypeError: the state is a DTensor of Transformer Engine, and only Transformer Engine can decode it.
    """
    if type(x).__module__.partition(".")[0] == "torchao":
        return x.dequantize()
    unscaled = getattr(optimizer, "get_unscaled_state", None)
    if unscaled is None or (x.dtype in (torch.float32, torch.bfloat16) and type(x) in (torch.Tensor, torch.nn.Parameter)):
        return x
    if is_dtensor(x):
        if x.dtype in (torch.float32, torch.bfloat16):
            return x
        raise TypeError(f"{name} is a DTensor of {x.dtype}; this dtype is not supported if ranks shard the optimizer state")
    return unscaled(parameter, name)
