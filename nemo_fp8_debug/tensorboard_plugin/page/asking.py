"""The tab's routes asked from Python: what a page would ask, with the answers that it would get."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..plugin import FP8Plugin
from ..records.logdir import Root
from ..web.errors import Refused
from .figures import Tensor

#: seconds between two looks at a job
_LOOK = 0.2


class Asking:
    """Questions about the records below some folders."""

    def __init__(self, roots: Sequence[Root], renames: Sequence[str] = ()) -> None:
        """
        Args:
            renames: of the runs' layers, as `compare` takes them.
        """
        self._plugin = FP8Plugin.over(roots, renames)
        self._plugin.await_records()
        self._routes = self._plugin.routes()

    def routes_about(self, parameters: Iterable[str]) -> list[str]:
        """Routes that take these parameters and no other."""
        return [name for name, route in self._routes.items() if set(route.parameters) == set(parameters)]

    def ask(self, route: str, **parameters: object) -> Any:
        """The answer, bytes or what JSON can say; parameters that are None are left out.

        Raises:
            Refused: there is no such run, tensor or step.
        """
        given = [(name.rstrip("_"), str(value)) for name, value in parameters.items() if value is not None]
        return self._routes[route].asked(given)

    def try_to(self, route: str, **parameters: object) -> Any:
        """The answer, or None where there is none."""
        try:
            return self.ask(route, **parameters)
        except Refused:
            return None

    def in_record(self, run: str, baseline: str | None, tensor: Tensor) -> Tensor:
        """A tensor of a verdict, which has the baseline's names, as the record of a run calls it."""
        if baseline in (None, run):
            return tensor
        names = self.ask("names", run=run, baseline=baseline)["names"]
        return replace(tensor, layer=next((own for own, theirs in names.items() if theirs == tensor.layer), tensor.layer))

    def verdict(self, names: Mapping[str, Any], by: str = "step") -> dict[str, Any]:
        """The verdict of runs by part (run, baseline, reference), as a job: done and its result, or failed and why."""
        while (job := self._plugin.judge(**names, by=by))["state"] == "working":
            time.sleep(_LOOK)
        return job
