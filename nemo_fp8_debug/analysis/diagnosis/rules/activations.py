"""Do logits of attention explode, and do routers send all tokens to the same experts, or none to some?"""

from __future__ import annotations

import numpy as np
import polars as pl

from ....core.keys import UNCAST
from ...formatting import number
from ...runs.run import Run
from .finding import Finding
from .rises import Course, courses

_Loads = np.ndarray[tuple[int, int], np.dtype[np.int64]]

#: times what is usual that logits must grow, and what they must come to: exp(50) tells one key from all others
_GROWS, _LOGIT = 4.0, 50.0
#: how far from an even load (0) to all tokens (1) one expert is if a router has collapsed, and at the most before
_ALL, _BEFORE = 0.95, 0.6
#: samples at the end in which an expert is given nothing, if it is dead; and tokens that it would have had in each by chance
_SAMPLES, _TOKENS = 4, 16.0
_LOGITS_ADVICE = (
    "Look at the queries and keys of this layer: normalize them (QK-norm), cap the logits, or lower the learning rate."
)
_ROUTER_ADVICE = "Look at the router's bias, its load-balancing loss and z-loss, and in which precision it computes."


def activations(run: Run, baseline: Run | None) -> list[Finding]:
    """What happened first in attention, and what in routers; nothing if the record has no activations."""
    mine, theirs = _in_use(run), None if baseline is None else _in_use(baseline)
    if mine.is_empty() or (theirs is not None and theirs.is_empty()):
        return []
    unit = run.unit
    return [*_attention(mine, theirs, unit), *_collapsed(mine, theirs, unit), *_dead(mine, theirs, unit)]


def _in_use(run: Run) -> pl.DataFrame:
    """Without what-if recipes, and what was sampled of steps that others made up for."""
    rows = run.table("activations").filter(
        pl.col("scale_source") != "what-if", pl.col("role").is_in(list(UNCAST["activations"]))
    )
    return rows.filter(~pl.col("step").is_in(run.made_up_for.implode()))


def _attention(mine: pl.DataFrame, theirs: pl.DataFrame | None, unit: str) -> list[Finding]:
    role = "attention_logits"
    found = [
        (at, course)
        for course in courses(*_of(role, mine, theirs), "amax")
        if (at := course.since((course.values > _GROWS * course.usual.max()) & (course.values > _LOGIT))) is not None
    ]
    if not found:
        return []
    at, course = min(found, key=lambda each: each[1].steps[each[0]])
    since = int(course.steps[at])
    told = (
        f"the largest logit of {course.layer} is {number(float(course.values[at]))} at {unit} {since}, "
        f"{number(float(course.values[at] / course.usual.max()))} times {_whose(theirs)}{_entropy(mine, course, since)}"
        f"{_others(len(found) - 1, 'attention layers')}"
    )
    advice = _LOGITS_ADVICE
    return [Finding("attention", "attention_logits", "medium", told, advice, course.layer, role, since, True)]


def _entropy(rows: pl.DataFrame, course: Course, since: int) -> str:
    """What became of the entropy of its weights."""
    of_layer = rows.filter(layer=course.layer, role="attention_logits")
    before, after = (of_layer.filter(side)["entropy"].median() for side in (pl.col("step") < since, pl.col("step") >= since))
    if not isinstance(before, float) or not isinstance(after, float):
        return ""
    return f"; the entropy of its weights goes from {number(before)} to {number(after)} nats"


def _collapsed(mine: pl.DataFrame, theirs: pl.DataFrame | None, unit: str) -> list[Finding]:
    """Routers that give one expert nearly all tokens, and did not."""
    role, even = "router_logits", pl.col("loads").list.mean()
    uneven = (pl.col("loads").list.max() - even) / (pl.col("rows") - even)
    rows, others = (None if table is None else table.with_columns(uneven=uneven) for table in _of(role, mine, theirs))
    assert rows is not None
    found = []
    for course in courses(rows, others, "uneven"):
        usual = float(course.usual.max())
        if usual <= _BEFORE and (at := course.since(course.values >= _ALL)) is not None:
            found.append((at, course, usual))
    if not found:
        return []
    at, course, usual = min(found, key=lambda each: each[1].steps[each[0]])
    since = int(course.steps[at])
    row = rows.filter(layer=course.layer, step=since).row(0, named=True)
    expert, even_load = int(np.argmax(row["loads"])), sum(row["loads"]) / len(row["loads"]) / row["rows"]
    share = max(row["loads"]) / row["rows"]
    told = (
        f"{course.layer} gives expert {expert} {100 * share:.0f}% of the tokens at {unit} {since}, "
        f"and no expert more than {100 * (even_load + usual * (1 - even_load)):.0f}% {_before(theirs)}"
        f"{_others(len(found) - 1, 'routers')}"
    )
    return [Finding("router", "router_collapse", "medium", told, _ROUTER_ADVICE, course.layer, role, since, True)]


def _dead(mine: pl.DataFrame, theirs: pl.DataFrame | None, unit: str) -> list[Finding]:
    """Experts that are given no token to the end, and were before or are in the baseline."""
    role = "router_logits"
    rows, others = _of(role, mine, theirs)
    found = []
    for (layer,), of_layer in rows.drop_nulls("loads").group_by("layer", maintain_order=True):
        loads = np.array(of_layer["loads"].to_list(), dtype=np.int64)
        usual = None if others is None else np.array(others.filter(layer=layer)["loads"].drop_nulls().to_list())
        steps = of_layer["step"].to_numpy()
        found += [(steps[at], str(layer), expert) for at, expert in _silent(loads, usual)]
    if not found:
        return []
    since, layer, expert = min(found)
    told = (
        f"expert {expert} of {layer} is given no token from {unit} {since} on, and was {_before(theirs)}"
        f"{_others(len(found) - 1, 'experts')}"
    )
    return [Finding("experts", "dead_experts", "low", told, _ROUTER_ADVICE, layer, role, int(since), True)]


def _silent(loads: _Loads, usual: _Loads | None) -> list[tuple[int, int]]:
    """Since which sample, and which expert.

    Args:
        loads: int64 [S, E]
        usual: of the baseline likewise; None: there is none.
    """
    found = []
    for expert in range(loads.shape[1]):
        given = np.flatnonzero(loads[:, expert])
        at = int(given[-1]) + 1 if len(given) else 0
        had_some = len(given) > at / 2 > 0 if usual is None else len(usual) > 0 and (usual[:, expert] > 0).mean() > 0.5
        expected = loads[at:].sum(1) / loads.shape[1]
        if had_some and len(loads) - at >= _SAMPLES and expected.min() >= _TOKENS:
            found.append((at, expert))
    return found


def _of(role: str, mine: pl.DataFrame, theirs: pl.DataFrame | None) -> tuple[pl.DataFrame, pl.DataFrame | None]:
    return mine.filter(role=role), None if theirs is None else theirs.filter(role=role)


def _whose(theirs: pl.DataFrame | None) -> str:
    return "the largest of the run's beginning" if theirs is None else "the largest of the baseline"


def _before(theirs: pl.DataFrame | None) -> str:
    return "before" if theirs is None else "in the baseline"


def _others(n: int, what: str) -> str:
    return f"; so it is of {n} more {what}" if n else ""
