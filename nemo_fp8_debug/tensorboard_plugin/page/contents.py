"""What of records goes into a page: the answers to what its views ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..records import metadata
from .asking import Asking
from .held import Held, name_of
from .thinning import joined, of_columns

#: points of a loss or a timeline
POINTS = 1000
#: metrics that are asked for at once
_AT_ONCE = 16
#: columns of a course as the page asks for them, at least, and values of one at most
_COLUMNS, _LEAST_COLUMNS, _COURSE = 800, 20, 60_000


class Contents:
    """Answers for a page, by what they are about."""

    def __init__(self, asking: Asking) -> None:
        self.asking, self.held = asking, Held()
        self._headlines: dict[str, Any] = {}

    def runs(self, told: Sequence[str]) -> None:
        """The list of runs, none of which grows any more here, and what there is to say about the page."""
        answer = self.asking.ask("runs")
        still = [run | {"state": "still" if run["state"] == "growing" else run["state"]} for run in answer["runs"]]
        self.held.put(name_of("runs"), answer | {"runs": still, "told": list(told)})

    def run(self, run: str, table: str, steps: Sequence[int]) -> None:
        """What there is to know of a run, of which these sampled steps are in the page."""
        answer = self.asking.ask("run", run=run, table=table)
        self.held.put(name_of("run", run=run, table=table), answer | {"steps": list(steps)})

    def about(self, **about: str) -> None:
        """What every route answers that takes just these parameters: a run, a run and a baseline, a run's metric, a tensor
        of a run, with a baseline or without."""
        for route in self.asking.routes_about(about):
            if (answer := self.asking.try_to(route, **about)) is not None:
                self.held.put(name_of(route, **about), of_columns(answer, POINTS))

    def names(self, run: str, baseline: str) -> None:
        """What a baseline calls layers of a run, if it calls any otherwise."""
        answer = self.asking.ask("names", run=run, baseline=baseline)
        if answer["names"]:
            self.held.put(name_of("names", run=run, baseline=baseline), answer)

    def frames(self, run: str, metric: str, table: str, steps: Sequence[int]) -> int:
        """A metric of all tensors at steps; how many characters that takes."""
        about = {"run": run, "metric": metric, "table": table}
        answers = [self.asking.ask("frames", **about, from_=step, to=step) for step in steps]
        return self.held.put(name_of("frames", **about), joined(answers)) if answers else 0

    def course(self, run: str, metric: str, table: str, tensors: int) -> int:
        """A metric of all tensors over all steps, of many tensors in fewer columns; how many characters it takes."""
        about = {"run": run, "metric": metric, "table": table}
        columns = max(_LEAST_COLUMNS, min(_COLUMNS, _COURSE // max(1, tensors)))
        answer = self.asking.ask("course", **about, columns=columns)
        return self.held.put(name_of("course", **about), answer)

    def timeline(self, run: str, layer: str, role: str) -> int:
        """All metrics of a tensor, and how many ranks they are of; how many steps, 0 where the run has no such tensor."""
        metrics = [*metrics_of(metadata.table_of(role)), "ranks", "ranks_missing"]
        asked = [",".join(metrics[i : i + _AT_ONCE]) for i in range(0, len(metrics), _AT_ONCE)]
        answers = [self.asking.try_to("timeline", run=run, layer=layer, role=role, metrics=names) for names in asked]
        if None in answers:
            return 0
        whole = answers[0] | {"metrics": {name: values for one in answers for name, values in one["metrics"].items()}}
        self.held.put(name_of("timeline", run=run, layer=layer, role=role), of_columns(whole, POINTS))
        return len(whole["step"])

    def histograms(self, run: str, layer: str, role: str, steps: Iterable[int]) -> int:
        """Distributions of a tensor at steps; how many characters they take."""
        return self._at_steps("histogram", steps, run=run, layer=layer, role=role)

    def others(self, run: str, steps: Iterable[int]) -> int:
        """What was recorded under recipes that were not in use."""
        return self._at_steps("others", steps, run=run)

    def _at_steps(self, route: str, steps: Iterable[int], **about: str) -> int:
        found = [self.asking.try_to(route, **about, step=step) for step in steps]
        by_step = {answer["step"]: answer for answer in found if answer}
        return self.held.put(name_of(route, **about), [by_step[step] for step in sorted(by_step)]) if by_step else 0

    def fingerprints(self, a: str, b: str | None = None) -> None:
        """The settings of a run, or of two and in what they differ."""
        self.held.put(name_of("fingerprints", a=a, b=b), self.asking.ask("fingerprints", a=a, b=b))

    def verdict(self, names: Mapping[str, str | None], job: Mapping[str, Any]) -> None:
        """The verdict of runs by part, a job that has ended."""
        self.held.put(name_of("verdict", **names), job)
        if job["state"] == "done":
            self._headlines[str(names["run"])] = job["result"]["story"]["headline"]

    def rows(self, baseline: str | None) -> None:
        """The table of all runs; verdicts of those that are in the page."""
        while not (answer := self.asking.ask("rows", baseline=baseline))["is_complete"]:
            pass
        for name, row in answer["rows"].items():
            row["headline"] = self._headlines.get(name) or row.get("headline")
        self.held.put(name_of("rows", baseline=baseline), answer)


def metrics_of(table: str) -> list[str]:
    """Names of the metrics that are offered of the tensors of a table."""
    return [one["name"] for one in metadata.metrics_of() if one.get("table", table) == table]


def steps_of(asking: Asking, run: str, table: str) -> list[int]:
    """All sampled steps of a run."""
    return list(asking.ask("run", run=run, table=table)["steps"])


def nearest(steps: Sequence[int], step: int | None) -> list[int]:
    """The sampled step next to one, or the last; none where nothing was sampled."""
    return [min(steps, key=lambda one: abs(one - step)) if step is not None else steps[-1]] if steps else []
