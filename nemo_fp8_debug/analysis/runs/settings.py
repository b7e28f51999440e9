"""Compare the settings in the fingerprints of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl

from ...core.coverage_text import describe_unobserved
from ...core.keys import MIXED
from ...core.scale_sources import ENGINE, describe_quantization
from .. import thresholds
from .grid import Ints
from .metrics import MetricsTable
from .run import Run

#: largest relative difference between learning rates that rounding explains
_ROUNDING = 1e-5


def find_usual_casts(metrics: MetricsTable) -> pl.DataFrame:
    """Return a table with layer, role, recipe (the most frequent, or null) and cast (whether an engine usually casts it).

    Example:
        >>> rows = {"step": [0, 1, 2], "layer": "fc1", "role": "input", "recipe": ["mxfp8", "mxfp8", None]}
        >>> find_usual_casts(MetricsTable.from_rows(pl.DataFrame(rows | {"scale_source": "engine"}))).row(0)
        ('fc1', 'input', 'mxfp8', True)
    """
    recipes, sources = metrics.count_rows_by_value("recipe"), metrics.count_rows_by_value("scale_source")
    none = np.zeros(len(metrics.tensors), dtype=np.int64)
    cast = sum((counts for source, counts in sources.items() if source in (ENGINE, MIXED)), none)
    is_cast = 2 * cast >= sum(sources.values(), none)
    return metrics.tensors.with_columns(recipe=_most_often(recipes, none), cast=pl.Series(is_cast, dtype=pl.Boolean))


def _most_often(counts: dict[str | None, Ints], none: Ints) -> pl.Series:
    """Return the most frequent name of each operand. If several are equally frequent, return the first in order."""
    names = sorted(name for name in counts if name is not None)
    by_name = np.stack([none, *(counts[name] for name in names)])
    most = by_name.argmax(axis=0)  # 0: the operand has no name
    return pl.Series([None, *names], dtype=pl.String).gather(most)


#: sections in which differences are most likely to affect precision
TELLING = ("recipe", "risky_features_on", "backend_options", "environment")
#: settings that always differ between two attempts
_PASSED_OVER = ("attempt", "schema_version")


def list_setting_differences(baseline: Mapping[str, Any], run: Mapping[str, Any]) -> pl.DataFrame:
    """Return one row for each setting that differs. Settings that affect precision come first.

    The columns are setting (`section.name`), baseline and run (text, or null), and telling (whether it matters for
    precision).
    """
    ours, theirs = (dict(_flat(fingerprint)) for fingerprint in (baseline, run))
    rows = [
        (name, ours.get(name), theirs.get(name), name.partition(".")[0] in TELLING)
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    ]
    schema = {"setting": pl.String, "baseline": pl.String, "run": pl.String, "telling": pl.Boolean}
    return pl.DataFrame(rows, schema, orient="row").sort("telling", descending=True, maintain_order=True)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if name in _PASSED_OVER and not prefix:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield _encodable(f"{prefix}{name}"), _encodable(str(value))


def _encodable(text: str) -> str:
    """Escape characters that UTF-8 cannot encode, such as lone surrogates from a JSON file."""
    return text.encode("utf-8", "backslashreplace").decode()


def describe_coverage_gap(fingerprint: Mapping[str, Any]) -> list[str]:
    """Return a sentence if more than 5% of a run's GEMM work is unobserved or may be unobserved."""
    text = describe_unobserved(fingerprint.get("coverage"), above=0.05)
    return [f"{text[0].upper()}{text[1:]}."] if text else []


def list_comparability_warnings(baseline: Run, run: Run) -> list[str]:
    """Return sentences that name metrics of the two runs that are not directly comparable."""
    recipes = [sorted(filter(None, each.metrics.list_distinct_values("recipe"))) for each in (baseline, run)]
    told = []
    if recipes[0] != recipes[1]:
        measured = " and ".join(", ".join(names) or "nothing" for names in recipes)
        told.append(
            f"The runs were measured against different recipes ({measured}), so differences in underflow, overflow and "
            "errors may be due to the recipes. amax and outlier_log2 do not depend on the recipe."
        )
    notices = [
        describe_quantization(each.quantization, name) for each, name in ((baseline, "the baseline"), (run, "the run"))
    ]
    return told + [sentence for sentence in notices if sentence]


def find_learning_rate_split(run: pl.DataFrame, baseline: pl.DataFrame, least: float = _ROUNDING) -> dict[str, Any] | None:
    """Return the first step at which two learning rates differ, or None.

    Args:
        run: a table with step and lr.
        baseline: a table with step and lr.
        least: relative difference above which rates differ. By default, more than rounding explains.

    Returns:
        step, run and baseline (the rates of both at this step), and before (the last earlier step in both tables).

    Example:
        >>> find_learning_rate_split(
        ...     pl.DataFrame({"step": [0, 9], "lr": [1.0, 4.0]}), pl.DataFrame({"step": [0, 9], "lr": [1.0, 1.0]})
        ... )
        {'step': 9, 'run': 4.0, 'baseline': 1.0, 'before': 0}
    """
    both = read_learning_rates(run).join(read_learning_rates(baseline), on="step", suffix="_baseline").sort("step")
    apart = (both["lr"] / both["lr_baseline"] - 1).abs() > least
    if not apart.any():
        return None
    first = int(apart.arg_max() or 0)
    step, mine, theirs = both.row(first)
    return {"step": step, "run": mine, "baseline": theirs, "before": both["step"][first - 1] if first else None}


def choose_reference(run: Run, reference: Run | None) -> tuple[Run | None, list[str]]:
    """Return the reference run if it can show the effect of precision. Otherwise return None, and the reason as a sentence.

    Args:
        run: the run to explain.
        reference: the run that the user gave as the same run in higher precision.
    """
    departure = (
        None if reference is None else find_learning_rate_split(reference.steps, run.steps, thresholds.RATE_DIFFERS - 1)
    )
    if departure is None:
        return reference, []
    why = f"The reference run has another learning rate than this run from step {departure['step']} on"
    return None, [f"{why}, so it does not show the effect of precision. We leave it out."]


def read_learning_rates(steps: pl.DataFrame) -> pl.DataFrame:
    """Return step and lr of the steps at which lr is known and above 0."""
    rows = steps.select("step", pl.col("lr").fill_nan(None)).drop_nulls().unique("step", keep="last")
    return rows.filter(pl.col("lr").is_finite() & (pl.col("lr") > 0)).sort("step")
