"""Two runs side by side: their losses, and the tensors ranked by how far FP8's grip on them drifted apart."""

from __future__ import annotations

import os
from collections.abc import Sequence

import polars as pl

from ...core.keys import MIXED
from ...core.layer_names import fold_key, is_fold
from ..runs.grid import Grid
from ..runs.run import Run
from ..runs.settings import remarks
from .comparison import Comparison
from .drift import SHOWN, drifts
from .layer_matching import named_alike
from .onset import IN_A_ROW, onsets_of

#: of `figures`, all that a comparison takes
COLUMNS = (
    *("step", "consumed_samples", "layer", "role", "recipe", "scale_source"),
    *("n", "nan", "inf", "nonfinite_order", "true_mse"),
    *SHOWN,
)


def compare(
    good: str | os.PathLike[str] | Run,
    bad: str | os.PathLike[str] | Run,
    twin: str | os.PathLike[str] | Run | None = None,
    by: str = "step",
    renames: Sequence[str] = (),
) -> Comparison:
    """Compare the records of two runs.

    Args:
        good: a record; or a run that has been read, with the same `by` and with `COLUMNS` at least. Likewise the others.
        twin: a run that differs from `bad` in one thing, as BF16 instead of FP8.
        by: what the runs are matched by: `step`, or `samples` that were consumed, for runs of other batch sizes.
        renames: see `named_alike`.

    Raises:
        RecordError: a record is missing or unreadable, or the two have no sampled step and tensor in common, or are of
            different models.
        ConfigError: `by` or `renames` cannot be used.
    """
    first, second, other = (run if run is None or isinstance(run, Run) else Run.read(run, by) for run in (good, bad, twin))
    assert first and second
    second, notes = named_alike(first, second, renames)
    ranked = drifts(first, second)
    judged = quantised(second.figures)
    left = onsets_of(first.grid, second.grid if judged is second.figures else Grid.of_table(judged))
    left = _with_lead(left, second.loss.above(first.loss))
    since = left.group_by("layer", "role").agg(pl.col("onset").min(), pl.col("lead").max())
    ranked = ranked.with_row_index("rank").join(since, on=["layer", "role"], how="left").sort("rank").drop("rank")
    tensors, experts = experts_apart(ranked)
    notes = [*_mistaken(first, second), *notes, *_coverage(first, second), *remarks(first.figures, second.figures)]
    return Comparison(first, second, other, tensors, experts, experts_apart(left)[0], tuple(notes))


def _with_lead(left: pl.DataFrame, loss_left: int | None) -> pl.DataFrame:
    return left.with_columns(lead=pl.lit(loss_left, pl.Int64) - pl.col("onset"))


def _mistaken(good: Run, bad: Run) -> list[str]:
    """What looks as if the runs were not those that were meant."""
    if good.path == bad.path:
        return ["Both runs are the same record."]
    above = good.loss.above(bad.loss)
    if above is None or bad.loss.above(good.loss) is not None:
        return []
    return [f"The first (good) run's loss stays above the second's from {good.unit} {above}: were the two swapped?"]


def _coverage(good: Run, bad: Run) -> list[str]:
    """What the runs' lengths leave untold."""
    steps = [run.figures["step"].unique().sort() for run in (good, bad)]
    both = steps[1].filter(steps[1].is_between(steps[0].min(), steps[0].max()))
    told = []
    if len(both) < IN_A_ROW:
        told.append(f"{len(both)} samples of the second run are within the first: too few to tell when a tensor leaves.")
    elif steps[1][-1] > steps[0][-1]:
        ends = f"{good.unit} {steps[0][-1]}, the second's at {steps[1][-1]}"
        told.append(f"The first run's samples end at {ends}: nothing later is judged.")
    return told


def quantised(figures: pl.DataFrame) -> pl.DataFrame:
    """Rows of operands that an engine quantises, where one does: the others cannot have done harm."""
    by_engine = figures["scale_source"].is_in(["engine", MIXED])
    return figures.filter(by_engine) if by_engine.any() and not by_engine.all() else figures


def experts_apart(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows of tensors, and apart from them those of experts whose fold is among them."""
    keys = rows.select("layer", "role").rows()
    folds = {key for key in keys if is_fold(key[0])}
    apart = pl.Series([fold_key(*key) in folds for key in keys], dtype=pl.Boolean)
    return rows.filter(~apart), rows.filter(apart)
