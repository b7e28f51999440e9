"""Find operands that are out of band, and explain this by their scale and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from ....core.keys import GRADIENTS, SHOWN_AS
from ....core.layer_names import find_expert_aggregate, is_expert_aggregate
from ....core.scale_sources import QUANTIZED
from ....core.text import format_count, format_number
from ....numerics.limits import MADE_UP
from ....numerics.recipe import find_recipe
from ....numerics.tensor_scaling import DelayedScaling
from ... import thresholds
from ...comparison.compare import Comparison, select_quantized_operands, split_off_single_experts
from ...comparison.onset import IN_A_ROW, find_onsets
from ...runs.blocks import compute_column_median
from ...runs.grid import Floats, Ints
from ...runs.metrics import IS_NONFINITE, MetricsTable
from ...runs.run import Run
from ...runs.settings import find_usual_casts
from ..facts import DiagnosedRecords, Facts, define_fact
from ..finding import CAUSES, Finding, advise_on_nonfinite, advise_on_producer
from ..limits import find_operands_over_limit, select_fp8_operands
from ..rule import register_rule
from .losses import resumes
from .values import value_jumps

_KEY = ["layer", "role"]
#: largest number of suspects that are explained
_LOOKED_INTO = 8
#: advice for a history that is longer than the time since the values shrank
_SHORTER = (
    "Shorten the amax history, or cast with current scaling. If the values should not shrink, find what computes them."
)
#: metrics that are independent of the recipe
_OF_VALUES = ("nonfinite", "outlier_log2")
#: columns of the `metrics` table from which a `Course` is built
COURSE = ("scale", "scale_ratio_log2", "amax", "outlier_log2", "underflow_pct", "overflow_pct", "nan", "inf")


@dataclass(frozen=True)
class Course:
    """The metrics of an operand over the samples of a run, oldest first. A missing metric is NaN."""

    steps: Ints
    #: log2 of the scale in use, and its difference from the log2 of the scale that fits the values
    scale: Floats
    off: Floats
    #: whether the scale in use is infinite, zero or negative
    broken: npt.NDArray[np.bool_]
    amax: Floats
    outlier: Floats
    underflow: Floats
    overflow: Floats
    nonfinite: Floats

    @classmethod
    def build_course(cls, metrics: pl.DataFrame, layer: str, role: str) -> Course:
        """Return the course of one operand.

        Args:
            metrics: rows with the columns COURSE. Rows of other operands are ignored.
        """
        rows = metrics.filter(layer=layer, role=role).sort("step")

        def column(name: str) -> Floats:
            values: Floats = rows[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
            return values

        scale = column("scale")
        broken = np.isinf(scale) | (scale <= 0)
        off = np.where(np.isfinite(column("scale_ratio_log2")), column("scale_ratio_log2"), np.nan)
        amax, outlier, underflow, overflow = map(column, ("amax", "outlier_log2", "underflow_pct", "overflow_pct"))
        nonfinite: Floats = rows.select(pl.sum_horizontal("nan", "inf").cast(pl.Float64)).to_series().to_numpy()
        log_scale = np.log2(np.where(broken, np.nan, scale))
        return cls(rows["step"].to_numpy(), log_scale, off, broken, amax, outlier, underflow, overflow, nonfinite)


@dataclass(frozen=True)
class Suspect:
    """An operand that is out of band or beyond a limit, and its course over the samples."""

    layer: str
    role: str
    since: int
    #: multiple of the threshold
    excess: float
    #: number of consecutive samples out of band, and whether the run or the baseline ends with these samples
    samples: int
    cut_off: bool
    #: the criterion: `band` of a baseline, `limits` of all healthy operands, or `history` of the operand
    by: str
    course: Course
    baseline: Course | None
    #: usual outlier of operands with this role, in bits above the median
    usual_outlier: float
    #: if many values are lost later: metric, percent, percent in the baseline, step; otherwise None
    loses_later: tuple[str, float, float, int] | None = None
    #: number of steps whose largest amax gives the scale; 0 if there is no such history
    history: int = 0


@define_fact
def suspects(records: DiagnosedRecords) -> list[Suspect]:
    """Return the operands out of band: first operands far out of band in order of onset, then the others."""
    if records.run.quantization != QUANTIZED:
        return []
    return _against_baseline(records) if records.comparison is not None else _alone(records)


@define_fact
def judged_samples(records: DiagnosedRecords) -> Ints:
    """Return the steps, [S], at which operands can be checked.

    With a baseline, these are the samples with error metrics within the baseline's steps. Without a baseline, these are all
    samples, provided that there are enough samples, and that limits or bands exist for the operands.
    """
    run, baseline = records.run, records.baseline
    if baseline is None:
        covered = records.bands is not None and records.bands.is_mostly_covered
        limited = run.quantization != QUANTIZED or not select_fp8_operands(select_quantized_operands(run.metrics)).is_empty()
        return (
            run.metrics.steps
            if (covered or limited) and not take_beginning(run.metrics).is_empty()
            else run.metrics.steps[:0]
        )
    known = pl.col("relative_error").is_not_null() | IS_NONFINITE
    columns = ["relative_error", "nan", "inf"]
    steps: Ints = run.metrics.reduce_rows(columns, lambda rows: rows.filter(known).unique("step"))["step"].sort().to_numpy()
    ends = (baseline.metrics.steps[0], baseline.metrics.steps[-1]) if len(baseline.metrics.steps) else (0, -1)
    within: Ints = steps[(steps >= ends[0]) & (steps <= ends[1])]
    return within


@register_rule(
    "operand",
    ("corrupted_scale", "stale_scale", "clipping", "underflow", "outlier", "nonfinite", "dead"),
    (suspects, judged_samples, value_jumps),
    needs_no_baseline=True,
)
def find_operands(facts: Facts) -> Iterator[Finding]:
    """Name the reason why an operand left its band: its scale or its values.

    Example: the scale of X of layers.3.fc2 does not follow the values from step 120 on, so 80% of the values underflow.
    """
    found = [_explain(each, facts) for each in suspects(facts)]
    for each, finding in zip(suspects(facts), found, strict=True):
        rivals = [one.excess for one in suspects(facts) if each.role in GRADIENTS or one.role not in GRADIENTS]
        weak = each.excess < thresholds.STRONG_PART * max(rivals) or _lags_behind_a_jump(finding, facts)
        yield replace(finding, strength="hint") if weak and finding.strength == "clear" else finding


def _lags_behind_a_jump(found: Finding, facts: Facts) -> bool:
    """Return True if values jumped before, so that delayed scales are wrong until their histories contain new values only.

    A jump of X or W also changes gradients, and a history may contain gradients from between two samples.
    """
    jumps = value_jumps(facts)
    soon = facts.steps[facts.steps >= jumps[0].since][: thresholds.LASTING] if jumps else facts.steps[:0]
    if not len(soon) or not soon[0] <= (found.since or 0) <= soon[-1]:
        return False
    return found.cause in ("clipping", "underflow") or (found.role in GRADIENTS and CAUSES[found.cause].kind == "scale")


def _explain(suspect: Suspect, facts: Facts) -> Finding:
    """Return the finding about a suspect. The suspect's criterion limits the strength of the finding."""
    found = replace(explain_course(suspect), excess=suspect.excess)
    by_values = found.may_follow_the_loss and found.cause not in ("nonfinite", "dead")
    if suspect.baseline is not None and suspect.samples < IN_A_ROW and found.cause != "nonfinite":
        if not suspect.cut_off:
            again = _count_returns(suspect)
            ends = f"it lasted for {format_count(suspect.samples, 'sample')}, a transient"
            ends = f"the same happened in {format_count(again, 'later sample')}" if again else ends
            found = replace(found, evidence=f"{found.evidence}; {ends}", is_transient=not again)
        # A single batch may have far larger gradients than others, and a delayed scale reacts late.
        if suspect.role in GRADIENTS and found.cause in ("clipping", "underflow"):
            found = replace(found, strength="hint")
    # If the scale is not to blame, a different seed may be the reason for a higher underflow.
    other_values = suspect.baseline is not None and not facts.has_same_batches and suspect.excess < thresholds.OTHER_BATCHES
    if by_values and found.cause == "underflow" and other_values:
        found = replace(found, strength="hint")
    # If the loss is almost zero, most gradients are almost zero too.
    if by_values and suspect.role in GRADIENTS and facts.loss.run.falls_near_zero:
        return replace(found, strength="hint", of_kind="gradients")
    if suspect.loses_later is not None and (found.cause, found.strength) == ("outlier", "hint"):
        metric, value, usual, step = suspect.loses_later
        more = f"{metric} {format_number(value, '%')} instead of {format_number(usual, '%')}"
        found = replace(found, evidence=f"{found.evidence}; from {step} on {more}", strength="clear")
    if suspect.baseline is None and found.cause not in ("nonfinite", "dead"):
        lags = found.cause in ("clipping", "underflow") and (
            _grew_from_zero(suspect)
            or (suspect.role != "input" and not found.may_follow_the_loss and _follows_late(suspect))
        )
        if suspect.by == "history" or lags:
            return replace(found, strength="hint", of_kind="gradients" if suspect.role in GRADIENTS and by_values else "")
    if suspect.by == "limits" and found.strength == "hint":
        found = replace(found, strength="clear")
    lost_at = facts.loss.run.all_nonfinite_from_step
    if found.cause == "nonfinite" and lost_at is not None and suspect.since > lost_at:
        found = replace(found, strength="hint", may_follow_the_loss=True)
    return replace(found, of_kind="gradients" if suspect.role in GRADIENTS and by_values else "")


@register_rule("resume", ("resumed_without_scales",), (suspects, resumes))
def find_lost_scales(facts: Facts) -> Iterator[Finding]:
    """Name a resume at which scales went wrong because FP8 state was not restored.

    Example: the run was resumed at step 80 without its amax histories, so all scales are 1 for 16 steps.
    """
    interval = facts.steps[1] - facts.steps[0] if len(facts.steps) > 1 else 1
    for step in resumes(facts):
        after = [each for each in suspects(facts) if 0 <= each.since - step <= 2 * interval]
        lost = [each for each in after if CAUSES[explain_course(each).cause].kind == "scale"]
        if lost:
            first = lost[0]
            evidence = f"the run was resumed at {facts.unit} {step}, and scales are wrong from then on"
            evidence += f", first that of {SHOWN_AS[first.role]} of {first.layer}"
            name = first.layer, first.role, step
            yield Finding("resume", "resumed_without_scales", "clear", evidence, *name, is_exact=True)
            return


def loses_most_values(suspect: Suspect) -> bool:
    """Return True if an operand loses most of its values from the onset to the end of the run."""
    behind = suspect.course.steps >= suspect.since
    lost = np.fmax(suspect.course.underflow, suspect.course.overflow)[behind]
    known = lost[np.isfinite(lost)]
    return len(known) >= 2 * thresholds.FEW and bool(min(np.median(known), np.median(known[-2 * thresholds.FEW :])) >= 50.0)


# Why an operand is out --------------------------------------------------------------------------------------------------


def explain_course(suspect: Suspect) -> Finding:
    """Return a finding with the cause that the samples around the onset show.

    Usual values come from the baseline. Without a baseline, they come from the samples before the onset.
    """
    run, baseline = suspect.course, suspect.baseline
    start = int(np.searchsorted(run.steps, suspect.since))
    # In the first samples, scales have initial values, so these samples show neither usual values nor a fault.
    reference = run if baseline is None else baseline
    before = slice(min(MADE_UP, max(start - 1, 0)), start) if baseline is None else slice(None)
    first = MADE_UP if start == 0 and suspect.samples > MADE_UP else start
    behind = slice(first, first + min(thresholds.LASTING, max(suspect.samples, 1)))
    if not len(run.steps[behind]):
        return _name(suspect, "unknown", "hint", f"no sample from {suspect.since} on")
    if (run.nonfinite[behind] > 0).any() and not (reference.nonfinite[before] > 0).any():
        most = int(np.nanmax(run.nonfinite[behind]))
        return _name(
            suspect,
            "nonfinite",
            "clear",
            f"up to {most:,} values are NaN or infinite" if most > 1 else "a value is NaN or infinite",
        )
    if run.broken[behind].any():
        return _name(suspect, "corrupted_scale", "clear", "the scale in use is zero, negative or infinite")
    if (run.amax[behind] == 0).all() and _median(reference.amax[before], 1.0) > 0:
        return replace(_name(suspect, "dead", "clear", "all values are zero"), may_follow_the_loss=True)
    usual = _median(reference.off[MADE_UP:] if baseline is not None else reference.off[before])
    error = _farthest(run.off[behind] - usual)
    higher = _highest(run.outlier[behind]) - _usual_outlier(suspect, start)
    # A delayed scale reacts late to a new outlier. If the scale's error is smaller than usual, the scale is not to blame.
    by_scale = abs(error) > thresholds.SCALE_OFF and error * (error + usual) > 0
    if by_scale and not higher > max(thresholds.OUTLIER_HIGHER, abs(error)):
        return _explain_scale(suspect, slice(first, behind.stop), error, usual)
    return replace(_explain_values(suspect, start, np.isfinite(error)), may_follow_the_loss=True)


def _count_returns(suspect: Suspect) -> int:
    """Return the number of samples after the first stretch out of band that lose at least half as many values."""
    run = suspect.course
    start = int(np.searchsorted(run.steps, suspect.since))
    lost = np.nan_to_num(np.fmax(run.underflow, run.overflow))
    most = lost[start : start + suspect.samples].max(initial=0.0)
    return int((lost[start + suspect.samples :] > max(most / 2, thresholds.LOST_MORE)).sum())


def _follows_late(suspect: Suspect) -> bool:
    """Return True if a scale follows fast-changing values with a delay, as in growing adapters or falling gradients."""
    run = suspect.course
    start = int(np.searchsorted(run.steps, suspect.since))
    off, wanted = run.off[start:], (run.scale - run.off)[max(start - thresholds.LASTING, 0) :]
    if not np.isfinite(off).any() or not np.isfinite(wanted).any():
        return False
    error, known = _farthest(off), wanted[np.isfinite(wanted)]
    values_moved = float(known[0] - known.min()) if error > 0 else float(known.max() - known[0])
    scale_moves = len(_moves(run.scale[start:])) > 0 and bool(_moves(run.scale[start:]).any())
    return scale_moves and values_moved > abs(error) / 2 and not _has_jumped_anywhere(run, start, error)


def _grew_from_zero(suspect: Suspect) -> bool:
    """Return True if all values were zero in a sample before the onset, and the format represents the values well at the
    end.
    """
    run = suspect.course
    start = int(np.searchsorted(run.steps, suspect.since))
    lost = np.fmax(run.underflow, run.overflow)
    return bool((run.amax[:start] == 0).any() and np.nan_to_num(lost[-1]) < thresholds.LOST_MORE)


def _has_jumped_anywhere(run: Course, start: int, error: float) -> bool:
    around = slice(max(start - thresholds.LASTING, 0), start + thresholds.LASTING)
    return _has_jumped(_moves(run.scale[around]), _moves((run.scale - run.off)[around]), error)


def _explain_scale(suspect: Suspect, out: slice, error: float, usual: float) -> Finding:
    """Explain why the scale does not fit the values.

    Args:
        out: samples out of band, from the onset on.
        error: error of the scale minus its usual error, in bits.
        usual: usual error of the scale, in bits.
    """
    run, start = suspect.course, out.start
    around = slice(min(max(start - thresholds.LASTING, MADE_UP), max(start - 1, 0)), out.stop)
    scale, wanted = _moves(run.scale[around]), _moves((run.scale - run.off)[around])
    moved, asked, off = float(scale.sum()), float(wanted.sum()), error + usual
    side, usual_side = ("too large" if bits > 0 else "too small" for bits in (off, usual))
    evidence = f"the scale is {abs(off):.1f} bits {side}"
    evidence += f" (usually {abs(usual):.1f} bits {usual_side})" if abs(usual) >= 0.1 else ""
    lost = {"underflow": _highest(run.underflow[out]), "overflow": _highest(run.overflow[out])}
    evidence += "".join(
        f"; {name} {format_number(value, '%')}" for name, value in lost.items() if value >= thresholds.LOST_MORE
    )
    cause = "clipping" if error > 0 else "underflow"
    known = run.scale[np.isfinite(run.scale)]
    if len(known) > thresholds.LASTING and (known == known[0]).all() and known[0] == 0.0:
        return _name(suspect, "stale_scale", "clear", f"{evidence}; it is exactly 1 in all {len(known)} samples")
    if not len(scale):
        return _name(suspect, cause, "hint", f"{evidence}; no earlier sample has it")
    # Test the samples up to the onset, because a scale may recover later, and all samples, because a scale may change
    # slowly.
    until = slice(around.start, start + 1)
    for moves in ((_moves(run.scale[until]), _moves((run.scale - run.off)[until])), (scale, wanted)):
        if start > MADE_UP and _has_jumped(*moves, error):
            by, values = float(moves[0].sum()), -float(moves[1].sum())
            scale_by, values_by = (format_number(bits, signed=True) for bits in (by, values))
            evidence += (
                f"; around step {suspect.since}, the scale moved by {scale_by} bits and the values by {values_by} bits"
            )
            return _name(suspect, "corrupted_scale", "clear", evidence)
    stands = len(run.scale[start : around.stop]) > 1 and not _moves(run.scale[start : around.stop]).any()
    if stands and abs(moved) < abs(asked) / 2 and asked * np.sign(error) < -thresholds.SCALE_OFF / 2:
        evidence += f"; the scale stands still while the values moved by {format_number(-asked, signed=True)} bits"
        if error < 0 and suspect.history > run.steps[out][-1] - run.steps[around.start]:
            evidence += f"; its amax history of {suspect.history:,} steps still contains the earlier values"
            loses = lost["underflow"] >= thresholds.LOST_MORE
            return replace(_name(suspect, "underflow", "clear" if loses else "hint", evidence), advice=_SHORTER)
        return _name(suspect, "stale_scale", "clear", evidence)
    return replace(_name(suspect, cause, "clear", evidence), advice=CAUSES["clipping"].advice)


def _explain_values(suspect: Suspect, start: int, has_scale: bool) -> Finding:
    """Explain lost values by the values themselves, if their scale is not to blame.

    Without a baseline, the finding is only a hint.

    Args:
        start: index of the onset.
        has_scale: whether the scale is known.
    """
    run, baseline = suspect.course, suspect.baseline
    behind, before = slice(start, start + thresholds.LASTING), slice(None, start) if baseline is None else slice(None)
    reference = run if baseline is None else baseline
    under, over = (_highest(metric[behind]) for metric in (run.underflow, run.overflow))
    more_under = under - _median(reference.underflow[before])
    more_over = over - _median(reference.overflow[before])
    sure = "clear" if baseline is not None else "hint"
    losses = ", ".join(f"{name} {format_number(x, '%')}" for name, x in (("underflow", under), ("overflow", over)) if x == x)
    usual, higher = _usual_outlier(suspect, start), _highest(run.outlier[behind])
    if higher - usual > thresholds.OUTLIER_HIGHER:
        loses = max(np.nan_to_num(more_under), np.nan_to_num(more_over)) > thresholds.LOST_MORE
        evidence = f"its largest value stands {higher:.1f} bits above the median instead of {usual:.1f}; {losses}"
        return _name(suspect, "outlier", sure if loses else "hint", evidence)
    evidence = f"its scale is {'right' if has_scale else 'unknown'}; {losses}"
    if more_over > 0.01 and over >= np.nan_to_num(under):
        return _name(suspect, "clipping", "hint", losses)
    if more_under > thresholds.LOST_MORE:
        return _name(suspect, "underflow", sure, evidence)
    return _name(suspect, "unknown", "hint", evidence)


def _name(suspect: Suspect, cause: str, strength: str, evidence: str) -> Finding:

    advice = ""
    if cause == "nonfinite":
        advice = advise_on_nonfinite(suspect.layer, suspect.role)
    elif cause == "dead":
        advice = advise_on_producer(suspect.layer, suspect.role)
    return Finding("operand", cause, strength, evidence, suspect.layer, suspect.role, suspect.since, advice)


def _median(metric: Floats, otherwise: float = 0.0) -> float:
    known = metric[np.isfinite(metric)]
    return float(np.median(known)) if len(known) else otherwise


def _farthest(bits: Floats) -> float:
    known = bits[np.isfinite(bits)]
    return float(known[np.abs(known).argmax()]) if len(known) else np.nan


def _highest(metric: Floats) -> float:
    known = metric[np.isfinite(metric)]
    return float(known.max()) if len(known) else np.nan


def _moves(bits: Floats) -> Floats:
    """Return the differences between consecutive samples with known values."""
    return np.diff(bits[np.isfinite(bits)])


def _has_jumped(scale: Floats, wanted: Floats, error: float) -> bool:
    """Return True if the scale jumped in the direction of its error, and the values did not change accordingly."""
    if not len(scale):
        return False
    jump = int(np.argmax(np.abs(scale)))
    most, rest = scale[jump], scale.sum() - scale[jump]
    asked = wanted[jump] if len(wanted) == len(scale) else np.inf
    large = most * error > 0 and abs(most) >= thresholds.SCALE_JUMP
    return bool(large and abs(most) > 2 * abs(rest) and abs(asked) < abs(most) / 2)


def _usual_outlier(suspect: Suspect, start: int) -> float:
    """Return the usual outlier, in bits above the median. It comes from the baseline, otherwise from earlier samples,
    otherwise from other operands with the same role.
    """
    if suspect.baseline is not None:
        return _median(suspect.baseline.outlier, np.nan)
    if start > MADE_UP or np.isnan(suspect.usual_outlier):
        return _median(suspect.course.outlier[:start], np.nan)
    return suspect.usual_outlier


# Which operands are out -------------------------------------------------------------------------------------------------


def _against_baseline(records: DiagnosedRecords) -> list[Suspect]:
    comparison = records.comparison
    assert comparison is not None
    run, baseline = comparison.run, comparison.baseline
    chosen = []
    for layer, role, since, excess, samples in _strongest_first(_comparable(comparison), run):
        expert = _outstanding_expert(comparison.experts_out_of_band, run, layer, role, since)
        chosen.append((*(expert or (layer, role, since, excess)), samples, "band"))
    named = pl.DataFrame([each[:2] for each in chosen], dict.fromkeys(_KEY, pl.String), orient="row")
    # An operand beyond the limits of healthy operands counts, unless the baseline's operand is beyond them by a similar
    # amount.
    far = split_off_single_experts(records.operands_over_limit)[0].join(named, on=_KEY, how="anti")
    if len(far):
        theirs = find_operands_over_limit(
            select_quantized_operands(baseline.metrics.select_tensors_by_key(far.select(_KEY))), 0.0
        ).rename({"excess": "usual"})
        both = far.join(theirs.select(*_KEY, "usual"), on=_KEY, how="left", maintain_order="left")
        far = both.filter(pl.col("excess") > thresholds.TIMES_USUAL * pl.col("usual").fill_null(0.0)).drop("usual")
    chosen += [(*each, "limits") for each in _strongest_first(far, run)]
    return _with_courses(run, baseline, chosen, comparison.out_of_band)


def _alone(records: DiagnosedRecords) -> list[Suspect]:
    """Return operands beyond limits or bands of healthy runs, then operands that left the band of their own first
    samples.
    """
    run = records.run
    usual, cast = take_beginning(run.metrics), select_quantized_operands(run.metrics)
    far = [records.operands_over_limit.select(*_KEY, "onset", "excess")]
    if records.bands is not None:
        out = records.bands.beyond.join(cast.tensors, on=_KEY, how="semi", maintain_order="left")
        far.append(out.select(*_KEY, "onset", "excess"))
    beyond = pl.concat(far).group_by(_KEY, maintain_order=True).agg(pl.col("onset").min(), pl.col("excess").max())
    beyond = split_off_single_experts(beyond.sort("onset", -pl.col("excess"), maintain_order=True))[0]
    moved = split_off_single_experts(find_onsets(usual, cast if not usual.is_empty() else usual))[0]
    beyond = _begin_earlier(beyond, moved, run)
    moved = moved.join(beyond, on=_KEY, how="anti", maintain_order="left")
    if records.bands is not None:
        moved = moved.join(records.bands.covered, on=_KEY, how="anti", maintain_order="left")
    chosen = [(*each, by) for rows, by in ((beyond, "limits"), (moved, "history")) for each in _strongest_first(rows, run)]
    return _with_courses(run, None, chosen[:_LOOKED_INTO], moved)


def _with_courses(
    run: Run, baseline: Run | None, chosen: Sequence[tuple[str, str, int, float, int, str]], out_of_band: pl.DataFrame
) -> list[Suspect]:
    keys = pl.DataFrame([each[:2] for each in chosen], dict.fromkeys(_KEY, pl.String), orient="row").unique()
    mine = run.metrics.select_tensors_by_key(keys).read_all_rows(COURSE)
    theirs = None if baseline is None else baseline.metrics.select_tensors_by_key(keys)
    known = set() if theirs is None else set(theirs.tensors.rows())
    rows = None if theirs is None else theirs.read_all_rows(COURSE)
    usual = {
        role: compute_column_median(run.metrics.select_roles(role), "outlier_log2") for role in {each[1] for each in chosen}
    }
    end = None if baseline is None else baseline.metrics.steps[-1]
    casts = find_usual_casts(run.metrics.select_tensors_by_key(keys)).iter_rows()
    histories = {(layer, role): _count_steps_of_history(recipe) for layer, role, recipe, _ in casts}
    steps, found = run.metrics.steps, []
    for layer, role, since, excess, samples, by in chosen:
        last = steps[-1] if end is None else min(steps[-1], end)
        cut_off = int(((steps >= since) & (steps <= last)).sum()) <= samples
        other = Course.build_course(rows, layer, role) if rows is not None and (layer, role) in known else None
        found.append(
            Suspect(
                *(layer, role, since, excess, samples, bool(cut_off), by),
                Course.build_course(mine, layer, role),
                other,
                usual[role] + thresholds.OUTLIER_HIGHER,
                _find_losses(out_of_band, layer, role),
                histories.get((layer, role), 0),
            )
        )
    return found


def _count_steps_of_history(recipe: str | None) -> int:
    scaling = None if (known := find_recipe(recipe)) is None else known.scaling
    uses_all = isinstance(scaling, DelayedScaling) and scaling.amax_compute_algo == "max"
    return scaling.amax_history_len if isinstance(scaling, DelayedScaling) and uses_all else 0


def _find_losses(out_of_band: pl.DataFrame, layer: str, role: str) -> tuple[str, float, float, int] | None:
    lost = {"underflow_pct": "underflow", "overflow_pct": "overflow"}
    if "metric" not in out_of_band.columns:
        return None
    rows = out_of_band.filter(pl.col("metric").is_in(list(lost)), layer=layer, role=role).sort("onset")
    if rows.is_empty():
        return None
    row = rows.row(0, named=True)
    return lost[row["metric"]], row["value"], row["expected"], row["onset"]


def _comparable(comparison: Comparison) -> pl.DataFrame:
    """Return the rows out of the baseline's band, without rows that a different recipe explains.

    If an operand's recipe differs from its recipe in the baseline, its errors and scales differ too. Such an operand counts
    only if its values are unusual, or if it exceeds the limits of healthy operands.
    """
    mine, theirs = (find_usual_casts(run.metrics) for run in (comparison.run, comparison.baseline))
    both = mine.join(theirs, on=_KEY, suffix="_baseline")
    alike = both.filter(pl.struct("recipe", "cast") == pl.struct(recipe="recipe_baseline", cast="cast_baseline"))
    rows, run = comparison.out_of_band, comparison.run
    others = rows.join(alike, on=_KEY, how="anti", maintain_order="left")
    if others.is_empty():
        return rows
    far = find_operands_over_limit(select_quantized_operands(run.metrics.select_tensors_by_key(others)))
    counts = pl.concat([alike.select(_KEY), far.select(_KEY)])
    known = counts.select(operand=pl.struct(_KEY))["operand"].implode()
    return rows.filter(pl.col("metric").is_in(_OF_VALUES) | pl.struct(_KEY).is_in(known))


def _begin_earlier(far: pl.DataFrame, moved: pl.DataFrame, run: Run) -> pl.DataFrame:
    """Return operands beyond limits. If an operand left the band of its first samples slightly earlier, use that onset."""
    samples = {step: i for i, step in enumerate(run.metrics.steps.tolist())}
    before = moved.group_by(_KEY).agg(moved=pl.col("onset").min())
    joined = far.join(before, on=_KEY, how="left", maintain_order="left")
    places = [pl.col(name).replace_strict(samples, default=None, return_dtype=pl.Int64) for name in ("onset", "moved")]
    soon = (places[0] - places[1]).is_between(0, thresholds.LASTING)
    return joined.with_columns(onset=pl.when(soon).then("moved").otherwise("onset")).drop("moved").sort("onset")


def _outstanding_expert(
    experts: pl.DataFrame, run: Run, layer: str, role: str, since: int
) -> tuple[str, str, int, float] | None:
    """Return the expert because of which a layer's aggregate is out of band, or None if there are several such experts.

    Args:
        experts: single experts that are out of band.
    """
    if not is_expert_aggregate(layer) or experts.is_empty():
        return None
    samples = run.metrics.steps
    soon = max(samples[samples > since][:2].tolist(), default=since)
    of_layer = pl.col("layer").map_elements(find_expert_aggregate, pl.String) == layer
    rows = experts.filter(pl.col("role") == role, pl.col("onset") <= soon).filter(of_layer)
    each = rows.group_by("layer").agg(pl.col("onset").min(), pl.col("excess").max()).sort("excess", descending=True)
    alone = len(each) == 1 or (len(each) > 1 and each["excess"][0] > thresholds.TIMES_USUAL * each["excess"][1])
    return (each["layer"][0], role, each["onset"][0], each["excess"][0]) if alone else None


def take_beginning(metrics: MetricsTable) -> MetricsTable:
    """Return the first samples with their steps scaled to cover the whole run. Return no samples if there are too few."""
    n = round(len(metrics.steps) * thresholds.BEGINNING)
    if n < 2 * thresholds.FEW:
        return metrics.select_steps(metrics.steps[:0])
    first = pl.Series("step", metrics.steps[:n])
    stretch = (metrics.steps[-1] - metrics.steps[0]) / (metrics.steps[n - 1] - metrics.steps[0])
    spread = (pl.lit(metrics.steps[0]) + (pl.col("step") - metrics.steps[0]) * stretch).round().cast(pl.Int64)
    return metrics.renumber_steps(first.to_frame().select("step", sample=spread))


def _strongest_first(out_of_band: pl.DataFrame, run: Run) -> list[tuple[str, str, int, float, int]]:
    """Return layer, role, onset, excess and number of consecutive samples. Tensors far out of band come first, by onset,
    and then all others.
    """
    lasting = pl.col("samples").max() if "samples" in out_of_band.columns else pl.lit(thresholds.LASTING)
    groups = out_of_band.group_by(_KEY, maintain_order=True)
    tensors = groups.agg(pl.col("onset").min(), pl.col("excess").max(), samples=lasting)
    tensors = tensors.join(_order_of_nonfinite(run, tensors), on=[*_KEY, "onset"], how="left", maintain_order="left")
    is_gradient = pl.col("role").is_in(GRADIENTS)
    strongest = pl.when(is_gradient).then(pl.col("excess").max()).otherwise(pl.col("excess").filter(~is_gradient).max())
    tensors = tensors.with_columns(weak=pl.col("excess") < thresholds.STRONG_PART * strongest)
    ordered = tensors.sort("weak", "onset", -pl.col("excess"), "order", nulls_last=True, maintain_order=True)
    return ordered.head(_LOOKED_INTO).select(*_KEY, "onset", "excess", "samples").rows()


def _order_of_nonfinite(run: Run, tensors: pl.DataFrame) -> pl.DataFrame:
    """Return layer, role, onset and execution order of the tensors with NaN or infinity at the onset."""
    metrics, column = run.metrics.select_tensors_by_key(tensors), "nonfinite_order"
    wanted = metrics.tensors.with_row_index("tensor").join(tensors, on=_KEY).select(pl.col("tensor").cast(pl.Int64), "onset")

    def choose(rows: pl.DataFrame) -> pl.DataFrame:
        known = rows.drop_nulls(column)
        return known.join(wanted, left_on=["tensor", "step"], right_on=["tensor", "onset"], how="semi")

    return metrics.add_tensor_names(metrics.reduce_rows([column], choose)).select(*_KEY, onset="step", order=column)
