"""In which order TensorBoard gives colors to its runs, so that a run has the same color here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tensorboard.context import RequestContext


def ordered(names: Iterable[str], provider: Any) -> list[str]:
    """Names of runs in the order of their colors: as TensorBoard has them, then those that it does not know, by name.

    TensorBoard sorts runs by their first event, and runs without one by name. A record belongs to the run of its name, or
    to the first one below it.

    Args:
        provider: TensorBoard's data provider; None: there is none.
    """
    places = _places(provider)
    return sorted(names, key=lambda name: (_place(name, places), name))


def _places(provider: Any) -> dict[str, int]:
    try:
        known = [] if provider is None else provider.list_runs(RequestContext(), experiment_id="")
        told = [(math.inf if run.start_time is None else run.start_time, run.run_name) for run in known]
    except Exception:  # its data server may be busy or gone, and colors are not worth a failure
        return {}
    return {name: place for place, (_, name) in enumerate(sorted(told))}


def _place(name: str, places: dict[str, int]) -> float:
    below = "" if name == "." else f"{name}/"
    found = (place for run, place in places.items() if run.startswith(below))
    return places.get(name, min(found, default=math.inf))
