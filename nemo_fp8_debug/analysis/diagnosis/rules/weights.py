"""Do weights shrink faster than weight decay lets them, or do those of a layer stand still while the others learn?

AdamW and SGD with decoupled decay multiply each weight by 1 - lr * decay a step. Gradients change single weights and hardly
the root mean square of all, so a fall of that by more than lr * 1 a step is another decay than any that is in use (0.01 to
0.3), or something else that writes weights.

A step moves the smallest value of nearly every W, and so its range. Weight decay hardly does: it multiplies all values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import polars as pl

from ....core.layer_names import aggregate_of
from ...comparison.groups import depth_of
from ...formatting import number
from ...runs.grid import Floats, Ints
from ...runs.run import Run
from .finding import Finding
from .levels_of_weights import Levels, levels_of

#: decay that counts; and how many times the baseline's
_DECAY, _TIMES = 1.0, 4.0
#: samples in a row that must show it
_IN_A_ROW = 3
#: samples that a W must stand still for; share of a layer's W that must; and of the layers that may: if more do, nothing
#: learns
_STILL, _MOST, _FEW = 4, 0.5, 0.5
_ADVICE = "Look at the weight decay, at its parameter groups, and at what else writes the weights."
_ADVICE_STILL = (
    "Look at whether the gradients of these weights arrive (their reduction, `requires_grad`), at the learning rate of "
    "their parameter group, and at whether what the optimizer writes gets back to the model."
)


def weights(run: Run, baseline: Run | None) -> list[Finding]:
    """That the weights of most layers shrink, by how much, and since when; and which of them no longer learn."""
    mine, theirs = levels_of(run), None if baseline is None else levels_of(baseline)
    return [*_shrink(run, mine, baseline, theirs), *_stand_still(run, mine, theirs)]


def _shrink(run: Run, mine: Levels, baseline: Run | None, theirs: Levels | None) -> list[Finding]:
    steps, decays = _decays(run, mine)
    limit = _DECAY
    if baseline is not None and theirs is not None:
        _, usual = _decays(baseline, theirs)
        limit = max(limit, _TIMES * float(usual.max())) if len(usual) else limit
    if len(steps) < _IN_A_ROW:
        return []
    shrinks = np.lib.stride_tricks.sliding_window_view(decays > limit, _IN_A_ROW).all(-1)
    if not shrinks.any():
        return []
    at = int(np.argmax(shrinks))
    decay = float(np.median(decays[at:][decays[at:] > limit]))
    facts = (
        f"the weights of most layers shrink from {run.unit} {steps[at]} on as under a weight decay of {number(decay)} "
        "(their root mean square, by the learning rate)"
    )
    return [Finding("weights", "weight_decay", "medium", facts, _ADVICE, since=int(steps[at]), severity=2)]


def _decays(run: Run, levels: Levels) -> tuple[Ints, Floats]:
    """Sampled steps but for the last one, and by what decay the weights of most layers shrank up to the next."""
    if len(levels.steps) < 2:
        return levels.steps[:0], np.zeros(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        decays = np.nan_to_num(levels.falls / _rates(run, levels.steps), nan=-np.inf, posinf=-np.inf)
    return levels.steps[:-1], decays


def _rates(run: Run, steps: Ints) -> Floats:
    """The sum of learning rates from each sampled step to the next; NaN where it is not known."""
    rows = run.steps.select("step", pl.col("lr").fill_nan(None)).drop_nulls().unique("step", keep="last").sort("step")
    if rows.is_empty():
        return np.full(len(steps) - 1, np.nan)
    every = np.arange(steps[0], steps[-1])
    rates = np.interp(every, rows["step"].to_numpy(), rows["lr"].to_numpy())
    sums: Floats = np.diff(np.concatenate([[0.0], np.cumsum(rates)])[steps - steps[0]])
    return sums


def _stand_still(run: Run, mine: Levels, theirs: Levels | None) -> list[Finding]:
    """The first layer of the model of which most W no longer change."""
    blocks = _blocks(mine)
    usual = set() if theirs is None else {block for block, still in _blocks(theirs).items() if _is_still(still)}
    found = {block: still for block, still in blocks.items() if block not in usual and _is_still(still)}
    if not found or len(found) > _FEW * len(blocks):
        return []
    block, still = min(found.items(), key=lambda each: min(at for at in each[1] if at is not None))
    since = min(at for at in still if at is not None)
    told = (
        f"{len(still) - still.count(None)} of {len(still)} W of {block} stand still, from {run.unit} {since} on at the "
        "latest, while those of other layers learn"
    )
    told += f"; so do those of {len(found) - 1} more layers" if len(found) > 1 else ""
    return [Finding("still weights", "software", "medium", told, _ADVICE_STILL, block, since=since, severity=2)]


def _is_still(since: Sequence[int | None]) -> bool:
    return len(since) - since.count(None) > max(_MOST * len(since), 1)


def _blocks(levels: Levels) -> dict[str, list[int | None]]:
    """By layer of the model, since when each W that has moved stands still; None: it does not. A single expert may get no
    tokens, so it does not count."""
    of_depth: dict[int, list[tuple[str, int | None]]] = defaultdict(list)
    moved, still = levels.standing.moves > 1, levels.still(_STILL)
    for at, layer in enumerate(levels.layers):
        depth = depth_of(layer)
        if moved[at] and depth is not None and not aggregate_of(layer):
            of_depth[depth].append((layer, int(levels.standing.since[at]) if still[at] else None))
    return {_shared([layer for layer, _ in of]): [since for _, since in of] for of in of_depth.values()}


def _shared(layers: Sequence[str]) -> str:
    """What the names of layers begin with."""
    parts = [layer.split(".") for layer in layers]
    return ".".join(of_all[0] for of_all in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))
