"""What is known of an operand after a sampled step: on one rank, or of the whole tensor once ranks have added theirs up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..core.keys import MIXED, Key
from ..numerics.histogram import Histogram
from ..numerics.metrics import Moments, QuantizationSums, merge


@dataclass(frozen=True)
class Cast:
    """How an operand was cast, in words."""

    recipe: str
    format: str
    #: see `ScaleInUse.source`; MIXED where operands that were added up differ in it
    source: str
    #: of the tensor that was looked at
    dtype: str
    #: of the copy that another product multiplies: its recipe, format and source; "" if it holds the same, or is not known
    copy_recipe: str = ""
    copy_format: str = ""
    copy_source: str = ""


@dataclass
class OperandStats:
    """The part of an operand that a rank saw in a step, over all its micro-batches; parts of the same operand add up."""

    #: (layer, role)
    key: Key
    #: what the GEMM does in its layer, see `Gemm.kind`
    kind: str
    cast: Cast
    #: of all calls together
    histogram: Histogram
    #: largest finite magnitude
    amax: float
    #: of float32 operands one row, whose histograms are rounded
    moments: Moments | None
    #: one row under the scales in use; None: under current scaling, whose scale follows from the amax of the whole
    sums: QuantizationSums | None
    #: one row under each recipe that histograms cannot answer for, by its name
    what_if: dict[str, QuantizationSums] = field(default_factory=dict)
    #: one row of the copy that another product multiplies, where it is measured and all calls have one
    copy: QuantizationSums | None = None
    #: smallest and largest scale in use; None: not known yet, or blocks have scales of their own
    scales: tuple[float, float] | None = None
    #: histograms of what was cast with one scale each, where they are kept apart, and the recipe and format of each
    parts: Sequence[tuple[Cast, float | None, Histogram]] = ()
    #: int64 [257], how often each scale of a block occurs, where that was asked for
    block_scales: torch.Tensor | None = None
    #: float64, sums that a histogram cannot tell, as `activations` has them
    further: torch.Tensor | None = None
    calls: int = 0
    #: place in the order of execution of the first call that held NaN or infinity
    nonfinite_order: int | None = None
    #: ranks whose stats are in it
    ranks: int = 1
    #: ranks whose stats should be, and are not
    missing: int = 0

    @property
    def one_scale(self) -> bool:
        """Whether all of it was cast, or is measured, with one scale."""
        return self.scales is None or self.scales[0] == self.scales[1]


def added_up(key: Key, stats: Sequence[OperandStats]) -> OperandStats:
    """Whole operands of the same recipe, format and dtype as one, but for their sums: scales may still be unknown."""
    first = stats[0]
    direct = [s.moments for s in stats if s.moments]
    orders = [s.nonfinite_order for s in stats if s.nonfinite_order is not None]
    sources = {s.cast.source for s in stats}
    scales = [s.block_scales for s in stats if s.block_scales is not None]
    return OperandStats(
        key=key,
        kind=first.kind,
        cast=replace(first.cast, source=first.cast.source if len(sources) == 1 else MIXED),
        histogram=Histogram.total([s.histogram for s in stats]),
        amax=max(s.amax for s in stats),
        moments=merge(Moments.concat(direct)) if direct else None,
        sums=None,
        block_scales=torch.stack(scales).sum(0) if len(scales) == len(stats) else None,
        calls=sum(s.calls for s in stats),
        nonfinite_order=min(orders, default=None),
        ranks=sum(s.ranks for s in stats),
        missing=sum(s.missing for s in stats),
    )
