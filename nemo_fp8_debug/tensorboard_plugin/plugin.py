"""The routes of the FP8 tab: parameters are parsed and checked, answers encoded; nothing else."""

from __future__ import annotations

import gzip
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import Request, Response

from ..analysis.diagnosis.rules.learning_rate import find_departure
from ..analysis.runs.run import UNITS
from ..analysis.runs.settings import differences
from ..errors import RecordError, hearing
from ..record.reader import read_fingerprint, read_table
from .jobs.jobs import Jobs
from .records import course, extents, losses, metadata, runs, spread, tables
from .records.bands import Bands
from .records.cache import Cache
from .records.dumps import Dumps
from .records.layer_names import LayerNames
from .records.logdir import Logdir, Root, roots_of
from .records.part_matrices import Parts
from .records.timeline import timeline
from .runs_table.board_order import ordered
from .runs_table.headlines import Headlines
from .runs_table.rows import Rows
from .web.errors import Refused
from .web.json_values import encoded, plain
from .web.query import Parameter, count, one_of, parsed, some_of, step, text
from .web.same_origin import check_host, check_origin, own_names

NAME = "fp8"
SCRIPT = Path(__file__).with_name("static") / "page.js"
#: what makes a module of the script that TensorBoard imports and calls
_AS_MODULE = b"export const render = () => fp8Debug(null, import.meta.url);\n"
#: seconds that the list of tabs waits for the first record
_ACTIVE = 0.3

#: runs whose losses are kept, a few thousand points each
_LOSSES = 16
#: bytes of maps over all steps that are kept
_PICTURES = 64 << 20

_RUN = Parameter(text)
_LAYER = Parameter(text)
_ROLE = Parameter(one_of(metadata.ROLES))
_STEP = Parameter(step)
_METRIC = Parameter(one_of(metadata.NUMBERS))
_OTHER = Parameter(text, optional=True)
_TABLE = Parameter(one_of(metadata.TABLES), optional=True)

_BOUND = Parameter(step, optional=True)
_OF_METRIC = {"run": _RUN, "metric": _METRIC, "table": _TABLE}


@dataclass(frozen=True)
class Route:
    """An address, what it takes, and what answers."""

    answer: Callable[..., Any]
    parameters: Mapping[str, Parameter]

    def asked(self, given: Iterable[tuple[str, str]]) -> Any:
        """The answer to a request with these parameters: bytes, or what JSON can say.

        Raises:
            Refused: a parameter is wrong, or there is no such run, tensor or step.
        """
        return self.answer(**parsed(given, self.parameters))


class FP8Plugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """The FP8 tab."""

    plugin_name = NAME

    def __init__(self, context: Any) -> None:
        """
        Args:
            context: TensorBoard's TBContext.
        """
        names = own_names(getattr(context.flags, "host", None))
        self._open(roots_of(context.flags), names, getattr(context, "data_provider", None))
        self._logdir.look()  # the browser is opened later than TensorBoard is started

    @classmethod
    def over(cls, roots: Sequence[Root], renames: Sequence[str] = ()) -> FP8Plugin:
        """The same without TensorBoard, on records below some folders. Its server checks which names it answers to.

        Args:
            renames: of the layers of runs that have a baseline, as `compare` takes them.
        """
        plugin: FP8Plugin = cls.__new__(cls)
        plugin._open(roots, renames=renames)
        return plugin

    def _open(
        self,
        roots: Sequence[Root],
        names: Collection[str] | None = None,
        board: Any = None,
        renames: Sequence[str] = (),
    ) -> None:
        self._tables = {table: Parts(table) for table in metadata.TABLES}
        self._parts = self._tables["metrics"]
        self._logdir = Logdir(roots, self._parts.warm)
        self._renames = renames
        self._layer_names = LayerNames(self._parts, renames)
        self._bands = Bands(self._parts, self._layer_names)
        self._dumps = Dumps()
        self._jobs = Jobs()
        self._losses: Cache[Any] = Cache(_LOSSES, lambda _: 1)
        self._pictures: Cache[bytes] = Cache(_PICTURES, len)
        self._headlines = Headlines(self._jobs, self._parts, self._logdir)
        self._rows = Rows(self._parts, self._logdir, self._headlines)
        self._board = board
        self._bundle = Bundle(_AS_MODULE)
        self._names = names

    def routes(self) -> dict[str, Route]:
        """What can be asked for, by the last part of its address."""
        return {
            "runs": Route(self._runs, {}),
            "run": Route(self._run, {"run": _RUN, "table": _TABLE}),
            "frames": Route(self._frames, {"run": _RUN, "metric": _METRIC, "from": _STEP, "to": _STEP, "table": _TABLE}),
            "course": Route(self._course, {**_OF_METRIC, "columns": Parameter(count), "from": _BOUND, "to": _BOUND}),
            "spread": Route(self._spread, _OF_METRIC),
            "extent": Route(self._extent, _OF_METRIC),
            "timeline": Route(
                self._timeline,
                {"run": _RUN, "layer": _LAYER, "role": _ROLE, "metrics": Parameter(some_of(metadata.NUMBERS))},
            ),
            "band": Route(self._band, {"run": _RUN, "baseline": _RUN, "layer": _LAYER, "role": _ROLE}),
            "names": Route(self._names_of_layers, {"run": _RUN, "baseline": _RUN}),
            "loss": Route(self._loss, {"run": _RUN}),
            "divergence": Route(self._divergence, {"run": _RUN, "baseline": _OTHER}),
            "histogram": Route(self._histogram, {"run": _RUN, "layer": _LAYER, "role": _ROLE, "step": _STEP}),
            "dumps": Route(self._dumped, {"run": _RUN, "layer": _LAYER, "role": _ROLE}),
            "others": Route(self._others, {"run": _RUN, "step": _STEP}),
            "what_if": Route(self._what_if, {"run": _RUN, "step": _STEP, "recipe": Parameter(text)}),
            "verdict": Route(
                self._verdict,
                {"run": _RUN, "baseline": _OTHER, "reference": _OTHER, "by": Parameter(one_of(UNITS), optional=True)},
            ),
            "rows": Route(self._rows.told, {"baseline": _OTHER}),
            "headline": Route(self._headlines.ask, {"run": _RUN, "baseline": _OTHER, "reference": _OTHER}),
            "fingerprints": Route(self._fingerprints, {"a": _RUN, "b": _OTHER}),
        }

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """A WSGI application for each address below data/plugin/fp8."""
        return {
            "/index.js": wsgi_of(self._bundle, self._names),
            **{f"/{name}": wsgi_of(_checked(route), self._names) for name, route in self.routes().items()},
        }

    def await_records(self) -> None:
        """Wait until all folders have been looked through."""
        self._logdir.await_all()

    def is_active(self) -> bool:
        """Whether a record was found by now."""
        return self._logdir.any(_ACTIVE)

    def frontend_metadata(self) -> Any:
        """The name of the tab and where its page is."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="FP8")

    def data_plugin_names(self) -> tuple[str, ...]:
        """None: it reads records, not summaries."""
        return ()

    def _runs(self) -> Any:
        found = self._logdir.found()
        listed = runs.listed(self._parts, self._logdir)
        return {
            "runs": plain(listed),
            "suggested": runs.suggested([run["name"] for run in listed if run["state"] != "unreadable"]),
            "colored": ordered(found.records, self._board),
            "logdirs": [root.address for root in self._logdir.roots],
            "refused": [{"name": name, "why": why} for name, why in sorted(found.refused.items())],
            "metrics": metadata.metrics_of(),
            "formats": metadata.FORMATS,
            "roles": metadata.ROLES,
        }

    def _run(self, run: str, table: str | None) -> Any:
        return {"run": run, **tables.about_run(self._of(table), self._logdir.record(run))}

    def _frames(self, run: str, metric: str, table: str | None, **bounds: int) -> bytes:
        return tables.frames(self._of(table), self._logdir.record(run), metric, bounds["from"], bounds["to"])

    def _extent(self, run: str, metric: str, table: str | None) -> Any:
        return extents.extent(self._of(table), self._logdir.record(run), metric)

    def _course(self, run: str, metric: str, table: str | None, columns: int, **bounds: int | None) -> bytes:
        record, parts = self._logdir.record(run), self._of(table)
        key = (str(record), parts.index(record).version, "course", metric, table, columns, *bounds.values())
        return self._pictures.get(key, lambda: course.course(parts, record, metric, bounds["from"], bounds["to"], columns))

    def _spread(self, run: str, metric: str, table: str | None) -> bytes:
        record, parts = self._logdir.record(run), self._of(table)
        key = (str(record), parts.index(record).version, "spread", metric, table)
        return self._pictures.get(key, lambda: spread.spread(parts, record, metric))

    def _of(self, table: str | None) -> Parts:
        return self._tables[table or "metrics"]

    def _timeline(self, run: str, layer: str, role: str, metrics: list[str]) -> Any:
        return timeline(self._of(metadata.table_of(role)), self._logdir.record(run), layer, role, metrics)

    def _loss(self, run: str) -> Any:
        record = self._logdir.record(run)
        return self._losses.get((str(record), self._parts.index(record).version), lambda: losses.loss(record))

    def _band(self, run: str, baseline: str, layer: str, role: str) -> Any:
        return self._bands.of_tensor(self._logdir.record(run), self._logdir.record(baseline), layer, role)

    def _names_of_layers(self, run: str, baseline: str) -> Any:
        return self._layer_names.told(self._logdir.record(run), self._logdir.record(baseline))

    def _divergence(self, run: str, baseline: str | None) -> Any:
        other = None if baseline is None else self._logdir.record(baseline)
        return self._bands.divergence(self._logdir.record(run), other)

    def _histogram(self, run: str, layer: str, role: str, step: int) -> Any:
        return tables.histogram_of(self._of(metadata.table_of(role)), self._logdir.record(run), layer, role, step)

    def _dumped(self, run: str, layer: str, role: str) -> Any:
        record = self._logdir.record(run)
        return self._dumps.of_tensor(record, self._parts.index(record).version, layer, role)

    def _others(self, run: str, step: int) -> Any:
        return tables.others(self._parts, self._logdir.record(run), step)

    def _what_if(self, run: str, step: int, recipe: str) -> Any:
        record = self._logdir.record(run)
        index = self._parts.index(record)
        at = tables.nearest(record, index, step)
        return self._jobs.ask({"kind": "what_if", "run": str(record), "step": at, "recipe": recipe}, index.version)

    def _verdict(self, run: str, baseline: str | None, reference: str | None, by: str | None) -> Any:
        return self.judge(run, baseline, reference, by)

    def judge(
        self,
        run: str,
        baseline: str | None = None,
        reference: str | None = None,
        by: str | None = None,
    ) -> dict[str, Any]:
        """How far the verdict of runs is, as `Jobs.ask` says it; begins it if it was not asked for before."""
        records = {
            role: name and self._logdir.record(name)
            for role, name in (("run", run), ("baseline", baseline), ("reference", reference))
        }
        version = " ".join(self._parts.index(record).version for record in records.values() if record)
        places = {role: record and str(record) for role, record in records.items()}
        return self._jobs.ask({"kind": "verdict", **places, "by": by or "step", "renames": list(self._renames)}, version)

    def _fingerprints(self, a: str, b: str | None) -> Any:
        with hearing():
            of_a = read_fingerprint(self._logdir.record(a))
            of_b = None if b is None else read_fingerprint(self._logdir.record(b))
            rates = None if b is None else find_departure(*(self._learning_rates(name) for name in (b, a)))
        rows = [] if of_b is None else differences(of_a, of_b).to_dicts()
        return {"a": plain(of_a), "b": plain(of_b), "differences": rows, "learning_rates": rates}

    def _learning_rates(self, run: str) -> Any:
        return read_table(self._logdir.record(run), "steps", ["step", "lr"])


class Bundle:
    """The page's script, kept by browsers as long as it stays the same."""

    def __init__(self, more: bytes = b"") -> None:
        """
        Args:
            more: what is sent behind it.
        """
        self._more = more
        self._held: tuple[int, bytes, str] = (0, b"", "")

    def __call__(self, request: Request) -> Response:
        """The script, or that it has not changed."""
        written = SCRIPT.stat().st_mtime_ns
        if self._held[0] != written:
            content = SCRIPT.read_bytes() + self._more
            self._held = written, gzip.compress(content, mtime=0), hashlib.sha256(content).hexdigest()[:32]
        _, packed, digest = self._held
        response = http_util.Respond(request, packed, "text/javascript", content_encoding="gzip")
        response.set_etag(digest)
        response.headers["Cache-Control"] = "no-cache"
        del response.headers["Expires"]
        return response.make_conditional(request)  # type: ignore[no-any-return]


def wsgi_of(answer: Callable[[Request], Response], names: Collection[str] | None = None) -> Callable[..., Any]:
    """WSGI around an answer to a request; a request that is refused gets a sentence.

    Args:
        names: that it answers to, of `own_names`; None: the server checks the name itself.
    """

    def application(environ: Any, start_response: Any) -> Any:
        request = Request(environ)
        try:
            if request.method not in ("GET", "HEAD"):
                response = _error(request, 405, "Only GET is answered here.")
            else:
                if names is not None:
                    check_host(request.headers, names)
                check_origin(request.headers, names or ())
                response = answer(request)
        except Refused as error:
            response = _error(request, error.status, str(error))
        except (RecordError, OSError, RecursionError) as error:
            response = _error(request, 409, f"The record cannot be read: {error}")
        except Exception as error:
            logging.getLogger("nemo_fp8_debug").exception("the FP8 tab could not answer %s", request.path)
            response = _error(
                request, 500, f"Internal error of the FP8 tab ({type(error).__name__}); TensorBoard's log tells more."
            )
        return response(environ, start_response)

    return application


def _checked(route: Route) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        found = route.asked(request.args.items(multi=True))
        kind = "application/octet-stream" if isinstance(found, bytes) else "application/json"
        return _response(request, found if isinstance(found, bytes) else encoded(found), kind, 200)

    return answer


def _error(request: Request, status: int, sentence: str) -> Response:
    return _response(request, encoded({"error": sentence}), "application/json", status)


def _response(request: Request, content: str | bytes, kind: str, status: int) -> Response:
    response = http_util.Respond(request, content, kind, code=status)
    response.headers["Cache-Control"] = "no-store"
    return response  # type: ignore[no-any-return]
