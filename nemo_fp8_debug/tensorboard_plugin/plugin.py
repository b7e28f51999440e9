"""The routes of the FP8 tab: they parse and check parameters, and encode answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tensorboard.plugins import base_plugin

from ..analysis.formatting import make_jsonable
from ..analysis.runs.run import UNITS
from ..analysis.runs.settings import find_learning_rate_split, list_differences
from ..errors import capture_warnings
from ..record.reader import read_fingerprint, read_step_scalars
from .cache import Cache
from .jobs.job_queue import JobQueue
from .records import metadata
from .records.baseline import LayerNames, TensorBands
from .records.color_scales import Extents, pack_rise_thresholds
from .records.heatmap import pack_frames, pack_heatmap
from .records.logdir import Logdir, Root, parse_flags
from .records.part_matrices import PartMatrices
from .records.run_summary import describe_run, read_other_recipes, read_step_series
from .records.tensor_history import Files, find_dumps, find_nearest_step, list_dumps, read_histograms, read_timeline
from .runs_table import Headlines, RunsTable, list_runs, order_by_color, suggest_parts
from .web import (
    PageScript,
    Parameter,
    Route,
    answer_route,
    build_wsgi,
    list_own_names,
    read_count,
    read_one_of,
    read_some_of,
    read_step,
    read_text,
)

NAME = "fp8"
#: longest time in seconds that the list of tabs waits for the first record
_ACTIVE = 0.3
#: number of runs for which losses (a few thousand points each) and lists of dumped files are cached
_LOSSES = 16
#: maximum size in bytes of the cache of maps over all steps
_PICTURES = 64 << 20
_RUN = Parameter(read_text)
_LAYER = Parameter(read_text)
_ROLE = Parameter(read_one_of(metadata.ROLES))
_STEP = Parameter(read_step)
_METRIC = Parameter(read_one_of(metadata.NUMBERS))
_OTHER = Parameter(read_text, default=None)
_TABLE = Parameter(read_one_of(metadata.TABLES), default="metrics")
_BOUND = Parameter(read_step, default=None)
_OF_TENSOR = {"run": _RUN, "layer": _LAYER, "role": _ROLE}
_OF_METRIC = {"run": _RUN, "metric": _METRIC, "table": _TABLE}


class FP8Plugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """The FP8 tab."""

    plugin_name = NAME

    def __init__(self, context: Any) -> None:
        """
        Args:
            context: TensorBoard's TBContext.
        """
        names = list_own_names(getattr(context.flags, "host", None))
        self._open(parse_flags(context.flags), names, getattr(context, "data_provider", None))
        self._logdir.start_search()  # begin now, because TensorBoard starts before the browser opens

    @classmethod
    def open_folders(cls, roots: Sequence[Root], renames: Sequence[str] = ()) -> FP8Plugin:
        """Open the tab without TensorBoard, for records below some folders. The server must check the host name of requests.

        Args:
            renames: rules for the layer names of runs that have a baseline, as in `compare`.
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
        self._tables = {table: PartMatrices(table) for table in metadata.TABLES}
        self._parts = self._tables["metrics"]
        self._extents = {table: Extents(parts) for table, parts in self._tables.items()}
        self._logdir = Logdir(roots, self._parts.warm)
        self._renames = renames
        self._layer_names = LayerNames(self._parts, renames)
        self._bands = TensorBands(self._parts, self._layer_names)
        self._jobs = JobQueue()
        self._losses: Cache[Any] = Cache(_LOSSES)
        self._dumps: Cache[Files] = Cache(_LOSSES)
        self._pictures: Cache[bytes] = Cache(_PICTURES, len)
        self._headlines = Headlines(self._jobs, self._parts, self._logdir)
        self._table = RunsTable(self._parts, self._logdir, self._headlines)
        self._board = board
        self._bundle = PageScript(is_module=True)
        self._names = names

    def routes(self) -> dict[str, Route]:
        """Return the routes by the last part of their addresses."""
        record, tables, bounds = self._logdir.record, self._tables, {"from": _BOUND, "to": _BOUND}

        def tables_of(role: str) -> PartMatrices:
            return tables[metadata.find_table_of_role(role)]

        return {
            "runs": Route(self._runs, {}),
            "run": Route(
                lambda run, table: {"run": run, **describe_run(tables[table], record(run))}, {"run": _RUN, "table": _TABLE}
            ),
            "frames": Route(self._frames, {"run": _RUN, "metric": _METRIC, "from": _STEP, "to": _STEP, "table": _TABLE}),
            "course": Route(self._course, {**_OF_METRIC, "columns": Parameter(read_count), **bounds}),
            "spread": Route(self._spread, _OF_METRIC),
            "extent": Route(lambda run, metric, table: self._extents[table].describe(record(run), metric), _OF_METRIC),
            "timeline": Route(
                lambda run, layer, role, metrics: read_timeline(tables_of(role), record(run), layer, role, metrics),
                {**_OF_TENSOR, "metrics": Parameter(read_some_of(metadata.NUMBERS))},
            ),
            "band": Route(
                lambda run, baseline, layer, role: self._bands.judge_tensor(record(run), record(baseline), layer, role),
                {"run": _RUN, "baseline": _RUN, "layer": _LAYER, "role": _ROLE},
            ),
            "names": Route(
                lambda run, baseline: self._layer_names.match(record(run), record(baseline)),
                {"run": _RUN, "baseline": _RUN},
            ),
            "loss": Route(self._loss, {"run": _RUN}),
            "divergence": Route(
                lambda run, baseline: self._bands.find_divergence(record(run), baseline and record(baseline)),
                {"run": _RUN, "baseline": _OTHER},
            ),
            "histogram": Route(
                lambda run, layer, role, step: read_histograms(tables_of(role), record(run), layer, role, step),
                {**_OF_TENSOR, "step": _STEP},
            ),
            "dumps": Route(self._list_dumps, _OF_TENSOR),
            "others": Route(
                lambda run, step: read_other_recipes(self._parts, record(run), step), {"run": _RUN, "step": _STEP}
            ),
            "what_if": Route(self._what_if, {"run": _RUN, "step": _STEP, "recipe": Parameter(read_text)}),
            "verdict": Route(
                self.ask_verdict,
                {"run": _RUN, "baseline": _OTHER, "reference": _OTHER, "by": Parameter(read_one_of(UNITS), default="step")},
            ),
            "rows": Route(self._table.list_rows, {"baseline": _OTHER}),
            "headline": Route(self._headlines.ask, {"run": _RUN, "baseline": _OTHER, "reference": _OTHER}),
            "fingerprints": Route(self._fingerprints, {"a": _RUN, "b": _OTHER}),
        }

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Return a WSGI application for each address below data/plugin/fp8."""
        return {
            "/index.js": build_wsgi(self._bundle, self._names),
            **{f"/{name}": build_wsgi(answer_route(route), self._names) for name, route in self.routes().items()},
        }

    def await_records(self) -> None:
        """Wait until all folders have been searched."""
        self._logdir.await_all()

    def is_active(self) -> bool:
        """Return True if a record has been found."""
        return self._logdir.has_records(_ACTIVE)

    def frontend_metadata(self) -> Any:
        """Return the name of the tab and the address of its page."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="FP8")

    def data_plugin_names(self) -> tuple[str, ...]:
        """Return no names, because the tab reads records and no summaries."""
        return ()

    def _runs(self) -> Any:
        found = self._logdir.find_records()
        listed = list_runs(self._parts, self._logdir)
        return {
            "runs": make_jsonable(listed),
            "suggested": suggest_parts([run["name"] for run in listed if run["state"] != "unreadable"]),
            "colored": order_by_color(found.records, self._board),
            "logdirs": [root.address for root in self._logdir.roots],
            "refused": [{"name": name, "why": why} for name, why in sorted(found.refused.items())],
            "metrics": metadata.describe_metrics(),
            "formats": metadata.FORMATS,
            "roles": metadata.ROLES,
        }

    def _frames(self, run: str, metric: str, table: str, **bounds: int) -> bytes:
        return pack_frames(self._tables[table], self._logdir.record(run), metric, bounds["from"], bounds["to"])

    def _course(self, run: str, metric: str, table: str, columns: int, **bounds: int | None) -> bytes:
        record, parts = self._logdir.record(run), self._tables[table]
        key = (str(record), parts.index(record).version, "course", metric, table, columns, *bounds.values())
        return self._pictures.get(key, lambda: pack_heatmap(parts, record, metric, bounds["from"], bounds["to"], columns))

    def _spread(self, run: str, metric: str, table: str) -> bytes:
        record, parts = self._logdir.record(run), self._tables[table]
        key = (str(record), parts.index(record).version, "spread", metric, table)
        return self._pictures.get(key, lambda: pack_rise_thresholds(parts, record, metric))

    def _loss(self, run: str) -> Any:
        record = self._logdir.record(run)
        return self._losses.get((str(record), self._parts.index(record).version), lambda: read_step_series(record))

    def _list_dumps(self, run: str, layer: str, role: str) -> Any:
        record = self._logdir.record(run)
        files = self._dumps.get((str(record), self._parts.index(record).version), lambda: find_dumps(record))
        return list_dumps(files, layer, role)

    def _what_if(self, run: str, step: int, recipe: str) -> Any:
        record = self._logdir.record(run)
        index = self._parts.index(record)
        at = find_nearest_step(record, index, step)
        return self._jobs.ask({"kind": "what_if", "run": str(record), "step": at, "recipe": recipe}, index.version)

    def ask_verdict(
        self,
        run: str,
        baseline: str | None = None,
        reference: str | None = None,
        by: str = "step",
    ) -> dict[str, Any]:
        """Return the state of the verdict of runs, as in `JobQueue.ask`. Begin the job if it is new."""
        records = {
            role: name and self._logdir.record(name)
            for role, name in (("run", run), ("baseline", baseline), ("reference", reference))
        }
        version = " ".join(self._parts.index(record).version for record in records.values() if record)
        places = {role: record and str(record) for role, record in records.items()}
        return self._jobs.ask({"kind": "verdict", **places, "by": by, "renames": list(self._renames)}, version)

    def _fingerprints(self, a: str, b: str | None) -> Any:
        with capture_warnings():
            of_a = read_fingerprint(self._logdir.record(a))
            of_b = None if b is None else read_fingerprint(self._logdir.record(b))
            rates = None if b is None else find_learning_rate_split(*(self._learning_rates(name) for name in (b, a)))
        rows = [] if of_b is None else list_differences(of_a, of_b).to_dicts()
        return {"a": make_jsonable(of_a), "b": make_jsonable(of_b), "differences": rows, "learning_rates": rates}

    def _learning_rates(self, run: str) -> Any:
        return read_step_scalars(self._logdir.record(run), ["step", "lr"])
