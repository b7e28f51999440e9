"""Send scalars to Weights & Biases, MLflow, Comet and loggers of Lightning: one protocol, with an adapter for each.

Each sink works in its own thread, so it may wait, fail or hang. We import a logger's package only when its sink opens a run,
unless the user has imported the package already.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError, warn
from ...options.loggers import PACKAGES, LoggerChoice, has_sqlalchemy
from ..scalars import LayerMap

#: prefix of all names that loggers get
PREFIX = "fp8/"
#: the step axis of our charts in W&B
_STEP = f"{PREFIX}step"
#: metrics in one request to MLflow, and the folder of our artifacts
_BATCH, _FOLDER = 1000, "fp8"
#: features of Comet that hook frameworks or capture the program's output; we turn them off in runs that we start
_OFF = dict.fromkeys(
    ("auto_metric_logging", "auto_param_logging", "auto_output_logging", "auto_histogram_tensorboard_logging"), False
) | {"log_code": False, "log_graph": False, "parse_args": False, "display_summary_level": 0}


class LoggerSink:
    """A run in a logger. A subclass must implement `log`. The other methods do nothing by default."""

    #: the logger's name, for messages and for the thread's name
    name: str
    #: whether we started the run; if so, we also log the losses, and end the run
    owned = False

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Start or join the run, and store its settings."""

    def log_scalars(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Log finite scalars by step."""
        raise NotImplementedError

    def store_texts(self, texts: Mapping[str, str]) -> None:
        """Store strings by name. A later string replaces an earlier string with the same name."""

    def log_layer_map(self, layer_map: LayerMap) -> None:
        """Show the table of layers at a step."""

    def attach_file(self, page: Path) -> None:
        """Attach a file."""

    def close(self, failed: bool) -> None:
        """End the run if we started it. This is the last call."""


class WandbSink(LoggerSink):
    """A run in W&B. We log rows of its history, and define our own step metric.

    W&B numbers the rows of a history, and the user may set these numbers, which must increase. So in a user's run we never
    end a row. We add each sample to the user's next row.
    """

    name = "wandb"

    def __init__(self, run: Any = None, settings: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            run: the user's run, or None to start a new run.
            settings: arguments for `wandb.init`.
        """
        self._run, self._settings = run, dict(settings or {})
        self.owned = run is None
        self._waiting: deque[dict[str, float]] = deque()
        #: number of the last row that we added a sample to
        self._row: int | None = None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Start a run if the user gave none, and declare our step metric."""
        if self._run is None:
            import wandb

            # Turn console capture off. Otherwise W&B would process all output of the program in the thread that prints.
            self._run = wandb.init(**{"reinit": "create_new", "settings": {"console": "off"}, **self._settings})
        self._run.define_metric(_STEP, hidden=True)
        for names in (f"{PREFIX}*", "fp8_*"):
            self._run.define_metric(names, step_metric=_STEP)
        plain = json.loads(json.dumps(fingerprint, default=str))
        self._run.config.update({"fp8_debug": plain}, allow_val_change=True)

    def log_scalars(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Log a row for each step. In a user's run, queue the row until the user logs."""
        for step, scalars in rows.items():
            row = {**scalars, _STEP: step}
            if self.owned:
                self._run.log(row)
            else:
                self._waiting.append(row)
        self._ride()

    def _ride(self) -> None:
        """Add the oldest waiting sample to the user's current row, unless this row has a sample already."""
        if self._waiting and self._run.step != self._row:
            self._run.log(self._waiting.popleft(), commit=False)
            self._row = self._run.step

    def store_texts(self, texts: Mapping[str, str]) -> None:
        """Store strings in the summary."""
        self._run.summary.update(dict(texts))

    def log_layer_map(self, layer_map: LayerMap) -> None:
        """Log a table."""
        self._show("layers", layer_map.header, layer_map.rows, layer_map.step)

    def _show(self, name: str, header: Any, rows: Any, step: int) -> None:
        import wandb

        table = {f"{PREFIX}{name}": wandb.Table(columns=list(header), data=[list(row) for row in rows])}
        if self.owned:
            self._run.log(table | {_STEP: step})
        else:
            self._run.log(table, commit=False)

    def attach_file(self, page: Path) -> None:
        """Log an artifact."""
        import wandb

        artifact = wandb.Artifact(f"fp8_report_{self._run.id}", type="fp8_report")
        artifact.add_file(str(page))
        self._run.log_artifact(artifact)

    def close(self, failed: bool) -> None:
        """Log samples that still wait for a row, and end the run if we started it."""
        self._ride()
        if self._waiting:
            names = list(dict.fromkeys([_STEP, *(name for row in self._waiting for name in row)]))
            rows = [[row.get(name) for name in names] for row in self._waiting]
            self._show("samples_without_a_row", names, rows, 0)
        if self.owned:
            self._run.finish(exit_code=int(failed))


class MlflowSink(LoggerSink):
    """A run in MLflow. We use MLflow's client only, because MLflow's fluent functions act on the active run of the user's
    thread.
    """

    name = "mlflow"

    def __init__(self, run_id: str | None = None, client: Any = None, settings: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            run_id: the user's run, or None to start a new run.
            client: the user's client. If None, we make a client for `tracking_uri` in the settings, or else for MLflow's own
                URI.
            settings: `tracking_uri`, `experiment_name`, `run_name`, `tags`, or `run_id` to continue a run.
        """
        self._settings = dict(settings or {})
        self._run_id = run_id or self._settings.get("run_id")
        self._client = client
        self._uri, self._files = _absolute(self._settings.get("tracking_uri")), Path("mlruns").absolute()
        self.owned = self._run_id is None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Start a run if the user gave none."""
        if self._client is None:
            self._client = _make_client(self._uri, self._files)
        if self._run_id is None:
            options = {name: self._settings[name] for name in ("run_name", "tags") if name in self._settings}
            self._run_id = self._client.create_run(self._experiment(), **options).info.run_id
        self._client.log_text(self._run_id, json.dumps(fingerprint, indent=1, default=str), f"{_FOLDER}/fingerprint.json")

    def _experiment(self) -> str:
        name = self._settings.get("experiment_name", "fp8_debug")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def log_scalars(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Log metrics, each with its own step, in as few requests as MLflow allows."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for step, scalars in rows.items() for name, value in scalars.items()]
        for i in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[i : i + _BATCH])

    def store_texts(self, texts: Mapping[str, str]) -> None:
        """Store strings as tags."""
        from mlflow.entities import RunTag

        self._client.log_batch(self._run_id, tags=[RunTag(name, text[:5000]) for name, text in texts.items()])

    def log_layer_map(self, layer_map: LayerMap) -> None:
        """Log a file of comma-separated values."""
        text = io.StringIO()
        csv.writer(text).writerows([layer_map.header, *layer_map.rows])
        self._client.log_text(self._run_id, text.getvalue(), f"{_FOLDER}/layers/step_{layer_map.step:09d}.csv")

    def attach_file(self, page: Path) -> None:
        """Log an artifact."""
        self._client.log_artifact(self._run_id, str(page), _FOLDER)

    def close(self, failed: bool) -> None:
        """End the run if we started it."""
        if self.owned:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _absolute(uri: str | None) -> str | None:
    """Return a tracking URI with an absolute path. Another thread makes the client later, and the working folder may change
    until then.
    """
    path = (uri or "").removeprefix("file:")
    is_path = uri is not None and "://" not in uri and (path != uri or path.startswith(".") or "/" in path)
    return str(Path(path).absolute()) if is_path else uri


def _make_client(uri: str | None, files: Path) -> Any:
    """Return a client for a tracking URI, or for MLflow's own setting.

    Args:
        files: folder for MLflow's files, which we use if no URI is set and no database can be opened.
    """
    import mlflow

    if uri is None and not mlflow.is_tracking_uri_set() and not has_sqlalchemy():
        uri = str(files)  # earlier releases also default to files; later releases use a database, which needs SQLAlchemy
    # Later releases refuse file stores, which lack new features. We need no new features.
    with _variable("MLFLOW_ALLOW_FILE_STORE", os.environ.get("MLFLOW_ALLOW_FILE_STORE", "true")):
        return mlflow.MlflowClient(uri)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside a `with` block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


class CometSink(LoggerSink):
    """An experiment in Comet. We log metrics, Comet's "others", and assets.

    An experiment has one current step. `log_metric(step=...)` would change this step for everything that the user logs
    without a step. So we enqueue the messages that `log_metric` makes, each with its own step.
    """

    name = "comet"

    def __init__(self, experiment: Any = None, settings: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            experiment: the user's experiment, or None to start a new experiment.
            settings: arguments for `comet_ml.start`.
        """
        self._experiment, self._settings = experiment, dict(settings or {})
        self.owned = experiment is None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Start an experiment if the user gave none."""
        if self._experiment is None:
            # Turn Comet's framework hooks off, because they would start an experiment for each MLflow run.
            with _variable("COMET_DISABLE_AUTO_LOGGING", "1") if "comet_ml" not in sys.modules else contextlib.nullcontext():
                comet_ml = importlib.import_module("comet_ml")
            config = comet_ml.ExperimentConfig(**_OFF)
            self._experiment = comet_ml.start(**{"mode": "create", "experiment_config": config, **self._settings})
        self._experiment.log_asset_data(dict(fingerprint), name="fp8_fingerprint.json")

    def log_scalars(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Enqueue messages for Comet's own thread."""
        from comet_ml.messages import MetricMessage

        for step, scalars in rows.items():
            for name, value in scalars.items():
                message = MetricMessage()
                message.set_metric(name, value=value, step=step)
                self._experiment._enqueue_message(message)

    def store_texts(self, texts: Mapping[str, str]) -> None:
        """Store strings as Comet's "others"."""
        self._experiment.log_others(dict(texts))

    def log_layer_map(self, layer_map: LayerMap) -> None:
        """Log a table."""
        name = f"{PREFIX.strip('/')}_layers_step_{layer_map.step:09d}.csv"
        self._experiment.log_table(name, [list(row) for row in layer_map.rows], headers=list(layer_map.header))

    def attach_file(self, page: Path) -> None:
        """Log an asset."""
        self._experiment.log_asset(str(page), file_name=page.name)

    def close(self, failed: bool) -> None:
        """End the experiment if we started it."""
        if self.owned:
            self._experiment.end()


class CsvSink(LoggerSink):
    """A file next to a CSVLogger's file. We do not use the logger, because it rewrites its own file and is not
    thread-safe.
    """

    name = "CSVLogger"

    def __init__(self, folder: str) -> None:
        """
        Args:
            folder: the folder of the logger's `metrics.csv`.
        """
        self._file = Path(folder) / "fp8_metrics.csv"
        self._columns: list[str] = []

    def log_scalars(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Append rows. If a row has new columns, write the whole file again."""
        new: list[dict[str, Any]] = [{"step": step, **scalars} for step, scalars in rows.items()]
        columns = list(dict.fromkeys([*self._columns, *(name for row in new for name in row)]))
        if columns != self._columns:
            if self._columns:
                with self._file.open(newline="", encoding="utf-8") as file:
                    new = [*csv.DictReader(file), *new]
            self._columns = columns
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(columns)
        with self._file.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, columns).writerows(new)


class AnyLoggerSink(LoggerSink):
    """A logger with Lightning's `log_metrics(metrics, step)`. Users who pass it confirm that another thread may call it."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.name = type(logger).__name__

    def log_scalars(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Call the logger once for each step."""
        for step, scalars in rows.items():
            self._logger.log_metrics(dict(scalars), step)


# --- from the option to sinks ---------------------------------------------------------------------------------------------


def make_logger_sinks(choices: Sequence[LoggerChoice]) -> list[LoggerSink]:
    """Return the sinks of the option `loggers`. Call this in the thread that opened the user's runs.

    Raises:
        ConfigError: a package is missing, or an object is not a known logger.
    """
    for choice in choices:
        choice.check_installed()
    sinks: list[LoggerSink] = []
    for choice in choices:
        try:
            sinks.append(_named(choice) if choice.name else _given(choice.given))
        except ConfigError:
            raise
        except Exception as error:
            warn(f"the logger {choice} receives no data of this run: {type(error).__name__}: {error}")
    return sinks


def _named(choice: LoggerChoice) -> LoggerSink:
    """Join an open run, unless the user gives settings for a new run."""
    joined = choice.settings is None
    package: Any = sys.modules.get(PACKAGES[str(choice.name)]) if joined else None
    if choice.name == "wandb":
        return WandbSink(package.run if package else None, choice.settings)
    if choice.name == "comet":
        return CometSink(package.get_running_experiment() if package else None, choice.settings)
    active = package.active_run() if package else None
    return MlflowSink(active.info.run_id if active else None, settings=choice.settings)


def _given(logger: Any) -> LoggerSink:
    sink = find_sink(logger)
    if sink is None and not hasattr(logger, "log_metrics"):
        raise ConfigError(
            f"{type(logger).__name__} is not a supported logger. Pass a run of W&B, a run or client of MLflow, an "
            "experiment of Comet, or a logger of Lightning"
        )
    return sink or AnyLoggerSink(logger)


#: functions that make the sink for an object, by the name of its class, with or without the package; the first match counts
_SINKS: Mapping[str, Callable[[Any], LoggerSink]] = {
    "wandb.Run": WandbSink,
    "mlflow.MlflowClient": lambda client: MlflowSink(client=client),
    "mlflow.Run": lambda run: MlflowSink(run.info.run_id),
    "comet_ml.CometExperiment": CometSink,
    "comet_ml.BaseExperiment": CometSink,
    "WandbLogger": lambda logger: WandbSink(logger.experiment),
    "MLFlowLogger": lambda logger: MlflowSink(logger.run_id, logger.experiment),
    "CometLogger": lambda logger: CometSink(logger.experiment),
    "CSVLogger": lambda logger: CsvSink(logger.log_dir),
}


def find_sink(logger: Any) -> LoggerSink | None:
    """Return the sink of a known run, experiment or Lightning logger. Return None for any other object."""
    kinds = type(logger).__mro__
    names = {name for kind in kinds for name in (kind.__name__, f"{kind.__module__.split('.')[0]}.{kind.__name__}")}
    return next((make(logger) for name, make in _SINKS.items() if name in names), None)
