"""A report: what was found of runs against a baseline, in one file that needs nothing but a browser."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...errors import ConfigError, RecordError
from ..records.logdir import Root
from .asking import Asking
from .contents import Contents, nearest, steps_of
from .figures import Figure, figures_of, that_matter
from .html import alone
from .names import names_of
from .thinning import of_verdict

#: rows in each list of a verdict
_ROWS = 60
#: tensors that are drawn of a run, and of each where there are several runs
_TENSORS, _OF_EACH = 4, 2
#: characters of answers; with the script it makes a page of less than 2 MB
_MOST = 1_100_000
_MISSING = "This is not in the report: `nemo-fp8-debug view` of the runs shows all of them."


@dataclass(frozen=True)
class Compared:
    """What a report is about: addresses of records."""

    baseline: str
    runs: Sequence[str]
    reference: str | None = None
    by: str = "step"
    renames: Sequence[str] = ()


def check_report(path: str | os.PathLike[str]) -> None:
    """Whether a report can be written, before the work is done.

    Raises:
        ConfigError: the file exists, or its folder does not.
    """
    if Path(path).exists():
        raise ConfigError(f"{path} exists and is not overwritten; give --html another name, or delete the file first")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {Path(path).parent}; make it first")


def write_report(path: str | os.PathLike[str], compared: Compared) -> None:
    """Write a report.

    Raises:
        ConfigError: the file exists or cannot be written.
        RecordError: nothing can be said of a run.
    """
    check_report(path)
    content = report(compared)
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def report(compared: Compared) -> str:
    """The text of the file."""
    addresses = [compared.baseline, *compared.runs, *filter(None, [compared.reference])]
    baseline, *names = names_of(addresses)
    reference = names.pop() if compared.reference else None
    roots = [Root(n, a) for n, a in zip([baseline, *names, *filter(None, [reference])], addresses, strict=True)]
    contents = Contents(Asking(roots, compared.renames))
    made = _Report(contents, baseline, _TENSORS if len(names) == 1 else _OF_EACH)
    sections = [made.section({"run": name, "baseline": baseline, "reference": reference}, compared) for name in names]
    contents.runs(())
    title = f"{', '.join(names)} against {baseline}"
    told = [f"Made by nemo-fp8-debug {__version__} on {date.today().isoformat()}.", *made.told]
    whole = {"title": f"FP8: {title}", "told": told, "sections": sections}
    return alone(f"FP8: {title}", {"held": dict(contents.held), "report": whole, "missing": _MISSING})


class _Report:
    """Sections, and the answers that they ask for."""

    def __init__(self, contents: Contents, baseline: str, most: int) -> None:
        """
        Args:
            most: tensors that are drawn of a run.
        """
        self._contents, self._baseline, self._most = contents, baseline, most
        self.told: list[str] = []

    def section(self, names: Mapping[str, str | None], compared: Compared) -> dict[str, Any]:
        """What was found of a run, as figures."""
        job = self._contents.asking.verdict(names, compared.by)
        if job["state"] == "failed":
            raise RecordError(job["error"])
        result, told = of_verdict(job["result"], _ROWS)
        self.told += told
        self._contents.verdict(names, job | {"result": result})
        matter = that_matter(result, self._most)
        figures = figures_of(result, matter, (result["comparison"] or {}).get("unit", "step"))
        parts = [name for name in names.values() if name]
        for name in parts:
            self._contents.about(run=name)
            if name != self._baseline:
                self._contents.about(run=name, baseline=self._baseline)
        drawn = [{"title": one.title, "state": one.state(names)} for one in figures if self._filled(one, parts)]
        return {"title": f"{names['run']} against {names['baseline']}", "about": _about(names, compared), "figures": drawn}

    def _layers(self, run: str, table: str) -> list[str]:
        return list(self._contents.asking.ask("run", run=run, table=table)["tensors"]["layer"])

    def _filled(self, figure: Figure, parts: Sequence[str]) -> bool:
        """Whether there is something to show, and room for it."""
        if figure.view == "verdict":
            return True
        held = self._contents.held
        before = set(held.names())
        fill = {
            "course": self._course,
            "map": self._map,
            "timeline": self._timeline,
            "distribution": self._distribution,
        }[figure.view]
        sizes = [fill(figure, part) for part in parts]  # of all parts
        if held.size > _MOST:
            held.keep(before)
            self.told.append(f"There is no room for “{figure.title}”: `nemo-fp8-debug view` shows it.")
            return False
        return any(sizes)

    def _course(self, figure: Figure, run: str) -> int:
        table = figure.state({}).get("table", "metrics")
        assert figure.metric is not None
        return self._contents.course(run, figure.metric, table, len(self._layers(run, table)))

    def _map(self, figure: Figure, run: str) -> int:
        table = figure.state({}).get("table", "metrics")
        steps = steps_of(self._contents.asking, run, table)
        self._contents.run(run, table, steps)
        assert figure.metric is not None
        self._contents.about(run=run, metric=figure.metric, table=table)
        return self._contents.frames(run, figure.metric, table, nearest(steps, figure.step))

    def _timeline(self, figure: Figure, run: str) -> int:
        about = self._tensor(figure, run)
        self._contents.about(run=run, **about)
        if run != self._baseline:
            self._contents.about(run=run, baseline=self._baseline, **about)
        return self._contents.timeline(run, **about)

    def _distribution(self, figure: Figure, run: str) -> int:
        steps = nearest(steps_of(self._contents.asking, run, figure.state({})["table"]), figure.step)
        return self._contents.histograms(run, **self._tensor(figure, run), steps=steps)

    def _tensor(self, figure: Figure, run: str) -> dict[str, str]:
        """Layer and role of a figure's tensor, as a run's record calls it."""
        assert figure.tensor is not None
        tensor = self._contents.asking.in_record(run, self._baseline, figure.tensor)
        return {"layer": tensor.layer, "role": tensor.role}


def _about(names: Mapping[str, str | None], compared: Compared) -> str:
    beside = f", with the reference run {names['reference']}" if names["reference"] else ""
    return f"{names['run']} is compared with {names['baseline']}{beside}."
