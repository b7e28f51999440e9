"""Why an operand left the band: what its scale did, and what its values did."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from ....core.keys import GRADIENTS
from ....numerics.limits import MADE_UP
from ...formatting import number
from ...runs.grid import Floats, Ints
from .finding import Finding
from .producers import advise_on_nonfinite, look_at_producer

#: bits by which a scale is off that count
OFF = 1.0
#: bits that a scale moves by from one sample to the next, without the values, when it jumps; or an outlier within few
JUMP = 3.0
#: bits that an outlier stands higher above the median than before, which count
HIGHER = 2.0
#: points of a percent of values that overflow, or underflow, above what is usual, which count; and that underflow at once
_OVERFLOW, _UNDERFLOW, MOST = 0.01, 1.0, 10.0
#: points of a percent of values that an outlier costs, at least, if it is more than a hint
_LOSES = 0.5
#: percent of values that are most of them, that are many, and samples in which they must be lost, at least
_MOST_LOST, _MANY_LOST, _LASTING = 50.0, 20.0, 6
#: samples behind the onset that tell what happened
BEHIND = 4

#: columns of a `metrics` table that a course is made of
COURSE = ("scale", "scale_ratio_log2", "amax", "outlier_log2", "underflow_pct", "overflow_pct", "nan", "inf")

_ADVICE = {
    "stale_scale": "Let its scale follow: current scaling, or a shorter amax history; check that the history is updated.",
    "corrupted_scale": "Look at what writes the scale (memory, a checkpoint, a reduction over ranks); current scaling "
    "keeps none that could be corrupted.",
    "clipping": "A larger margin, a shorter amax history with the largest of it, or current scaling.",
    "underflow": "Current or finer scaling (blockwise, MXFP8), E5M2 where range matters more than precision, or BF16.",
    "outlier": "Finer scaling (blockwise, MXFP8), or BF16 for the GEMMs that read it: one scale cannot serve both.",
}


@dataclass(frozen=True)
class Course:
    """What an operand did over the samples of a run, oldest first; NaN where a metric is absent."""

    layer: str
    role: str
    steps: Ints
    #: log2 of the scale in use, and by how much that is above the log2 of the one that the values ask for
    scale: Floats
    off: Floats
    #: whether the scale in use is none: infinite, zero or negative
    broken: npt.NDArray[np.bool_]
    amax: Floats
    outlier: Floats
    underflow: Floats
    overflow: Floats
    nonfinite: Floats

    @classmethod
    def of(cls, metrics: pl.DataFrame, layer: str, role: str) -> Course:
        """
        Args:
            metrics: rows with the columns COURSE, of this operand and perhaps others.
        """
        rows = metrics.filter(layer=layer, role=role).sort("step")

        def column(name: str) -> Floats:
            values: Floats = rows[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
            return values

        scale = column("scale")
        broken = np.isinf(scale) | (scale <= 0)
        scale = np.log2(np.where(broken, np.nan, scale))
        off = np.where(np.isfinite(column("scale_ratio_log2")), column("scale_ratio_log2"), np.nan)
        steps: Ints = rows["step"].to_numpy()
        amax, outlier, underflow, overflow = map(column, ("amax", "outlier_log2", "underflow_pct", "overflow_pct"))
        nonfinite: Floats = rows.select(pl.sum_horizontal("nan", "inf").cast(pl.Float64)).to_series().to_numpy()
        return cls(layer, role, steps, scale, off, broken, amax, outlier, underflow, overflow, nonfinite)


def why(run: Course, since: int, baseline: Course | None = None, samples: int = BEHIND, outlier: float = np.nan) -> Finding:
    """The cause, from the samples around the onset.

    Args:
        since: step of the onset.
        baseline: the same operand of a baseline; None: the run's samples before the onset tell what is usual.
        samples: in a row that are out; what came behind them has another cause.
        outlier: bits above the median that are usual where no sample tells; NaN: it is not known.
    """
    at = int(np.searchsorted(run.steps, since))
    behind = slice(at, at + min(BEHIND, samples))
    if not len(run.steps[behind]):
        return _found(run, since, "unknown", "low", f"it has no sample from {since} on")
    # Scales of the first samples are made up, and tell nothing of what is usual.
    alone = slice(min(MADE_UP, max(at - 1, 0)), at)
    reference, before = (run, alone) if baseline is None else (baseline, slice(None))
    if (run.nonfinite[behind] > 0).any() and not (reference.nonfinite[before] > 0).any():
        most = int(np.nanmax(run.nonfinite[behind]))
        return _found(run, since, "nonfinite", "high", f"up to {most} values are NaN or infinite")
    if run.broken[behind].any():
        return _found(run, since, "corrupted_scale", "high", "the scale in use is zero, negative or infinite")
    if (run.amax[behind] == 0).all() and _usual(reference.amax[before], 1.0) > 0:
        return replace(_found(run, since, "dead", "high", "all values are zero"), may_follow_the_loss=True)
    usual = _usual(reference.off[before])
    error = _farthest(run.off[behind] - usual)
    higher = _highest(run.outlier[behind]) - _usual_outlier(run, at, baseline, outlier)
    # A scale lags behind an outlier that has just come up. One that is less far off than usual holds the values better.
    if abs(error) > OFF and error * (error + usual) > 0 and not higher > max(HIGHER, abs(error)):
        return _of_the_scale(run, since, slice(at, behind.stop), error, usual)
    return replace(_of_the_values(run, since, at, baseline, np.isfinite(error), outlier), may_follow_the_loss=True)


def severity(run: Course, since: int) -> int:
    """As of a `Finding`: 2 if an X or W loses most values from the onset to the end; 1 if it loses many, or a dY most."""
    behind = run.steps >= since
    if behind.sum() < _LASTING:
        return 0
    lost = np.fmax(run.underflow[behind], run.overflow[behind])
    known = lost[np.isfinite(lost)]
    percent = min(float(np.median(known)), float(np.median(known[-_LASTING:]))) if len(known) else 0.0
    if run.role in GRADIENTS:
        return int(percent >= _MOST_LOST)
    return 2 if percent >= _MOST_LOST else int(percent >= _MANY_LOST)


def _usual(metric: Floats, otherwise: float = 0.0) -> float:
    """Median of what is known of it."""
    known = metric[np.isfinite(metric)]
    return float(np.median(known)) if len(known) else otherwise


def _farthest(bits: Floats) -> float:
    """From 0; NaN where nothing is known."""
    known = bits[np.isfinite(bits)]
    return float(known[np.abs(known).argmax()]) if len(known) else np.nan


def _of_the_scale(run: Course, since: int, out: slice, error: float, usual: float) -> Finding:
    """The scale is not the one that the values ask for.

    Args:
        out: samples that are out, from the onset on.
        error: bits by which it is off, above what is usual.
    """
    at = out.start
    around = slice(min(max(at - BEHIND, MADE_UP), max(at - 1, 0)), out.stop)
    scale, wanted = _moves(run.scale[around]), _moves((run.scale - run.off)[around])
    moved, asked = float(scale.sum()), float(wanted.sum())
    off = error + usual
    fact = f"the scale is {abs(off):.1f} bits {'too large' if off > 0 else 'too small'}"
    fact += f", where {usual:+.1f} are usual" if abs(usual) >= 0.1 else ""
    clips_or_not = "clipping" if error > 0 else "underflow"
    if not len(scale):
        return _found(run, since, clips_or_not, "low", f"{fact}; what it was before is not known")
    facts = f"{fact}; around {since} it moved by {moved:+.1f} bits, and what the values ask for by {asked:+.1f}"
    until = slice(around.start, at + 1)
    if _jumped(scale, wanted, error) or _jumped(_moves(run.scale[until]), _moves((run.scale - run.off)[until]), error):
        return _found(run, since, "corrupted_scale", "high", facts)
    still = not _moves(run.scale[at : around.stop]).any() and len(run.scale[at : around.stop]) > 1
    if still and abs(moved) < abs(asked) / 2 and asked * np.sign(error) < -OFF / 2:
        return _found(run, since, "stale_scale", "high", facts)
    return _found(run, since, clips_or_not, "medium", facts)


def _moves(bits: Floats) -> Floats:
    """From one sample that knows it to the next."""
    return np.diff(bits[np.isfinite(bits)])


def _jumped(scale: Floats, wanted: Floats, error: float) -> bool:
    """Whether the scale moved at once, to where the error is, and not as the values ask for."""
    if not len(scale):
        return False
    jump = int(np.argmax(np.abs(scale)))
    most, rest = scale[jump], scale.sum() - scale[jump]
    asked = wanted[jump] if len(wanted) == len(scale) else np.inf
    return bool(most * error > 0 and abs(most) >= JUMP and abs(most) > 2 * abs(rest) and abs(asked) < abs(most) / 2)


def _of_the_values(run: Course, since: int, at: int, baseline: Course | None, scaled: bool, outlier: float) -> Finding:
    """The scale is right, or there is none to tell by, and the values are such that it does not serve them.

    Without a baseline that is no more than a hint, unless it happened at once.

    Args:
        scaled: whether the scale is known.
    """
    behind, before = slice(at, at + BEHIND), slice(None, at) if baseline is None else slice(None)
    reference = run if baseline is None else baseline
    under, over = (_highest(metric[behind]) for metric in (run.underflow, run.overflow))
    usual = _usual_outlier(run, at, baseline, outlier)
    more_under, more_over = (
        known - _usual(metric[before]) for known, metric in ((under, reference.underflow), (over, reference.overflow))
    )
    surely = baseline is not None or _at_once(run, at)
    losses = f"underflow {_shown(under)}, overflow {_shown(over)}"
    if (higher := _highest(run.outlier[behind])) - usual > HIGHER:
        loses = max(np.nan_to_num(more_under), np.nan_to_num(more_over)) > _LOSES
        confidence = "low" if not loses else "high" if baseline is not None else "medium" if surely else "low"
        facts = f"its largest value stands {higher:.1f} bits above the median instead of {usual:.1f}; {losses}"
        return _found(run, since, "outlier", confidence, facts)
    facts = f"{'its scale is right' if scaled else 'its scale is not known'}; {losses}"
    if more_over > _OVERFLOW and over >= np.nan_to_num(under):
        return _found(run, since, "clipping", "low", facts)
    if more_under > _UNDERFLOW:
        return _found(run, since, "underflow", "medium" if surely else "low", facts)
    return _found(run, since, "unknown", "low", f"{facts}: neither tells why more is lost than before")


def _usual_outlier(run: Course, at: int, baseline: Course | None, otherwise: float) -> float:
    """Bits above the median: of the baseline, or else of the samples before, unless they are the first."""
    if baseline is not None:
        return _usual(baseline.outlier, np.nan)
    return _usual(run.outlier[:at], np.nan) if at > MADE_UP or np.isnan(otherwise) else otherwise


def _at_once(run: Course, at: int) -> bool:
    """Whether values changed within few samples: metrics of runs that go well trend, and do not jump."""
    behind, before = slice(at, at + BEHIND), slice(max(at - BEHIND, 0), at)
    rises = ((run.outlier, JUMP), (run.underflow, MOST))
    return any(_highest(metric[behind]) - _usual(metric[before], np.nan) > least for metric, least in rises)


def _highest(metric: Floats) -> float:
    known = metric[np.isfinite(metric)]
    return float(known.max()) if len(known) else np.nan


def _shown(percent: float) -> str:
    return number(None if np.isnan(percent) else percent, "%")


def _found(run: Course, since: int, cause: str, confidence: str, evidence: str) -> Finding:
    if cause == "nonfinite":
        advice = advise_on_nonfinite(run.layer, run.role)
    else:
        advice = look_at_producer(run.layer, run.role) if cause == "dead" else _ADVICE.get(cause, "")
    return Finding("operand", cause, confidence, evidence, advice, run.layer, run.role, since)
