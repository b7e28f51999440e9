"""Do the inputs of a kind of GEMM move to another level at once?

Weights change slowly, and so does the magnitude of what a GEMM gets. It moves from one sample to the next and stays there
where something else is computed from then on: attention without its mask, dropout that is on, other data. The root mean
square tells it best; an outlier moves that as well, but not the median.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.special import stdtr

from ...formatting import number
from ...loss.outcome import LossOutcome
from ...loss.step_change import Rise, likeliest_rise
from ...runs.grid import Floats, Ints
from ...runs.run import Run
from .finding import Finding
from .levels import MEDIAN, ROOT_MEAN_SQUARE, Level, moves_of_levels

#: samples on either side whose means are compared, and moves before that tell the noise as well
_SIDE, _BEFORE = 4, 16
#: of the moves that tell the noise, the least number, and the part that counts as independent: each is the difference of two
#: levels, and so depends on the next one
_FEWEST, _INDEPENDENT = 6, 2 / 3
#: of a move, the part that the median must come with too, and the baseline must not
_HALF = 0.5
#: noise that is there at the least, the least change, and the least part of it that comes with one sample
_LEAST_NOISE, _LEAST_CHANGE, _AT_ONCE = 0.0035, 0.05, 0.6
#: of each move in the difference of the means of as many samples on either side
_WEIGHTS = (_SIDE - np.abs(np.arange(1 - _SIDE, _SIDE))) / _SIDE
#: part of a run's samples that is its start, in which all moves
_START = 0.2
#: how many such moves noise makes in a run, at the most, of what is told, times the chance of the loss's rise if there is
#: one; of what is looked at; and the chance of a rise that is one
_BY_NOISE, _LOOKED_AT, _RISES = 0.001, 0.5, 0.05
#: beside another model, whose own moves excuse less: how many times as seldom it has to be, and what is looked at
_OTHER_MODEL, _LOOKED_AT_BESIDE_IT = 5.0, 0.25
#: kinds of GEMMs that a model has, at the most
_MOST_KINDS = 256
_ADVICE = (
    "Look at what this GEMM's input is computed from, and what changed at that step: attention masks, dropout, position "
    "ids, lengths of sequences, the data."
)


def inputs(run: Run, baseline: Run | None, loss: LossOutcome) -> list[Finding]:
    """The farthest move of X at once, of a kind of GEMM, that is no noise or that the loss rises with, and that the baseline
    does not make."""
    found = _moves(run)
    usual = _levels(baseline, ROOT_MEAN_SQUARE) if baseline is not None and found else None
    other_model = baseline is not None and not loss.same_model
    times, looked_at = (_OTHER_MODEL, _LOOKED_AT_BESIDE_IT) if other_model else (1.0, _LOOKED_AT)
    for move in found:
        if move.by_noise > looked_at or (usual is not None and abs(_part_of(move, *usual)) > _HALF):
            continue
        rise = _rise_with(move, loss, run.metrics.steps, times)
        if times * move.by_noise * (1.0 if rise is None else rise.chance) < _BY_NOISE:
            return [_told(run, move, None if rise is None else loss.percents(rise.percent, move.step))]
    return []


def _rise_with(move: _Move, loss: LossOutcome, sampled: Ints, times: float) -> Rise | None:
    """That of the loss, by more than the limit and so many times as seldom as has to be; None: there is none."""
    rise = likeliest_rise(loss.run, loss.baseline, move.step, sampled)
    return rise if rise is not None and rise.percent > loss.max_gap and times * rise.chance < _RISES else None


@dataclass(frozen=True)
class _Move:
    """A move of the level of the X of a kind of GEMM."""

    #: the name of such layers, `*` for their numbers
    kind: str
    step: int
    #: of the natural log of the level
    change: float
    #: how many as far noise makes in such a run
    by_noise: float


def _told(run: Run, move: _Move, rise: str | None) -> Finding:
    way, percent = "up" if move.change > 0 else "down", 100 * abs(np.expm1(move.change))
    told = f"X of {move.kind} goes {way} by {number(percent)}% at {run.unit} {move.step} (root mean square) and stays there"
    told += "" if rise is None else f", and the loss rises by {rise} with it"
    return Finding("inputs", "software", "medium", told, _ADVICE, move.kind, since=move.step, severity=1)


def _moves(run: Run) -> list[_Move]:
    """Those that are worth a look at the loss, what noise makes least often first."""
    steps, levels = _levels(run, ROOT_MEAN_SQUARE)
    first, found, judged = round(_START * len(steps)), list[_Move](), 0
    for kind, moves in levels.items():
        change, chance = _changes(moves)
        judged += int(np.isfinite(chance[first:]).sum())
        far = (np.abs(change) > _LEAST_CHANGE) & (chance < 1)
        found += [_Move(kind, int(steps[s]), float(change[s]), float(chance[s])) for s in np.flatnonzero(far) if s >= first]
    found = [replace(move, by_noise=judged * move.by_noise) for move in found]
    found = sorted((move for move in found if move.by_noise < _LOOKED_AT), key=lambda move: move.by_noise)
    medians = _levels(run, MEDIAN) if found else (steps[:0], {})
    return [move for move in found if _part_of(move, *medians) > _HALF]


def _part_of(move: _Move, steps: Ints, levels: Mapping[str, Floats]) -> float:
    """How far other levels of the same kind move at the nearest sample, in units of a move; 0 if there are none."""
    if move.kind not in levels or not len(steps):
        return 0.0
    return float(np.nan_to_num(_changes(levels[move.kind])[0][np.argmin(np.abs(steps - move.step))])) / move.change


def _levels(run: Run, level: Level) -> tuple[Ints, dict[str, Floats]]:
    """Sampled steps, and of the X of each kind of GEMM how the mean level of its layers moves from each to the next; NaN
    where it is not known. Of more kinds than any model has, none."""
    operands = run.metrics.with_role("input")
    names = [_kind_of(layer) for layer in operands.tensors["layer"]]
    kinds, places = np.unique(np.array(names, dtype=np.str_), return_inverse=True)
    if len(kinds) > _MOST_KINDS:
        return operands.steps[:0], {}
    steps, moves = moves_of_levels(operands, level, partial(_mean_by_kind, places, len(kinds)))
    return steps, dict(zip(kinds.tolist(), np.array(moves).reshape(-1, max(len(kinds), 1)).T, strict=False))


def _kind_of(layer: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in layer.split("."))


def _mean_by_kind(places: Ints, kinds: int, moves: Floats) -> Floats:
    """[T] -> [K]: NaN where none is known."""
    known = np.isfinite(moves)
    sums, counts = (np.bincount(places[known], each, kinds) for each in (moves[known], None))
    with np.errstate(invalid="ignore"):
        means: Floats = sums / counts
    return means


def _changes(moves: Floats) -> tuple[Floats, Floats]:
    """[S - 1] -> [S] each: the mean level of some samples from each on less that of as many before, and the chance with
    which noise makes as much of it, 1 where it does not come at once; NaN where there are too few samples."""
    change, chance = np.full(len(moves) + 1, np.nan), np.full(len(moves) + 1, np.nan)
    if len(moves) < 2 * _SIDE:
        return change, chance
    padded = np.concatenate([np.full(_BEFORE, np.nan), moves])
    windows = np.lib.stride_tricks.sliding_window_view(padded, _BEFORE + _SIDE)  # of each move, with those around it
    apart, others = windows[:, 1 - 2 * _SIDE :] @ _WEIGHTS, np.delete(windows, _BEFORE, axis=1)
    known = np.isfinite(others).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        noise = np.sqrt(np.nansum(others**2, axis=1) / (2 * known)) + _LEAST_NOISE
        as_much = 2 * stdtr(_INDEPENDENT * known, -np.abs(apart) / (noise * np.sqrt(2 / _SIDE)))
        at_once = windows[:, _BEFORE] * np.sign(apart) > _AT_ONCE * np.abs(apart)
    judged = slice(1, 1 + len(windows))
    change[judged] = apart
    chance[judged] = np.where(np.isfinite(apart) & (known >= _FEWEST), np.where(at_once, as_much, 1.0), np.nan)
    return change, chance
