"""Write a report that compares runs with a baseline, in one file that opens in any browser."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...errors import ConfigError, RecordError
from ..records import metadata
from ..records.logdir import LogdirRoot, name_runs
from ..records.thinning import shorten_verdict
from .contents import (
    USUAL_METRIC,
    PageContents,
    RouteClient,
    ShownTensor,
    choose_most_harmful_tensors,
    choose_nearest_step,
    list_sampled_steps,
)
from .server import render_single_file


@dataclass(frozen=True)
class Figure:
    """A view in a report. Its state has the same keys as the tab's address."""

    title: str
    view: str
    tensor: ShownTensor | None = None
    step: int | None = None
    metric: str | None = None

    def make_view_state(self, names: Mapping[str, str | None]) -> dict[str, str]:
        """Return the state of the view.

        Args:
            names: names of the runs by part.
        """
        about = {"layer": self.tensor.layer, "role": self.tensor.role} if self.tensor else {}
        table = {} if self.tensor is None else {"table": metadata.find_table_of_role(self.tensor.role)}
        parts = {part: name or "" for part, name in names.items()}
        state: dict[str, Any] = {"view": self.view, **parts, **about, **table, "step": self.step, "metric": self.metric}
        return {name: str(value) for name, value in state.items() if value is not None}


def choose_figures(result: Mapping[str, Any], tensors: list[ShownTensor], unit: str) -> list[Figure]:
    """Return the figures: the verdict, then all tensors at the onset, then single tensors in order of harm."""
    divergence = result["diagnosis"]["divergence_step"]

    def step(of: ShownTensor | None) -> int | None:
        since = of.since if of and of.since is not None else divergence
        return since if unit == "step" else None  # the page shows steps, not samples

    first = tensors[0] if tensors else None
    metric = first.metric if first else USUAL_METRIC
    label = next(one["label"] for one in metadata.describe_metrics() if one["name"] == metric)
    figures = [
        Figure("Verdict", "verdict"),
        Figure(f"All tensors over all steps: {label}", "course", first, step(first), metric),
        Figure(f"All tensors at one step: {label}", "map", first, step(first), metric),
    ]
    for tensor in tensors:
        figures.append(Figure(f"{tensor.tensor_name} over the steps", "timeline", tensor, step(tensor)))
        figures.append(Figure(f"The values of {tensor.tensor_name}", "distribution", tensor, step(tensor)))
    return figures


#: largest number of rows in each list of a verdict
_ROWS = 60
#: number of tensors with figures, for a single run and for each of several runs
_TENSORS, _OF_EACH = 4, 2
#: largest number of characters of all answers, so that the page with its script stays below 2 MB
_MOST = 1_100_000
_MISSING = "This is not in the report. To see everything, run `nemo-fp8-debug view` on the runs."


@dataclass(frozen=True)
class ReportRecords:
    """The subject of a report: the addresses of its records."""

    baseline: str
    runs: Sequence[str]
    reference: str | None = None
    by: str = "step"
    renames: Sequence[str] = ()


def check_report_path(path: str | os.PathLike[str]) -> None:
    """Check that a report can be written. Call this before the runs are compared.

    Raises:
        ConfigError: the file exists, or its folder does not.
    """
    if Path(path).exists():
        raise ConfigError(f"{path} exists and is not overwritten; give --html another name, or delete the file first")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {Path(path).parent}; make it first")


def write_report(path: str | os.PathLike[str], subject: ReportRecords) -> None:
    """Write a report.

    Raises:
        ConfigError: the file exists or is not writable.
        RecordError: the verdict on a run failed.
    """
    check_report_path(path)
    content = build_report(subject)
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def build_report(subject: ReportRecords) -> str:
    """Return the text of a report."""
    addresses = [subject.baseline, *subject.runs, *filter(None, [subject.reference])]
    baseline, *names = name_runs(addresses)
    reference = names.pop() if subject.reference else None
    roots = [LogdirRoot(n, a) for n, a in zip([baseline, *names, *filter(None, [reference])], addresses, strict=True)]
    contents = PageContents(RouteClient(roots, subject.renames))
    made = _Report(contents, baseline, _TENSORS if len(names) == 1 else _OF_EACH)
    sections = [made.section({"run": name, "baseline": baseline, "reference": reference}, subject) for name in names]
    contents.add_run_list(())
    title = f"{', '.join(names)} against {baseline}"
    told = [f"Made by nemo-fp8-debug {__version__} on {date.today().isoformat()}.", *made.told]
    whole = {"title": f"FP8: {title}", "told": told, "sections": sections}
    return render_single_file(f"FP8: {title}", {"held": dict(contents.held), "report": whole, "missing": _MISSING})


class _Report:
    """The sections of a report, and the answers that they need."""

    def __init__(self, contents: PageContents, baseline: str, most: int) -> None:
        """
        Args:
            most: largest number of tensors with figures for each run.
        """
        self._contents, self._baseline, self._most = contents, baseline, most
        self.told: list[str] = []

    def section(self, names: Mapping[str, str | None], subject: ReportRecords) -> dict[str, Any]:
        """Return the section of a run, with its figures."""
        job = self._contents.client.await_verdict(names, subject.by)
        if job["state"] == "failed":
            raise RecordError(job["error"])
        result, told = shorten_verdict(job["result"], _ROWS)
        self.told += told
        self._contents.add_verdict(names, job | {"result": result})
        matter = choose_most_harmful_tensors(result, self._most)
        figures = choose_figures(result, matter, (result["comparison"] or {}).get("unit", "step"))
        parts = [name for name in names.values() if name]
        for name in parts:
            self._contents.add_route_answers(run=name)
            if name != self._baseline:
                self._contents.add_route_answers(run=name, baseline=self._baseline)
        drawn = [{"title": one.title, "state": one.make_view_state(names)} for one in figures if self._filled(one, parts)]
        return {"title": f"{names['run']} against {names['baseline']}", "about": _about(names, subject), "figures": drawn}

    def _layers(self, run: str, table: str) -> list[str]:
        return list(self._contents.client.request_answer("run", run=run, table=table)["tensors"]["layer"])

    def _filled(self, figure: Figure, parts: Sequence[str]) -> bool:
        """Fill a figure with data. Return False if there is no data or no room."""
        if figure.view == "verdict":
            return True
        held = self._contents.held
        before = set(held.list_names())
        fill = {
            "course": self._course,
            "map": self._map,
            "timeline": self._timeline,
            "distribution": self._distribution,
        }[figure.view]
        sizes = [fill(figure, part) for part in parts]  # fill all parts
        if held.size > _MOST:
            held.drop_except(before)
            self.told.append(f"“{figure.title}” does not fit in this report: `nemo-fp8-debug view` shows it.")
            return False
        return any(sizes)

    def _course(self, figure: Figure, run: str) -> int:
        table = figure.make_view_state({}).get("table", "metrics")
        assert figure.metric is not None
        return self._contents.add_heatmap(run, figure.metric, table, len(self._layers(run, table)))

    def _map(self, figure: Figure, run: str) -> int:
        table = figure.make_view_state({}).get("table", "metrics")
        steps = list_sampled_steps(self._contents.client, run, table)
        self._contents.add_run_description(run, table, steps)
        assert figure.metric is not None
        self._contents.add_route_answers(run=run, metric=figure.metric, table=table)
        return self._contents.add_metric_at_steps(run, figure.metric, table, choose_nearest_step(steps, figure.step))

    def _timeline(self, figure: Figure, run: str) -> int:
        about = self._tensor(figure, run)
        self._contents.add_route_answers(run=run, **about)
        if run != self._baseline:
            self._contents.add_route_answers(run=run, baseline=self._baseline, **about)
        return self._contents.add_tensor_timeline(run, **about)

    def _distribution(self, figure: Figure, run: str) -> int:
        steps = choose_nearest_step(
            list_sampled_steps(self._contents.client, run, figure.make_view_state({})["table"]), figure.step
        )
        return self._contents.add_tensor_histograms(run, **self._tensor(figure, run), steps=steps)

    def _tensor(self, figure: Figure, run: str) -> dict[str, str]:
        """Return the layer and role of a figure's tensor, with the layer's name in a run's record."""
        assert figure.tensor is not None
        tensor = self._contents.client.rename_tensor(run, self._baseline, figure.tensor)
        return {"layer": tensor.layer, "role": tensor.role}


def _about(names: Mapping[str, str | None], subject: ReportRecords) -> str:
    beside = f", with the reference run {names['reference']}" if names["reference"] else ""
    return f"{names['run']} is compared with {names['baseline']}{beside}."
