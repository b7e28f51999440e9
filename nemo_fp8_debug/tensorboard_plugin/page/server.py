"""Serve the tab's page without TensorBoard, or export it to a folder that opens without a server."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from html import escape
from itertools import permutations
from pathlib import Path
from typing import Any

from werkzeug import Request, Response
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from ..._version import __version__
from ...errors import ConfigError
from ..plugin import FP8Plugin
from ..records.logdir import LogdirRoot, name_roots
from ..records.thinning import choose_evenly_spread_steps, shorten_verdict
from ..runs_table import suggest_run_roles
from ..web import SCRIPT, CachedPageScript, ForeignSiteError, NotFoundError, make_wsgi_application, names_this_server
from .contents import (
    CompressedAnswers,
    PageContents,
    RouteClient,
    ShownTensor,
    choose_most_harmful_tensors,
    encode_json_for_script,
    list_metrics,
    list_sampled_steps,
)

#: content security policy of a page in one file, which loads nothing from elsewhere
_ALONE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_WITHOUT = "This page needs JavaScript: switch JavaScript on to see it."


def render_page(title: str, scripts: str, policy: str = "") -> str:
    """Return an HTML page that contains scripts."""
    allowed = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n' if policy else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{allowed}'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n</head>\n'
        f"<body>\n<noscript>{_WITHOUT}</noscript>\n{scripts}\n</body>\n</html>\n"
    )


def render_single_file(title: str, data: dict[str, Any]) -> str:
    """Return a page in one file."""
    # In strings and comments of a script, the escapes mean the same as the characters, but HTML parsers ignore the escapes.
    code = SCRIPT.read_text(encoding="utf-8").replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return render_page(title, f"<script>{render_data(data)}</script>\n<script>{code}</script>", _ALONE)


def render_data(data: dict[str, Any]) -> str:
    """Return the script that contains the data of a page."""
    return f"globalThis.fp8DebugPage = {encode_json_for_script(data)};"


#: prefix of the routes, the same as in TensorBoard
_ROUTES = "/data/plugin/fp8"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)


class _Quiet(WSGIRequestHandler):
    """A request handler that logs nothing."""

    def log(self, type: str, message: str, *args: Any) -> None:
        """Write nothing."""


def make_bound_server(roots: Sequence[LogdirRoot], host: str, port: int) -> BaseWSGIServer:
    """Return a server that is bound but not started.

    Args:
        host: a name or address of this machine. Requests must name this host, localhost, or an address in digits.
        port: port number; 0 for any free port.

    Raises:
        ConfigError: the address is not available.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as bound:
            return make_server(
                host, port, _build_application(roots, host), threaded=True, request_handler=_Quiet, fd=bound.fileno()
            )
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror}; choose another --port, 0 for any"
        ) from None


def _build_application(roots: Sequence[LogdirRoot], host: str) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application: the page at /, its script and the tab's routes below `/data/plugin/fp8`."""
    places = {f"{_ROUTES}{name}": route for name, route in FP8Plugin.open_folders(roots).get_plugin_apps().items()}
    places |= {f"{_ROUTES}/page.js": make_wsgi_application(CachedPageScript()), "/": make_wsgi_application(_index)}
    missing, foreign = make_wsgi_application(_missing), make_wsgi_application(_foreign)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        ours = names_this_server(environ.get("HTTP_HOST", ""), host)
        chosen = places.get(environ.get("PATH_INFO", ""), missing) if ours else foreign
        found: Iterable[bytes] = chosen(environ, start_response)
        return found

    return answer


def _index(request: Request) -> Response:
    response = Response(render_page("FP8", f'<script src="{_ROUTES[1:]}/page.js"></script>'), mimetype="text/html")
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["Cache-Control"] = "no-store"
    return response


def _missing(request: Request) -> Response:
    raise NotFoundError("There is nothing at this address; the page is at /.")


def _foreign(request: Request) -> Response:
    raise ForeignSiteError(
        "The server does not answer to this name; open the address that it printed, or set the name with --host."
    )


#: largest number of sampled steps of a run in the page
_STEPS = 128
#: largest number of characters: of all maps, of all distributions, and of an answer that goes into data.js instead of its
#: own file
_MAPS, _DISTRIBUTIONS, _INLINE = 24_000_000, 16_000_000, 1000
#: largest numbers: steps of a run with distributions, tensors of a verdict with timelines, rows in a list, verdicts
_HISTOGRAMS, _TENSORS, _ROWS, _VERDICTS = 6, 12, 1000, 20
#: estimated bytes of one packed value in a map
_PACKED = 4.5
_MISSING = (
    "This page has no server and does not contain the answer. Its top lists what it contains. To see everything, run "
    "`nemo-fp8-debug view` on the runs."
)


def export_page(folder: str | os.PathLike[str], addresses: Sequence[str]) -> tuple[int, int]:
    """Write the page of the runs below some addresses into a new folder. Return the numbers of files and bytes.

    Raises:
        ConfigError: the folder exists or is not writable, or there is no run.
    """
    place = Path(folder)
    if place.exists():
        raise ConfigError(f"{place} exists and is not overwritten; give --export another folder")
    exported = _Export(RouteClient(name_roots(addresses)))
    exported.fill()
    try:
        place.mkdir(parents=True)
        return _written(place, exported.contents.held)
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {error.strerror}") from None


def _written(place: Path, held: CompressedAnswers) -> tuple[int, int]:
    inline: dict[str, str] = {}
    files: dict[str, str] = {}
    (place / "data").mkdir()
    for i, (name, text) in enumerate(held):
        if len(text) <= _INLINE:
            inline[name] = text
            continue
        files[name] = f"data/{i:05}.js"
        (place / files[name]).write_text(
            f"fp8DebugPage.held[{encode_json_for_script(name)}] = {encode_json_for_script(text)};", encoding="utf-8"
        )
    data = {"held": inline, "files": files, "missing": _MISSING}
    (place / "data.js").write_text(render_data(data), encoding="utf-8")
    (place / "page.js").write_bytes(SCRIPT.read_bytes())
    scripts = '<script src="data.js"></script>\n<script src="page.js"></script>'
    (place / "index.html").write_text(render_page("FP8", scripts), encoding="utf-8")
    written = [path for path in place.rglob("*") if path.is_file()]
    return len(written), sum(path.stat().st_size for path in written)


class _Export:
    """The answers to the requests of all views, until the page is full."""

    def __init__(self, client: RouteClient) -> None:
        self.contents, self._client = PageContents(client), client
        listed = client.request_answer("runs")["runs"]
        self._runs = [run["name"] for run in listed if run["state"] not in ("unreadable", "empty")]
        if not self._runs:
            raise ConfigError("no run record with samples below these folders; give a folder that contains one")
        self._told = [f"Written by nemo-fp8-debug {__version__} on {date.today().isoformat()}: this page does not change."]
        self._matter: dict[str, list[ShownTensor]] = {}

    def fill(self) -> None:
        """Collect all answers. Begin with the verdicts, because their tensors take precedence if the page gets full."""
        self._verdicts()
        tables = [(run, table) for run in self._runs for table in self._client.request_answer("run", run=run)["tables"]]
        columns = sum(self._width(run, table) for run, table in tables)
        room = int(_MAPS / _PACKED / max(1, columns))
        for run, table in tables:
            self._maps(run, table, max(1, min(_STEPS, room)))
        for run in self._runs:
            self.contents.add_route_answers(run=run)
            self.contents.add_run_settings(run)
        for run, baseline in permutations(self._runs, 2):
            self.contents.add_baseline_layer_names(run, baseline)
        self._tensors()
        self.contents.add_runs_table(suggest_run_roles(self._runs)["baseline"])
        self.contents.add_run_list([*self._told, _NEEDS_SERVER])

    def _verdicts(self) -> None:
        parts = suggest_run_roles(self._runs)
        baseline, reference = parts["baseline"], parts["reference"]
        others = [run for run in self._runs if run not in (baseline, reference)] or [self._runs[0]]
        for run in others[:_VERDICTS]:
            names = {
                part: name for part, name in (("baseline", baseline), ("reference", reference)) if name not in (None, run)
            }
            job = self._client.await_verdict({"run": run, "baseline": None, "reference": None} | names)
            if job["state"] == "done":
                result, told = shorten_verdict(job["result"], _ROWS)
                job, self._told = job | {"result": result}, [*self._told, *told]
                for name in (run, *names.values()):
                    self._note(name, names.get("baseline"), choose_most_harmful_tensors(result, _TENSORS))
            self.contents.add_verdict({"run": run, **names}, job)
            for name in names.values():
                self.contents.add_run_settings(str(name), run)
            self._against(run, baseline if baseline != run else None)
        if len(others) > _VERDICTS:
            self._told.append(f"Verdicts are those of the first {_VERDICTS} of {len(others)} runs.")

    def _note(self, run: str, baseline: str | None, tensors: Iterable[ShownTensor]) -> None:
        """Note the tensors of a verdict, with their names in the record of a run."""
        matter = self._matter.setdefault(run, [])
        found = [self._client.rename_tensor(run, baseline, tensor) for tensor in tensors]
        matter += [tensor for tensor in found if tensor not in matter]

    def _against(self, run: str, baseline: str | None) -> None:
        if baseline is not None:
            self.contents.add_route_answers(run=run, baseline=baseline)
            for tensor in self._matter.get(run, []):
                self.contents.add_route_answers(run=run, baseline=baseline, layer=tensor.layer, role=tensor.role)

    def _width(self, run: str, table: str) -> int:
        return len(self._client.request_answer("run", run=run, table=table)["tensors"]["layer"]) * len(list_metrics(table))

    def _since(self, run: str) -> list[int | None]:
        return [tensor.since for tensor in self._matter.get(run, [])]

    def _maps(self, run: str, table: str, most: int) -> None:
        every = list_sampled_steps(self._client, run, table)
        steps = choose_evenly_spread_steps(every, most, self._since(run))
        self.contents.add_run_description(run, table, steps)
        tensors = len(self._client.request_answer("run", run=run, table=table)["tensors"]["layer"])
        for metric in list_metrics(table):
            self.contents.add_route_answers(run=run, metric=metric, table=table)
            self.contents.add_metric_at_steps(run, metric, table, steps)
            self.contents.add_heatmap(run, metric, table, tensors)
        if len(steps) < len(every):
            self._told.append(f"{run}: {len(steps)} of {len(every):,} sampled steps are in this page.")

    def _tensors(self) -> None:
        """Add timelines of the tensors in verdicts, and as many distributions as fit."""
        taken, there, all_of_them = 0, 0, 0
        for run in self._runs:
            matter = [(tensor.layer, tensor.role) for tensor in self._matter.get(run, [])]
            for layer, role in matter:
                self.contents.add_tensor_timeline(run, layer, role)
                self.contents.add_route_answers(run=run, layer=layer, role=role)
            about = self._client.request_answer("run", run=run)
            steps = choose_evenly_spread_steps(about["steps"], _HISTOGRAMS, self._since(run))
            self.contents.add_metrics_of_other_recipes(run, steps)
            tensors = list(dict.fromkeys([*matter, *zip(about["tensors"]["layer"], about["tensors"]["role"], strict=True)]))
            all_of_them += len(tensors)
            for layer, role in tensors:
                if taken < _DISTRIBUTIONS * (self._runs.index(run) + 1) / len(self._runs):
                    taken += (size := self.contents.add_tensor_histograms(run, layer, role, steps))
                    there += size > 0
        self._told.append(
            f"Distributions of {there:,} of {all_of_them:,} tensors are in this page, at up to {_HISTOGRAMS} steps a run."
        )


_NEEDS_SERVER = "To see verdicts for other choices of runs, or other recipes, start the server with `nemo-fp8-debug view`."
