"""The values of the option `loggers`: a name, a name with settings, or a logger that the user made."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.arguments import format_value, suggest_name
from ..errors import ConfigError

#: package of each logger, by name
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml"}
#: URI schemes of databases for which MLflow needs SQLAlchemy, which mlflow-skinny does not install
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


@dataclass(frozen=True)
class LoggerChoice:
    """One item of the option `loggers`.

    Attributes:
        name: the logger's name, or None if `given` is set.
        settings: settings for a new run, or None to join an open run.
        given: a run or logger that the user made.
    """

    name: str | None = None
    settings: Mapping[str, Any] | None = field(default=None, repr=False)
    given: Any = field(default=None, repr=False)

    def check_installed(self) -> None:
        """Check that the logger's package is installed, without importing it. For MLflow, also check the packages
        that its tracking URI needs.

        Raises:
            ConfigError: a package is missing. The message says how to install it.
        """
        if self.name and importlib.util.find_spec(PACKAGES[self.name]) is None:
            install = f"pip install 'nemo-fp8-debug[{self.name}]'"
            raise ConfigError(f"the logger {self.name!r} needs the package {PACKAGES[self.name]}: {install}")
        if self.name == "mlflow":
            uri = str((self.settings or {}).get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI", ""))
            scheme = uri.partition(":")[0].partition("+")[0]
            if scheme in _DATABASES and not has_sqlalchemy():
                raise ConfigError(
                    f"MLflow cannot open its {scheme} tracking URI without SQLAlchemy. Run pip install mlflow, or use a "
                    "tracking_uri such as file:./mlruns."
                )

    def __str__(self) -> str:
        return self.name or type(self.given).__name__


def has_sqlalchemy() -> bool:
    """Return True if MLflow can open databases."""
    return importlib.util.find_spec("sqlalchemy") is not None


def parse_loggers(value: Any) -> tuple[LoggerChoice, ...]:
    """Parse the value of the option `loggers`.

    Raises:
        ConfigError: the value is not a list, or an item is neither a known name (alone or with settings) nor a logger.

    Example:
        >>> [str(choice) for choice in parse_loggers(["wandb", {"mlflow": {"experiment_name": "fp8"}}])]
        ['wandb', 'mlflow']
    """
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise ConfigError(f"loggers is {format_value(value)}; it takes a list, such as ['wandb']")
    return tuple(choice for item in value for choice in _choices(item))


def _choices(item: Any) -> list[LoggerChoice]:
    if isinstance(item, str):
        return [LoggerChoice(_known(item))]
    if isinstance(item, Mapping):
        for name, settings in item.items():
            if not isinstance(settings, Mapping):
                raise ConfigError(f"settings of the logger {name!r} are {format_value(settings)}; they must be a mapping")
        return [LoggerChoice(_known(name), dict(settings)) for name, settings in item.items()]
    if item is None or isinstance(item, (bool, int, float, Sequence)):
        raise ConfigError(f"{format_value(item)} is not a logger; use {_names()}, or a run or logger that you made")
    return [LoggerChoice(given=item)]


def _known(name: Any) -> str:
    if name not in PACKAGES:
        raise ConfigError(f"unknown logger {format_value(name)}{suggest_name(str(name), PACKAGES)}; choose from {_names()}")
    return str(name)


def _names() -> str:
    return ", ".join(PACKAGES)
