"""Is dY multiplied by what it should be? Figures in units of the loss, and FP8's range, both depend on it."""

from __future__ import annotations

import numpy as np
import polars as pl

from .finding import Finding

#: a factor between multipliers that counts
_FACTOR = 1.5
#: what a multiplier may be below the loss scale for accumulation and averaging over ranks
_LEAST_SHARE = 2.0**-14


def multiplier(bad: pl.DataFrame, good: pl.DataFrame | None = None) -> list[Finding]:
    """Faults of what gradients are multiplied by.

    Args:
        bad: `steps` table, with grad_multiplier and loss_scale.
        good: likewise.
    """
    known = bad.filter(pl.col("grad_multiplier").is_not_null())
    if known.is_empty():
        return []
    return [*_against_the_loss_scale(known), *_moved(known), *_against_the_good_run(known, good)]


def _against_the_loss_scale(known: pl.DataFrame) -> list[Finding]:
    rows = known.filter(pl.col("loss_scale") > 0).with_columns(share=pl.col("grad_multiplier").abs() / pl.col("loss_scale"))
    wrong = rows.filter((pl.col("share") > _FACTOR) | (pl.col("share") < _LEAST_SHARE))
    if wrong.is_empty():
        return []
    step, measured, scale = wrong.select("step", "grad_multiplier", "loss_scale").row(0)
    facts = f"at step {step} gradients are multiplied by {measured:.3g}, and a loss scale of {scale:.3g} is reported"
    return [
        Finding("multiplier", "multiplier", "high", facts, "The loss scale that is reported is not applied.", since=step)
    ]


def _moved(known: pl.DataFrame) -> list[Finding]:
    """By a factor, with no loss scale that tells why."""
    per_scale = (pl.col("grad_multiplier") / pl.col("loss_scale").fill_null(1.0)).abs()
    values = known.with_columns(value=per_scale).filter(pl.col("value") > 0)
    usual = values["value"].head(max(1, len(values) // 4)).median()
    if not isinstance(usual, float):
        return []
    off = values.filter((pl.col("value") / usual).log(2).abs() > np.log2(_FACTOR))
    if off.is_empty():
        return []
    step, value = off.select("step", "value").row(0)
    facts = f"the gradients' multiplier is {value:.3g} from step {step} on and was {usual:.3g}, with the same loss scale"
    advice = "Look at what divides the loss: accumulation, tokens, data-parallel averaging."
    return [Finding("multiplier", "multiplier", "high", facts, advice, since=step)]


def _against_the_good_run(known: pl.DataFrame, good: pl.DataFrame | None) -> list[Finding]:
    theirs = None if good is None else good["grad_multiplier"].drop_nulls().abs().median()
    mine = known["grad_multiplier"].abs().median()
    if not isinstance(theirs, float) or not isinstance(mine, float) or not theirs or not mine:
        return []
    if abs(np.log2(mine / theirs)) <= np.log2(_FACTOR):
        return []
    facts = f"gradients are multiplied by {mine:.3g} here and by {theirs:.3g} in the good run"
    advice = "Other loss scales or accumulation explain that; otherwise the loss is divided twice, or not at all."
    return [Finding("multiplier", "multiplier", "low", facts, advice, since=int(known["step"][0]))]
