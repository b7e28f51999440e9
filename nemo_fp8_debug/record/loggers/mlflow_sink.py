"""A run in MLflow, by its client alone: the fluent functions belong to the user's thread."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...options.loggers import has_sqlalchemy
from ..start_here import LayerMap

#: metrics that MLflow takes at once
_BATCH = 1000
#: folder of our artifacts
_FOLDER = "fp8"
_ALLOW = "MLFLOW_ALLOW_FILE_STORE"


class MlflowSink:
    """Metrics with a step of their own each, tags and artifacts."""

    name = "mlflow"

    def __init__(self, run_id: str | None = None, client: Any = None, settings: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            run_id: of a run that the user made; None: one is started.
            client: None: one for `tracking_uri` of the settings, or MLflow's own.
            settings: `tracking_uri`, `experiment_name`, `run_name`, `tags`; or `run_id`, to go on in a run.
        """
        self._settings = dict(settings or {})
        self._run_id = run_id or self._settings.get("run_id")
        self._client = client
        self._uri, self._files = _absolute(self._settings.get("tracking_uri")), Path("mlruns").absolute()
        self.owned = self._run_id is None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Start the run unless there is one."""
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

    def log(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """In as few requests as MLflow allows."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for step, scalars in rows.items() for name, value in scalars.items()]
        for i in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[i : i + _BATCH])

    def tell(self, texts: Mapping[str, str]) -> None:
        """As tags."""
        from mlflow.entities import RunTag

        self._client.log_batch(self._run_id, tags=[RunTag(name, text[:5000]) for name, text in texts.items()])

    def show(self, layer_map: LayerMap) -> None:
        """A file of comma-separated values."""
        text = io.StringIO()
        csv.writer(text).writerows([layer_map.header, *layer_map.rows])
        self._client.log_text(self._run_id, text.getvalue(), f"{_FOLDER}/layers/step_{layer_map.step:09d}.csv")

    def attach(self, page: Path) -> None:
        """An artifact."""
        self._client.log_artifact(self._run_id, str(page), _FOLDER)

    def close(self, failed: bool) -> None:
        """End the run if it is ours."""
        if self.owned:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _absolute(uri: str | None) -> str | None:
    """Return a tracking URI that means the same folder when the client is made, in another thread and maybe elsewhere."""
    path = (uri or "").removeprefix("file:")
    is_path = uri is not None and "://" not in uri and (path != uri or path.startswith(".") or "/" in path)
    return str(Path(path).absolute()) if is_path else uri


def _make_client(uri: str | None, files: Path) -> Any:
    """Return a client for a tracking URI, or for what MLflow is set to.

    Args:
        files: folder of a run if neither is known and no database can be opened.
    """
    import mlflow

    if uri is None and not mlflow.is_tracking_uri_set() and not has_sqlalchemy():
        uri = str(files)  # as earlier releases do; later ones take a database, which needs SQLAlchemy
    with _file_store_allowed():
        return mlflow.MlflowClient(uri)


@contextlib.contextmanager
def _file_store_allowed() -> Iterator[None]:
    """Let MLflow open a store of files. Later releases refuse to, because that store gets no new features; we use none."""
    before = os.environ.get(_ALLOW)
    os.environ.setdefault(_ALLOW, "true")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ALLOW]
