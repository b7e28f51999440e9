"""What the loss of a run did: how low it came, whether it went bad, and since when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from .onset import stays
from .smoothing import persistence, running_median

#: rise of the smoothed loss above its own minimum that counts, as a part of that, and in standard deviations of its noise
RISE, SIGMAS = 0.02, 8.0

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
        return cls(table["step"].to_numpy(), losses, running_median(losses, half), half)

    @property
    def final(self) -> float | None:
        """Smoothed loss at the end; None without losses."""
        return float(self.smooth[-1]) if len(self.smooth) else None

    @property
    def lowest(self) -> tuple[int, float] | None:
        """Step and value of the smoothed minimum; None without losses that are finite."""
        if not np.isfinite(self.smooth).any():
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
        """Standard deviation of the smoothed loss: that of a median over Gaussian noise that persists as this one does."""
        with np.errstate(invalid="ignore"):
            lasting = persistence(self.losses - self.smooth)
        return float(np.sqrt(np.pi / 2) * self.scatter * lasting / np.sqrt(2 * self.half + 1))

    @property
    def has_enough(self) -> bool:
        """Whether there are enough losses to tell whether they diverge."""
        return len(self.losses) > 2 * self.half

    @property
    def lost_at(self) -> int | None:
        """First step from which no loss is a number any longer, for two or more; None: the last two are not all lost."""
        lost = ~np.isfinite(self.losses)
        if len(lost) < 2 or not lost[-2:].all():
            return None
        numbers = np.flatnonzero(~lost)
        return int(self.steps[numbers[-1] + 1 if len(numbers) else 0])

    def _least_rise(self, floor: float) -> float:
        return max(RISE * abs(floor), SIGMAS * self.noise)

    @property
    def visible_rise(self) -> float:
        """The smallest rise above the smoothed minimum that counts, in percent of it; NaN without losses."""
        floor = float(self.smooth.min()) if len(self.smooth) else 0.0
        return 100 * self._least_rise(floor) / abs(floor) if floor else float("nan")

    @property
    def diverged_at(self) -> int | None:
        """First step from which the smoothed loss stays above its own minimum for good; None: it does not."""
        if not len(self.smooth):
            return None
        lowest = int(np.argmin(self.smooth))
        floor = float(self.smooth[lowest])
        high = self.smooth > floor + self._least_rise(floor)
        with np.errstate(invalid="ignore"):
            first = stays(high, self.losses - floor, self.half, after=lowest)
        return None if first is None else int(self.steps[first])
