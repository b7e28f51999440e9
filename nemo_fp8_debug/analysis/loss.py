"""What the loss of a run did: how low it came, whether it went bad, and since when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

#: relative rise of the smoothed loss, over its own minimum or over another run, that counts
RISE = 0.05

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LossCurve:
    """Losses by step, and their running median, which a lone spike does not move."""

    steps: npt.NDArray[np.int64]
    losses: Floats
    smooth: Floats

    @classmethod
    def of(cls, table: pl.DataFrame) -> LossCurve:
        """From the `losses` table of a record; a non-finite loss counts as infinite."""
        table = table.unique("step", keep="last").sort("step")
        losses = table["loss"].to_numpy().astype(np.float64)
        losses = np.where(np.isfinite(losses), losses, np.inf)
        half = max(1, len(losses) // 40)
        windows = [losses[max(0, i - half) : i + half + 1] for i in range(len(losses))]
        return cls(table["step"].to_numpy(), losses, np.array([np.median(w) for w in windows]))

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
    def diverged_at(self) -> int | None:
        """First step from which the smoothed loss stays more than `RISE` above its own minimum; None: it did not."""
        if not len(self.smooth):
            return None
        start = int(np.argmin(self.smooth))
        return self._stays(self.smooth > self.smooth[start] + RISE * abs(self.smooth[start]), after=start)

    def above(self, other: LossCurve) -> int | None:
        """First step from which the smoothed loss stays more than `RISE` above the other run's; None: it does not."""
        if not len(self.smooth) or not len(other.smooth):
            return None
        reference = np.interp(self.steps, other.steps, other.smooth)
        return self._stays(self.smooth > reference + RISE * np.abs(reference), after=-1)

    def _stays(self, high: npt.NDArray[np.bool_], after: int) -> int | None:
        low = np.flatnonzero(~high)
        first = max(after, int(low[-1]) if len(low) else -1) + 1
        return int(self.steps[first]) if first < len(high) else None
