"""Rules about tensors between GEMMs: attention logits, routers and experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl

from ...analysis import thresholds
from ...analysis.diagnosis.courses import LayerTimeline, build_layer_timelines
from ...analysis.diagnosis.facts import DiagnosedRecords, Facts, define_fact, subtract_baseline_tensors
from ...analysis.diagnosis.finding import Finding
from ...analysis.diagnosis.rule import register_rule
from ...analysis.diagnosis.rules.nonfinite import FirstNonfinite, find_first_nonfinite_row
from ...analysis.runs.metrics import IS_NONFINITE
from ...analysis.runs.run import Run
from ...core.text import format_number
from .table import TABLES

_Loads = np.ndarray[tuple[int, int], np.dtype[np.int64]]
_LOGITS, _ROUTER = "attention_logits", "router_logits"


class AttentionCourse(NamedTuple):
    """The largest logit of one attention layer, and the entropy of its weights, sample by sample."""

    course: LayerTimeline
    steps: np.ndarray[tuple[int], np.dtype[np.int64]]
    entropy: np.ndarray[tuple[int], np.dtype[np.float64]]


class RouterCourse(NamedTuple):
    """How unevenly a router spreads its tokens, and the tokens of each expert."""

    #: course of the unevenness, or None for too few samples
    course: LayerTimeline | None
    layer: str
    steps: np.ndarray[tuple[int], np.dtype[np.int64]]
    #: int64 [S, E]
    loads: _Loads
    #: tokens in each sample
    rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    #: loads of the baseline, int64 [S, E], or None without a baseline
    usual: _Loads | None


@define_fact
def attention_logits(records: DiagnosedRecords) -> list[AttentionCourse]:
    """Return the largest logits of each attention layer, sample by sample."""
    mine, theirs = _read_both(records, _LOGITS)
    found = []
    for course in [] if mine is None else build_layer_timelines(mine, theirs, "amax"):
        rows = mine.filter(layer=course.layer).sort("step")  # type: ignore[union-attr]
        entropy = rows["entropy"].cast(pl.Float64).fill_null(np.nan).to_numpy()
        found.append(AttentionCourse(course, rows["step"].to_numpy(), entropy))
    return found


@define_fact
def router_loads(records: DiagnosedRecords) -> list[RouterCourse]:
    """Return how each router spreads its tokens, sample by sample."""
    mine, theirs = _read_both(records, _ROUTER)
    if mine is None:
        return []
    even = pl.col("loads").list.mean()
    uneven = (pl.col("loads").list.max() - even) / (pl.col("rows") - even)
    rows, others = (None if each is None else each.with_columns(uneven=uneven) for each in (mine, theirs))
    assert rows is not None
    by_layer = {course.layer: course for course in build_layer_timelines(rows, others, "uneven")}
    found = []
    for (layer,), of_layer in rows.drop_nulls("loads").group_by("layer", maintain_order=True):
        loads = np.array(of_layer["loads"].to_list(), dtype=np.int64)
        usual = None if others is None else np.array(others.filter(layer=layer)["loads"].drop_nulls().to_list())
        name = str(layer)
        steps, tokens = of_layer["step"].to_numpy(), of_layer["rows"].to_numpy()
        found.append(RouterCourse(by_layer.get(name), name, steps, loads, tokens, usual))
    return found


def _read_both(records: DiagnosedRecords, role: str) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
    """Return the rows of a role in the run and in the baseline. Return None for both if either record has no rows."""
    mine, theirs = (None if each is None else _read(each) for each in (records.run, records.baseline))
    assert mine is not None
    if mine.is_empty() or (theirs is not None and theirs.is_empty()):
        return None, None
    return mine.filter(role=role), None if theirs is None else theirs.filter(role=role)


def _read(run: Run) -> pl.DataFrame:
    table = TABLES[0]
    rows = run.read_table(table.name).filter(pl.col("scale_source") != "what-if", pl.col("role").is_in(list(table.roles)))
    return rows.filter(~pl.col("step").is_in(run.loss_scale_skips.implode()))


@register_rule("attention", ("attention_logits",), (attention_logits,))
def find_attention(facts: Facts) -> Iterator[Finding]:
    """Name the first attention layer whose logits explode.

    Example: the largest logit of layers.3.attention is 210 at step 90, 9 times the largest of the baseline.
    """
    found = []
    for each in attention_logits(facts):
        course = each.course
        out = (course.values > thresholds.TIMES_USUAL * course.usual.max()) & (course.values > thresholds.LOGIT)
        if (first := course.find_lasting_exit(out)) is not None:
            found.append((int(course.steps[course.find_rise_start(first)]), first, each))
    if not found:
        return
    since, first, (course, steps, entropy) = min(found, key=lambda each: each[0])
    value = float(course.values[first])
    evidence = (
        f"the largest logit of {course.layer} is {format_number(value)} at {facts.unit} {course.steps[first]}, "
        f"{format_number(value / float(course.usual.max()))} times the largest {_where(facts)}"
    )
    sides = [entropy[side][np.isfinite(entropy[side])] for side in (steps < since, steps >= since)]
    if all(map(len, sides)):
        before, after = (float(np.median(side)) for side in sides)
        evidence += f"; the entropy of its weights goes from {format_number(before)} to {format_number(after)} nats"
    evidence += f"; {len(found) - 1} more attention layers do so" if len(found) > 1 else ""
    yield Finding("attention", "attention_logits", "clear", evidence, course.layer, _LOGITS, since, "", True)


@register_rule("router", ("router_collapse", "dead_experts"), (router_loads,))
def find_router_faults(facts: Facts) -> Iterator[Finding]:
    """Name routers that give one expert nearly all tokens, and experts that no longer get any tokens.

    Example: the router of layers.1 gives expert 3 98% of the tokens at step 70, and no expert more than 31% before.
    """
    collapsed, dead = list[tuple[int, int, RouterCourse]](), list[tuple[int, str, int]]()
    for each in router_loads(facts):
        course = each.course
        if course is not None and course.usual.max() <= thresholds.UNEVEN:
            first = course.find_lasting_exit(course.values >= thresholds.COLLAPSED)
            if first is not None:
                collapsed.append((int(course.steps[course.find_rise_start(first)]), int(course.steps[first]), each))
        dead += [(int(each.steps[first]), each.layer, expert) for first, expert in _find_silent(each.loads, each.usual)]
    if collapsed:
        since, step, router = min(collapsed, key=lambda each: each[0])
        place = int(np.searchsorted(router.steps, step))
        loads, tokens = router.loads[place], float(router.rows[place])
        assert router.course is not None
        usual, even = float(router.course.usual.max()), float(loads.sum()) / len(loads) / tokens
        evidence = (
            f"{router.layer} gives expert {int(np.argmax(loads))} {100 * loads.max() / tokens:.0f}% of the tokens at "
            f"{facts.unit} {step}, and no expert more than {100 * (even + usual * (1 - even)):.0f}% {_where(facts)}"
        )
        evidence += f"; {len(collapsed) - 1} more routers do so" if len(collapsed) > 1 else ""
        yield Finding("router", "router_collapse", "clear", evidence, router.layer, _ROUTER, since, "", True)
    if dead:
        since, layer, expert = min(dead)
        evidence = f"expert {expert} of {layer} gets no token from {facts.unit} {since} on, and did {_where(facts)}"
        evidence += f"; neither do {len(dead) - 1} more experts" if len(dead) > 1 else ""
        yield Finding("router", "dead_experts", "hint", evidence, layer, _ROUTER, since, "", True)


def _find_silent(loads: _Loads, usual: _Loads | None) -> list[tuple[int, int]]:
    """Return (sample, expert): the sample since which an expert receives no tokens.

    Args:
        loads: int64 [S, E].
        usual: loads of the baseline, or None without a baseline.
    """
    found = []
    for expert in range(loads.shape[1]):
        given = np.flatnonzero(loads[:, expert])
        first = int(given[-1]) + 1 if len(given) else 0
        had_some = len(given) > first / 2 > 0 if usual is None else len(usual) > 0 and (usual[:, expert] > 0).mean() > 0.5
        expected = loads[first:].sum(1) / loads.shape[1]
        if had_some and len(loads) - first >= thresholds.LASTING and expected.min() >= thresholds.TOKENS:
            found.append((first, expert))
    return found


def _where(facts: Facts) -> str:
    return "in the baseline" if facts.paired else "before"


def find_nonfinite(run: Run, baseline: Run | None) -> list[FirstNonfinite]:
    """Return the first NaN or infinity between GEMMs, unless the baseline has it too."""
    return find_first_nonfinite_row(subtract_baseline_tensors(lambda each: _read(each).filter(IS_NONFINITE), run, baseline))
