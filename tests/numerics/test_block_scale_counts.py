"""The distribution of the scales of blocks, against each block by itself."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from nemo_fp8_debug.numerics.block_scaling import BlockScalingRule, count_block_scales
from nemo_fp8_debug.numerics.formats import E2M1, E4M3
from nemo_fp8_debug.numerics.metric_columns import make_block_scale_columns
from nemo_fp8_debug.numerics.metric_names import BLOCK_SCALES
from nemo_fp8_debug.numerics.recipe import parse_recipe

NAMES = ["mxfp8", "mxfp8(square_weights=True)", "blockwise", "nvfp4", "nvfp4(four_over_six=MAE)", "nvfp4_torchao", "rowwise"]


def operand(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(70, 200, generator=torch.Generator().manual_seed(0))
    x *= torch.exp2(torch.randint(-30, 6, (70, 1), generator=torch.Generator().manual_seed(1)).float())
    x[:33, :64] = 0
    return x.to(dtype)


def stored_scales(x: torch.Tensor, rule: BlockScalingRule, role: str) -> tuple[list[float], int]:
    """Of each block as it is kept, and how many blocks are empty."""
    fmt = E2M1 if rule.two_level else E4M3
    made = rule.quantize(x, role, fmt)
    high, wide = made.block
    kept, empty = [], 0
    for i in range(math.ceil(x.shape[0] / high)):
        for j in range(math.ceil(x.shape[1] / wide)):
            if not x[i * high : (i + 1) * high, j * wide : (j + 1) * wide].any():
                empty += 1
            elif rule.two_level:
                kept.append(made.scales.stored[i, j].item())
            else:
                kept.append(2.0 ** math.floor(math.log2(made.scales.scale_inv[i, j].item())))
    return kept, empty


@pytest.mark.parametrize("role", ["input", "weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_each_block(name: str, dtype: torch.dtype, role: str) -> None:
    rule = parse_recipe(name).scaling
    assert isinstance(rule, BlockScalingRule)
    x = operand(dtype)
    counts = count_block_scales(x, rule, role, E2M1 if rule.two_level else E4M3)
    (found,) = zip(*make_block_scale_columns(counts[None], [rule]).values(), strict=True)
    kept, empty = stored_scales(x, rule, role)
    smallest, largest = (2.0**-9, 448.0) if rule.two_level else (2.0**-127, 2.0**127)
    expected = {
        "blocks": len(kept),
        "empty_blocks": empty,
        "scale_min": min(kept),
        "scale_median": statistics.median_low(kept),
        "scale_max": max(kept),
        "at_smallest_pct": 100 * sum(scale <= smallest for scale in kept) / len(kept),
        "at_largest_pct": 100 * sum(scale >= largest for scale in kept) / len(kept),
    }
    assert dict(zip(BLOCK_SCALES, found, strict=True)) == pytest.approx(expected, rel=1e-12)
    assert expected["at_largest_pct"] > 0 or not rule.two_level


def test_what_has_no_values() -> None:
    rule = parse_recipe("mxfp8").scaling
    assert isinstance(rule, BlockScalingRule)
    for x in (torch.zeros(4, 64), torch.zeros(0, 64)):
        counts = count_block_scales(x, rule, "input", E4M3)
        found = make_block_scale_columns(counts[None], [rule])
        assert found["blocks"] == [0] and found["empty_blocks"] == [2 * len(x)] and found["scale_median"] == [None]
