"""Rules about weight gradients that become zero, or whose size differs from the baseline in the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl

from ...analysis import thresholds
from ...analysis.diagnosis.facts import DiagnosedRecords, Facts, define_fact, subtract_baseline_tensors
from ...analysis.diagnosis.finding import Finding
from ...analysis.diagnosis.rule import register_rule
from ...analysis.diagnosis.rules.nonfinite import WEIGHT_GRADIENT, FirstNonfinite
from ...analysis.diagnosis.rules.operands import loses_most_values, suspects
from ...analysis.diagnosis.rules.values import zero_tensors
from ...analysis.runs.run import Run
from ...core.layer_names import find_expert_aggregate
from ...core.text import format_number

_ROLE = "weight_gradient"


class ZeroGradient(NamedTuple):
    """A weight whose gradient is zero from a step on."""

    layer: str
    since: int


@define_fact
def zero_gradients(records: DiagnosedRecords) -> list[ZeroGradient]:
    """Return weights whose gradient is zero from a step on, but not in the baseline, in the order of the record."""
    rows = _read(records.run)
    if rows.is_empty():
        return []
    dead = (pl.col("zeros") == pl.col("elements")) & (pl.col("elements") > 0)
    last = pl.col("step").filter(~dead).max()
    since = pl.col("step").filter(dead & ((pl.col("step") > last) | last.is_null())).min()
    count = (dead & ((pl.col("step") > last) | last.is_null())).sum()
    each = rows.group_by("layer", maintain_order=True).agg(since.alias("since"), count.alias("count"))
    found = each.filter(pl.col("count") >= thresholds.IN_A_ROW)
    if records.baseline is not None:
        usual = _read(records.baseline).filter(dead).select("layer").unique()
        found = found.join(usual, on="layer", how="anti", maintain_order="left")
    return [ZeroGradient(*row) for row in found.select("layer", "since").iter_rows()]


@register_rule("zero weight gradient", ("dead",), (zero_gradients, zero_tensors, suspects))
def find_zero_gradients(facts: Facts) -> Iterator[Finding]:
    """Name the first weights that no longer get a gradient, although dY and X of their GEMMs have values.

    Two cases do not count: an expert without tokens, and an operand that underflows completely.

    Example: a buffer is not reduced, so from step 80 on dW of layers.2.qkv is zero.
    """
    explained = {each.layer for each in zero_tensors(facts)} | {
        each.layer for each in suspects(facts) if loses_most_values(each)
    }
    found = [
        each for each in zero_gradients(facts) if each.layer not in explained and find_expert_aggregate(each.layer) is None
    ]
    if not found:
        return
    since = min(each.since for each in found)
    # The backward pass reaches the last layer first.
    layers = [each.layer for each in found if each.since == since]
    evidence = f"dW of {layers[-1]} is zero from {facts.unit} {since} on"
    evidence += f"; {len(found) - 1} more weights get no gradient" if len(found) > 1 else ""
    advice = f"Look at the backward pass of {layers[-1]}, and at what its gradient is cast by, reduced by and written to."
    name = layers[-1], _ROLE, since
    yield Finding("zero weight gradient", "dead", "clear", evidence, *name, advice)


class GradientRatio(NamedTuple):
    """A weight gradient in the first sample of both runs."""

    layer: str
    step: int
    #: log2 of the ratio of the gradient's norm to its norm in the baseline
    bits: float
    #: log2 of the ratio of the weight's norm to its norm in the baseline
    weight_bits: float
    #: the gradient's norm in the baseline, divided by the median norm of all gradients
    share: float = 1.0

    @property
    def norm_change_bits(self) -> float:
        """Bits by which the norm differs from its baseline. A small norm counts less, because it is mostly noise."""
        return min(abs(self.bits), float(np.log2(1 + self.share * abs(2**self.bits - 1))))


@define_fact
def first_gradients(records: DiagnosedRecords) -> list[GradientRatio]:
    """Return sizes of weight gradients in the first sample, compared with the baseline.

    Return an empty list if the two runs begin at different steps.
    """
    if records.baseline is None:
        return []
    mine, theirs = (_read(each).filter(pl.col("norm") > 0) for each in (records.run, records.baseline))
    if mine.is_empty() or theirs.is_empty() or mine["step"].min() != theirs["step"].min():
        return []
    first = mine.filter(pl.col("step") == pl.col("step").min())
    both = first.join(theirs, on=["layer", "step"], suffix="_baseline", maintain_order="left")
    bits = [(pl.col(name) / pl.col(f"{name}_baseline")).log(2) for name in ("norm", "weight_norm")]
    share = pl.col("norm_baseline") / pl.col("norm_baseline").median()
    rows = both.select("layer", "step", bits=bits[0], weight_bits=bits[1].fill_null(0.0), share=share)
    return [GradientRatio(*row) for row in rows.iter_rows()]


@define_fact
def same_recipes(records: DiagnosedRecords) -> bool:
    """Return True if run and baseline use the same recipes."""
    runs = [each for each in (records.run, records.baseline) if each is not None]
    return len({frozenset(each.metrics.list_distinct_values("recipe")) for each in runs}) == 1


@register_rule("first step", ("multiplier", "software"), (first_gradients, same_recipes, suspects))
def find_first_step(facts: Facts) -> Iterator[Finding]:
    """Name weight gradients that differ from the baseline in the first step, although the losses agree.

    If both runs have the same weights and the same batch, the gradients of the first step must also agree.

    Example: attention's backward pass is wrong, so dW of layers.2.qkv is 1.8 times the baseline's in step 0.
    """
    run, baseline, sizes = facts.loss.run, facts.loss.baseline, first_gradients(facts)
    if (
        baseline is None
        or not sizes
        or not facts.has_same_batches
        or not same_recipes(facts)
        or not len(run.losses)
        or not len(baseline.losses)
    ):
        return
    step = sizes[0].step
    mine, theirs = (each.losses[each.steps == step] for each in (run, baseline))
    if step != run.steps[0] or not len(mine) or not len(theirs):
        return
    same_weights = np.median([abs(each.weight_bits) for each in sizes]) < thresholds.RANGE_MOVES
    if not same_weights or not abs(mine[0] - theirs[0]) <= thresholds.MAX_GAP / 100 * abs(theirs[0]):
        return
    bits = np.array([each.bits for each in sizes])
    usual = float(np.median(bits))
    noise = 1.4826 * float(np.median(np.abs(bits - usual)))
    # If loss and weights are equal to the last bit, a correct backward pass rounds equally too.
    is_exact = mine[0] == theirs[0] and not any(each.weight_bits for each in sizes)
    least = thresholds.FIRST_STEP if is_exact else thresholds.FIRST_STEP_ROUNDED
    explained = {each.layer for each in suspects(facts) if each.since <= step}
    off = [
        each
        for each in sizes
        if each.norm_change_bits > max(least, thresholds.NORM_SIGMAS * noise) and each.layer not in explained
    ]
    agree = f"in {facts.unit} {step}, in which the losses agree"
    if np.abs(bits - usual).max() < 0.5 * abs(usual) and abs(usual) > np.log2(thresholds.FACTOR):
        evidence = f"all dW are {format_number(2**usual)} times the baseline's {agree}"
        yield Finding("first step", "multiplier", "clear", evidence, since=step, is_exact=True)
    elif len(off) > 1 and sizes[-1].norm_change_bits > least:
        # The backward pass reaches the last weight first. A fault there points to the loss or the forward pass.
        evidence = f"{len(off)} of {len(sizes)} dW are not the baseline's {agree}, and the last layer's is one of them"
        advice = "Look at the forward pass of later micro-batches, at the loss, and at what multiplies it."
        yield Finding("first step", "software", "clear", evidence, None, None, step, advice, is_exact=True)
    elif off:
        first = off[-1]
        evidence = f"dW of {first.layer} is {format_number(2**first.bits)} times the baseline's {agree}"
        evidence += f"; {len(off) - 1} more dW differ" if len(off) > 1 else ""
        advice = (
            f"Look at the backward pass of {first.layer} and of what follows it, such as attention, a norm or a fused "
            "kernel. `verify_rows=8` checks the GEMMs."
        )
        name = first.layer, _ROLE, step
        yield Finding("first step", "software", "clear", evidence, *name, advice, is_exact=True, of_kind="size")


def find_nonfinite(run: Run, baseline: Run | None) -> list[FirstNonfinite]:
    """Return the first weight gradient with NaN or infinity, unless the baseline has it too."""
    rows = subtract_baseline_tensors(lambda each: _read(each).filter(pl.col("nonfinite") > 0), run, baseline, ["layer"])
    if rows.is_empty():
        return []
    # The backward pass reaches the last layer first.
    first = rows.filter(pl.col("step") == pl.col("step").min()).row(-1, named=True)
    place = WEIGHT_GRADIENT, 0
    return [FirstNonfinite(int(first["step"]), place, f"dW of {first['layer']}", first["layer"], _ROLE)]


def _read(run: Run) -> pl.DataFrame:
    rows = run.read_table("gradients")
    return rows.filter(~pl.col("step").is_in(run.loss_scale_skips.implode())).sort("step", maintain_order=True)
