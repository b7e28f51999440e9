"""Find operands that hold nothing but zeros. A zero tensor has no errors, so no other rule sees one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl

from ....core.keys import GRADIENTS, SHOWN_AS, Key
from ....core.layer_names import aggregate_of
from ....numerics.limits import MADE_UP
from ...runs.blocks import in_parts, over_blocks
from ...runs.grid import Grid, Ints
from ...runs.metrics import Metrics
from ...runs.run import Run
from ...runs.source import Bools
from .finding import Finding
from .producers import look_at_producer

#: names of layers that a sentence lists
_LISTED = 6


@dataclass(frozen=True)
class _Zeros:
    """Since when all values of a tensor are zero."""

    since: int
    #: whether it had other values before
    had_values: bool
    #: whether it has none but zeros from then on, and had none before: a path that is dropped by chance comes and goes
    lasts: bool


def find_zeros(run: Run, baseline: Run | None) -> list[Finding]:
    """Return a finding for each role and sample at which operands become all zeros that are not so in the baseline.

    Gradients count from the start too. X and W count only if they had values, here or in the baseline: the queries of a
    decoder and the weights of adapters may begin with zeros, and stay so if frozen.
    """
    found = _find(run.metrics)
    usual = {} if baseline is None or not found else _find(baseline.metrics)
    theirs = set() if baseline is None else set(baseline.metrics.tensors.rows())
    at_first: dict[tuple[int, str], list[str]] = {}
    for (layer, role), zeros in found.items():
        if (layer, role) not in usual and (zeros.had_values or role in GRADIENTS or (layer, role) in theirs):
            at_first.setdefault((zeros.since, role), []).append(layer)
    return [
        _finding(run, role, since, layers, found, theirs)
        for (since, role), layers in sorted(at_first.items(), key=_in_order)
    ]


def _in_order(of: tuple[tuple[int, str], list[str]]) -> tuple[int, bool]:
    """By sample, in the order of a step: a forward pass comes before its backward pass."""
    (since, role), _ = of
    return since, role in GRADIENTS


def _finding(
    run: Run, role: str, since: int, layers: Sequence[str], found: Mapping[Key, _Zeros], theirs: set[Key]
) -> Finding:
    all_layers = [layer for layer in run.metrics.with_role(role).tensors["layer"] if not _is_expert(layer)]
    # The backward pass comes to the last layer first, and what goes wrong there goes on to those before it.
    first = layers[-1] if role in GRADIENTS else layers[0]
    zeros = found[first, role]
    # A loss that diverges leaves a gradient to some layer.
    of_all = role in GRADIENTS and len(layers) == len(all_layers)
    surely = of_all or zeros.had_values or (first, role) in theirs
    sure = "low" if not zeros.lasts else "high" if surely else "medium"
    return Finding(
        "operand",
        "dead",
        sure,
        _told(run, role, since, layers, all_layers, zeros),
        look_at_producer(first, role),
        first,
        role,
        since,
        may_follow_the_loss=not of_all,
        excess=1.0,
        severity=2 if of_all and zeros.lasts else 0,
    )


def _told(run: Run, role: str, since: int, layers: Sequence[str], of: Sequence[str], zeros: _Zeros) -> str:
    """Return since when, for how long, and in which layers a tensor is zero."""
    at, tensor = f"{run.unit} {since}", SHOWN_AS[role]
    when = f"from {at} to the end," if zeros.lasts else f"at some samples, first at {at},"
    others = [layer for layer in of if layer not in layers]
    if not others:
        return f"{when} {tensor} is zero in all {len(of)} GEMMs"
    if len(others) < len(layers) and len(others) <= _LISTED:
        which = f"all but {', '.join(others)}"
    else:
        which = ", ".join(layers[:_LISTED]) + (f" and {len(layers) - _LISTED} more" if len(layers) > _LISTED else "")
    return f"{when} {tensor} is zero in {len(layers)} of {len(of)} GEMMs: {which}"


def _find(metrics: Metrics) -> dict[Key, _Zeros]:
    # A single expert may get no tokens, or none but rows of zeros that fill up its share; all experts of a layer as one may
    # not.
    metrics = metrics.narrowed(metrics.tensors.filter(~pl.col("layer").map_elements(_is_expert, pl.Boolean)))
    if metrics.is_empty() or metrics.tensors.is_empty():
        return {}
    of_blocks = over_blocks(partial(in_parts, _zero_samples), metrics, together=[("amax", "n", "nonfinite")])
    each = {key: _since(*of) for of_block in of_blocks for of_part in of_block for key, of in of_part}
    return {key: zeros for key, zeros in each.items() if zeros is not None}


def _is_expert(layer: str) -> bool:
    return aggregate_of(layer) is not None


def is_zero(grid: Grid) -> Bools:
    """[T, S]: whether a tensor has values, and all are zero."""
    zero: Bools = (grid.metric("amax") == 0) & ~(grid.metric("nonfinite") > 0)
    return zero


def _zero_samples(grid: Grid) -> list[tuple[Key, tuple[Ints, Bools]]]:
    """Return the steps at which a tensor is known, and at which it is zero, for each tensor that ever is."""
    # Without tokens there are no values.
    zero = is_zero(grid) & ~(grid.metric("n") == 0)
    known = ~np.isnan(grid.metric("amax")) | (grid.metric("nonfinite") > 0)
    keys = list(grid.tensors.iter_rows())
    return [(keys[i], (grid.steps[known[i]], zero[i][known[i]])) for i in np.flatnonzero(zero.any(axis=1)).tolist()]


def _since(steps: Ints, zero: Bools) -> _Zeros | None:
    """Return since when a tensor is zero, or None if it never is for two samples in a row behind the first ones.

    In 5,639,301 samples of operands of the benchmark's clean runs, experts among them, none is all zeros. Behind a weight
    that begins with zeros, as in adapters, gradients are zero until the first step has moved that weight.
    """
    in_a_row = np.flatnonzero(zero[MADE_UP:-1] & zero[MADE_UP + 1 :])
    if not len(in_a_row):
        return None
    at = int(in_a_row[0]) + MADE_UP
    while at > 0 and zero[at - 1]:
        at -= 1
    return _Zeros(int(steps[at]), not zero[:at].all(), bool(zero[at:].all()) and not zero[MADE_UP:at].any())
