"""The metrics by which a tensor can be out of a band, and what counts of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...numerics.limits import LEAST_VALUES
from ..runs.grid import Floats


@dataclass(frozen=True)
class Evidence:
    """A metric by which a tensor can be out of the band."""

    metric: str
    #: the least rise that counts, however steady the baseline is; on a log2 scale where `log2`
    least: float
    #: whether it is what a loss of precision looks like, and counts only where more is lost, or above `anyway`
    of_error: bool = False
    #: how many times the least rise counts even if no more is lost
    anyway: float = np.inf
    #: whether equal ratios mean the same, and not equal differences
    log2: bool = False
    #: what is less is rounding, on a log2 scale
    floor: float = 0.01
    #: scaled values below this count as this: they are all equally good
    good: float = -np.inf
    #: 1: a rise counts; -1: a fall
    sign: int = 1
    #: how many times the least rise a sample must show, to be told as a transient if fewer than three in a row do
    transient: float = 6.0
    #: values of a tensor that must be affected at least, where `least` is in percent of them
    least_values: int = 0
    #: part of what is usual that a rise must be at least: FP4 loses so much that its noise is points
    least_part: float = 0.0

    def least_of(self, usual: Floats) -> Floats:
        """The least rise that counts, above what is usual (scaled)."""
        least: Floats = np.fmax(self.least, self.least_part * usual)
        return least

    def scaled(self, x: Floats) -> Floats:
        """To a scale on which equal steps mean the same."""
        return np.maximum(self.sign * (np.log2(np.maximum(x, self.floor)) if self.log2 else x), self.good)

    def unscaled(self, x: Floats) -> Floats:
        """Back from it."""
        return np.exp2(self.sign * x) if self.log2 else self.sign * x


#: how many times the least rise counts against healthy operands of another model; of gradients more, which differ from task
#: to task
OF_OTHER_MODELS, OF_GRADIENTS = 2.0, 4.0
#: in the order in which one explains the next: a stale scale clips, and clipping is an error
EVIDENCE = (
    Evidence("nonfinite", 0.5),
    Evidence("scale_ratio_log2", 1.0, good=0.0),  # no value is clipped
    Evidence("scale_ratio_log2", 6.0, sign=-1, transient=2.0),
    Evidence("overflow_pct", 0.05, of_error=True, least_values=LEAST_VALUES, least_part=0.5),
    Evidence("underflow_pct", 1.0, of_error=True, least_part=0.5),
    Evidence("relative_error", 0.585, of_error=True, log2=True),  # half as much again
    Evidence("outlier_log2", 3.0, of_error=True, transient=3.0, anyway=2.5),
)
