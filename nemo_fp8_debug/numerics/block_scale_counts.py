"""How the scales of a tensor's blocks are distributed: counts that add up, and what is told of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .block_scaling import CHUNK, BlockRule, block_amax, matrix
from .formats import FloatFormat
from .metric_names import BLOCK_SCALES

#: codes of scales, and behind them a place for blocks of zeros, which need none
CODES = 256
EMPTY = CODES
#: E8M0 and the exponents of float32: codes of the smallest scale and of the largest
_POWERS = (0, 254)
#: E4M3: from zero, which loses its block, to the least subnormal; and 448
_E4M3 = (1, 0x7E)


def count_block_scales(x: torch.Tensor, rule: BlockRule, role: str, fmt: FloatFormat) -> torch.Tensor:
    """How often each scale occurs among the blocks of an operand; no host synchronization.

    Args:
        x: [..., features], any floating dtype.
        fmt: format of the codes.

    Returns:
        int64 [257] on x's device, by what is kept beside the codes: the byte of an E8M0 or E4M3 scale, the exponent's byte
        of a float32 one, which is scale_inv. The last place counts blocks of zeros.
    """
    rows = matrix(x) if x.numel() else x.new_zeros(0, 1)
    counts = torch.zeros(CODES + 1, dtype=torch.int64, device=x.device)
    if not rows.numel():
        return counts
    block = rule.block_in(rows, role)
    chunks = rows.split(max(1, CHUNK // rows.shape[1] // block[0]) * block[0])
    whole = torch.stack([block_amax(c, block).amax() for c in chunks]).amax()
    for chunk in chunks:
        scales = rule.scales_in(chunk, block, whole, fmt)
        codes = _codes(scales.stored, scales.scale_inv)
        empty = block_amax(chunk, block) == 0
        found = torch.where(empty, EMPTY, codes.long()).flatten()
        counts += torch.zeros_like(counts).scatter_add_(0, found, torch.ones_like(found))
    return counts


def _codes(stored: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    if stored.element_size() == 1:
        return stored.view(torch.uint8)
    return scale_inv.float().abs().view(torch.int32) >> 23


def distributions(counts: torch.Tensor, rules: Sequence[BlockRule]) -> dict[str, list[float | int | None]]:
    """Columns of B operands, as `BLOCK_SCALES`; None where no block has values.

    Scales are those that are kept, by which codes are multiplied; of float32 ones the power of two at or below. Of NVFP4
    they are those of the first level.

    Args:
        counts: int64 [B, 257], as `count_block_scales` gives them.
        rules: B of them.
    """
    columns: dict[str, list[float | int | None]] = {name: [] for name in BLOCK_SCALES}
    for row, rule in zip(counts.tolist(), rules, strict=True):
        for name, value in zip(BLOCK_SCALES, _distribution(row, rule), strict=True):
            columns[name].append(value)
    return columns


def _distribution(row: Sequence[int], rule: BlockRule) -> tuple[float | int | None, ...]:
    counts, total = row[:CODES], sum(row[:CODES])
    if not total:
        return 0, row[EMPTY], None, None, None, None, None
    values = _values(rule.two_level)
    low, high = _E4M3 if rule.two_level else _POWERS
    codes = [code for code, count in enumerate(counts) if count]
    reached, middle = 0, codes[0]
    for middle in codes:  # the lower of two in the middle
        reached += counts[middle]
        if 2 * reached >= total:
            break
    smallest, largest = sum(counts[: low + 1]), sum(counts[high:])
    share = 100 / total
    return total, row[EMPTY], values[codes[0]], values[middle], values[codes[-1]], share * smallest, share * largest


def _values(is_e4m3: bool) -> list[float]:
    if is_e4m3:
        return torch.arange(CODES, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    return torch.exp2(torch.arange(CODES, dtype=torch.float64) - 127).tolist()
