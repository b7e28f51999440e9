"""The routes of the FP8 tab: they parse and check parameters, and encode answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tensorboard.plugins import base_plugin

from ..analysis.formatting import make_jsonable
from ..analysis.runs.run import UNITS
from ..analysis.runs.settings import find_learning_rate_split, list_setting_differences
from ..errors import capture_warnings
from ..record.reader import read_fingerprint, read_step_scalars
from .cache import LRUCache
from .jobs.job_queue import JobQueue
from .records import metadata
from .records.baseline import LayerMatchCache, TensorBandCache
from .records.color_scales import MetricRangeCache, pack_rise_thresholds
from .records.heatmap import pack_heatmap, pack_metric_at_steps
from .records.logdir import LogdirRecords, LogdirRoot, parse_logdir_flags
from .records.part_matrices import CachedPartReader
from .records.run_summary import describe_run, read_other_recipes, read_step_series
from .records.tensor_history import (
    Files,
    find_dump_files,
    find_nearest_step,
    list_latest_dumps_of_tensor,
    read_tensor_histograms,
    read_tensor_timeline,
)
from .runs_table import HeadlineCache, RunsTable, list_runs, sort_names_by_color, suggest_run_roles
from .web import (
    CachedPageScript,
    Route,
    RouteParameter,
    list_accepted_host_names,
    make_choice_parser,
    make_choices_parser,
    make_route_handler,
    make_wsgi_application,
    parse_count_parameter,
    parse_step_parameter,
    parse_text_parameter,
)

NAME = "fp8"
#: longest time in seconds that the list of tabs waits for the first record
_ACTIVE = 0.3
#: number of runs for which losses (a few thousand points each) and lists of dumped files are cached
_LOSSES = 16
#: maximum size in bytes of the cache of maps over all steps
_PICTURES = 64 << 20
_RUN = RouteParameter(parse_text_parameter)
_LAYER = RouteParameter(parse_text_parameter)
_ROLE = RouteParameter(make_choice_parser(metadata.ROLES))
_STEP = RouteParameter(parse_step_parameter)
_METRIC = RouteParameter(make_choice_parser(metadata.NUMBERS))
_OTHER = RouteParameter(parse_text_parameter, default=None)
_TABLE = RouteParameter(make_choice_parser(metadata.TABLES), default="metrics")
_BOUND = RouteParameter(parse_step_parameter, default=None)
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
        names = list_accepted_host_names(getattr(context.flags, "host", None))
        self._open(parse_logdir_flags(context.flags), names, getattr(context, "data_provider", None))
        self._logdir.start_search()  # begin now, because TensorBoard starts before the browser opens

    @classmethod
    def open_folders(cls, roots: Sequence[LogdirRoot], renames: Sequence[str] = ()) -> FP8Plugin:
        """Open the tab without TensorBoard, for records below some folders. The server must check the host name of requests.

        Args:
            renames: rules for the layer names of runs that have a baseline, as in `compare`.
        """
        plugin: FP8Plugin = cls.__new__(cls)
        plugin._open(roots, renames=renames)
        return plugin

    def _open(
        self,
        roots: Sequence[LogdirRoot],
        names: Collection[str] | None = None,
        board: Any = None,
        renames: Sequence[str] = (),
    ) -> None:
        self._tables = {table: CachedPartReader(table) for table in metadata.TABLES}
        self._parts = self._tables["metrics"]
        self._extents = {table: MetricRangeCache(parts) for table, parts in self._tables.items()}
        self._logdir = LogdirRecords(roots, self._parts.read_index_in_advance)
        self._renames = renames
        self._layer_names = LayerMatchCache(self._parts, renames)
        self._bands = TensorBandCache(self._parts, self._layer_names)
        self._jobs = JobQueue()
        self._losses: LRUCache[Any] = LRUCache(_LOSSES)
        self._dumps: LRUCache[Files] = LRUCache(_LOSSES)
        self._pictures: LRUCache[bytes] = LRUCache(_PICTURES, len)
        self._headlines = HeadlineCache(self._jobs, self._parts, self._logdir)
        self._table = RunsTable(self._parts, self._logdir, self._headlines)
        self._board = board
        self._bundle = CachedPageScript(is_module=True)
        self._names = names

    def routes(self) -> dict[str, Route]:
        """Return the routes by the last part of their addresses."""
        record, tables, bounds = self._logdir.get_record, self._tables, {"from": _BOUND, "to": _BOUND}

        def tables_of(role: str) -> CachedPartReader:
            return tables[metadata.find_table_of_role(role)]

        return {
            "runs": Route(self._runs, {}),
            "run": Route(
                lambda run, table: {"run": run, **describe_run(tables[table], record(run))}, {"run": _RUN, "table": _TABLE}
            ),
            "frames": Route(self._frames, {"run": _RUN, "metric": _METRIC, "from": _STEP, "to": _STEP, "table": _TABLE}),
            "course": Route(self._course, {**_OF_METRIC, "columns": RouteParameter(parse_count_parameter), **bounds}),
            "spread": Route(self._spread, _OF_METRIC),
            "extent": Route(
                lambda run, metric, table: self._extents[table].describe_metric_range(record(run), metric), _OF_METRIC
            ),
            "timeline": Route(
                lambda run, layer, role, metrics: read_tensor_timeline(tables_of(role), record(run), layer, role, metrics),
                {**_OF_TENSOR, "metrics": RouteParameter(make_choices_parser(metadata.NUMBERS))},
            ),
            "band": Route(
                lambda run, baseline, layer, role: self._bands.find_tensor_band_exit(
                    record(run), record(baseline), layer, role
                ),
                {"run": _RUN, "baseline": _RUN, "layer": _LAYER, "role": _ROLE},
            ),
            "names": Route(
                lambda run, baseline: self._layer_names.match_layers(record(run), record(baseline)),
                {"run": _RUN, "baseline": _RUN},
            ),
            "loss": Route(self._loss, {"run": _RUN}),
            "divergence": Route(
                lambda run, baseline: self._bands.find_divergence(record(run), baseline and record(baseline)),
                {"run": _RUN, "baseline": _OTHER},
            ),
            "histogram": Route(
                lambda run, layer, role, step: read_tensor_histograms(tables_of(role), record(run), layer, role, step),
                {**_OF_TENSOR, "step": _STEP},
            ),
            "dumps": Route(self._list_dumps, _OF_TENSOR),
            "others": Route(
                lambda run, step: read_other_recipes(self._parts, record(run), step), {"run": _RUN, "step": _STEP}
            ),
            "what_if": Route(self._what_if, {"run": _RUN, "step": _STEP, "recipe": RouteParameter(parse_text_parameter)}),
            "verdict": Route(
                self.ask_verdict,
                {
                    "run": _RUN,
                    "baseline": _OTHER,
                    "reference": _OTHER,
                    "by": RouteParameter(make_choice_parser(UNITS), default="step"),
                },
            ),
            "rows": Route(self._table.list_rows, {"baseline": _OTHER}),
            "headline": Route(self._headlines.get_or_start_job, {"run": _RUN, "baseline": _OTHER, "reference": _OTHER}),
            "fingerprints": Route(self._fingerprints, {"a": _RUN, "b": _OTHER}),
        }

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Return a WSGI application for each address below data/plugin/fp8."""
        return {
            "/index.js": make_wsgi_application(self._bundle, self._names),
            **{
                f"/{name}": make_wsgi_application(make_route_handler(route), self._names)
                for name, route in self.routes().items()
            },
        }

    def await_record_search(self) -> None:
        """Wait until all folders have been searched."""
        self._logdir.await_first_search()

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
        found = self._logdir.list_known_records()
        listed = list_runs(self._parts, self._logdir)
        return {
            "runs": make_jsonable(listed),
            "suggested": suggest_run_roles([run["name"] for run in listed if run["state"] != "unreadable"]),
            "colored": sort_names_by_color(found.records, self._board),
            "logdirs": [root.address for root in self._logdir.roots],
            "refused": [{"name": name, "why": why} for name, why in sorted(found.refused.items())],
            "metrics": metadata.describe_metrics(),
            "formats": metadata.FORMATS,
            "roles": metadata.ROLES,
        }

    def _frames(self, run: str, metric: str, table: str, **bounds: int) -> bytes:
        return pack_metric_at_steps(self._tables[table], self._logdir.get_record(run), metric, bounds["from"], bounds["to"])

    def _course(self, run: str, metric: str, table: str, columns: int, **bounds: int | None) -> bytes:
        record, parts = self._logdir.get_record(run), self._tables[table]
        key = (str(record), parts.read_index(record).version, "course", metric, table, columns, *bounds.values())
        return self._pictures.get_or_make(
            key, lambda: pack_heatmap(parts, record, metric, bounds["from"], bounds["to"], columns)
        )

    def _spread(self, run: str, metric: str, table: str) -> bytes:
        record, parts = self._logdir.get_record(run), self._tables[table]
        key = (str(record), parts.read_index(record).version, "spread", metric, table)
        return self._pictures.get_or_make(key, lambda: pack_rise_thresholds(parts, record, metric))

    def _loss(self, run: str) -> Any:
        record = self._logdir.get_record(run)
        return self._losses.get_or_make(
            (str(record), self._parts.read_index(record).version), lambda: read_step_series(record)
        )

    def _list_dumps(self, run: str, layer: str, role: str) -> Any:
        record = self._logdir.get_record(run)
        files = self._dumps.get_or_make(
            (str(record), self._parts.read_index(record).version), lambda: find_dump_files(record)
        )
        return list_latest_dumps_of_tensor(files, layer, role)

    def _what_if(self, run: str, step: int, recipe: str) -> Any:
        record = self._logdir.get_record(run)
        index = self._parts.read_index(record)
        at = find_nearest_step(record, index, step)
        return self._jobs.get_or_start_job(
            {"kind": "what_if", "run": str(record), "step": at, "recipe": recipe}, index.version
        )

    def ask_verdict(
        self,
        run: str,
        baseline: str | None = None,
        reference: str | None = None,
        by: str = "step",
    ) -> dict[str, Any]:
        """Return the state of the verdict of runs, as in `JobQueue.get_or_start_job`. Begin the job if it is new."""
        records = {
            role: name and self._logdir.get_record(name)
            for role, name in (("run", run), ("baseline", baseline), ("reference", reference))
        }
        version = " ".join(self._parts.read_index(record).version for record in records.values() if record)
        places = {role: record and str(record) for role, record in records.items()}
        return self._jobs.get_or_start_job({"kind": "verdict", **places, "by": by, "renames": list(self._renames)}, version)

    def _fingerprints(self, a: str, b: str | None) -> Any:
        with capture_warnings():
            of_a = read_fingerprint(self._logdir.get_record(a))
            of_b = None if b is None else read_fingerprint(self._logdir.get_record(b))
            rates = None if b is None else find_learning_rate_split(*(self._learning_rates(name) for name in (b, a)))
        rows = [] if of_b is None else list_setting_differences(of_a, of_b).to_dicts()
        return {"a": make_jsonable(of_a), "b": make_jsonable(of_b), "differences": rows, "learning_rates": rates}

    def _learning_rates(self, run: str) -> Any:
        return read_step_scalars(self._logdir.get_record(run), ["step", "lr"])
