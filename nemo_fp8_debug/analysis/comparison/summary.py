"""A comparison in sentences, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...core.layer_names import fold_key
from ..formatting import number
from .comparison import Comparison
from .groups import concentrated


def summarize(found: Comparison) -> str:
    """The comparison in a sentence or three."""
    worst = found.tensors.row(0, named=True)
    sentences = [
        *_of_the_loss(found),
        *_of_the_first_out(found),
        *concentrated(found.tensors),
        described(worst, found.bad.unit),
        *_of_the_experts(found, worst),
        *_of_other_recipes(found, worst),
    ]
    if found.twin is not None:
        sentences.append(_of_the_twin(found))
    return " ".join(sentences)


def _of_the_loss(found: Comparison) -> list[str]:
    loss, unit = found.bad.loss, found.bad.unit
    if found.good.loss.final is None or loss.final is None:
        return ["Not both records have losses, so only tensors are compared."]
    if found.loss_left is None:
        return ["The second run's loss stays with the first run's."]
    fell = loss.diverged_at
    how = f"and rises for good from {unit} {fell}" if fell is not None else "but does not rise above its own minimum"
    return [f"The second run's loss stays above the first run's from {unit} {found.loss_left}, {how}."]


def _of_the_first_out(found: Comparison) -> list[str]:
    if found.left.is_empty():
        return ["No tensor leaves the good run's band."]
    first = found.left.row(0, named=True)
    unit = found.bad.unit
    before = "" if first["lead"] is None else f", {_apart(first['lead'], unit)} the loss"
    what = f"{first['figure']} {number(first['expected'])} -> {number(first['value'])}"
    which = f"{first['tensor']} of {first['layer']}"
    return [f"First out of the good run's band is {which}, from {unit} {first['onset']}{before}: {what}."]


def _apart(lead: int, unit: str) -> str:
    if lead == 0:
        return "with"
    return f"{abs(lead)} {unit}s {'before' if lead > 0 else 'after'}"


def _of_the_experts(found: Comparison, fold: Mapping[str, Any]) -> list[str]:
    """The worst of the experts, if there are any and one of them stands out."""
    for row in found.experts.iter_rows(named=True):
        if fold_key(row["layer"], row["role"]) == (fold["layer"], fold["role"]):
            tells = row["nonfinite_since"] is not None or row["drift_log2"] is not None
            text = described(row, found.bad.unit)
            return [f"Of its experts, {text[0].lower()}{text[1:]}"] if tells else []
    return []


def _of_other_recipes(found: Comparison, worst: Mapping[str, Any]) -> list[str]:
    rows = found.what_if().filter(layer=worst["layer"], role=worst["role"]).sort("relative_error")
    before = number(worst["relative_error_bad"])
    return [
        f"Under {row['recipe']} its relative error would be {number(row['relative_error'])} instead of {before}, "
        f"its underflow {number(row['underflow_pct'], '%')}."
        for row in rows.iter_rows(named=True)
    ]


def _of_the_twin(found: Comparison) -> str:
    assert found.twin is not None
    since = found.twin.loss.above(found.good.loss)
    if found.twin.loss.final is None:
        return "Its twin's record has no losses, so it has nothing to tell."
    if found.loss_left is None:
        return "With no divergence in the second run, the twin has nothing to tell."
    if since is None:
        return "Its twin does not diverge: what differs between them (quantisation, for a BF16 twin) is to blame."
    return f"Its twin's loss leaves too, from {found.twin.unit} {since}: FP8 is not all of the cause."


def described(worst: Mapping[str, Any], unit: str) -> str:
    """The tensor at the top of the ranking, in a sentence."""
    name = f"{worst['tensor']} of {worst['layer']}"
    if worst["nonfinite_since"] is not None:
        return f"First to hold NaN or infinity is {name}, at {unit} {worst['nonfinite_since']}."

    if worst["drift_log2"] is None:
        return "No figure that both records have tells their tensors apart."

    def pair(figure: str) -> str:
        return " -> ".join(number(worst[f"{figure}_{run}"], "%") for run in ("good", "bad"))

    ratio = number(worst["mse_ratio"], prefix="x ")
    return f"Farthest apart is {name}: MSE {ratio}, underflow {pair('underflow_pct')}, overflow {pair('overflow_pct')}."


def to_json(found: Comparison) -> dict[str, Any]:
    """Plain values: the losses of each run, the verdict, the ranking."""
    runs = {"good": found.good, "bad": found.bad} | ({"twin": found.twin} if found.twin else {})
    plain = {
        "verdict": summarize(found),
        "notes": list(found.notes),
        "unit": found.bad.unit,
        "runs": {
            name: {
                "path": run.path,
                "final_loss": run.loss.final,
                "lowest_loss": run.loss.lowest,
                "diverged_at": run.loss.diverged_at,
                "above_good_since": None if run is found.good else run.loss.above(found.good.loss),
            }
            for name, run in runs.items()
        },
        "tensors": found.tensors.to_dicts(),
        "experts": found.experts.to_dicts(),
        "left": found.left.to_dicts(),
        "groups": found.groups().to_dicts(),
        "differences": found.differences().to_dicts(),
        "what_if": found.what_if().to_dicts(),
    }
    result: dict[str, Any] = _jsonable(plain)
    return result


def _jsonable(value: Any) -> Any:
    """JSON has neither NaN nor infinity: null."""
    if isinstance(value, Mapping):
        return {k: _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
