"""What the loss of a run did: how low it came, whether it went bad, and since when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

#: relative rise of the smoothed loss, over its own minimum or over another run, that counts ...
RISE = 0.05
#: the same, and the standard deviations, where runs see the same data and are compared batch by batch
GAP, GAP_SIGMAS = 0.02, 5.0
#: ... unless the curve's own noise is larger: standard deviations of the smoothed loss that count
SIGMAS = 8.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LossCurve:
    """Losses by step, and their running median over a sixth of the run, which a lone spike does not move."""

    steps: npt.NDArray[np.int64]
    losses: Floats
    smooth: Floats
    #: half the width of the running median, in steps
    half: int

    @classmethod
    def of(cls, table: pl.DataFrame) -> LossCurve:
        """From the `steps` table of a record; a non-finite loss counts as infinite."""
        table = table.filter(pl.col("loss").is_not_null()).unique("step", keep="last").sort("step")
        losses = table["loss"].to_numpy().astype(np.float64)
        losses = np.where(np.isfinite(losses), losses, np.inf)
        half = max(2, len(losses) // 12)
        return cls(table["step"].to_numpy(), losses, _running_median(losses, half), half)

    @property
    def final(self) -> float | None:
        """Smoothed loss at the end; None without losses."""
        return float(self.smooth[-1]) if len(self.smooth) else None

    @property
    def lowest(self) -> tuple[int, float] | None:
        """Step and value of the smoothed minimum."""
        if not len(self.smooth):
            return None
        i = int(np.argmin(self.smooth))
        return int(self.steps[i]), float(self.smooth[i])

    @property
    def scatter(self) -> float:
        """Standard deviation of the losses around the smoothed one, from their median distance."""
        finite = np.isfinite(self.losses) & np.isfinite(self.smooth)
        if not finite.any():
            return 0.0
        return float(np.median(np.abs(self.losses[finite] - self.smooth[finite]))) / 0.6745

    @property
    def noise(self) -> float:
        """Standard deviation of the smoothed loss: that of a median over Gaussian noise."""
        return float(np.sqrt(np.pi / 2) * self.scatter / np.sqrt(2 * self.half + 1))

    @property
    def diverged_at(self) -> int | None:
        """First step from which the smoothed loss stays above its own minimum for good; None: it did not."""
        if not len(self.smooth):
            return None
        start = int(np.argmin(self.smooth))
        return self._stays_above(np.full_like(self.smooth, self.smooth[start]), RISE, self.noise, after=start)

    def above(self, other: LossCurve) -> int | None:
        """First step from which the loss stays above the other run's for good; None: it does not.

        Where both runs have a loss at each step it is their difference, batch by batch, that is smoothed: runs that see the
        same data have most of their noise in common.
        """
        if not len(self.smooth) or not len(other.smooth):
            return None
        at = np.searchsorted(other.steps, self.steps)
        if not np.array_equal(other.steps[np.minimum(at, len(other.steps) - 1)], self.steps):
            reference = np.interp(self.steps, other.steps, other.smooth)
            return self._stays_above(reference, RISE, float(np.hypot(self.noise, other.noise)), after=-1)
        with np.errstate(invalid="ignore"):
            gap = np.nan_to_num(self.losses - other.losses[at], nan=0.0, posinf=np.inf, neginf=-np.inf)
        reference = other.smooth[at]
        apart = LossCurve(self.steps, gap, _running_median(gap, self.half), self.half)
        least = np.maximum(GAP * np.abs(reference), GAP_SIGMAS * apart.noise)
        return apart._for_baseline(apart.smooth > least, after=-1)

    def _stays_above(self, reference: Floats, part: float, noise: float, after: int) -> int | None:
        least = np.maximum(part * np.abs(reference), SIGMAS * noise)
        return self._for_baseline(self.smooth > reference + least, after)

    def _for_baseline(self, high: npt.NDArray[np.bool_], after: int) -> int | None:
        """First step behind `after` from which it is high to the end, for longer than half a window."""
        low = np.flatnonzero(~high)
        first = max(after, int(low[-1]) if len(low) else -1) + 1
        return int(self.steps[first]) if first < len(high) - self.half else None


def _running_median(losses: Floats, half: int) -> Floats:
    """Over `half` losses on either side, windows as wide at either end as in the middle."""
    width = min(len(losses), 2 * half + 1)
    if not width:
        return losses
    medians = pl.Series(losses).rolling_median(width).to_numpy()[width - 1 :]
    result: Floats = medians[np.clip(np.arange(len(losses)) - half, 0, len(losses) - width)]
    return result
