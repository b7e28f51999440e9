"""Compare errors of GEMM results with the bounds of their arithmetic, and find the rank with the largest error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...numerics.gemm_error import sample_indices
from ...numerics.product_check import CHECKED

#: why a product cannot be checked; ranks exchange the index
REASONS = (
    "",
    "the result of the GEMM was not seen",
    "how the engine casts an operand is unknown",
    "codes are rounded stochastically, in a way that cannot be repeated",
    "its operands are gathered inside its module from several ranks",
    "its result is summed over ranks inside its module, and was not seen before",
    "one of its operands, or its result, exists only inside its module",
    "it multiplies a copy of an operand that is transformed first, or whose cast is not known",
    "its weight is stored in blocks, with a copy for this product that was not read",
    "a foreign hook may change X or W",
    "a foreign hook changed dY after it was observed",
    "it is unknown how ranks add up its gradient",
    "ranks did not add up its gradient in this step",
    "the gradient that the optimizer uses was not seen",
    "some summands of its gradient were not seen",
    "its gradient is not finite, or may have too many roundings to be checked",
)
NOT_SEEN, UNKNOWN_CAST, BY_CHANCE, GATHERED, ADDED_UP, INSIDE, UNKNOWN_COPY, STORED, HOOKED, CHANGED = range(1, 11)
OTHER_REDUCTION, NOT_REDUCED, GRADIENT_NOT_SEEN, PARTS_MISSING, ROUNDINGS = range(11, len(REASONS))
#: name of the check in addition to products: whether an optimizer's gradient is the sum of the ranks' gradients
REDUCTION = "reduction"
#: largest number of rows and columns of a gradient to compare
REDUCED_ROWS = 8

#: a rank's numbers for a product: the reason why it cannot be checked or 0, the shape of its result, and its block
FOUND = ("reason", "result_rows", "result_columns", *CHECKED)
#: numbers of several ranks for a product: counts of each outcome, and `FOUND` of the rank with the largest error
OF_RANKS = ("ranks_within", "ranks_beyond", "ranks_unknown", "values_of_all", "rank", *FOUND)
#: float64 by (layer, product), in the order of `FOUND` or of `OF_RANKS`
ProductsFound = Mapping[tuple[str, str], torch.Tensor]
_RATIOS = ("value_ratio", "row_ratio", "column_ratio", "block_ratio")
#: columns that are null if the product could not be checked
_OF_BLOCK = ("factor", "relative_error", "shape", "row", "column", "values_beyond", "rows_beyond", "columns_beyond")
#: number of ranks that fit into a severity code
_RANKS = 1 << 15


def compute_error_over_bound(found: Mapping[str, float]) -> float:
    """Return the largest ratio of an error to its bound, over values, rows, columns and the block."""
    return max(found[name] for name in _RATIOS)


def rank_severities(found: Sequence[torch.Tensor | None], rank: int) -> torch.Tensor:
    """Return the severity of each product, int32 [products]: larger for larger errors, -1 if there is no result.

    Any two ranks have different severities."""
    codes = []
    for one in found:
        of = None if one is None else dict(zip(FOUND, one.tolist(), strict=True))
        if of is None:
            codes.append(-1)
            continue
        level = 0
        if not of["reason"]:
            ratio = compute_error_over_bound(of)
            octaves = math.log2(min(max(ratio, 2.0**-60), 2.0**60)) + 60
            level = _RANKS - 1 if ratio == math.inf else 1 + int(256 * octaves)
        codes.append(level * _RANKS + _RANKS - 1 - rank % _RANKS)
    return torch.tensor(codes, dtype=torch.int32)


def of_a_rank(found: torch.Tensor | None, rank: int, is_worst: bool) -> torch.Tensor:
    """Return numbers to be summed over ranks, float64 in the order of `OF_RANKS`. Exactly one rank is the worst."""
    row = torch.zeros(len(OF_RANKS), dtype=torch.float64)
    if found is None:
        return row
    of = dict(zip(FOUND, found.tolist(), strict=True))
    outcome = 2 if of["reason"] else int(compute_error_over_bound(of) > 1)
    row[outcome], row[3] = 1, of["values"]
    if is_worst:
        row[4], row[5:] = rank, found
    return row


def make_verification_columns(found: ProductsFound, kinds: Mapping[str, str], rows: int, step: int) -> dict[str, list[Any]]:
    """Return the columns, with a row for each product.

    Args:
        found: results in the order of `OF_RANKS`.
        kinds: kinds of GEMMs, by name.
        rows: number of rows and columns that were compared.
        step: sampled step.
    """
    named = {key: dict(zip(OF_RANKS, of.tolist(), strict=True)) for key, of in found.items()}
    about = [{"layer": layer, "gemm": kinds[layer], "product": product} for layer, product in named]
    table = [row | _row(of, _rows_of(row["product"], rows), step) for row, of in zip(about, named.values(), strict=True)]
    return {name: [row[name] for row in table] for name in table[0]} if table else {}


def _rows_of(product: str, rows: int) -> int:
    return REDUCED_ROWS if product == REDUCTION else rows


def _row(of: Mapping[str, float], rows: int, step: int) -> dict[str, Any]:
    known = not of["reason"]
    ratio = compute_error_over_bound(of) if known else None
    told: dict[str, Any] = {
        "outcome": "unknown" if ratio is None else "beyond" if ratio > 1 else "within",
        "reason": REASONS[int(of["reason"])] or None,
        "rank": int(of["rank"]),
        "ranks": int(of["ranks_within"] + of["ranks_beyond"] + of["ranks_unknown"]),
        "ranks_beyond": int(of["ranks_beyond"]),
        "ranks_unknown": int(of["ranks_unknown"]),
        "values": int(of["values_of_all"]),
        "error_over_bound": ratio,
    }
    of_block = dict.fromkeys(_OF_BLOCK)
    if known:
        row, column = _place(of)
        of_block |= {
            "relative_error": math.sqrt(of["error2"] / of["exact2"]) if of["exact2"] > 0 else None,
            "factor": of["factor"] if math.isfinite(of["factor"]) else None,
            "shape": _shape(of, rows) if ratio is not None and ratio > 1 else None,
            "row": _in_whole(row, of["result_rows"], rows, step, False),
            "column": _in_whole(column, of["result_columns"], rows, step, True),
            **{name: int(of[name]) for name in ("values_beyond", "rows_beyond", "columns_beyond")},
        }
    return told | of_block


def _place(of: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Return the row and column, among those compared, with the largest error. None means all rows or all columns."""
    places = {
        "value_ratio": (of["row"], of["column"]),
        "row_ratio": (of["worst_row"], None),
        "column_ratio": (None, of["worst_column"]),
        "block_ratio": (None, None),
    }
    return places["value_ratio" if of["value_ratio"] > 1 else max(_RATIOS, key=lambda name: of[name])]


def _in_whole(place: float | None, n: float, rows: int, step: int, columns: bool) -> int | None:
    """Return the position in the whole result, or None if `place` is None."""
    return None if place is None else int(sample_indices(int(n), rows, torch.device("cpu"), step, columns)[int(place)])


def _shape(of: Mapping[str, float], rows: int) -> str:
    """Return which part is wrong: `one value`, `values`, `rows`, `columns` or `all`."""
    if not of["values_beyond"]:
        return {"row_ratio": "rows", "column_ratio": "columns"}.get(max(_RATIOS, key=lambda name: of[name]), "all")
    if of["values_beyond"] == 1:
        return "one value"
    high, wide = (min(of[name], rows) for name in ("result_rows", "result_columns"))
    for shape, hit, lines, length in (
        ("rows", of["rows_hit"], high, wide),
        ("columns", of["columns_hit"], wide, high),
    ):
        if 2 * hit <= lines and 2 * of["values_beyond"] >= hit * length:
            return shape
    return "all" if of["block_ratio"] > 1 or 8 * of["values_beyond"] >= high * wide else "values"


class WorstProductReduction:
    """This rank's contribution to the two collectives of a sample."""

    def __init__(self, keys: Sequence[tuple[str, str]], rank: int) -> None:
        """
        Args:
            keys: (layer, product), the same on all ranks.
        """
        self._keys, self._rank = keys, rank

    def compute_single_rank_result(self, found: ProductsFound) -> dict[tuple[str, str], torch.Tensor]:
        """Return what `unpack_all_ranks` would return for a run with a single rank."""
        return {key: of_a_rank(of, self._rank, is_worst=True) for key, of in found.items()}

    def compute_severities(self, found: ProductsFound) -> torch.Tensor:
        """Return the severities, int32 [products]. Their maximum over ranks identifies the rank with the largest error."""
        return rank_severities([found.get(key) for key in self._keys], self._rank)

    def collect_sums(self, found: ProductsFound, worst: torch.Tensor) -> torch.Tensor:
        """Return numbers to be summed over ranks, float64 [products, columns].

        Args:
            worst: int32 [products], the maximum over ranks.
        """
        none = torch.zeros(0, len(OF_RANKS), dtype=torch.float64)
        mine = (self.compute_severities(found) == worst).tolist()
        rows = [of_a_rank(found.get(key), self._rank, is_mine) for key, is_mine in zip(self._keys, mine, strict=True)]
        return torch.stack(rows) if rows else none

    def unpack_all_ranks(self, added: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
        """Return the results of any rank by (layer, product).

        Args:
            added: float64 [products * columns], the sums over all ranks.
        """
        rows = zip(self._keys, added.view(-1, len(OF_RANKS)), strict=True)
        return {key: row for key, row in rows if row[:3].sum() > 0}
