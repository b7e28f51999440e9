"""What sets a run apart from a baseline, as plain data; `summary` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl

from ...core.features import load_modules
from ...core.keys import UNCAST
from ..loss.outcome import MAX_GAP, LossOutcome
from ..loss.seeds import Beside
from ..runs.run import Run
from ..runs.settings import differences
from .drift import TAIL
from .groups import groups
from .layer_matching import sizes_of_weights

#: metrics that are shown under other recipes
_WEIGHED = ("relative_error", "underflow_pct", "overflow_pct", "mse")


@dataclass(frozen=True)
class Comparison:
    """What sets a run apart from a baseline."""

    baseline: Run
    #: with the baseline's names for its layers
    run: Run
    reference: Run | None
    #: a row a tensor, farthest drifted first; columns as in `drifts`, and the first onset and lead of each; the experts of a
    #: layer are one
    tensors: pl.DataFrame
    #: the same of those experts one by one
    experts: pl.DataFrame
    #: since when tensors are out of the baseline's band, earliest first; as in `onsets`, but the experts of a layer are one,
    #: and with lead: steps from the onset to that of the loss, negative behind it, null where the loss does not leave
    out_of_band: pl.DataFrame
    #: the same of the experts of layers whose experts are out as one, one by one
    experts_out_of_band: pl.DataFrame
    #: what to bear in mind, in sentences: how names were matched, what was left out, what cannot be told
    notes: Sequence[str] = ()
    #: percent that the loss may lie above the baseline's before it counts as harm
    max_gap: float = MAX_GAP
    #: what the loss is compared with, if that is not the baseline's: one of other baselines, or the mean of several
    beside: Beside | None = None

    @property
    def divergence_step(self) -> int | None:
        """Since when the run's loss stays above the baseline's; None: it does not, or is not known."""
        return self.loss.since

    @cached_property
    def loss(self) -> LossOutcome:
        """What the run's loss came to."""
        sizes = sizes_of_weights(self.run.metrics)
        same_model = None not in sizes.values() and sizes == sizes_of_weights(self.baseline.metrics)
        beside = Beside(self.baseline.loss) if self.beside is None else self.beside
        found = LossOutcome.of(self.run.loss, beside.curve, self.max_gap, same_model, beside.seeds)
        return found if self.reference is None else replace(found, reference=self.reference.loss)

    @cached_property
    def sampled_alike(self) -> bool:
        """Whether the runs sampled the same tensors at the same steps, all of them: then medians over samples that belong
        together are those of each run."""
        run, baseline = self.run.metrics, self.baseline.metrics
        same = run.tensors.equals(baseline.tensors) or set(run.tensors.rows()) == set(baseline.tensors.rows())
        return same and np.array_equal(run.steps, baseline.steps) and run.is_complete and baseline.is_complete

    def groups(self) -> pl.DataFrame:
        """Where the tensors out of band are; see `groups`."""
        return groups(self.tensors)

    def differences(self) -> pl.DataFrame:
        """In what the runs' settings differ; see `differences`."""
        return differences(self.baseline.fingerprint, self.run.fingerprint)

    @cached_property
    def features(self) -> dict[str, pl.DataFrame]:
        """What other features observed of the runs, by name; see `compare_runs` of each."""
        modules = load_modules("two_runs")
        return {module.NAME: module.compare_runs(self.baseline, self.run) for module in modules}

    def what_if(self) -> pl.DataFrame:
        """Return the run's tensors under recipes that were tried or replayed.

        A row a recipe, with medians over the later half of the samples.
        """
        steps = pl.Series(self.run.metrics.steps)
        tail = steps.tail(max(1, round(len(steps) * TAIL)))
        columns = ["step", "layer", "role", "recipe", *_WEIGHED]
        tables = (self.run.table(name) for name in UNCAST)
        uncast = [rows.filter(scale_source="what-if").select(columns) for rows in tables]
        rows = pl.concat([self.run.others.select(columns), *uncast]).filter(pl.col("step").is_in(tail.implode()))
        return rows.group_by("layer", "role", "recipe", maintain_order=True).agg(pl.median(*_WEIGHED))
