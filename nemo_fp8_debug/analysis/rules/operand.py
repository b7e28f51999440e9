"""Why an operand left the band: what its scale did, and what its values did."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from ..grid import Floats, Ints
from ..verdict import number
from .finding import Finding

#: bits by which a scale is off that count
OFF = 1.0
#: bits that a scale moves by from one sample to the next, without the values, when it jumps
JUMP = 3.0
#: bits that an outlier stands higher above the median than before, which count
HIGHER = 2.0
#: samples behind the onset that tell what happened
_BEHIND = 4

_ADVICE = {
    "stale_scale": "Let its scale follow: current scaling, or a shorter amax history; check that the history is updated.",
    "corrupted_scale": "Look at what writes the scale (memory, a checkpoint, a reduction over ranks); current scaling "
    "keeps none that could be corrupted.",
    "clipping": "A larger margin, a shorter amax history with the largest of it, or current scaling.",
    "underflow": "Current or finer scaling (blockwise, MXFP8), E5M2 where range matters more than precision, or BF16.",
    "outlier": "Finer scaling (blockwise, MXFP8), or BF16 for the GEMMs that read it: one scale cannot serve both.",
    "dead": "Look at what produces it: a masked or unused path, or a gradient that does not arrive.",
    "nonfinite": "Dump the layer at this step (`triggers=['nonfinite']`) and look at what produces it.",
}


@dataclass(frozen=True)
class Course:
    """What an operand did over the samples of a run, oldest first; NaN where a figure is absent."""

    layer: str
    role: str
    steps: Ints
    #: log2 of the scale in use, and of the one that the values ask for
    scale: Floats
    wanted: Floats
    amax: Floats
    outlier: Floats
    underflow: Floats
    overflow: Floats
    nonfinite: Floats

    @classmethod
    def of(cls, figures: pl.DataFrame, layer: str, role: str) -> Course:
        """From a `figures` table."""
        rows = figures.filter(layer=layer, role=role).sort("step")

        def column(name: str) -> Floats:
            values: Floats = rows[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
            return values

        with np.errstate(divide="ignore", invalid="ignore"):
            scale, ratio = np.log2(column("scale")), column("scale_ratio_log2")
        steps: Ints = rows["step"].to_numpy()
        amax, outlier, underflow, overflow = map(column, ("amax", "outlier_log2", "underflow_pct", "overflow_pct"))
        nonfinite = column("nan") + column("inf")
        return cls(layer, role, steps, scale, scale - ratio, amax, outlier, underflow, overflow, nonfinite)


def why(bad: Course, since: int, good: Course | None = None) -> Finding:
    """The cause, from the samples around the onset.

    Args:
        since: step of the onset.
        good: the same operand of a good run.
    """
    at = int(np.searchsorted(bad.steps, since))
    behind = slice(at, at + _BEHIND)
    if (bad.nonfinite[behind] > 0).any():
        return _found(bad, since, "nonfinite", "high", f"{bad.nonfinite[at]:.0f} values are NaN or infinite")
    if (bad.amax[behind] == 0).all():
        return _found(bad, since, "dead", "high", "all values are zero")
    off = bad.scale - bad.wanted
    usual = _usual(good, off[:at])
    error = max((off[behind] - usual).tolist(), key=lambda bits: abs(bits) if np.isfinite(bits) else -1.0, default=np.nan)
    if abs(error) > OFF:
        return _of_the_scale(bad, since, at, float(error))
    return replace(_of_the_values(bad, since, at, good), may_follow_the_loss=True)


def _usual(good: Course | None, before: Floats) -> float:
    """By how many bits the scale in use is off the current one as a rule."""
    known = (good.scale - good.wanted) if good else before
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else 0.0


def _of_the_scale(bad: Course, since: int, at: int, error: float) -> Finding:
    """The scale is not the one that the values ask for."""
    start = max(at - _BEHIND, 0)
    end = min(at + _BEHIND, len(bad.steps))
    scale, wanted = np.diff(bad.scale[start:end]), np.diff(bad.wanted[start:end])
    moved, asked = float(np.nansum(scale)), float(np.nansum(wanted))
    sign = "too large" if error > 0 else "too small"
    facts = (
        f"the scale is {abs(error):.1f} bits {sign}; around step {since} it moved by {moved:+.1f} bits, "
        f"and what the values ask for by {asked:+.1f}"
    )
    if not len(scale):
        return _found(bad, since, "clipping" if error > 0 else "underflow", "low", facts)
    jump = int(np.nanargmax(np.abs(scale)))
    since_then = np.diff(bad.scale[at:end])
    stood_still = len(since_then) > 0 and not since_then.any() and abs(moved) < abs(asked) / 2
    at_once = abs(scale[jump]) > 2 * abs(moved - scale[jump])
    if at_once and abs(scale[jump]) >= JUMP and abs(wanted[jump]) < abs(scale[jump]) / 2:
        return _found(bad, since, "corrupted_scale", "high", facts)
    if stood_still and abs(asked) > OFF / 2:
        return _found(bad, since, "stale_scale", "high", facts)
    return _found(bad, since, "clipping" if error > 0 else "underflow", "medium", facts)


def _of_the_values(bad: Course, since: int, at: int, good: Course | None) -> Finding:
    """The scale is right, and the values are such that it does not serve them."""
    reference = good.outlier if good else bad.outlier[:at]
    usual = float(np.nanmedian(reference)) if np.isfinite(reference).any() else np.nan
    highest, under, over = (_highest(figure[at : at + _BEHIND]) for figure in (bad.outlier, bad.underflow, bad.overflow))
    higher = highest - usual
    if higher > HIGHER:
        facts = f"its largest value stands {usual + higher:.1f} bits above the median instead of {usual:.1f}"
        return _found(bad, since, "outlier", "high", f"{facts}; underflow {number(under, '%')}")
    facts = f"its scale is right; underflow {number(under, '%')}, overflow {number(over, '%')}"
    if over > 0.01 and over >= under:
        return _found(bad, since, "clipping", "low", facts)
    return _found(bad, since, "underflow", "medium" if under > 1 else "low", facts)


def _highest(figure: Floats) -> float:
    known = figure[np.isfinite(figure)]
    return float(known.max()) if len(known) else np.nan


def _found(bad: Course, since: int, cause: str, confidence: str, evidence: str) -> Finding:
    return Finding("operand", cause, confidence, evidence, _ADVICE.get(cause, ""), bad.layer, bad.role, since)
