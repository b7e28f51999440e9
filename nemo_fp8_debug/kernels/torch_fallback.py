"""Count magnitude patterns and measure blocks with plain torch operations, on any device that torch supports."""

from __future__ import annotations

import torch

from ..numerics.block_scaling import CHUNK as CHUNK_OF_BLOCKS
from ..numerics.block_scaling import WHOLE_ROW, BlockScalingRule, quantization_sums_in_blocks
from ..numerics.formats import FloatFormat
from ..numerics.metrics import QuantizationSums

#: number of values handled at once, so that torch's indices take at most 64 MiB
CHUNK = 1 << 22
#: number of partial histograms. Neighboring values go to different histograms, because additions to one address run one
#: after the other
LANES = 64
#: number of values, in whole rows, to measure at once in float64, with few launches and at most about 200 MiB of memory
CHUNK_OF_ROWS = 1 << 22


def count_bit_patterns(values: torch.Tensor, counts: torch.Tensor) -> None:
    """Add to `counts[p]` how often the magnitude pattern `p` (sign bit cleared) occurs. Do not wait for the device.

    Args:
        values: int16 [n], on the device of `counts`.
        counts: int64 [32768], updated in place.
    """
    lanes = counts.new_zeros(LANES * len(counts))
    first = torch.arange(min(CHUNK, len(values)), device=counts.device) % LANES * len(counts)
    one = torch.ones((), dtype=torch.int64, device=counts.device)
    for chunk in values.split(CHUNK):
        index = chunk.to(torch.int64).bitwise_and_(0x7FFF).add_(first[: len(chunk)])
        lanes.scatter_add_(0, index, one.expand_as(index))
    counts += lanes.view(LANES, -1).sum(0)


def block_quantization_sums(
    x: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat, counted: object = None
) -> QuantizationSums:
    """Return the sums of an operand under a block rule.

    Args:
        x: [..., features], any floating dtype.
        counted: ignored.
    """
    in_rows = rule.get_block_shape(role)[1] == WHOLE_ROW and not (
        rule.rounds_stochastically or rule.has_value_dependent_scales
    )
    return quantization_sums_in_blocks(x, rule, role, fmt, CHUNK_OF_ROWS if in_rows else CHUNK_OF_BLOCKS)
