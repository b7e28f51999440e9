"""Write a comparison in sentences or as JSON, and a story as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...core.layer_names import find_aggregate_key
from ...core.text import format_number
from ...numerics.metric_names import LABELS
from ..comparison.compare import Comparison
from ..comparison.drift import describe_common_property
from ..diagnosis.narrator import (
    describe_band_exit,
    describe_step_distance,
    format_metric_value,
    tell_loss_outcome,
    tell_reference_loss,
)
from ..formatting import make_jsonable
from ..loss.gap import find_rise_above_baseline

#: largest number of rows in each table
_EVENTS, _TENSORS = 15, 8


def write_markdown(told: Mapping[str, Any]) -> str:
    """Write a story as Markdown for GitHub and GitLab. The caller adds a heading that names the runs.

    Args:
        told: the result of `story`.

    Example:
        >>> from nemo_fp8_debug.analysis.story.story import story
        >>> told = write_markdown(story(diagnose("runs/bad", "runs/baseline")))
        >>> print(told.splitlines()[0])
        - **Why (high confidence)**: The learning rate is wrong at step 60. It left the baseline's after step 59 ...
    """
    return "\n".join([*_facts(told["headline"]), *_events(told), *_tensors(told["tensors"])])


def _facts(headline: Mapping[str, Any]) -> Iterator[str]:
    first = headline["first"]
    kind = "First tensor, a consequence" if first and first["is_consequence"] else "First tensor"
    facts = {
        f"Why ({headline['confidence']} confidence)" if headline["confidence"] else "Why": _plain(headline["cause_told"]),
        "Gap": headline["gap_told"] and _plain(headline["gap_told"]),
        kind: first and _since(first, headline["unit"]),
        "Early warning": headline["warning"] and _plain(headline["warning"]),
        "What to do": headline["change"] and _plain(headline["change"]),
    }
    yield from (f"- **{name}**: {fact}" for name, fact in facts.items() if fact)


def _events(told: Mapping[str, Any]) -> Iterator[str]:
    events = told["events"]
    if events:
        unit = told["headline"]["unit"]
        yield from _table((unit, "what happened"), [(str(e["step"]), _plain(e["what"])) for e in events], _EVENTS)


def _tensors(tensors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if tensors:
        rows = [(str(row["harm_rank"]), _named(row), _moved(row), _plain(row["why"])) for row in tensors]
        yield from _table(("rank by harm", "tensor", "baseline -> run", "why"), rows, _TENSORS)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    yield from (f"| {' | '.join(row)} |" for row in rows[:most])
    if len(rows) > most:
        yield f"\n{len(rows) - most} more are left out."


def _since(first: Mapping[str, Any], unit: str) -> str:
    others = f", with {first['with']} more" if first["with"] else ""
    return _named(first) + ("" if first["since"] is None else f" since {unit} {first['since']}{others}")


def _named(row: Mapping[str, Any]) -> str:
    """Return the tensor's name with the layer formatted as code, because Markdown would interpret underscores."""
    layer = " ".join(row["layer"].split()).replace("`", "").replace("|", "\\|")
    return f"{row['tensor']} of `{layer}`"


def _moved(row: Mapping[str, Any]) -> str:
    metric = row["metric"]
    if row["zero_since"] is not None:
        return f"all values zero since {row['zero_since']}"
    if metric is None or metric == "nonfinite":
        return "-"
    return f"{LABELS[metric][0]} " + " -> ".join(format_metric_value(metric, row[which]) for which in ("expected", "found"))


def _plain(text: str) -> str:
    """Return the text on one line, with Markdown's special characters escaped."""
    line = " ".join(text.split())
    for sign in "\\|*_[]#":
        line = line.replace(sign, f"\\{sign}")
    return line.replace("<", "&lt;")


def summarize(found: Comparison) -> str:
    """Return the comparison in a few sentences."""
    return " ".join(
        [*_of_the_loss(found), *_of_the_first_out(found), *tell_drifted_tensors(found), *_of_the_reference(found)]
    )


def tell_conclusion(found: Comparison) -> str:
    """Return sentences about the outcome of the loss, the first tensor out of the baseline's band, and the reference run."""
    return " ".join([*_of_the_loss(found)[:1], *_of_the_first_out(found), *_of_the_reference(found)])


def tell_drifted_tensors(found: Comparison) -> list[str]:
    """Return sentences about the layers whose tensors drifted, and about the tensor that drifted farthest."""
    worst = found.tensors.row(0, named=True)
    return [
        *describe_common_property(found.tensors),
        described(worst, found.run.unit),
        *_of_the_experts(found, worst),
        *_of_other_recipes(found, worst),
    ]


def _of_the_reference(found: Comparison) -> list[str]:
    return [*filter(None, [tell_reference_loss(found.loss, found.run.unit)])]


def _of_the_loss(found: Comparison) -> list[str]:
    loss, unit = found.run.loss, found.run.unit
    if found.baseline.loss.final_loss is None or loss.final_loss is None:
        return ["Not both records have losses, so only tensors are compared."]
    told, rises = [tell_loss_outcome(found.loss, unit)], loss.divergence_step
    if rises is not None:
        told.append(f"It rises for good from {unit} {rises} on.")
    elif found.loss.rise_step is not None:
        told.append("It does not rise above its own minimum.")
    return told


def _of_the_first_out(found: Comparison) -> list[str]:
    if found.out_of_band.is_empty():
        return ["No tensor leaves the baseline's band."]
    first = found.out_of_band.row(0, named=True)
    unit = found.run.unit
    before = "" if first["lead"] is None else f", {describe_step_distance(-first['lead'], 0, unit)} the loss"
    which = f"{first['tensor']} of {first['layer']}, from {unit} {first['onset']}{before}"
    return [f"The first tensor out of the baseline's band is {which}: {describe_band_exit(first)}."]


def _of_the_experts(found: Comparison, aggregate: Mapping[str, Any]) -> list[str]:
    """Describe the worst expert of an aggregate in a sentence, if an expert's drift or NaN is known."""
    for row in found.experts.iter_rows(named=True):
        if find_aggregate_key(row["layer"], row["role"]) == (aggregate["layer"], aggregate["role"]):
            tells = row["nonfinite_since"] is not None or row["drift_log2"] is not None
            text = described(row, found.run.unit)
            return [f"Of its experts, {text[0].lower()}{text[1:]}"] if tells else []
    return []


def _of_other_recipes(found: Comparison, worst: Mapping[str, Any]) -> list[str]:
    rows = found.list_what_if_metrics().filter(layer=worst["layer"], role=worst["role"]).sort("relative_error")
    before = format_number(worst["relative_error_run"])
    return [
        f"Under {row['recipe']} its relative error would be {format_number(row['relative_error'])} instead of {before}, "
        f"its underflow {format_number(row['underflow_pct'], '%')}."
        for row in rows.iter_rows(named=True)
    ]


def described(worst: Mapping[str, Any], unit: str) -> str:
    """Describe the tensor at the top of the ranking in a sentence."""
    name = f"{worst['tensor']} of {worst['layer']}"
    if worst["nonfinite_since"] is not None:
        return f"The first tensor with NaN or infinity is {name}, at {unit} {worst['nonfinite_since']}."

    if worst["drift_log2"] is None:
        return "No metric that both records have tells their tensors apart."

    def pair(metric: str) -> str:
        return " -> ".join(format_number(worst[f"{metric}_{run}"], "%") for run in ("baseline", "run"))

    ratio = format_number(worst["mse_ratio"], prefix="x ")
    lost = f"underflow {pair('underflow_pct')}, overflow {pair('overflow_pct')}"
    return f"The tensor that drifted farthest is {name}: MSE {ratio}, {lost}."


def serialize_comparison(found: Comparison) -> dict[str, Any]:
    """Return the losses of each run, the verdict, the notes and the tables as plain values."""
    runs = {"baseline": found.baseline, "run": found.run} | ({"reference": found.reference} if found.reference else {})
    plain = {
        "verdict": summarize(found),
        "notes": list(found.notes),
        "unit": found.run.unit,
        "gap": found.loss.gap,
        "harm": found.loss.harm,
        "runs": {
            name: {
                "path": run.path,
                "final_loss": run.loss.final_loss,
                "lowest_loss": run.loss.minimum_step_and_loss,
                "diverged_at": run.loss.divergence_step,
                "above_baseline_since": None
                if run is found.baseline
                else find_rise_above_baseline(run.loss, found.baseline.loss),
            }
            for name, run in runs.items()
        },
    }
    tables = {
        "tensors": found.tensors,
        "experts": found.experts,
        "out_of_band": found.out_of_band,
        "groups": found.count_out_of_band_groups(),
        "differences": found.differences(),
        "what_if": found.list_what_if_metrics(),
        **found.feature_comparisons,
    }
    return make_jsonable(plain | tables)  # type: ignore[no-any-return]
