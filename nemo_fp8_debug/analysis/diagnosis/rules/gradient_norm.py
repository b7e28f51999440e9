"""Does the gradient norm move from one step to the next to another level, as if gradients were multiplied by a factor?

Gradients that are multiplied at the loss have all dY multiplied by the same factor. Those that are multiplied behind the
backward pass, as by data-parallel averaging, have none. Where some dY move and others do not, the cause lies between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from ...formatting import number
from ...loss.onset import stays
from ...loss.smoothing import running_median
from ...loss.step_change import rises_at
from ...runs.grid import Floats, Ints
from ...runs.run import Run
from ...runs.source import Bools
from .finding import Finding
from .grad_scale import common_loss_scale, severity_of

#: factor between gradient norms, either way, that counts as another level
_LARGER = 4.0
#: norms on either side whose medians make two levels, and on either side of a move that comes at once
_LEVEL, _CLOSE = 10, 3
#: bits between two levels, at least, and in standard deviations of what the norm moves by from step to step; part of them
#: that come at once
_BITS, _SIGMAS, _AT_ONCE = 0.85, 6.0, 0.8
#: part of a move that both the run's own norm and that in units of the baseline's must make
_OWN = 0.5
#: part of a run without a baseline in which the norm falls as the model begins to learn
_BEGINNING = 0.1
#: bits by which a norm may be off the loss scale, in units of the baseline's, if it is not taken back
_NEAR = 1.0
#: bits by which a dY may be off the others, and share of all dY that must agree
_OFF, _MOST = 0.75, 0.8
#: samples on either side whose medians tell what dY did
_SAMPLES = 2
#: values on either side that a running median is taken over
_HALF = 2
_AT_THE_LOSS = "dY of all layers move with it, so the loss is multiplied"
_BEHIND = "no dY moves with it, so gradients are multiplied behind the backward pass"
_FACTOR = "Look at what multiplies the loss or divides gradients: loss scale, accumulation, data-parallel averaging."
_GROWS = "Look at what came before it: learning rate, data, the first tensor out of band."
_ZERO = (
    "Look at where gradients get lost: the loss function and its backward pass, masked labels, a detached tensor, the "
    "buffers that the optimizer reads."
)
#: steps in a row: in a single one all labels may be masked, or all rewards the same
_ZEROS_IN_A_ROW = 3


@dataclass(frozen=True)
class _Move:
    """To another level."""

    step: int
    bits: float


def norms(run: Run) -> pl.DataFrame:
    """step, grad_norm: where it is reported; NaN and infinite ones too."""
    rows = run.steps.select("step", "grad_norm").filter(pl.col("grad_norm").is_not_null())
    return rows.unique("step", keep="last").sort("step")


def gradient_norm(run: Run, baseline: Run | None) -> list[Finding]:
    """Find a norm that is zero, that moves at once to another level and keeps it, or that leaves the baseline's."""
    return [*_zero(run, baseline), *_moves_or_grows(run, baseline)]


def _zero(run: Run, baseline: Run | None) -> list[Finding]:
    """Find a norm that is exactly zero, unless the baseline's norm is zero at any step."""
    rows = norms(run).filter(~pl.col("step").is_in(run.made_up_for.implode()))
    steps, zero = rows["step"].to_numpy(), (rows["grad_norm"] == 0).to_numpy()
    if not zero.any() or (baseline is not None and (norms(baseline)["grad_norm"] == 0).any()):
        return []
    behind = len(zero) - int(np.argmin(zero[::-1])) if not zero.all() else 0
    lasts = len(zero) - behind >= _ZEROS_IN_A_ROW
    since = int(steps[behind] if lasts else steps[np.argmax(zero)])
    # Megatron-Core reports 0 where it does not clip, and so computes no norm.
    arrive = _has_gradients(run, since, int(steps[zero][-1]))
    recorded = not run.metrics.with_role("grad_output").is_empty()
    if zero.all() and (arrive or not recorded) and (baseline is None or norms(baseline).is_empty()):
        return []
    facts = f"the gradient norm is exactly 0 at {zero.sum()} of {len(zero)} {run.unit}s"
    facts += f", and at each one from {run.unit} {since} on" if lasts else f", first at {run.unit} {since}"
    facts += "; dY has other values, so the norm may not have been computed" if arrive else ""
    sure = "high" if lasts and recorded and not arrive else "low"
    return [Finding("gradient norm", "dead", sure, facts, _ZERO, since=since, severity=2 if sure == "high" else 0)]


def _has_gradients(run: Run, first: int, last: int) -> bool:
    """Return True if any dY has values in the samples of these steps."""
    gradients = run.metrics.with_role("grad_output")
    within = gradients.over(gradients.steps[(gradients.steps >= first) & (gradients.steps <= last)])
    return not within.gathered(["amax"], lambda rows: rows.filter(pl.col("amax") > 0).head(1)).is_empty()


def _moves_or_grows(run: Run, baseline: Run | None) -> list[Finding]:
    move = _move_of(run, baseline)
    if move is None or _follows_the_loss(run, baseline, move):
        return _grows(run, baseline)
    times = 2**move.bits
    what = f"{times:.3g} times" if times > 1 else f"1/{1 / times:.3g} of"
    facts = f"the gradient norm is {what} what it was from {run.unit} {move.step} on, at once and steadily"
    where = _where(run, move)
    if where is None:
        return [Finding("gradient norm", "unknown", "low", facts, _GROWS, since=move.step)]
    facts, severity = f"{facts}; {where}", severity_of(times)
    return [Finding("gradient norm", "multiplier", "medium", facts, _FACTOR, since=move.step, severity=severity)]


def _move_of(run: Run, baseline: Run | None) -> _Move | None:
    """The move of the norm or of its ratio to the baseline's: of whichever has less noise, or else of the other. Both must
    move."""
    own = _bits(_usable(run), "grad_norm")
    apart = None if baseline is None else _apart(run, baseline)
    first = int(_BEGINNING * len(own[0]))
    behind = own[0][first:], own[1][first:]
    for steps, bits in sorted((each for each in (behind, apart) if each is not None), key=lambda each: _noise(each[1])):
        move = _move(steps, bits)
        if move is not None and all(_part(move, *each) > _OWN for each in (own, apart) if each is not None):
            return move
    return None


def _usable(run: Run) -> pl.DataFrame:
    return norms(run).filter(pl.col("grad_norm").is_finite() & (pl.col("grad_norm") > 0))


def _apart(run: Run, baseline: Run) -> tuple[Ints, Floats] | None:
    """Steps, and log2 of the norm in units of the baseline's; None: they have too few steps in common."""
    both = _usable(run).join(_usable(baseline), on="step", suffix="_baseline").sort("step")
    both = both.with_columns(ratio=pl.col("grad_norm") / pl.col("grad_norm_baseline"))
    return _bits(both, "ratio") if len(both) > 2 * _LEVEL else None


def _bits(rows: pl.DataFrame, name: str) -> tuple[Ints, Floats]:
    return rows["step"].to_numpy(), np.log2(rows[name].to_numpy())


def _move(steps: Ints, bits: Floats) -> _Move | None:
    """The largest move to another level that comes at once and is kept to the end."""
    if len(bits) <= 2 * _LEVEL:
        return None
    medians = np.median(np.lib.stride_tricks.sliding_window_view(bits, _LEVEL), axis=1)
    apart = medians[_LEVEL:] - medians[:-_LEVEL]
    # The windows straddle the move, so several places are as good: the one with the largest step from value to value.
    best = float(np.abs(apart).max())
    near = np.flatnonzero(np.abs(apart) >= _AT_ONCE * best) + _LEVEL
    at = int(near[np.argmax(np.abs(bits[near] - bits[near - 1]))])
    move = float(np.median(bits[at : at + _LEVEL]) - np.median(bits[at - _LEVEL : at]))
    close = float(np.median(bits[at : at + _CLOSE]) - np.median(bits[at - _CLOSE : at]))
    lasting = float(np.median(bits[at:]) - np.median(bits[max(0, at - len(bits[at:])) : at]))
    least = max(_BITS, _SIGMAS * _noise(bits))
    kept = min(close / move, lasting / move) >= _AT_ONCE if move else False
    return _Move(int(steps[at]), move) if abs(move) >= least and kept else None


def _noise(bits: Floats) -> float:
    """Its standard deviation, from what they move by from step to step."""
    return 1.4826 * float(np.median(np.abs(np.diff(bits)))) / 2**0.5 if len(bits) > 1 else 0.0


def _part(move: _Move, steps: Ints, bits: Floats) -> float:
    """How far a norm goes at that step, in units of the move; 0 where it is not known."""
    at = int(np.searchsorted(steps, move.step))
    before, after = bits[max(at - _LEVEL, 0) : at], bits[at : at + _LEVEL]
    return float(np.median(after) - np.median(before)) / move.bits if len(before) and len(after) else 0.0


def _follows_the_loss(run: Run, baseline: Run | None, move: _Move) -> bool:
    """Whether the loss moved at that step too, or the batches became smaller or larger: then gradients are what they are."""
    rise = rises_at(run.loss, None if baseline is None else baseline.loss, move.step)
    return rise is not None or _other_batches(run, move.step)


def _other_batches(run: Run, step: int) -> bool:
    consumed = run.steps.select("step", "consumed_samples").drop_nulls().sort("step")
    sizes = consumed.with_columns(per_step=pl.col("consumed_samples").diff() / pl.col("step").diff()).drop_nulls()
    before = sizes.filter(pl.col("step") < step).tail(_CLOSE)["per_step"].median()
    after = sizes.filter(pl.col("step") > step).head(_CLOSE)["per_step"].median()
    return before is not None and after is not None and before != after


def _where(run: Run, move: _Move) -> str | None:
    """Where gradients are multiplied, in words; None: dY of some layers say one thing and others another, or there are
    none."""
    gradients, known = run.metrics.with_role("grad_output"), (pl.col("amax") > 0) & pl.col("amax").is_finite()
    steps = gradients.gathered(["amax"], lambda rows: rows.filter(known).unique("step"))["step"].sort()
    before, after = steps.filter(steps < move.step).tail(_SAMPLES), steps.filter(steps >= move.step).head(_SAMPLES)
    if before.is_empty() or after.is_empty():
        return None
    levels = [
        gradients.over(side.to_numpy())
        .frame(["amax"])
        .filter(known)
        .group_by("layer")
        .agg(level=pl.col("amax").log(2).median())
        for side in (before, after)
    ]
    both = levels[0].join(levels[1], on="layer", suffix="_after")
    bits = (both["level_after"] - both["level"]).to_numpy()
    if not len(bits):
        return None
    for expected, told in ((move.bits, _AT_THE_LOSS), (0.0, _BEHIND)):
        if float(np.mean(np.abs(bits - expected) <= _OFF)) >= _MOST:
            return told
    return None


def _grows(run: Run, baseline: Run | None) -> list[Finding]:
    if baseline is None:
        return []
    both = _usable(run).join(_usable(baseline), on="step", suffix="_baseline").sort("step")
    if len(both) < 2 * _HALF + 1:
        return []
    apart = np.log2(both["grad_norm"].to_numpy() / both["grad_norm_baseline"].to_numpy())
    smooth = running_median(apart, _HALF)
    far = {sign: sign * smooth > np.log2(_LARGER) for sign in (1, -1)}
    lasting = (stays(high, sign * apart, _HALF) for sign, high in far.items())
    at, end = next((at for at in lasting if at is not None), None), len(smooth)
    if at is None:
        at, end = max((_longest(high) for high in far.values()), key=lambda each: each[1] - each[0])
        if end - at < _LEVEL:
            return []
    since, times = int(both["step"][at]), 2 ** float(np.median(smooth[at:end]))
    until = "on" if end == len(smooth) else f"to {both['step'][end - 1]}"
    facts = f"the gradient norm is {number(times)} times the baseline's from {run.unit} {since} {until} (median)"
    scale = common_loss_scale(run.steps, baseline.steps)
    if at == 0 and scale is not None and abs(np.log2(times / scale)) <= _NEAR:
        facts += f", which is about the loss scale of both ({number(scale)}): it is not taken back"
        return [Finding("gradient norm", "multiplier", "medium", facts, _FACTOR, since=since)]
    return [Finding("gradient norm", "unknown", "low", facts, _GROWS, since=since)]


def _longest(high: Bools) -> tuple[int, int]:
    """Return the first place of the longest stretch of True and the place after it, or two zeros."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], high, [False]]).astype(np.int8)))
    stretches = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    return max(stretches, key=lambda each: each[1] - each[0], default=(0, 0))
