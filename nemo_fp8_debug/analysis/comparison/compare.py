"""Compare two runs: their losses, and the errors of their tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl

from ...core.keys import MIXED
from ...core.layer_names import find_expert_aggregate, is_expert_aggregate
from ...core.scale_sources import ENGINE
from ...core.table import load_feature_modules
from ...errors import ConfigError
from ...record.schema import TABLES
from ..loss.gap import find_rise_above_baseline
from ..loss.outcome import MAX_GAP, LossOutcome
from ..loss.seeds import BaselineLoss, choose_baseline_loss
from ..runs.metrics import MetricsTable
from ..runs.run import Run
from ..runs.settings import choose_reference, describe_coverage_gap, list_comparability_warnings, list_setting_differences
from .drift import TAIL, count_out_of_band_groups, measure_drifts
from .layer_matching import (
    count_layers,
    filter_onsets_for_other_depth,
    has_other_layer_count,
    match_layers_from_output,
    read_weight_sizes,
    rename_layers_to_baseline,
)
from .onset import IN_A_ROW, find_onsets

#: metrics that `Comparison.list_what_if_metrics` shows under other recipes
_WEIGHED = ("relative_error", "underflow_pct", "overflow_pct", "mse")


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a run with a baseline."""

    baseline: Run
    #: the run, with the baseline's names for its layers
    run: Run
    reference: Run | None
    #: one row for each tensor, largest drift first, with the columns of `measure_drifts`, the first onset, and its lead
    #: (see `out_of_band`). The experts of a layer count as one tensor
    tensors: pl.DataFrame
    #: the same columns for single experts
    experts: pl.DataFrame
    #: tensors out of the baseline's band, earliest first, with the columns of `find_onsets`, and lead: the number of steps
    #: from this onset until the loss rises (negative if the loss rose first, null if the loss does not rise). The experts
    #: of a layer count as one tensor
    out_of_band: pl.DataFrame
    #: the same columns for single experts, in layers that are out of band in the aggregate of their experts
    experts_out_of_band: pl.DataFrame
    #: sentences about the limits of the comparison: how names were matched, which tensors were left out, what is unknown
    notes: Sequence[str] = ()
    #: largest gap to the baseline's loss that does not count as harm, in percent
    max_gap: float = MAX_GAP
    #: the loss to compare with, if it is not the loss of `baseline`: the loss of another baseline, or the mean of several
    #: baselines
    beside: BaselineLoss | None = None

    @property
    def divergence_step(self) -> int | None:
        """Return the step from which the run's loss stays above the baseline's loss, or None if no such rise is visible."""
        return self.loss.rise_step

    @cached_property
    def loss(self) -> LossOutcome:
        """Return the result of comparing the run's loss with the baseline's loss."""
        sizes = read_weight_sizes(self.run.metrics)
        same_model = None not in sizes.values() and sizes == read_weight_sizes(self.baseline.metrics)
        beside = BaselineLoss(self.baseline.loss) if self.beside is None else self.beside
        found = LossOutcome.judge_loss(self.run.loss, beside.curve, self.max_gap, same_model, beside.seeds)
        reference, _ = choose_reference(self.run, self.reference)
        return found if reference is None else replace(found, reference=reference.loss)

    @cached_property
    def has_equal_sampling(self) -> bool:
        """Return True if both runs sampled the same tensors, and each tensor at the same steps.

        If so, medians over paired samples are equal to the medians of each run.
        """
        run, baseline = self.run.metrics, self.baseline.metrics
        same = run.tensors.equals(baseline.tensors) or set(run.tensors.rows()) == set(baseline.tensors.rows())
        return same and np.array_equal(run.steps, baseline.steps) and run.has_all_samples and baseline.has_all_samples

    def count_out_of_band_groups(self) -> pl.DataFrame:
        """Count the tensors out of band by kind, depth and role; see `count_out_of_band_groups`."""
        return count_out_of_band_groups(self.tensors)

    def differences(self) -> pl.DataFrame:
        """List the settings that differ; see `list_setting_differences`."""
        return list_setting_differences(self.baseline.fingerprint, self.run.fingerprint)

    @cached_property
    def feature_comparisons(self) -> dict[str, pl.DataFrame]:
        """Return the results of `compare_runs` of all features in `observations` that have it, by feature."""
        modules = load_feature_modules("two_runs")
        return {module.NAME: module.compare_runs(self.baseline, self.run) for module in modules}

    def list_what_if_metrics(self) -> pl.DataFrame:
        """Return metrics of the run's tensors under recipes that were tried in the run or replayed.

        Each tensor has one row for each recipe, with medians over the later half of the samples.
        """
        steps = pl.Series(self.run.metrics.steps)
        tail = steps.tail(max(1, round(len(steps) * TAIL)))
        columns = ["step", "layer", "role", "recipe", *_WEIGHED]
        tables = (self.run.read_table(table.name) for table in TABLES.values() if table.has_what_if)
        uncast = [rows.filter(scale_source="what-if").select(columns) for rows in tables]
        rows = pl.concat([self.run.unused_recipe_metrics.select(columns), *uncast]).filter(
            pl.col("step").is_in(tail.implode())
        )
        return rows.group_by("layer", "role", "recipe", maintain_order=True).agg(pl.median(*_WEIGHED))


def compare(
    run: str | os.PathLike[str] | Run,
    baseline: str | os.PathLike[str] | Run,
    reference: str | os.PathLike[str] | Run | None = None,
    by: str = "step",
    renames: Sequence[str] = (),
    max_gap: float = MAX_GAP,
    others: Sequence[str | os.PathLike[str] | Run] = (),
) -> Comparison:
    """Compare the record of a run with the record of a baseline.

    Args:
        run: the record of the run to explain, or a folder above it, as a path or any fsspec address.
        baseline: the record of a good run.
        reference: the record of a run that differs from `run` in one setting, such as BF16 instead of FP8.
        by: how to match the runs: by `step`, or by consumed `samples` if their batch sizes differ.
        renames: rules `REGEX=REPLACEMENT`, as in `re.sub`. They are applied in turn to convert the run's layer names to the
            baseline's names. If there are no rules and the runs have no name in common, layers are matched by the end of
            their names, or by order, size and kind.
        max_gap: largest gap to the baseline's loss that does not count as harm, in percent. The gap is between the mean
            losses over the last part of the runs.
        others: further good runs of the baseline's model with other seeds. We compare the loss with the mean of all
            baselines, but the tensors only with `baseline`.

    Returns:
        A comparison. `.divergence_step` is the step from which the loss stays above the baseline's loss, or None. `.tensors`
        is a polars frame with the drift of each tensor, worst first. `.out_of_band` is a polars frame with the step at which
        each of its tensors left the baseline's band. `.differences()` lists the settings that differ.

    Raises:
        RecordError: a record is missing or unreadable, the runs have no sampled step and tensor in common, or the models
            differ.
        ConfigError: `by` or `renames` is invalid, or the model of one of `others` differs from the baseline's model.

    Example:
        >>> found = compare("runs/bad", "runs/baseline", "runs/reference")
        >>> found.divergence_step
        61
        >>> found.tensors.select("layer", "role").row(0)
        ('layers.0.qkv', 'grad_output')
    """
    first, second, other = (
        run if run is None or isinstance(run, Run) else Run.read(run, by) for run in (baseline, run, reference)
    )
    assert first and second
    second, notes = rename_layers_to_baseline(first, second, renames)
    expected = _beside(first, second, [each if isinstance(each, Run) else Run.read(each, by, held=0) for each in others])
    ranked = measure_drifts(first, second)
    depths = _depths(first, second)
    out_of_band = _with_lead(_out_of_band(first, second), find_rise_above_baseline(second.loss, expected.curve))
    since = out_of_band.group_by("layer", "role").agg(pl.col("onset").min(), pl.col("lead").max())
    ranked = ranked.with_row_index("rank").join(since, on=["layer", "role"], how="left").sort("rank").drop("rank")
    tensors, experts = split_off_single_experts(ranked)
    notes = [
        *_mistaken(first, second),
        *choose_reference(second, other)[1],
        *expected.notes,
        *depths,
        *notes,
        *_coverage(first, second),
        *list_comparability_warnings(first, second),
    ]
    notes += [f"In the run's model: {text}" for text in describe_coverage_gap(second.fingerprint)]
    return Comparison(
        first, second, other, tensors, experts, *split_off_single_experts(out_of_band), tuple(notes), max_gap, expected
    )


def _beside(baseline: Run, run: Run, others: Sequence[Run]) -> BaselineLoss:
    """Return the loss with which the run's loss is compared."""
    for other in others:
        if has_other_layer_count(*_layers_of(baseline, other)) or _differ_in_size(baseline, other):
            raise ConfigError(f"{other.path} and {baseline.path} are of different models: give baselines of one model")
    return choose_baseline_loss((run.path, run.loss), {each.path: each.loss for each in (baseline, *others)})


def _differ_in_size(baseline: Run, other: Run) -> bool:
    """Return True if most weights of known size differ in size. Smaller differences do not
    count, because an output layer may be padded.
    """
    sizes = [read_weight_sizes(each.metrics) for each in (baseline, other)]
    known = [(n, sizes[1][name]) for name, n in sizes[0].items() if n is not None and sizes[1].get(name) is not None]
    return 2 * sum(mine != theirs for mine, theirs in known) > len(known)


def _out_of_band(baseline: Run, run: Run) -> pl.DataFrame:
    """Return the rows of `find_onsets` that count, for tensors that an engine quantizes."""
    expected, judged = baseline.metrics, select_quantized_operands(run.metrics)
    found, layers = find_onsets(expected, judged), _layers_of(baseline, run)
    if not has_other_layer_count(*layers):
        return found
    names = match_layers_from_output(*layers)

    def beside(tensors: pl.DataFrame) -> pl.DataFrame:
        theirs = tensors.with_columns(pl.col("layer").cast(pl.String).replace_strict(names))
        mine = {other: name for name, other in names.items()}
        return find_onsets(expected.select_tensors_by_key(theirs).rename_layers(mine), judged.select_tensors_by_key(tensors))

    return filter_onsets_for_other_depth(found, names, beside)


def _layers_of(baseline: Run, run: Run) -> tuple[pl.Series, pl.Series]:
    return baseline.metrics.tensors["layer"].unique(), run.metrics.tensors["layer"].unique()


def _with_lead(out_of_band: pl.DataFrame, divergence_step: int | None) -> pl.DataFrame:
    return out_of_band.with_columns(lead=pl.lit(divergence_step, pl.Int64) - pl.col("onset"))


def _mistaken(baseline: Run, run: Run) -> list[str]:
    """Return a note if both runs are the same record, or if run and baseline seem to be swapped."""
    if baseline.path == run.path:
        return ["Both runs are the same record."]
    since = find_rise_above_baseline(baseline.loss, run.loss)
    if since is None or find_rise_above_baseline(run.loss, baseline.loss) is not None:
        return []
    return [f"The baseline's loss stays above the run's from {baseline.unit} {since}: were the two swapped?"]


def _depths(baseline: Run, run: Run) -> list[str]:
    """Return a note if the models have different depths, because layer names do not show that."""
    layers = _layers_of(baseline, run)
    if not has_other_layer_count(*layers):
        return []
    counts = list(map(count_layers, layers))
    return [
        f"The baseline has {counts[0]} layers and the run {counts[1]}: layers of the same name are at different "
        "depths, which may explain differences between them."
    ]


def _coverage(baseline: Run, run: Run) -> list[str]:
    """Return a note if the runs have too few samples in the same steps, or if the baseline ends before the run."""
    steps = [each.metrics.steps for each in (baseline, run)]
    both = steps[1][(steps[1] >= steps[0][0]) & (steps[1] <= steps[0][-1])]
    told = []
    if len(both) < IN_A_ROW:
        told.append(
            f"{len(both)} samples of the run are within the baseline's steps, too few to see when a tensor leaves the band."
        )
    elif steps[1][-1] > steps[0][-1]:
        ends = f"{baseline.unit} {steps[0][-1]}, the run's at {steps[1][-1]}"
        told.append(f"The baseline's samples end at {ends}. Later samples are not compared.")
    return told


def select_quantized_operands(metrics: MetricsTable) -> MetricsTable:
    """Keep operands that an engine quantizes, because only these affect the run. If no engine quantizes any, keep all."""
    # The scale source of aggregated experts is MIXED even if no engine quantizes any of the experts.
    return (
        metrics.filter_rows("scale_source", (ENGINE, MIXED))
        if ENGINE in metrics.list_distinct_values("scale_source")
        else metrics
    )


def split_off_single_experts(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows without single experts whose aggregate also has rows, and the rows of these single experts."""
    names = rows["layer"].cast(pl.String).unique(maintain_order=True)
    ones = pl.DataFrame({"layer": names, "aggregate": pl.Series(list(map(find_expert_aggregate, names)), dtype=pl.String)})
    keys = rows.select(pl.col("layer", "role").cast(pl.String))
    aggregates = keys.filter(pl.col("layer").is_in(list(filter(is_expert_aggregate, names)))).unique()
    its = keys.join(ones, on="layer", how="left", maintain_order="left").select(layer="aggregate", role="role")
    apart = its.join(aggregates.with_columns(apart=True), on=["layer", "role"], how="left", maintain_order="left")["apart"]
    apart = apart.fill_null(False)
    return rows.filter(~apart), rows.filter(apart)
