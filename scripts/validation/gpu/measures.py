"""What a part found, as plain values: numbers, what each may be, and whether it is."""

from __future__ import annotations

from typing import Any

from benchmarks.common.paired import Estimate

Measure = dict[str, Any]
#: what a part has found since its last piece: measures, lines, ...
Piece = dict[str, Any]


def measure(
    what: str,
    value: float | str | Estimate,
    unit: str = "",
    *,
    of: int | None = None,
    limit: str = "",
    kept: bool | None = None,
    of_time: bool = False,
) -> Measure:
    """A row of a table.

    Args:
        value: an estimate is kept with its interval.
        of: how many `value` could be at most.
        limit: what it may be, in words; `kept` says whether it is, None where nothing is promised.
        of_time: that it depends on how fast something ran; it means nothing over emulated kernels.
    """
    found: Measure = {"what": what, "value": value, "unit": unit, "limit": limit, "kept": kept, "of_time": of_time}
    if isinstance(value, Estimate):
        found |= {"value": value.median, "low": value.low, "high": value.high}
    return found if of is None else found | {"of": of}


def all_of(what: str, holds: int, of: int) -> Measure:
    """So many of all; promised is every one, and that there are any."""
    return measure(what, holds, of=of, limit="all", kept=0 < holds == of)


def at_most(what: str, found: Estimate, limit: float, unit: str) -> Measure:
    """A ratio of times, which may be so large."""
    return measure(what, found, unit, limit=f"at most {limit:g}", kept=found.median <= limit, of_time=True)
