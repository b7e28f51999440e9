"""Call the tab's routes from Python, and collect the answers for a page."""

from __future__ import annotations

import base64
import gzip
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from ...core.keys import SHOWN_AS
from ..plugin import FP8Plugin
from ..records import metadata
from ..records.logdir import LogdirRoot
from ..records.thinning import join_metrics_at_steps, thin_columns
from ..web import RequestError, encode_json

#: seconds between two checks of a job
_LOOK = 0.2


#: metric that is shown for tensors without a finding
USUAL_METRIC = "relative_error"


@dataclass(frozen=True)
class ShownTensor:
    """A tensor to show, with its onset and the metric to show."""

    layer: str
    role: str
    since: int | None
    metric: str

    @property
    def tensor_name(self) -> str:
        """Return the usual name of the tensor."""
        return f"{SHOWN_AS[self.role]} of {self.layer}"


def choose_most_harmful_tensors(result: Mapping[str, Any], most: int) -> list[ShownTensor]:
    """Return the first tensors of a verdict's story, in which tensors are ranked by harm."""
    rows = [{"metric": None, **row} for row in result["story"]["tensors"][:most]]
    metrics = [row["metric"] if row["metric"] in metadata.NUMBERS else USUAL_METRIC for row in rows]
    return [ShownTensor(row["layer"], row["role"], row["since"], metric) for row, metric in zip(rows, metrics, strict=True)]


class RouteClient:
    """A client of the tab's routes, for the records below some folders."""

    def __init__(self, roots: Sequence[LogdirRoot], renames: Sequence[str] = ()) -> None:
        """
        Args:
            renames: rules for the runs' layer names, as in `compare`.
        """
        self._plugin = FP8Plugin.open_folders(roots, renames)
        self._plugin.await_record_search()
        self._routes = self._plugin.routes()

    def list_routes(self, parameters: Iterable[str]) -> list[str]:
        """Return the routes that take exactly these parameters."""
        return [name for name, route in self._routes.items() if set(route.parameters) == set(parameters)]

    def request_answer(self, route: str, **parameters: object) -> Any:
        """Return the answer of a route as bytes or as values for JSON. Parameters that are None are left out.

        Raises:
            RequestError: there is no such run, tensor or step.
        """
        given = [(name.rstrip("_"), str(value)) for name, value in parameters.items() if value is not None]
        return self._routes[route].answer_query(given)

    def try_to_ask(self, route: str, **parameters: object) -> Any:
        """Return the answer of a route, or None if the request is refused."""
        try:
            return self.request_answer(route, **parameters)
        except RequestError:
            return None

    def rename_tensor(self, run: str, baseline: str | None, tensor: ShownTensor) -> ShownTensor:
        """Return a tensor of a verdict with the layer's name in the run's record. Verdicts use the layer's name in the
        baseline.
        """
        if baseline in (None, run):
            return tensor
        names = self.request_answer("names", run=run, baseline=baseline)["names"]
        return replace(tensor, layer=next((own for own, theirs in names.items() if theirs == tensor.layer), tensor.layer))

    def await_verdict(self, names: Mapping[str, Any], by: str = "step") -> dict[str, Any]:
        """Wait for a verdict, and return its job. `names` contains the run, the baseline and the reference by part."""
        while (job := self._plugin.ask_verdict(**names, by=by))["state"] == "working":
            time.sleep(_LOOK)
        return job


#: characters that JavaScript's encodeURIComponent does not escape
_PLAIN = "!'()*~-_."


def name_answer(route: str, **parameters: object) -> str:
    """Return the name of an answer. `nameOf` of the page's `sources/standing.js` returns the same name.

    Example:
        >>> name_answer("frames", run="a b", metric="mse", table=None)
        'frames?metric=mse&run=a%20b'
    """
    given = sorted((name, value) for name, value in parameters.items() if value is not None)
    return f"{route}?{'&'.join(f'{name}={quote(str(value), safe=_PLAIN)}' for name, value in given)}"


class CompressedAnswers:
    """Answers by name. Each is compressed by gzip and encoded in base64."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        #: number of characters of all answers
        self.size = 0

    def add_answer(self, name: str, answer: Any) -> int:
        """Add an answer, bytes or values for JSON, and return its number of characters."""
        content = answer if isinstance(answer, bytes) else encode_json(answer).encode()
        text = base64.b64encode(gzip.compress(content, mtime=0)).decode()
        self.size += len(text) - len(self._texts.get(name, ""))
        self._texts[name] = text
        return len(text)

    def list_names(self) -> list[str]:
        """Return the names of all answers."""
        return list(self._texts)

    def drop_except(self, names: Collection[str]) -> None:
        """Drop all answers except these."""
        self._texts = {name: text for name, text in self._texts.items() if name in names}
        self.size = sum(map(len, self._texts.values()))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._texts.items())


def encode_json_for_script(value: Any) -> str:
    """Return a value as JSON that is safe inside a script of a page, whatever text it contains."""
    return encode_json(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


#: largest number of points of a loss or a timeline
POINTS = 1000
#: largest number of metrics in one request
_AT_ONCE = 16
#: default and least number of columns of a heatmap over all steps, and largest number of its values
_COLUMNS, _LEAST_COLUMNS, _COURSE = 800, 20, 60_000


class PageContents:
    """The answers for a page. Each method adds the answers about one subject."""

    def __init__(self, client: RouteClient) -> None:
        self.client, self.held = client, CompressedAnswers()
        self._headlines: dict[str, Any] = {}

    def add_run_list(self, told: Sequence[str]) -> None:
        """Add the list of runs and the notes about the page. A run that is growing is marked as not growing."""
        answer = self.client.request_answer("runs")
        still = [run | {"state": "still" if run["state"] == "growing" else run["state"]} for run in answer["runs"]]
        self.held.add_answer(name_answer("runs"), answer | {"runs": still, "told": list(told)})

    def add_run_description(self, run: str, table: str, steps: Sequence[int]) -> None:
        """Add the description of a run, limited to the sampled steps in the page."""
        answer = self.client.request_answer("run", run=run, table=table)
        self.held.add_answer(name_answer("run", run=run, table=table), answer | {"steps": list(steps)})

    def add_route_answers(self, **about: str) -> None:
        """Add the answers of all routes that take exactly these parameters, such as a run and a baseline."""
        for route in self.client.list_routes(about):
            if (answer := self.client.try_to_ask(route, **about)) is not None:
                self.held.add_answer(name_answer(route, **about), thin_columns(answer, POINTS))

    def add_baseline_layer_names(self, run: str, baseline: str) -> None:
        """Add the baseline's names of a run's layers, if any name differs."""
        answer = self.client.request_answer("names", run=run, baseline=baseline)
        if answer["names"]:
            self.held.add_answer(name_answer("names", run=run, baseline=baseline), answer)

    def add_metric_at_steps(self, run: str, metric: str, table: str, steps: Sequence[int]) -> int:
        """Add a metric of all tensors at steps, and return the number of characters."""
        about = {"run": run, "metric": metric, "table": table}
        answers = [self.client.request_answer("frames", **about, from_=step, to=step) for step in steps]
        return self.held.add_answer(name_answer("frames", **about), join_metrics_at_steps(answers)) if answers else 0

    def add_heatmap(self, run: str, metric: str, table: str, tensors: int) -> int:
        """Add a metric of all tensors over all steps, in fewer columns if there are many tensors. Return the number of
        characters.
        """
        about = {"run": run, "metric": metric, "table": table}
        columns = max(_LEAST_COLUMNS, min(_COLUMNS, _COURSE // max(1, tensors)))
        answer = self.client.request_answer("course", **about, columns=columns)
        return self.held.add_answer(name_answer("course", **about), answer)

    def add_tensor_timeline(self, run: str, layer: str, role: str) -> int:
        """Add all metrics of a tensor and its ranks. Return the number of steps, or 0 if the run does not have the
        tensor.
        """
        metrics = [*list_metrics(metadata.find_table_of_role(role)), "ranks", "ranks_missing"]
        asked = [",".join(metrics[i : i + _AT_ONCE]) for i in range(0, len(metrics), _AT_ONCE)]
        answers = [self.client.try_to_ask("timeline", run=run, layer=layer, role=role, metrics=names) for names in asked]
        if None in answers:
            return 0
        whole = answers[0] | {"metrics": {name: values for one in answers for name, values in one["metrics"].items()}}
        self.held.add_answer(name_answer("timeline", run=run, layer=layer, role=role), thin_columns(whole, POINTS))
        return len(whole["step"])

    def add_tensor_histograms(self, run: str, layer: str, role: str, steps: Iterable[int]) -> int:
        """Add distributions of a tensor at steps, and return the number of characters."""
        return self._at_steps("histogram", steps, run=run, layer=layer, role=role)

    def add_metrics_of_other_recipes(self, run: str, steps: Iterable[int]) -> int:
        """Add the metrics under recipes that were not in use, and return the number of characters."""
        return self._at_steps("others", steps, run=run)

    def _at_steps(self, route: str, steps: Iterable[int], **about: str) -> int:
        found = [self.client.try_to_ask(route, **about, step=step) for step in steps]
        by_step = {answer["step"]: answer for answer in found if answer}
        return (
            self.held.add_answer(name_answer(route, **about), [by_step[step] for step in sorted(by_step)]) if by_step else 0
        )

    def add_run_settings(self, a: str, b: str | None = None) -> None:
        """Add the settings of a run, or of two runs with their differences."""
        self.held.add_answer(name_answer("fingerprints", a=a, b=b), self.client.request_answer("fingerprints", a=a, b=b))

    def add_verdict(self, names: Mapping[str, str | None], job: Mapping[str, Any]) -> None:
        """Add a verdict as a finished job. `names` contains its runs by part."""
        self.held.add_answer(name_answer("verdict", **names), job)
        if job["state"] == "done":
            self._headlines[str(names["run"])] = job["result"]["story"]["headline"]

    def add_runs_table(self, baseline: str | None) -> None:
        """Add the table of all runs, with the verdicts that are in the page."""
        while not (answer := self.client.request_answer("rows", baseline=baseline))["is_complete"]:
            pass
        for name, row in answer["rows"].items():
            row["headline"] = self._headlines.get(name) or row.get("headline")
        self.held.add_answer(name_answer("rows", baseline=baseline), answer)


def list_metrics(table: str) -> list[str]:
    """Return the names of the metrics for tensors of a table."""
    return [one["name"] for one in metadata.describe_metrics() if one.get("table", table) == table]


def list_sampled_steps(client: RouteClient, run: str, table: str) -> list[int]:
    """Return all sampled steps of a run."""
    return list(client.request_answer("run", run=run, table=table)["steps"])


def choose_nearest_step(steps: Sequence[int], step: int | None) -> list[int]:
    """Return a list with the sampled step nearest to a step, or the last sampled step. Return an empty list without
    samples.
    """
    return [min(steps, key=lambda one: abs(one - step)) if step is not None else steps[-1]] if steps else []
