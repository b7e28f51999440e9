"""From what the user asked for to sinks. No package of a logger is imported here: a run that is open has imported it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError, warn
from ...options.loggers import PACKAGES, LoggerChoice
from .comet_sink import CometSink
from .lightning_sinks import AnyLoggerSink, CsvSink
from .mlflow_sink import MlflowSink
from .sink import Sink
from .wandb_sink import WandbSink


def chosen_sinks(choices: Sequence[LoggerChoice]) -> list[Sink]:
    """The sinks of the option `loggers`; called in the thread that the user's runs were opened in.

    Raises:
        ConfigError: a package is missing, or an object is no logger that is known.
    """
    for choice in choices:
        choice.check_installed()
    sinks: list[Sink] = []
    for choice in choices:
        try:
            sinks.append(_named(choice) if choice.name else _given(choice.given))
        except ConfigError:
            raise
        except Exception as error:
            warn(f"the logger {choice} gets nothing of this run: {type(error).__name__}: {error}")
    return sinks


def _named(choice: LoggerChoice) -> Sink:
    """Joins a run that is open, unless settings for another one are given."""
    joined = choice.settings is None
    package: Any = sys.modules.get(PACKAGES[str(choice.name)]) if joined else None
    if choice.name == "wandb":
        return WandbSink(package.run if package else None, choice.settings)
    if choice.name == "comet":
        return CometSink(package.get_running_experiment() if package else None, choice.settings)
    active = package.active_run() if package else None
    return MlflowSink(active.info.run_id if active else None, settings=choice.settings)


def _given(logger: Any) -> Sink:
    sink = known_sink(logger)
    if sink is None and not hasattr(logger, "log_metrics"):
        raise ConfigError(
            f"{type(logger).__name__} is not a logger that is known; give a run of W&B, a run or client of MLflow, an "
            "experiment of Comet, or a logger of Lightning"
        )
    return sink or AnyLoggerSink(logger)


def known_sink(logger: Any) -> Sink | None:
    """The sink of a run, an experiment or a logger of Lightning that is known; None: of any other."""
    kinds = {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(logger).__mro__}
    names = {kind.__name__ for kind in type(logger).__mro__}
    if "wandb.Run" in kinds:
        return WandbSink(logger)
    if "mlflow.MlflowClient" in kinds:
        return MlflowSink(client=logger)
    if "mlflow.Run" in kinds:
        return MlflowSink(logger.info.run_id)
    if kinds & {"comet_ml.CometExperiment", "comet_ml.BaseExperiment"}:
        return CometSink(logger)
    if "WandbLogger" in names:
        return WandbSink(logger.experiment)
    if "MLFlowLogger" in names:
        return MlflowSink(logger.run_id, logger.experiment)
    if "CometLogger" in names:
        return CometSink(logger.experiment)
    if "CSVLogger" in names:
        return CsvSink(logger.log_dir)
    return None
