"""Rules about gradients: the factor by which they are multiplied, their norm, and their size by kind of GEMM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from ....core.keys import GRADIENTS, SHOWN_AS
from ....core.text import format_number
from ....numerics.limits import MADE_UP
from ... import thresholds
from ...loss.curve import compute_running_median, find_lasting_start
from ...loss.step_change import measure_loss_rise_at_step
from ...runs.grid import Floats, Ints
from ...runs.metrics import MetricsTable
from ...runs.run import Run
from ...runs.source import Bools
from ..facts import DiagnosedRecords, Facts, define_fact
from ..finding import Finding
from ..rule import register_rule

#: units of the factor. Gradients of micro-batches may be averaged or summed, so only a change in both units shows a fault
_UNITS = ("per_scale", "per_micro_batch")


# The factor that the loss is multiplied by ------------------------------------------------------------------------------


class Factors(NamedTuple):
    """Tables with the factors of gradients in the run and in the baseline: step, grad_scale, loss_scale, and both units."""

    run: pl.DataFrame
    baseline: pl.DataFrame | None


@define_fact
def gradient_factors(records: DiagnosedRecords) -> Factors:
    """Return the factors at steps around which the loss scale is constant. If the scale changes, frameworks may report the
    change a step early or late.
    """
    mine, theirs = (None if each is None else _read_factors(each) for each in (records.run, records.baseline))
    assert mine is not None
    return Factors(mine, None if theirs is None or theirs.is_empty() else theirs)


def _read_factors(run: Run) -> pl.DataFrame:
    rows = run.steps.sort("step").with_columns(pl.col("grad_scale", "loss_scale").fill_nan(None))
    if rows["loss_scale"].is_not_null().any():
        scale = pl.col("loss_scale")
        steady = (scale == scale.shift(1)).fill_null(True) & (scale == scale.shift(-1)).fill_null(True)
        rows = rows.filter(scale.is_not_null()).filter(steady & scale.is_finite() & (scale > 0))
    rows = rows.filter(pl.col("grad_scale").is_finite())
    calls = run.metrics.select_roles("grad_output").reduce_rows(
        ["calls"], lambda some: some.group_by("step").agg(pl.col("calls").cast(pl.Float64).median())
    )
    known = rows.join(calls.select("step", "calls"), on="step", how="left")
    known = known.with_columns(per_scale=pl.col("grad_scale") / pl.col("loss_scale").fill_null(1.0))
    known = known.with_columns(per_micro_batch=pl.col("per_scale") * pl.col("calls").fill_null(1.0))
    return known.select("step", "grad_scale", "loss_scale", *_UNITS).sort("step")


@register_rule("gradient factor", ("multiplier",), (gradient_factors,), event="multiplier", needs_no_baseline=True)
def find_factor(facts: Facts) -> Iterator[Finding]:
    """Name a wrong factor between the loss and the gradients.

    If the loss scale or accumulation explains a factor, there is no finding.

    Example: a loss scale of 65,536 is reported but never applied, so small gradients underflow.
    """
    mine, theirs = gradient_factors(facts)
    if mine.is_empty():
        return
    alike = theirs is not None and any(not _differ(_median(mine[unit]), _median(theirs[unit])) for unit in _UNITS)
    scaled = mine.filter(pl.col("loss_scale") > thresholds.FACTOR)
    if len(scaled) and not alike:
        share, scale = _median(scaled["per_scale"].abs()), _median(scaled["loss_scale"])
        carried = format_number(share * scale)
        evidence = f"gradients carry a factor of {carried}, and a loss scale of {format_number(scale)} is reported"
        is_lost, of_step = share < thresholds.LEAST_SHARE, pl.col("per_scale").abs()
        wrong = of_step < thresholds.LEAST_SHARE if is_lost else of_step > thresholds.FACTOR
        since = next(iter(scaled.filter(wrong)["step"].to_list()), int(scaled["step"][0]))
        if is_lost:
            yield _factor("proof", evidence, since, "Find why the reported loss scale is not applied.")
        elif share > thresholds.FACTOR and not _differ(share, scale):
            yield _factor("proof", evidence, since, "Find what applies the loss scale twice.")
        elif share > thresholds.FACTOR:
            yield _factor("hint", evidence, since, "A loss summed over tokens explains that; otherwise it is scaled twice.")
    yield from _moved(mine, theirs)
    if theirs is not None and not alike:
        here, there = (_median(rows["per_scale"]) for rows in (mine, theirs))
        factors = [format_number(factor) for factor in (here, there)]
        evidence = f"gradients carry a factor of {factors[0]} on top of the loss scale, and {factors[1]} in the baseline"
        off = (int(step) for step, value in mine["step", "per_scale"].iter_rows() if _differ(value, there))
        since = next(off, int(mine["step"][0]))
        scale_of_both = find_common_scale(mine, theirs)
        if scale_of_both is not None and here != 0 and not _differ(here * scale_of_both, there, 1.01):
            evidence += f"; both report a loss scale of {format_number(scale_of_both)}"
            yield _factor("proof", evidence, since, "Find why the reported loss scale is not applied.")
        else:
            advice = "Other numbers of ranks or tokens explain that; otherwise the loss is divided twice, or not at all."
            yield _factor("hint", evidence, since, advice)


def _moved(mine: pl.DataFrame, theirs: pl.DataFrame | None) -> Iterator[Finding]:
    places = [_leaves(mine[unit].to_numpy()) for unit in _UNITS]
    if None in places or (theirs is not None and None not in [_leaves(theirs[unit].to_numpy()) for unit in _UNITS]):
        return
    values = mine["per_scale"].to_numpy()
    first = max(place for place in places if place is not None)
    step = int(mine["step"][first])
    evidence = (
        f"gradients carry a factor of {format_number(values[first])} on top of the loss scale from step {step} on "
        f"(before: {format_number(_usual(values))}); neither the loss scale nor accumulation explains that"
    )
    yield _factor("proof", evidence, step, "Look at what else divides the loss: the number of tokens, averaging over ranks.")


def _leaves(values: Floats) -> int | None:
    """Return the index from which all values differ from the first values, or None if there is no such index.

    If the first values were not constant, also return None.
    """
    usual = _usual(values)
    off = np.array([_differ(value, usual) for value in values], dtype=bool)
    if len(values) < 2 * thresholds.FEW or off[: max(thresholds.FEW, len(values) // 4)].any():
        return None
    back = np.flatnonzero(~off)
    start = int(back[-1]) + 1
    return start if start <= len(values) - thresholds.FEW else None


def _usual(values: Floats) -> float:
    return float(np.median(values[: max(thresholds.FEW, len(values) // 4)]))


def find_common_scale(mine: pl.DataFrame, theirs: pl.DataFrame) -> float | None:
    """Return the median loss scale if it is equal in both runs, and so large that no other factor is likely to have this
    value. Otherwise return None.
    """
    scales = [rows["loss_scale"].fill_nan(None).median() for rows in (mine, theirs)]
    here, there = (scale if isinstance(scale, float) else 0.0 for scale in scales)
    return here if here == there and here >= 2.0**6 else None


def _differ(value: float, usual: float, factor: float | None = None) -> bool:
    """Return True if two values differ by more than a factor or in sign, or if only one of them is zero."""
    if value == 0 or usual == 0:
        return value != usual
    ratio = value / usual
    return ratio <= 0 or bool(abs(np.log2(ratio)) > np.log2(factor or thresholds.FACTOR))


def _median(values: pl.Series) -> float:
    median = values.median()
    assert isinstance(median, float)
    return median


def _factor(strength: str, evidence: str, since: int, advice: str) -> Finding:
    return Finding("gradient factor", "multiplier", strength, evidence, since=since, advice=advice, is_exact=True)


@define_fact
def sizes_against_baseline(records: DiagnosedRecords) -> pl.DataFrame:
    """Return layer, role and bits: log2 of the ratio of the run's median amax to the baseline's median amax in early
    samples.

    The first samples have initial scales and are left out.
    """
    if records.baseline is None:
        return pl.DataFrame(schema={"layer": pl.String, "role": pl.String, "bits": pl.Float64})
    mine, theirs = (_first_sizes(each.metrics) for each in (records.run, records.baseline))
    both = mine.join(theirs, on=["layer", "role"], suffix="_baseline", maintain_order="left")
    return both.select("layer", "role", bits=pl.col("level") - pl.col("level_baseline"))


def _first_sizes(metrics: MetricsTable) -> pl.DataFrame:
    n = len(metrics.steps)
    first = metrics.steps[MADE_UP : max(MADE_UP + thresholds.FEW, n // 8)]
    rows = metrics.select_roles("grad_output", "weight").select_steps(first).read_all_rows(["amax"])
    rows = rows.filter((pl.col("amax") > 0) & pl.col("amax").is_finite())
    return rows.group_by("layer", "role", maintain_order=True).agg(level=pl.col("amax").log(2).median())


# The gradient norm ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientNorms:
    """Gradient norms by step, and related quantities."""

    #: step and grad_norm, including NaN and infinity, but without skipped steps
    run: pl.DataFrame
    #: the same columns of the baseline, or None
    baseline: pl.DataFrame | None
    #: step, consumed_samples
    consumed: pl.DataFrame
    #: step, layer and level (log2 of the amax of dY); empty if no dY is recorded
    gradients: pl.DataFrame
    #: whether any dY is recorded
    records_gradients: bool
    #: median loss scale if it is equal in run and baseline, and large; otherwise None
    common_scale: float | None


@define_fact
def gradient_norms(records: DiagnosedRecords) -> GradientNorms:
    """Return the gradient norms of run and baseline, and the sizes of dY in the run's samples."""
    run, baseline = records.run, records.baseline
    gradients = run.metrics.select_roles("grad_output")
    known = (pl.col("amax") > 0) & pl.col("amax").is_finite()
    move = _find_move(_read_norms(run), None if baseline is None else _read_norms(baseline))
    steps = _samples_around(gradients.steps, None if move is None else move.step)
    rows = gradients.select_steps(steps).read_all_rows(["amax"]).filter(known)
    return GradientNorms(
        _read_norms(run),
        None if baseline is None else _read_norms(baseline),
        run.steps.select("step", "consumed_samples").drop_nulls().sort("step"),
        rows.select("step", "layer", level=pl.col("amax").log(2)),
        not gradients.is_empty(),
        None if baseline is None else find_common_scale(run.steps, baseline.steps),
    )


def _samples_around(steps: Ints, step: int | None) -> Ints:
    if step is None:
        return steps[-thresholds.LASTING :]
    before, after = steps[steps < step][-thresholds.LASTING :], steps[steps >= step][: thresholds.LASTING]
    around: Ints = np.unique(np.concatenate([before, after, steps[-thresholds.LASTING :]]))
    return around


def _read_norms(run: Run) -> pl.DataFrame:
    rows = run.steps.select("step", "grad_norm").filter(pl.col("grad_norm").is_not_null())
    rows = rows.filter(~pl.col("step").is_in(run.loss_scale_skips.implode()))
    return rows.unique("step", keep="last").sort("step")


class _Move(NamedTuple):
    step: int
    bits: float


@register_rule(
    "gradient norm",
    ("dead", "multiplier", "software", "unknown"),
    (gradient_norms, sizes_against_baseline),
    event="grad_norm",
    needs_no_baseline=True,
)
def find_norm(facts: Facts) -> Iterator[Finding]:
    """Name a gradient norm that is zero, that changes suddenly to another level, or that differs from the baseline's norm.

    Example: gradients are averaged twice from step 80 on, so their norm falls to a quarter, and no dY changes.
    """
    norms = gradient_norms(facts)
    yield from _zero_norms(norms, facts)
    move = _find_move(norms.run, norms.baseline)
    if move is not None and not _has_other_reason(norms, facts, move.step):
        times = 2**move.bits
        what = f"{format_number(times)} times" if times > 1 else f"1/{format_number(1 / times)} of"
        evidence = f"from {facts.unit} {move.step} on, the gradient norm is {what} its earlier value, at once and steadily"
        where = _where(norms, move)
        cause = ("unknown", "hint") if where is None else ("multiplier", "clear")
        yield Finding("gradient norm", *cause, f"{evidence}; {where}" if where else evidence, since=move.step, is_exact=True)
    else:
        yield from _apart(norms, facts)


def _zero_norms(norms: GradientNorms, facts: Facts) -> Iterator[Finding]:
    """Yield a finding if the norm is exactly zero, but the baseline's norm is not."""
    steps, zero = norms.run["step"].to_numpy(), (norms.run["grad_norm"] == 0).to_numpy()
    if not zero.any() or (norms.baseline is not None and (norms.baseline["grad_norm"] == 0).any()):
        return
    behind = len(zero) - int(np.argmin(zero[::-1])) if not zero.all() else 0
    lasts = len(zero) - behind >= thresholds.FEW
    since = int(steps[behind] if lasts else steps[np.argmax(zero)])
    # If Megatron-Core does not clip gradients, it computes no norm and reports 0.
    arrive = len(norms.gradients) > 0
    if zero.all() and (arrive or not norms.records_gradients) and (norms.baseline is None or norms.baseline.is_empty()):
        return
    evidence = f"the gradient norm is exactly 0 at {zero.sum()} of {len(zero)} {facts.unit}s"
    evidence += f", and at each one from {facts.unit} {since} on" if lasts else f", first at {facts.unit} {since}"
    evidence += "; dY has other values, so the norm may not have been computed" if arrive else ""
    advice = (
        "Look at where gradients get lost: the loss function and its backward pass, masked labels, a detached tensor, the "
        "buffers that the optimizer reads."
    )
    sure = "clear" if lasts and norms.records_gradients and not arrive else "hint"
    yield Finding("gradient norm", "dead", sure, evidence, since=since, advice=advice, is_exact=True)


def _find_move(mine: pl.DataFrame, theirs: pl.DataFrame | None) -> _Move | None:
    """Return a lasting change of the norm that is also visible in its ratio to the baseline's norm, or None. Measure the
    change in the norm or in this ratio, whichever is less noisy.
    """
    own = _bits(_usable(mine), "grad_norm")
    ratio = None if theirs is None else _ratio(mine, theirs)
    first = int(thresholds.EARLY * len(own[0]))
    both = [each for each in ((own[0][first:], own[1][first:]), ratio) if each is not None]
    for steps, bits in sorted(both, key=lambda each: _noise(each[1])):
        move = _largest_move(steps, bits)
        if move is not None and all(
            _part_of_move(move, *each) > thresholds.ABRUPT_PART for each in (own, ratio) if each is not None
        ):
            return move
    return None


def _usable(norms: pl.DataFrame) -> pl.DataFrame:
    return norms.filter(pl.col("grad_norm").is_finite() & (pl.col("grad_norm") > 0))


def _ratio(mine: pl.DataFrame, theirs: pl.DataFrame) -> tuple[Ints, Floats] | None:
    """Return the steps, and the log2 ratio of the norm to the baseline's norm. Return None if the runs share too few
    steps.
    """
    both = _usable(mine).join(_usable(theirs), on="step", suffix="_baseline").sort("step")
    both = both.with_columns(ratio=pl.col("grad_norm") / pl.col("grad_norm_baseline"))
    return _bits(both, "ratio") if len(both) > 2 * thresholds.LEVEL else None


def _bits(rows: pl.DataFrame, name: str) -> tuple[Ints, Floats]:
    return rows["step"].to_numpy(), np.log2(rows[name].to_numpy())


def _largest_move(steps: Ints, bits: Floats) -> _Move | None:
    """Return the largest change to another level if it is sudden and lasts to the end, otherwise None."""
    if len(bits) <= 2 * thresholds.LEVEL:
        return None
    medians = np.median(np.lib.stride_tricks.sliding_window_view(bits, thresholds.LEVEL), axis=1)
    apart = medians[thresholds.LEVEL :] - medians[: -thresholds.LEVEL]
    # Several windows contain the change, so several places fit equally well. Choose the place with the largest single step.
    near = np.flatnonzero(np.abs(apart) >= thresholds.AT_ONCE * np.abs(apart).max()) + thresholds.LEVEL
    place = int(near[np.argmax(np.abs(bits[near] - bits[near - 1]))])
    move = float(np.median(bits[place : place + thresholds.LEVEL]) - np.median(bits[place - thresholds.LEVEL : place]))
    close = float(np.median(bits[place : place + thresholds.FEW]) - np.median(bits[place - thresholds.FEW : place]))
    lasting = float(np.median(bits[place:]) - np.median(bits[max(0, place - len(bits[place:])) : place]))
    kept = min(close / move, lasting / move) >= thresholds.AT_ONCE if move else False
    return (
        _Move(int(steps[place]), move)
        if abs(move) >= max(thresholds.NORM_MOVES, thresholds.NORM_SIGMAS * _noise(bits)) and kept
        else None
    )


def _noise(bits: Floats) -> float:
    """Return the standard deviation of a series, estimated from the differences of neighbors."""
    return 1.4826 * float(np.median(np.abs(np.diff(bits)))) / 2**0.5 if len(bits) > 1 else 0.0


def _part_of_move(move: _Move, steps: Ints, bits: Floats) -> float:
    """Return how much a norm changes at the step of a known change, as a fraction of that change; 0 if unknown."""
    place = int(np.searchsorted(steps, move.step))
    before, after = bits[max(place - thresholds.LEVEL, 0) : place], bits[place : place + thresholds.LEVEL]
    return float(np.median(after) - np.median(before)) / move.bits if len(before) and len(after) else 0.0


def _has_other_reason(norms: GradientNorms, facts: Facts, step: int) -> bool:
    """Return True if the loss rose at that step, or if the batch size changed."""
    if measure_loss_rise_at_step(facts.loss.run, facts.loss.baseline, step) is not None:
        return True
    sizes = norms.consumed.with_columns(per_step=pl.col("consumed_samples").diff() / pl.col("step").diff()).drop_nulls()
    before = sizes.filter(pl.col("step") < step).tail(thresholds.FEW)["per_step"].median()
    after = sizes.filter(pl.col("step") > step).head(thresholds.FEW)["per_step"].median()
    return before is not None and after is not None and before != after


def _where(norms: GradientNorms, move: _Move) -> str | None:
    """Describe where gradients are multiplied, or return None if layers disagree or have no samples."""
    samples = norms.gradients["step"].unique().sort()
    sides = samples.filter(samples < move.step).tail(2), samples.filter(samples >= move.step).head(2)
    if any(side.is_empty() for side in sides):
        return None
    levels = [
        norms.gradients.filter(pl.col("step").is_in(side.implode())).group_by("layer").agg(pl.col("level").median())
        for side in sides
    ]
    both = levels[0].join(levels[1], on="layer", suffix="_after")
    bits = (both["level_after"] - both["level"]).to_numpy()
    for expected, told in (
        (move.bits, "dY of all layers moves with it, so the loss is multiplied"),
        (0.0, "no dY moves with it, so gradients are multiplied after the backward pass"),
    ):
        if len(bits) and float(np.mean(np.abs(bits - expected) <= thresholds.NEAR)) >= thresholds.MOST:
            return told
    return None


def _apart(norms: GradientNorms, facts: Facts) -> Iterator[Finding]:
    """Yield a finding if the norm leaves the baseline's norm for the rest of the run, or differs from the first step on."""
    if norms.baseline is None:
        return
    both = _usable(norms.run).join(_usable(norms.baseline), on="step", suffix="_baseline").sort("step")
    if len(both) < 2 * thresholds.LEVEL:
        return
    bits = np.log2(both["grad_norm"].to_numpy() / both["grad_norm_baseline"].to_numpy())
    smooth = compute_running_median(bits, 2)
    usual, noise = float(np.median(bits[: thresholds.LEVEL])), _noise(bits)
    # At the start, the models have not learned yet, so another seed causes only small differences.
    if abs(usual) > max(thresholds.NORM_APART, thresholds.NORM_SIGMAS * noise / thresholds.LEVEL**0.5) and (
        np.sign(usual) * np.median(bits[: 3 * thresholds.LEVEL]) > thresholds.NORM_APART
    ):
        times = 2**usual
        what = f"{format_number(times)} times" if times > 1 else f"1/{format_number(1 / times)} of"
        evidence = f"the gradient norm is {what} the baseline's from the first step on"
        scale = norms.common_scale
        is_scale = scale is not None and abs(usual - np.log2(scale)) <= 1
        where = _compare_gradients(facts, usual)
        advice, cause = "", "multiplier"
        if is_scale:
            evidence += f", about the loss scale that both report ({format_number(scale)})"
            advice = "Look at where gradients are divided by the loss scale."
        elif not where:
            where, cause = "dY of some layers differs, and that of others does not", "software"
            advice = "Look at what differs in forward and backward pass: kernels, attention, casts."
        evidence += f"; {where}" if where else ""
        start = int(both["step"][0])
        yield Finding("gradient norm", cause, "clear", evidence, since=start, is_exact=True, advice=advice)
        return
    far = {sign: sign * smooth > 2 * thresholds.NORM_APART for sign in (1, -1)}
    lasting = (find_lasting_start(high, sign * bits, 2) for sign, high in far.items())
    first, end = next((place for place in lasting if place is not None), None), len(smooth)
    if first is None:
        first, end = max((_longest(high) for high in far.values()), key=lambda each: each[1] - each[0])
        if end - first < thresholds.LEVEL:
            return
    times = 2 ** float(np.median(smooth[first:end]))
    until = "on" if end == len(smooth) else f"to {both['step'][end - 1]}"
    evidence = (
        f"the gradient norm is {format_number(times)} times the baseline's from {facts.unit} {both['step'][first]} {until}"
    )
    since = int(both["step"][first])
    yield Finding("gradient norm", "software", "hint", evidence, since=since, of_kind="gradients", is_exact=True)


def _longest(high: Bools) -> tuple[int, int]:
    """Return the first index of the longest sequence of True and the index after its end, or two zeros."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], high, [False]]).astype(np.int8)))
    stretches = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    return max(stretches, key=lambda each: each[1] - each[0], default=(0, 0))


def _compare_gradients(facts: Facts, bits: float) -> str:
    """Describe where gradients are multiplied from the start; return an empty string if layers disagree.

    Args:
        bits: log2 ratio of the gradient norm to the baseline's norm.
    """
    sizes = sizes_against_baseline(facts).filter(role="grad_output")["bits"].to_numpy()
    for expected, told in ((bits, "so is dY of all layers"), (0.0, "dY is the baseline's in all layers")):
        if len(sizes) and float(np.mean(np.abs(sizes - expected) <= thresholds.NEAR)) >= thresholds.MOST:
            return told
    return "" if len(sizes) else "no dY is recorded"


# Sizes by kind of GEMM -----------------------------------------------------------------------------------------------


@register_rule("sizes", ("multiplier", "software"), (sizes_against_baseline,), event="multiplier")
def find_sizes(facts: Facts) -> Iterator[Finding]:
    """Name kinds of GEMM if the size of their dY or W differs from the baseline from the start.

    Error metrics do not depend on the size of values, so no band shows such a fault. If all kinds differ by the same factor,
    there is no finding here, because a loss scale explains that.

    Example: E5M2 gradients are read as E4M3, so dY of fc2 is too small by a factor of 2^7 in all layers.
    """
    sizes = sizes_against_baseline(facts)
    for role in ("grad_output", "weight"):
        rows = sizes.filter(role=role).with_columns(
            kind=pl.col("layer").map_elements(name_kind, pl.String) if len(sizes) else pl.lit("")
        )
        kinds = rows.group_by("kind", maintain_order=True).agg(
            pl.col("bits").median(), pl.col("bits").min().alias("low"), pl.col("bits").max().alias("high"), pl.first("layer")
        )
        usual = _median(kinds["bits"]) if role in GRADIENTS and len(kinds) else 0.0
        kinds = kinds.with_columns(apart=pl.col("bits") - usual)
        limit = thresholds.SIZE_OFF * (1 if facts.has_same_batches else thresholds.OTHER_BATCHES)
        off = kinds.filter(pl.col("apart").abs() > limit).sort(pl.col("apart").abs(), descending=True)
        if off.is_empty() or len(off) == len(kinds) > 1:
            continue
        first = off.row(0, named=True)
        times = 2.0 ** abs(first["apart"])
        what = f"{format_number(times)} times" if first["apart"] > 0 else f"1/{format_number(times)} of"
        evidence = f"{SHOWN_AS[role]} of {first['kind']} has {what} its size in the baseline"
        if len(off) > 1:
            evidence += f"; {len(off)} kinds of layers are off"
        elif role in GRADIENTS:
            evidence += ", and dY of other layers has not"
        cause = "multiplier" if role in GRADIENTS else "software"
        advice = "Look at what multiplies this tensor: its format, its scale and the kernel that writes it."
        name = first["layer"], role, int(facts.steps[0])
        yield Finding("sizes", cause, "clear", evidence, *name, advice, of_kind="size" if cause == "software" else "")


def name_kind(layer: str) -> str:
    """Return the kind of a GEMM: its name without numbers.

    Example:
        >>> name_kind("decoder.layers.3.mlp.fc2")
        'decoder.layers.*.mlp.fc2'
    """
    return ".".join("*" if part.isdigit() else part for part in layer.split("."))
