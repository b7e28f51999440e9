"""Compare some rows and columns of a GEMM's output with the product of its operands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...capture.tensors import take_local_part
from ...numerics.block_scaling import view_as_matrix
from ...numerics.gemm_error import sample_indices
from ...numerics.product_check import CHECKED, FLOAT32, CheckedBlock, ExactBlock, GemmAccumulation, check_product_blocks
from .verification import CHANGED, GATHERED, NOT_SEEN

#: largest number of partial sums that a GEMM is split into
_SPLITS = 8
_HOPPER = (9, 0)


def accumulation_of(device: torch.device, dtype: torch.dtype, terms: int, fp8: bool, splits: bool) -> GemmAccumulation:
    """Return how a GEMM adds up the terms of a product.

    Args:
        device: device of the GEMM.
        dtype: dtype of its operands before any cast.
        terms: number of terms in each sum.
        fp8: whether the engine quantizes its operands.
        splits: whether the engine adds up the tensor core's partial sums in float32.
    """
    if device.type != "cuda":
        return FLOAT32
    if fp8:
        return _of_fp8(device, terms, splits)
    if dtype == torch.float32:
        return GemmAccumulation(besides=2.0**-9) if torch.backends.cuda.matmul.allow_tf32 else FLOAT32
    return _of_tensor_cores(terms, _partial_roundoff(dtype))


def _of_tensor_cores(terms: int, partial: float) -> GemmAccumulation:
    return GemmAccumulation(2.0**-23, 16, bias=2.0**-24 * (terms // 16 + 1), besides=_SPLITS * partial)


def _partial_roundoff(dtype: torch.dtype) -> float:
    """Return the roundoff of partial sums, which may be stored in the dtype of the operands."""
    flags = torch.backends.cuda.matmul
    if dtype == torch.bfloat16:
        return 2.0**-8 if flags.allow_bf16_reduced_precision_reduction else 0.0
    return 2.0**-11 if flags.allow_fp16_reduced_precision_reduction else 0.0


def _of_fp8(device: torch.device, terms: int, splits: bool) -> GemmAccumulation:
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return _of_tensor_cores(terms, 0.0)
    coarse = 4 if splits else terms // 32 + 1
    return GemmAccumulation(2.0**-23, 128, bias=2.0**-14 * coarse, besides=2.0**-13 * coarse)


@dataclass(frozen=True)
class MultipliedOperandRows:
    """Rows of an operand as the GEMM multiplied them."""

    #: [k, c], or None if unknown
    rows: torch.Tensor | None
    #: number of rows of the operand
    of: int
    #: why rows are unknown, an index into `REASONS`
    reason: int = 0
    #: whether the engine has cast the operand
    quantized: bool = False


class CheckQueue:
    """Blocks of a step that wait to be checked together, in the background if they are few."""

    #: largest number of waiting blocks. A block with 64 rows and columns takes about 60 KB
    LONGEST = 512

    def __init__(self) -> None:
        self._waiting: list[tuple[ProductChecks, str, CheckedBlock]] = []
        self._checks: list[ProductChecks] = []

    def serve(self, checks: ProductChecks) -> None:
        """When `move_tensors` is called, also move the tensors of these checks."""
        self._checks.append(checks)

    def add_block(self, checks: ProductChecks, product: str, block: CheckedBlock) -> None:
        """Add a block."""
        self._waiting.append((checks, product, block))
        if len(self._waiting) >= self.LONGEST:
            self.check_blocks()

    def move_tensors(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor by the result of `to`."""
        self._waiting = [(checks, product, block.moved(to)) for checks, product, block in self._waiting]
        for checks in self._checks:
            checks.move_tensors(to)

    def check_blocks(self) -> None:
        """Check the waiting blocks, and pass each result to its owner."""
        waiting, self._waiting = self._waiting, []
        kinds: dict[tuple[object, ...], list[tuple[ProductChecks, str, CheckedBlock]]] = defaultdict(list)
        for entry in waiting:
            kinds[entry[2].batch_key].append(entry)
        for entries in kinds.values():
            found = check_product_blocks([block for *_, block in entries])
            for (checks, product, _), row in zip(entries, found, strict=True):
                checks.found_of[product] = row


@dataclass(frozen=True)
class _Returned:
    """A block of a GEMM's output."""

    block: torch.Tensor
    shape: tuple[int, int]
    #: bias or earlier result that was added to the product, or None
    added: torch.Tensor | None


class ProductChecks:
    """Checks of the three products of one GEMM in one call."""

    def __init__(self, rows: int, step: int, queue: CheckQueue) -> None:
        """
        Args:
            rows: number of rows and columns to compare in each result.
            step: sampled step, which determines the positions of these rows and columns.
            queue: checks the blocks.
        """
        self._rows, self._step, self._queue = rows, step, queue
        queue.serve(self)
        self._how: dict[str, GemmAccumulation] = {}
        self._exact: dict[str, tuple[ExactBlock, tuple[int, int]]] = {}
        self._returned: dict[str, _Returned] = {}
        #: results by product, in the order of `CHECKED`
        self.found_of: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._reasons: dict[str, int] = {}
        self._not_computed: set[str] = set()
        #: a block of dY and the shape of dY, once as observed and once as the GEMM receives dY, in either order. `_changed`
        #: is a bool scalar: whether the two blocks differ
        self._gradients: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}
        self._changed: torch.Tensor | None = None

    def move_tensors(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each result by the result of `to`."""
        self._changed = None if self._changed is None else to(self._changed)
        self.found_of = {product: to(found) for product, found in self.found_of.items()}

    def add_observed_gradient(self, dy: torch.Tensor) -> None:
        """Note dY as it was observed.

        Args:
            dy: [rows, columns].
        """
        self._note_gradient("seen", dy)

    def add_multiplied_gradient(self, dy: torch.Tensor) -> None:
        """Note dY as the GEMM receives it, perhaps changed by hooks, without host synchronization."""
        self._note_gradient("multiplied", view_as_matrix(take_local_part(dy.detach())))

    def _note_gradient(self, which: str, m: torch.Tensor) -> None:
        self._gradients.setdefault(which, (self.copy_compared_block(m), tuple(m.shape)))
        if len(self._gradients) == 2 and self._changed is None:
            (seen, shape), (now, other) = self._gradients["seen"], self._gradients["multiplied"]
            if shape == other:
                self._changed = ~((seen == now) | (seen.isnan() & now.isnan())).all()

    def add_product_operands(
        self,
        product: str,
        a: MultipliedOperandRows,
        b: MultipliedOperandRows,
        splits: bool = False,
        exact: torch.Tensor | None = None,
    ) -> None:
        """Note the operands of a product, A and B of A B^T.

        Args:
            splits: whether the engine adds up the partial sums of an FP8 tensor core in float32.
            exact: A B^T in float64, or None if it is not known.
        """
        if a.rows is None or b.rows is None:
            self.mark_uncheckable(product, a.reason or b.reason)
        elif a.rows.shape[1] != b.rows.shape[1]:
            self.mark_uncheckable(product, GATHERED)
        else:
            fp8 = a.quantized and b.quantized
            self._how[product] = accumulation_of(a.rows.device, a.rows.dtype, a.rows.shape[1], fp8, splits)
            self._exact[product] = ExactBlock.from_rows(a.rows, b.rows, exact), (a.of, b.of)
            self._compare(product)

    def add_product_result(
        self, product: str, result: torch.Tensor, bias: torch.Tensor | None = None, before: torch.Tensor | None = None
    ) -> None:
        """Copy a block of a product's result.

        Args:
            result: [..., columns], in the layout of A B^T.
            bias: [columns], added to the product.
            before: the values that the product was added to, as a block that `copy_compared_block` returned.
        """
        m = view_as_matrix(take_local_part(result.detach()))
        if self.has_result(product) or not m.numel():
            return
        if bias is not None:
            bias = take_local_part(bias.detach())
            before = bias[sample_indices(len(bias), self._rows, bias.device, self._step, True)]
        self._returned[product] = _Returned(self.copy_compared_block(m), (m.shape[0], m.shape[1]), before)
        self._compare(product)

    def copy_compared_block(self, m: torch.Tensor) -> torch.Tensor:
        """Return a copy of the matrix's rows and columns to compare."""
        rows, columns = (sample_indices(n, self._rows, m.device, self._step, bool(i)) for i, n in enumerate(m.shape))
        return m.index_select(0, rows).index_select(1, columns)

    def has_result(self, product: str) -> bool:
        """Return True if the result of a product was seen."""
        return product in self._returned or product in self._shapes

    def mark_uncheckable(self, product: str, reason: int) -> None:
        """Note why a product cannot be checked, as an index into `REASONS`. Keep the first reason."""
        self._reasons.setdefault(product, reason)

    def mark_not_computed(self, product: str) -> None:
        """Note that the run does not compute a product, because its gradient is not needed."""
        self._not_computed.add(product)

    def _compare(self, product: str) -> None:
        if product not in self._exact or product not in self._returned or product in self._reasons:
            return
        (exact, shape), returned = self._exact.pop(product), self._returned.pop(product)
        if shape != returned.shape:
            self.mark_uncheckable(product, GATHERED)
        else:
            self._shapes[product] = shape
            self._queue.add_block(self, product, CheckedBlock(returned.block, exact, self._how[product], returned.added))

    def collect_product_errors(self) -> dict[str, torch.Tensor]:
        """Return the results by product in host memory, float64 in the order of `verification.FOUND`."""
        self._queue.check_blocks()
        if self._changed is not None and bool(self._changed):
            for product in ("dgrad", "wgrad"):
                self.found_of.pop(product, None)
                self.mark_uncheckable(product, CHANGED)
        of = {
            product: torch.cat([torch.tensor([0.0, *self._shapes[product]], dtype=torch.float64), found.cpu()])
            for product, found in self.found_of.items()
        }
        untold = dict.fromkeys(self._exact, NOT_SEEN) | self._reasons
        for product, reason in untold.items():
            if product not in of and product not in self._not_computed:
                of[product] = torch.zeros(3 + len(CHECKED), dtype=torch.float64)
                of[product][0] = reason
        return of
