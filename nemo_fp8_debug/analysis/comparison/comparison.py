"""What sets a run apart from a good one, as plain data; `summary` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from ..runs.run import Run
from ..runs.settings import differences
from .drift import TAIL
from .groups import groups

#: figures that are shown under other recipes
_WEIGHED = ("relative_error", "underflow_pct", "overflow_pct", "mse")


@dataclass(frozen=True)
class Comparison:
    """What sets a run apart from a good one."""

    good: Run
    #: with the good run's names for its layers
    bad: Run
    twin: Run | None
    #: a row a tensor, farthest drifted first; columns as in `drifts`, and the first onset and lead of each; the experts of a
    #: layer are one
    tensors: pl.DataFrame
    #: the same of those experts one by one
    experts: pl.DataFrame
    #: since when tensors are out of the good run's band, earliest first; as in `onsets`, but the experts of a layer are one,
    #: and with lead: steps from the onset to that of the loss, negative behind it, null where the loss does not leave
    left: pl.DataFrame
    #: what to bear in mind, in sentences: how names were matched, what was left out, what cannot be told
    notes: Sequence[str] = ()

    @property
    def loss_left(self) -> int | None:
        """Since when the bad run's loss stays above the good run's; None: it does not, or is not known."""
        return self.bad.loss.above(self.good.loss)

    def groups(self) -> pl.DataFrame:
        """Where the tensors are that left; see `groups`."""
        return groups(self.tensors)

    def differences(self) -> pl.DataFrame:
        """In what the runs' settings differ; see `differences`."""
        return differences(self.good.fingerprint, self.bad.fingerprint)

    def what_if(self) -> pl.DataFrame:
        """The bad run's tensors under recipes that were weighed or replayed: medians over its later half, a row a recipe."""
        steps = self.bad.figures["step"].unique().sort()
        tail = steps.tail(max(1, round(len(steps) * TAIL)))
        rows = self.bad.others.filter(pl.col("step").is_in(tail.implode()))
        return rows.group_by("layer", "role", "recipe", maintain_order=True).agg(pl.median(*_WEIGHED))
