"""Rules about values before any cast: all of them are zero, or they jump to another size. Such a tensor may have usual cast
errors, so it need not leave its band.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl

from ....core.keys import GRADIENTS, SHOWN_AS, Key
from ....core.layer_names import find_expert_aggregate
from ....core.text import format_number
from ....numerics.limits import MADE_UP
from ... import thresholds
from ...runs.blocks import map_grid_slices, map_tensor_chunks
from ...runs.grid import Floats, Ints, MetricGrid
from ...runs.metrics import MetricsTable
from ...runs.source import Bools
from ..facts import DiagnosedRecords, Facts, define_fact
from ..finding import Finding, advise_on_producer
from ..rule import register_rule

#: largest number of layers that a sentence lists
_LISTED = 6


@dataclass(frozen=True)
class ZeroTensor:
    """A tensor in which all values are zero."""

    layer: str
    role: str
    since: int
    #: whether the tensor had nonzero values before
    had_values: bool
    #: whether the tensor stays zero to the end; if a path is dropped at random, its tensors are zero only in some steps
    lasts: bool
    #: whether the baseline has the tensor, with nonzero values
    has_baseline: bool


@define_fact
def zero_tensors(records: DiagnosedRecords) -> list[ZeroTensor]:
    """Return tensors that are zero in the run but not in the baseline, in the order of the record.

    Gradients count even if they are zero from the start. X and W count only if they had nonzero values, in the run or in the
    baseline, because weights of adapters may begin with zeros.
    """
    run, baseline = records.run, records.baseline
    found = _find(run.metrics)
    usual = {} if baseline is None or not found else _find(baseline.metrics)
    theirs = set() if baseline is None else set(baseline.metrics.tensors.rows())
    return [
        ZeroTensor(layer, role, since, had, lasts, (layer, role) in theirs)
        for (layer, role), (since, had, lasts) in found.items()
        if (layer, role) not in usual and (had or role in GRADIENTS or (layer, role) in theirs)
    ]


@register_rule("zeros", ("dead",), (zero_tensors,), needs_no_baseline=True)
def find_zeros(facts: Facts) -> Iterator[Finding]:
    """Name tensors that become zero at the same time. Each role and sample gives one finding.

    Example: a fused loss returns no gradient, so from step 0 on dY is zero in all GEMMs.
    """
    groups: dict[tuple[int, str], list[ZeroTensor]] = {}
    for each in zero_tensors(facts):
        groups.setdefault((each.since, each.role), []).append(each)
    # A forward pass comes before its backward pass.
    for (since, role), zeros in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] in GRADIENTS)):
        rows = facts.tensors.filter(role=role)["layer"].to_list()
        layers = [layer for layer in rows if find_expert_aggregate(layer) is None]
        # The backward pass begins at the last layer, and a zero gradient spreads from there to the earlier layers.
        first = zeros[-1] if role in GRADIENTS else zeros[0]
        # A diverging loss gives at least one layer a nonzero gradient.
        of_all = role in GRADIENTS and len(zeros) == len(layers)
        yield Finding(
            "zeros",
            "dead",
            "clear" if first.lasts or role == "weight" else "hint",
            _describe(facts, role, since, [each.layer for each in zeros], layers, first.lasts),
            first.layer,
            role,
            since,
            advise_on_producer(first.layer, role),
            may_follow_the_loss=not of_all,
        )


def _describe(facts: Facts, role: str, since: int, layers: Sequence[str], of: Sequence[str], lasts: bool) -> str:
    """Describe when, for how long, and in which layers a tensor is zero."""
    at, tensor = f"{facts.unit} {since}", SHOWN_AS[role]
    when = f"from {at} to the end," if lasts else f"in some samples, first at {at},"
    others = [layer for layer in of if layer not in layers]
    if not others:
        return f"{when} {tensor} is zero in all {len(of)} GEMMs"
    if len(others) < len(layers) and len(others) <= _LISTED:
        which = f"all but {', '.join(others)}"
    else:
        which = ", ".join(layers[:_LISTED]) + (f" and {len(layers) - _LISTED} more" if len(layers) > _LISTED else "")
    return f"{when} {tensor} is zero in {len(layers)} of {len(of)} GEMMs: {which}"


# Jumps ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValueJump:
    """A jump of a tensor's values to another size, at which they stay."""

    layer: str
    role: str
    since: int
    #: log2 of the factor by which both amax and median change from one sample to the next; negative if the values shrink
    bits: float


@define_fact
def value_jumps(records: DiagnosedRecords) -> list[ValueJump]:
    """Return the jumps of X and W, the earliest first, then in the order of the record.

    Leave out tensors whose values jump in the baseline too.
    """
    found = _find_jumps(records.run.metrics)
    usual = () if records.baseline is None or not found else _find_jumps(records.baseline.metrics)
    known = {(each.layer, each.role) for each in usual}
    return sorted((each for each in found if (each.layer, each.role) not in known), key=lambda each: each.since)


@register_rule("value jump", ("value_jump",), (value_jumps,), needs_no_baseline=True)
def find_jumps(facts: Facts) -> Iterator[Finding]:
    """Name the first tensor whose values jump to another size for good.

    A scale that follows the values hides the jump from all error metrics, except in the first samples.

    Example: an activation is multiplied by 10,000 from step 150 on, so X of layers.1.fc2 grows by 13 bits at once.
    """
    jumps = value_jumps(facts)
    if not jumps:
        return
    first = jumps[0]
    together = sum(each.since == first.since and each.role == first.role for each in jumps)
    times = format_number(2.0 ** abs(first.bits))
    what = f"became {times} times {'larger' if first.bits > 0 else 'smaller'}"
    evidence = f"its values {what} from one sample to the next, and did not return"
    of_most = together > thresholds.MOST * len(facts.tensors.filter(role=first.role))
    yield Finding(
        *("value jump", "value_jump", "hint" if of_most else "clear", evidence),
        *(first.layer, first.role, first.since, advise_on_producer(first.layer, first.role)),
        may_follow_the_loss=of_most,
    )


def _find_jumps(metrics: MetricsTable) -> list[ValueJump]:
    metrics = metrics.select_roles("input", "weight")
    if metrics.is_empty() or metrics.tensors.is_empty():
        return []
    # A few tokens may reach a single expert, so its values change from step to step.
    of_expert = pl.col("layer").map_elements(lambda layer: find_expert_aggregate(layer) is not None, pl.Boolean)
    metrics = metrics.select_tensors_at_all_steps(metrics.tensors.filter(~of_expert))
    if metrics.tensors.is_empty():
        return []
    of_blocks = map_tensor_chunks(partial(map_grid_slices, _jumps_of), metrics, together=[("amax", "outlier_log2")])
    return [each for of_block in of_blocks for of_part in of_block for each in of_part]


def _jumps_of(grid: MetricGrid) -> list[ValueJump]:
    with np.errstate(divide="ignore", invalid="ignore"):
        amax = np.log2(grid.read_metric("amax"))[:, MADE_UP:]
    amax[~np.isfinite(amax)] = np.nan
    if amax.shape[1] < thresholds.FEW + thresholds.IN_A_ROW:
        return []
    # An outlier moves only the amax, so the median must move too.
    median = amax - grid.read_metric("outlier_log2")[:, MADE_UP:]
    up, down = (np.minimum(_lasting_rise(sign * amax), _lasting_rise(sign * median)) for sign in (1.0, -1.0))
    # Behind a gate or weight that begins near zero, values may grow by any factor.
    before = np.fmax.accumulate(median, axis=1)[:, thresholds.FEW - 1 : -thresholds.IN_A_ROW]
    up = np.where(before > thresholds.NEAR_ZERO_VALUES, up, np.nan)
    found, steps = list[ValueJump](), grid.steps[MADE_UP + thresholds.FEW :]
    for i in np.flatnonzero((np.fmax(up, down) > thresholds.VALUES_JUMP).any(axis=1)).tolist():
        at = int(np.nanargmax(np.fmax(up[i], down[i])))
        bits = up[i, at] if up[i, at] > np.nan_to_num(down[i, at], nan=-np.inf) else -down[i, at]
        layer, role = grid.tensors.row(i)
        found.append(ValueJump(layer, role, int(steps[at]), float(bits)))
    return found


def _lasting_rise(levels: Floats) -> Floats:
    """Return, for each sample, by how much all levels from this sample on exceed all earlier levels, [T, S]; NaN if unknown.

    Leave out the first and the last samples, because a jump must last for some samples on either side.
    """
    before = np.fmax.accumulate(levels, axis=1)[:, thresholds.FEW - 1 : -thresholds.IN_A_ROW]
    after = np.fmin.accumulate(levels[:, ::-1], axis=1)[:, ::-1][:, thresholds.FEW : 1 - thresholds.IN_A_ROW or None]
    rise: Floats = after - before
    return rise


# Zeros ------------------------------------------------------------------------------------------------------------------


def find_all_zero_samples(grid: MetricGrid) -> Bools:
    """For each tensor and sample, return True if the tensor was sampled and all its values are zero, [T, S]."""
    zero: Bools = (grid.read_metric("amax") == 0) & ~(grid.read_metric("nonfinite") > 0)
    return zero


def _find(metrics: MetricsTable) -> dict[Key, tuple[int, bool, bool]]:
    # A single expert may get no tokens, but all experts of a layer together always get tokens.
    of_expert = pl.col("layer").map_elements(lambda layer: find_expert_aggregate(layer) is not None, pl.Boolean)
    metrics = metrics.select_tensors_at_all_steps(metrics.tensors.filter(~of_expert))
    if metrics.is_empty() or metrics.tensors.is_empty():
        return {}
    of_blocks = map_tensor_chunks(partial(map_grid_slices, _zero_samples), metrics, together=[("amax", "n", "nonfinite")])
    each = {key: _since(key[1], *of) for of_block in of_blocks for of_part in of_block for key, of in of_part}
    return {key: zeros for key, zeros in each.items() if zeros is not None}


def _zero_samples(grid: MetricGrid) -> list[tuple[Key, tuple[Ints, Bools]]]:
    """For each tensor that is zero in some sample, return its sampled steps, and whether it is zero at each."""
    zero = find_all_zero_samples(grid) & ~(grid.read_metric("n") == 0)
    known = ~np.isnan(grid.read_metric("amax")) | (grid.read_metric("nonfinite") > 0)
    keys = list(grid.tensors.iter_rows())
    return [(keys[i], (grid.steps[known[i]], zero[i][known[i]])) for i in np.flatnonzero(zero.any(axis=1)).tolist()]


def _since(role: str, steps: Ints, zero: Bools) -> tuple[int, bool, bool] | None:
    """Return the first step at which a tensor is zero, whether it had nonzero values before, and whether it stays zero.

    Return None unless the tensor is zero in two consecutive samples after the first samples. If a weight begins with zeros,
    gradients are zero until the first step has changed the weight.
    """
    # A healthy W with nonzero values never becomes zero, so a single zero sample counts.
    again = zero[MADE_UP + 1 :] | (role == "weight" and bool((~zero).any()))
    in_a_row = np.flatnonzero(zero[MADE_UP:-1] & again)
    if not len(in_a_row):
        return None
    first = int(in_a_row[0]) + MADE_UP
    while first > 0 and zero[first - 1]:
        first -= 1
    return int(steps[first]), not zero[:first].all(), bool(zero[first:].all()) and not zero[MADE_UP:first].any()
