"""An experiment in Comet."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..start_here import LayerMap
from .sink import PREFIX

#: what Comet would do in the background of a run that is started here: it hooks frameworks and reads the program's output
_OFF = dict.fromkeys(
    ("auto_metric_logging", "auto_param_logging", "auto_output_logging", "auto_histogram_tensorboard_logging"), False
) | {"log_code": False, "log_graph": False, "parse_args": False, "display_summary_level": 0}


#: has Comet leave frameworks alone
_NO_HOOKS = "COMET_DISABLE_AUTO_LOGGING"


def _imported() -> Any:
    """The package; if nobody has imported it yet, without its hooks, which start an experiment for each run of MLflow."""
    if "comet_ml" in sys.modules:
        return sys.modules["comet_ml"]
    before = os.environ.get(_NO_HOOKS)
    os.environ[_NO_HOOKS] = "1"
    try:
        return importlib.import_module("comet_ml")
    finally:
        os.environ.pop(_NO_HOOKS)
        if before is not None:
            os.environ[_NO_HOOKS] = before


class CometSink:
    """Metrics, others and assets.

    An experiment holds one current step, which `log_metric(step=...)` moves and which counts for all that is logged without
    one. So metrics are handed over as the messages that this function makes, each with its step.
    """

    name = "comet"

    def __init__(self, experiment: Any = None, settings: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            experiment: that the user made; None: one is started.
            settings: for `comet_ml.start`.
        """
        self._experiment, self._settings = experiment, dict(settings or {})
        self.owned = experiment is None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Start the experiment unless there is one."""
        if self._experiment is None:
            comet_ml = _imported()
            config = comet_ml.ExperimentConfig(**_OFF)
            self._experiment = comet_ml.start(**{"mode": "create", "experiment_config": config, **self._settings})
        self._experiment.log_asset_data(dict(fingerprint), name="fp8_fingerprint.json")

    def log(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Messages, which Comet's own thread takes."""
        from comet_ml.messages import MetricMessage

        for step, scalars in rows.items():
            for name, value in scalars.items():
                message = MetricMessage()
                message.set_metric(name, value=value, step=step)
                self._experiment._enqueue_message(message)

    def tell(self, texts: Mapping[str, str]) -> None:
        """As others."""
        self._experiment.log_others(dict(texts))

    def show(self, layer_map: LayerMap) -> None:
        """A table."""
        name = f"{PREFIX.strip('/')}_layers_step_{layer_map.step:09d}.csv"
        self._experiment.log_table(name, [list(row) for row in layer_map.rows], headers=list(layer_map.header))

    def attach(self, page: Path) -> None:
        """An asset."""
        self._experiment.log_asset(str(page), file_name=page.name)

    def close(self, failed: bool) -> None:
        """End the experiment if it is ours."""
        if self.owned:
            self._experiment.end()
