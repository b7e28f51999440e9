"""Two runs side by side: their losses, and the tensors ranked by how far FP8's grip on them drifted apart."""

from __future__ import annotations

import os
from collections.abc import Sequence

import polars as pl

from ...core.keys import MIXED
from ...core.layer_names import aggregate_of, is_aggregate
from ...core.scale_sources import ENGINE
from ...errors import ConfigError
from ..loss.divergence import above
from ..loss.outcome import MAX_GAP
from ..loss.seeds import Beside, beside
from ..runs.metrics import Metrics
from ..runs.run import Run
from ..runs.settings import coverage_notes, remarks
from .comparison import Comparison
from .drift import drifts
from .layer_matching import named_alike, sizes_of_weights
from .onset import IN_A_ROW, onsets
from .other_depth import as_far_from_the_output, depths_of, differ_in_depth, that_count


def compare(
    baseline: str | os.PathLike[str] | Run,
    run: str | os.PathLike[str] | Run,
    reference: str | os.PathLike[str] | Run | None = None,
    by: str = "step",
    renames: Sequence[str] = (),
    max_gap: float = MAX_GAP,
    others: Sequence[str | os.PathLike[str] | Run] = (),
) -> Comparison:
    """Compare the records of two runs.

    Args:
        baseline: the record of a run that went well, or a folder above it; a path or any fsspec address.
        run: likewise, the record of the run to explain.
        reference: likewise, the record of a run that differs from `run` in one thing, as BF16 instead of FP8; None: there is
            none.
        by: what the runs are matched by: `step`, or `samples` that were consumed, for runs of other batch sizes.
        renames: how to make the baseline's names of the run's layers, a list of `REGEX=REPLACEMENT` as of `re.sub`, applied
            in turn. Without them, and if no name is in common, layers are matched by the rest of their names, or by order,
            size and kind.
        max_gap: percent that the mean loss over the last part may lie above the baseline's before it counts as harm.
        others: further runs that went well, of the baseline's model and of other seeds: the loss is compared with the mean
            of all, and tensors with those of the baseline alone.

    Returns:
        What sets the runs apart: `.divergence_step`, the step from which the loss stays above the baseline's, or None;
        `.tensors`, each tensor's drift, a polars frame, worst first; `.out_of_band`, when each left the baseline's band;
        `.differences()`, the settings that differ.

    Raises:
        RecordError: a record is missing or unreadable, or the two have no sampled step and tensor in common, or are of
            different models.
        ConfigError: `by` or `renames` cannot be used, or one of `others` is of another model than the baseline.

    Example:
        >>> found = compare("runs/baseline", "runs/bad", "runs/reference")
        >>> found.divergence_step
        61
        >>> found.tensors.select("layer", "role").row(0)
        ('layers.0.qkv', 'grad_output')
    """
    first, second, other = (
        run if run is None or isinstance(run, Run) else Run.read(run, by) for run in (baseline, run, reference)
    )
    assert first and second
    second, notes = named_alike(first, second, renames)
    expected = _beside(first, second, [each if isinstance(each, Run) else Run.read(each, by, held=0) for each in others])
    ranked = drifts(first, second)
    depths = _depths(first, second)
    out_of_band = _with_lead(_out_of_band(first, second), above(second.loss, expected.curve))
    since = out_of_band.group_by("layer", "role").agg(pl.col("onset").min(), pl.col("lead").max())
    ranked = ranked.with_row_index("rank").join(since, on=["layer", "role"], how="left").sort("rank").drop("rank")
    tensors, experts = split_experts(ranked)
    notes = [*_mistaken(first, second), *expected.notes, *depths, *notes, *_coverage(first, second), *remarks(first, second)]
    notes += [f"Of the run's model: {text}" for text in coverage_notes(second.fingerprint)]
    return Comparison(first, second, other, tensors, experts, *split_experts(out_of_band), tuple(notes), max_gap, expected)


def _beside(baseline: Run, run: Run, others: Sequence[Run]) -> Beside:
    """What the run's loss is compared with."""
    for other in others:
        if differ_in_depth(*_layers_of(baseline, other)) or _differ_in_size(baseline, other):
            raise ConfigError(f"{other.path} is of another model than {baseline.path}: give baselines of one model")
    return beside((run.path, run.loss), {each.path: each.loss for each in (baseline, *others)})


def _differ_in_size(baseline: Run, other: Run) -> bool:
    """Whether most W that both know the size of have another one; a padded output layer makes no other model."""
    sizes = [sizes_of_weights(each.metrics) for each in (baseline, other)]
    known = [(n, sizes[1][name]) for name, n in sizes[0].items() if n is not None and sizes[1].get(name) is not None]
    return 2 * sum(mine != theirs for mine, theirs in known) > len(known)


def _out_of_band(baseline: Run, run: Run) -> pl.DataFrame:
    """Of the tensors that an engine quantizes, those that count as out of the baseline's band."""
    expected, judged = baseline.metrics, quantized(run.metrics)
    found, layers = onsets(expected, judged), _layers_of(baseline, run)
    if not differ_in_depth(*layers):
        return found
    names = as_far_from_the_output(*layers)

    def beside(tensors: pl.DataFrame) -> pl.DataFrame:
        theirs = tensors.with_columns(pl.col("layer").cast(pl.String).replace_strict(names))
        mine = {other: name for name, other in names.items()}
        return onsets(expected.within(theirs).renamed(mine), judged.within(tensors))

    return that_count(found, names, beside)


def _layers_of(baseline: Run, run: Run) -> tuple[pl.Series, pl.Series]:
    return baseline.metrics.tensors["layer"].unique(), run.metrics.tensors["layer"].unique()


def _with_lead(out_of_band: pl.DataFrame, divergence_step: int | None) -> pl.DataFrame:
    return out_of_band.with_columns(lead=pl.lit(divergence_step, pl.Int64) - pl.col("onset"))


def _mistaken(baseline: Run, run: Run) -> list[str]:
    """What looks as if the runs were not those that were meant."""
    if baseline.path == run.path:
        return ["Both runs are the same record."]
    since = above(baseline.loss, run.loss)
    if since is None or above(run.loss, baseline.loss) is not None:
        return []
    return [f"The baseline's loss stays above the run's from {baseline.unit} {since}: were the two swapped?"]


def _depths(baseline: Run, run: Run) -> list[str]:
    """That the models are of another depth, which no name tells."""
    layers = _layers_of(baseline, run)
    if not differ_in_depth(*layers):
        return []
    counts = list(map(depths_of, layers))
    return [
        f"The baseline has {counts[0]} layers and the run {counts[1]}: layers of one name lie at other depths, so "
        "what sets them apart may be that."
    ]


def _coverage(baseline: Run, run: Run) -> list[str]:
    """What the runs' lengths leave untold."""
    steps = [each.metrics.steps for each in (baseline, run)]
    both = steps[1][(steps[1] >= steps[0][0]) & (steps[1] <= steps[0][-1])]
    told = []
    if len(both) < IN_A_ROW:
        told.append(
            f"{len(both)} samples of the run are within the baseline's steps: too few to tell when a tensor leaves the band."
        )
    elif steps[1][-1] > steps[0][-1]:
        ends = f"{baseline.unit} {steps[0][-1]}, the run's at {steps[1][-1]}"
        told.append(f"The baseline's samples end at {ends}: nothing later is judged.")
    return told


def quantized(metrics: Metrics) -> Metrics:
    """Rows of operands that an engine quantizes, where one does: the others cannot have done harm."""
    # Experts as one are also mixed where nothing quantizes any.
    return metrics.only("scale_source", (ENGINE, MIXED)) if ENGINE in metrics.unique("scale_source") else metrics


def split_experts(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows of tensors, and apart from them those of experts whose aggregate is among them."""
    names = rows["layer"].cast(pl.String).unique(maintain_order=True)
    ones = pl.DataFrame({"layer": names, "aggregate": pl.Series(list(map(aggregate_of, names)), dtype=pl.String)})
    keys = rows.select(pl.col("layer", "role").cast(pl.String))
    aggregates = keys.filter(pl.col("layer").is_in(list(filter(is_aggregate, names)))).unique()
    its = keys.join(ones, on="layer", how="left", maintain_order="left").select(layer="aggregate", role="role")
    apart = its.join(aggregates.with_columns(apart=True), on=["layer", "role"], how="left", maintain_order="left")["apart"]
    apart = apart.fill_null(False)
    return rows.filter(~apart), rows.filter(apart)
