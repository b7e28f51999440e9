"""Compute the products of a GEMM from some rows and columns of its operands.

These products show the error from quantization, and whether the GEMM returned the right result.

We copy only a few rows and columns of each operand, and free them after computing their product. From the forward of a
layer to its backward, we keep k columns of X and k columns of W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ...capture.backends.base import Args, CastInUse, Kwargs
from ...capture.backends.parallel import is_summed_over_ranks
from ...capture.dispatcher import EventDispatcher
from ...capture.gemms import Gemm
from ...capture.operands import OperandAccumulator
from ...capture.patching import find_emulation
from ...capture.tensors import cast_like_autocast, take_local_part
from ...kernels import quantize_dequantize
from ...numerics.block_scaling import BlockScalingRule, view_as_matrix
from ...numerics.gemm_error import (
    PRODUCTS,
    ProductTerms,
    RowSample,
    Side,
    compute_current_scale,
    copy_quantized_rows,
    sample_indices,
)
from ...numerics.tensor_scaling import CurrentScaling
from .checks import CheckQueue, MultipliedOperandRows, ProductChecks
from .results import ResultObserver, UnreducedResultMode
from .verification import BY_CHANCE, STORED, UNKNOWN_CAST, UNKNOWN_COPY


def _scale(m: torch.Tensor, cast: CastInUse) -> torch.Tensor | BlockScalingRule:
    """Return the scale of a whole operand, on its device, or the rule of its blocks."""
    if isinstance(cast.scale, CurrentScaling):
        return compute_current_scale(m, cast.scale, cast.format)
    return cast.scale.to(m.device) if isinstance(cast.scale, torch.Tensor) else cast.scale


@dataclass(frozen=True)
class ProductMeasurementOptions:
    """The measurements of products to make in addition to observing operands."""

    #: number of rows and columns of each product to measure errors on
    errors: int = 0
    #: number of rows and columns of each product to check results on
    verify: int = 0
    #: whether to keep the rows of dW, from which we compute the error of the optimizer's step
    keeps_gradients: bool = False

    @property
    def copied_rows(self) -> int:
        """Number of rows and columns to copy. Both measurements use the same rows and columns."""
        return max(self.errors, self.verify)


@dataclass(frozen=True)
class _Kept:
    """Rows of an operand, kept until the rows of the other operand arrive."""

    #: the rows and their quantized values, or None if they are not needed or not known
    rows: RowSample | None
    used: MultipliedOperandRows


class GemmProducts:
    """The three products of one GEMM in the first counted call of a step."""

    def __init__(
        self,
        gemm: Gemm,
        operands: Mapping[str, OperandAccumulator],
        chosen: ProductMeasurementOptions,
        step: int,
        guard: Callable[[str], AbstractContextManager[None]],
        queue: CheckQueue,
        dispatcher: EventDispatcher,
    ) -> None:
        """
        Args:
            operands: operands by role.
            step: sampled step, which determines the rows to take.
            guard: returns a context that keeps an exception out of the training loop.
            queue: checks results.
            dispatcher: dispatcher of the step.
        """
        self._dispatcher = dispatcher
        self.name = gemm.name
        self._gemm, self._operands, self._chosen, self._step, self._guard = gemm, operands, chosen, step, guard
        self._call: int | None = None
        self._kept: dict[Side, _Kept] = {}
        self._done: set[str] = set()
        self._sums: dict[str, torch.Tensor] = {}
        #: rows of this call's dW, computed exactly and from quantized operands, kept until the optimizer has stepped
        self.weight_gradient: tuple[torch.Tensor, torch.Tensor] | None = None
        self._counted = False
        self._checks = ProductChecks(chosen.copied_rows, step, queue) if chosen.verify else None
        self._results: ResultObserver | None = None

    def add_operand(self, role: str, x: torch.Tensor, call: int, use: CastInUse | None) -> None:
        """Copy the needed rows of an operand, and keep no reference to the operand. X determines which call counts.

        Args:
            call: number of the operand's forward call.
            use: how the operand is cast in this call, if known.
        """
        with self._guard("while computing parts of outputs"):
            m = view_as_matrix(take_local_part(x))
            if role == "input" and self._call is None and m.numel():
                self._call = call
            if call == self._call and m.numel():
                operand = self._operands[role]
                self._counted |= role != "weight" and operand.is_counted(x)
                if role == "grad_output" and self._checks:
                    self._checks.add_observed_gradient(m)
                self._take(role, m, use or operand.in_use)

    @property
    def has_checked_sums(self) -> bool:
        """True if the module sums its output over ranks, and we check the output."""
        return self._checks is not None and is_summed_over_ranks(self._gemm.module, "fprop")

    def make_unreduced_result_mode(self) -> UnreducedResultMode | None:
        """Return a mode that sees the sums of the call that is about to run, or None if they are not checked."""
        if self._results is None or self._checks is None:
            return None
        return UnreducedResultMode(self._checks, "fprop", self._results.shape)

    def begin_call(self, args: Args, kwargs: Kwargs) -> None:
        """Prepare for a forward call that counts. Observe the output of the first such call."""
        self._results = None
        if self._checks and self._call is None:
            with self._guard("while looking at what a GEMM returned"):
                self._results = ResultObserver(self._gemm, self._checks, args, kwargs, self._guard, self._dispatcher)

    def end_call(self, call: int, given: tuple[Args, Kwargs], weight: torch.Tensor | None, out: Any) -> None:
        """Observe the output of a call.

        Args:
            given: arguments of the module.
            weight: weight that the module multiplied.
            out: output of the module.
        """
        results, self._results = self._results, None
        if results and call == self._call:
            with self._guard("while looking at what a GEMM returned"):
                results.observe_output(given, weight, out)

    def _take(self, role: str, m: torch.Tensor, use: CastInUse) -> None:
        scales: dict[int, torch.Tensor | BlockScalingRule] = {}  # most operands have the same cast in both of their products
        for product, sides in PRODUCTS.items():
            cast = use.select_product_cast(product)
            for second, side in enumerate(sides):
                if side[0] != role or product in self._done:
                    continue
                of = m.t() if side[1] else m
                at = sample_indices(len(of), self._chosen.copied_rows, m.device, self._step, bool(second))
                rows = None
                if cast is not None and use.source != "stored" and (self._chosen.errors or _is_quantized(cast)):
                    if id(cast) not in scales:
                        scales[id(cast)] = _scale(m, cast)
                    rows = copy_quantized_rows(of, at, scales[id(cast)], role, cast.format)
                scale = scales.get(id(cast))
                self._kept[side] = _Kept(rows, self._used(side, of, at, rows, scale, use, cast))
            self._multiply(product, *sides)

    def _used(
        self,
        side: Side,
        of: torch.Tensor,
        at: torch.Tensor,
        rows: RowSample | None,
        scale: torch.Tensor | BlockScalingRule | None,
        use: CastInUse,
        cast: CastInUse | None,
    ) -> MultipliedOperandRows:
        """Return the rows in the form in which the GEMM multiplies them."""
        if not self._checks:
            return MultipliedOperandRows(None, len(of))
        if reason := _untold(side, use, cast):
            return MultipliedOperandRows(None, len(of), reason)
        assert cast is not None
        if use.decoded is not None:
            codes = view_as_matrix(use.decoded.values)
            return MultipliedOperandRows((codes.t() if side[1] else codes).index_select(0, at), len(of), quantized=True)
        if not _is_quantized(cast):
            return MultipliedOperandRows(
                cast_like_autocast(of.index_select(0, at) if rows is None else rows.values), len(of)
            )
        assert rows is not None and scale is not None
        if not find_emulation(self._gemm.module):
            return MultipliedOperandRows(rows.quantized, len(of), quantized=True)
        return MultipliedOperandRows(_emulated(side, of, at, rows, scale, cast), len(of))

    def _multiply(self, product: str, first: Side, second: Side) -> None:
        """Compute a product once both operands have arrived. Operands whose summed dimensions differ give no product."""
        if first in self._kept and second in self._kept:
            a, b = self._kept.pop(first), self._kept.pop(second)
            self._done.add(product)
            terms = None
            if self._chosen.errors and a.rows and b.rows and a.rows.values.shape[1] == b.rows.values.shape[1]:
                terms = ProductTerms.from_rows(a.rows, b.rows)
                self._sums[product] = terms.error_sums()
                if product == "wgrad" and self._chosen.keeps_gradients:
                    self.weight_gradient = terms.values, terms.values + terms.output_error
            if self._checks:
                splits = self._gemm.backend.splits_accumulator(self._gemm.module, product)
                self._checks.add_product_operands(product, a.used, b.used, splits, _exact(a, b, terms))

    def move_tensors(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each sum by the result of `to`."""
        self._sums = {product: to(sums) for product, sums in self._sums.items()}

    def collect_output_sums(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return this rank's `OutputSums` in host memory.

        Return an empty mapping if this rank's X and dY are copies of tensors that another rank counts.
        """
        if not self._counted:
            return {}
        return {(self.name, product): torch.cat([sums.cpu(), torch.ones(1)]) for product, sums in self._sums.items()}

    def collect_product_checks(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return this rank's `ProductChecks.collect_product_errors`, even if its operands are counted on another rank."""
        return (
            {(self.name, product): found for product, found in self._checks.collect_product_errors().items()}
            if self._checks
            else {}
        )


def _exact(a: _Kept, b: _Kept, terms: ProductTerms | None) -> torch.Tensor | None:
    """Return the product that the GEMM computes, if it was already computed for the errors of outputs."""
    if terms is None or a.rows is None or b.rows is None:
        return None
    if a.used.rows is a.rows.values and b.used.rows is b.rows.values:
        return terms.values
    if a.used.rows is a.rows.quantized and b.used.rows is b.rows.quantized:
        return terms.values + terms.output_error
    return None


def _emulated(
    side: Side, of: torch.Tensor, at: torch.Tensor, rows: RowSample, scale: torch.Tensor | BlockScalingRule, cast: CastInUse
) -> torch.Tensor:
    """Return rows as the emulation casts them: rounded to the operand's dtype, and with the same copy for both products."""
    if isinstance(scale, torch.Tensor):
        return quantize_dequantize(rows.values, scale, cast.format)
    if side[1]:
        return scale.quantize(of.t(), side[0], cast.format).dequantize().t().index_select(0, at).to(of.dtype)
    return rows.quantized.to(of.dtype)


def _is_quantized(cast: CastInUse) -> bool:
    return cast.source in ("engine", "expected")


def _untold(side: Side, use: CastInUse, cast: CastInUse | None) -> int:
    """Return why the GEMM's operand is unknown, an index into `REASONS`, or 0 if the operand is known."""
    if use.decoded is not None and side[1] and isinstance(use.scale, BlockScalingRule):
        return STORED
    if "unknown" in (use.source, cast and cast.source):
        return UNKNOWN_CAST
    if "expected" in (use.source, cast and cast.source):
        return BY_CHANCE
    return UNKNOWN_COPY if cast is None else 0
