"""Flag the operands to change after a diagnosis, with the reason, the steps, and an earlier change of recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import polars as pl

from ...core.keys import GRADIENTS, ROLES, Key
from ...core.scale_sources import QUANTIZED
from ...core.text import format_number
from ..recommendation.options import ChangeReason, RestoredSetting
from ..runs.grid import measure_sampling_interval
from ..runs.run import Run
from ..runs.settings import find_usual_casts
from .answer import DiagnosisResult
from .finding import CAUSES, NO_RECIPE, NOT_FP8, OF_FP8, Finding
from .ranking import rank_tensors_by_harm
from .rules.operands import loses_most_values, suspects
from .rules.recipe import recipe_changes

#: causes that affect only the scale, so that another way to compute the scale helps
_ONLY_SCALE = ("stale_scale", "corrupted_scale", "clipping")
_KEY = ["layer", "role"]


def find_blamed_tensor(found: DiagnosisResult) -> Finding | None:
    """Return the finding about the tensor whose cast is to blame, or most likely to blame. Return None if no cast is to
    blame.
    """
    likeliest = found.decision.likeliest if found.cause == "unknown" else ()
    chosen = found.decision.finding or next(iter(likeliest), None)
    if chosen is None or chosen.tensor_name is None or chosen.role not in ROLES:
        return None
    return chosen if CAUSES[chosen.cause].kind in OF_FP8 else None


def flag_operands_to_change(found: DiagnosisResult) -> dict[Key, ChangeReason]:
    """Return the operands to change, by harm rank.

    Flag the blamed operand, and operands that left the baseline's band before the loss diverged. If the loss follows the
    baseline's loss, flag operands that left the band at any time. Also flag two kinds of operands at any time: operands with
    a clearly wrong scale, which a diverging loss does not cause, and X or W that lose most of their values up to the end.
    Flag no operand if FP8 is not to blame.
    """
    flagged: dict[Key, ChangeReason] = {}
    if found.cause in (*NOT_FP8, *NO_RECIPE):
        return flagged
    blamed, out = find_blamed_tensor(found), _stretches(found)
    if blamed is not None and blamed.layer and blamed.role:
        key = (blamed.layer, blamed.role)
        flagged[key] = ChangeReason(
            f"{blamed.cause}: {blamed.evidence}", out.get(key), only_scale=blamed.cause in _ONLY_SCALE
        )
    if found.comparison is not None:
        _flag_compared(found, flagged, out)
    if blamed is not None and blamed.cause == "changed_recipe":
        for change in recipe_changes(found.facts):
            for key in change.keys:
                flagged.setdefault(key, ChangeReason("its recipe changed", out.get(key)))
    flagged = _add_undos(found, flagged, blamed)
    ranks = rank_tensors_by_harm(found)
    return {key: flagged[key] for key in sorted(flagged, key=lambda key: ranks.get(key, len(ranks)))}


def _flag_compared(found: DiagnosisResult, flagged: dict[Key, ChangeReason], out: Mapping[Key, tuple[int, int]]) -> None:
    assert found.comparison is not None
    begun = (found.decision.culprit.since or 0) if found.decision.culprit else 0
    for row in found.comparison.out_of_band.iter_rows(named=True):
        if found.divergence_step is not None and row["onset"] > max(found.divergence_step, begun):
            continue
        what = f"{row['metric']} {format_number(row['expected'])} -> {format_number(row['value'])} from step {row['onset']}"
        key = (row["layer"], row["role"])
        flagged.setdefault(key, ChangeReason(what, out.get(key)))
    for each in found.findings:
        if not each.is_out_of_band or each.strength == "hint" or each.cause == "nonfinite":
            continue
        if not each.may_follow_the_loss and each.layer and each.role:
            key = (each.layer, each.role)
            flag = ChangeReason(f"{each.cause}: {each.evidence}", out.get(key), only_scale=each.cause in _ONLY_SCALE)
            flagged[key] = replace(flagged.setdefault(key, flag), only_scale=flag.only_scale)
    for suspect in suspects(found.facts):
        if suspect.role not in GRADIENTS and loses_most_values(suspect):
            key = (suspect.layer, suspect.role)
            flagged.setdefault(key, ChangeReason(f"most values are lost from step {suspect.since} on", out.get(key)))


def _stretches(found: DiagnosisResult) -> dict[Key, tuple[int, int]]:
    """Return the first and last step at which each operand was out of band by any metric."""
    if found.comparison is None:
        return {}
    steps = pl.Series(found.run.metrics.steps)
    rows = found.comparison.out_of_band.with_columns(at=steps.search_sorted(found.comparison.out_of_band["onset"]))
    ends = (pl.col("at") + pl.col("samples") - 1).max().clip(upper_bound=len(steps) - 1)
    each = rows.group_by("layer", "role").agg(pl.col("onset").min(), ends.alias("end"))
    return {(layer, role): (onset, steps[end]) for layer, role, onset, end in each.iter_rows()}


def _add_undos(
    found: DiagnosisResult, flagged: Mapping[Key, ChangeReason], blamed: Finding | None
) -> dict[Key, ChangeReason]:
    """Add to each flag the last change of its operand's recipe before the fault."""
    if blamed is not None and blamed.cause == "resumed_without_scales":
        lost = RestoredSetting(None, blamed.since, is_cause=True)
        return {key: replace(flag, undo=lost) for key, flag in flagged.items()}
    since = None if blamed is None else blamed.since
    until = {key: flag.out[0] if flag.out is not None else since for key, flag in flagged.items()}
    undos = _find_undos(found.run, found.baseline, until)
    is_cause = blamed is not None and blamed.cause == "changed_recipe"
    return {
        key: replace(flag, undo=replace(undos[key], is_cause=is_cause)) if key in undos else flag
        for key, flag in flagged.items()
    }


def _find_undos(run: Run, baseline: Run | None, until: Mapping[Key, int | None]) -> dict[Key, RestoredSetting]:
    """Return the recipes that operands had before a change in the run, or else the recipes in the baseline.

    Args:
        until: the step at which each operand went wrong; None if unknown.
    """
    if run.quantization != QUANTIZED or not until:
        return {}
    before, slack = _recipes_in(baseline, until), int(measure_sampling_interval(run.metrics.steps))
    keys = pl.DataFrame(list(until), schema=dict.fromkeys(_KEY, pl.String), orient="row")
    rows = run.metrics.select_tensors_by_key(keys).read_all_rows(["recipe"]).drop_nulls("recipe")
    found: dict[Key, RestoredSetting] = {}
    for key, of_key in rows.group_by(_KEY, maintain_order=True):
        mine, names = (str(key[0]), str(key[1])), of_key["recipe"]
        moved = of_key.filter((names != names.shift(1)).fill_null(False))
        last, end = names[-1], until[mine]
        in_time = moved if end is None else moved.filter(pl.col("step") <= end + slack)
        if len(in_time):
            step = in_time["step"][-1]
            earlier = of_key.filter(pl.col("step") < step)["recipe"][-1]
            found |= {mine: RestoredSetting(earlier, step)} if earlier != last else {}
        elif before.get(mine, last) != last:
            found[mine] = RestoredSetting(before[mine], None)
    return found


def _recipes_in(baseline: Run | None, keys: Iterable[Key]) -> dict[Key, str]:
    """Return the most frequent recipes of operands in a baseline that quantizes."""
    if baseline is None or baseline.quantization != QUANTIZED:
        return {}
    wanted = set(keys)
    casts = find_usual_casts(baseline.metrics).drop_nulls("recipe").iter_rows()
    return {(layer, role): recipe for layer, role, recipe, _ in casts if (layer, role) in wanted}
