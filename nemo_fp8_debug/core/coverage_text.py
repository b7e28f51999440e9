"""Describe in a sentence which part of a model is not observed, from the section `coverage` of a fingerprint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: number of reasons that the sentence lists
_SHOWN = 3
#: name of the entry for products that functions compute; not listed, because any model may have such products
_FUNCTIONS = "*"


def describe_unobserved(coverage: object, above: float = -1.0) -> str:
    """Return a sentence with the share of multiply-adds that is not observed, and the main reasons.

    Args:
        coverage: the mapping that `CoverageLedger.summarize_coverage` returns. Other mappings, from older records, give "".
        above: largest share to ignore. It is reported nevertheless if a layer of unknown size is not observed.

    Returns:
        The sentence, or "" if there is nothing to report.
    """
    if not isinstance(coverage, Mapping):
        return ""
    share = coverage.get("share_not_observed")
    if isinstance(share, (int, float)) and share <= above and not coverage.get("layers_of_unknown_size"):
        return ""
    reasons = coverage.get("not_observed")
    told = list(_reasons(reasons)) if isinstance(reasons, Mapping) else []
    what = "the multiply-adds per token in known modules"
    if not isinstance(share, (int, float)):
        return f"it is unknown how much of the model is observed{_because(told)}"
    if share == 0:
        return f"all of {what} are observed" + (f". Not observed{_because(told)}" if told else "")
    return f"{_percent(share)} of {what} are not observed{_because(told)}"


def _reasons(reasons: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons, largest first. Reasons of unknown size come last."""

    def size(item: tuple[str, Any]) -> float:
        value = item[1].get("multiply_adds_per_token") if isinstance(item[1], Mapping) else None
        return float(value) if isinstance(value, (int, float)) else -1.0

    for reason, of in sorted(reasons.items(), key=size, reverse=True):
        if isinstance(of, Mapping) and of.get("first") != _FUNCTIONS:
            unknown = ", size unknown" if size((reason, of)) < 0 else ""
            first = f": {of.get('first')}" if of.get("count") == 1 else f", first {of.get('first')}"
            yield f"{reason} ({of.get('count')}{first}{unknown})"


def _because(told: list[str]) -> str:
    more = [f"and {len(told) - _SHOWN} more in the fingerprint"] if len(told) > _SHOWN else []
    return ": " + "; ".join([*told[:_SHOWN], *more]) if told else ""


def _percent(share: float) -> str:
    return "less than 0.1%" if share < 0.001 else f"{100 * share:.1f}%"
