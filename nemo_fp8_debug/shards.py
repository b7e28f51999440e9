"""What is known of an operand after a sampled step: on one rank, or of the whole tensor once ranks have added theirs up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .numerics.figures import Moments, QuantizationSums
from .numerics.history import Key
from .numerics.sketch import Sketch


@dataclass(frozen=True)
class Cast:
    """How an operand was cast, in words."""

    recipe: str
    format: str
    #: see `ScaleInUse.source`
    source: str
    #: of the tensor that was looked at
    dtype: str


@dataclass
class Shard:
    """The part of an operand that a rank saw in a step, over all its micro-batches; parts of the same operand add up."""

    #: (layer, role)
    key: Key
    #: what the GEMM does in its layer, see `Gemm.kind`
    kind: str
    cast: Cast
    #: of all calls together
    sketch: Sketch
    #: largest finite magnitude
    amax: float
    #: of float32 operands one row, whose sketches are rounded
    moments: Moments | None
    #: one row under the scales in use; None: under current scaling, whose scale follows from the amax of the whole
    sums: QuantizationSums | None
    #: one row under each recipe that sketches cannot answer for, by its name
    weighed: dict[str, QuantizationSums] = field(default_factory=dict)
    #: smallest and largest scale in use; None: not known yet, or blocks have scales of their own
    scales: tuple[float, float] | None = None
    #: sketches of what was cast with one scale each, where they are kept apart, and the recipe and format of each
    parts: Sequence[tuple[Cast, float | None, Sketch]] = ()
    calls: int = 0
    #: place in the order of execution of the first call that held NaN or infinity
    nonfinite_order: int | None = None
    #: ranks whose shards are in it
    shards: int = 1
    #: ranks whose shards should be, and are not
    missing: int = 0

    @property
    def one_scale(self) -> bool:
        """Whether all of it was cast, or is measured, with one scale."""
        return self.scales is None or self.scales[0] == self.scales[1]
