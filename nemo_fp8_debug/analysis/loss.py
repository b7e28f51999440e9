"""What the loss of a run did: how low it came, whether it went bad, and since when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

#: relative rise of the smoothed loss, over its own minimum or over another run, that counts ...
RISE = 0.05
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
    def noise(self) -> float:
        """Standard deviation of the smoothed loss, from the median distance of the losses from it."""
        finite = np.isfinite(self.losses) & np.isfinite(self.smooth)
        if not finite.any():
            return 0.0
        of_one = float(np.median(np.abs(self.losses - self.smooth)[finite])) / 0.6745
        return float(np.sqrt(np.pi / 2) * of_one / np.sqrt(2 * self.half + 1))  # of a median, Gaussian noise

    @property
    def diverged_at(self) -> int | None:
        """First step from which the smoothed loss stays above its own minimum for good; None: it did not."""
        if not len(self.smooth):
            return None
        start = int(np.argmin(self.smooth))
        return self._stays_above(np.full_like(self.smooth, self.smooth[start]), self.noise, after=start)

    def above(self, other: LossCurve) -> int | None:
        """First step from which the smoothed loss stays above the other run's for good; None: it does not."""
        if not len(self.smooth) or not len(other.smooth):
            return None
        reference = np.interp(self.steps, other.steps, other.smooth)
        return self._stays_above(reference, float(np.hypot(self.noise, other.noise)), after=-1)

    def _stays_above(self, reference: Floats, noise: float, after: int) -> int | None:
        """First step behind `after` from which the loss exceeds the reference to the end, for longer than half a window."""
        high = self.smooth > reference + np.maximum(RISE * np.abs(reference), SIGMAS * noise)
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
