"""Where samples go unless the caller says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from ..core.sample import Recorder
from ..errors import ConfigError
from ..options.config import Config
from ..record.console_table import TableRecorder
from ..record.event_file import EventFile
from ..record.loggers.recorder import ComparisonPage, LoggerRecorder
from ..record.loggers.sinks import choose_sinks
from ..record.scalars import ScalarRecorder
from ..record.storage import Storage
from ..record.tensorboard import TensorBoardRecorder
from ..record.writer import RunRecord


def chosen_recorders(own: Iterable[Recorder] | None, config: Config) -> Iterator[Recorder]:
    """The caller's recorders, or those by default; then what serves loggers.

    Raises:
        ConfigError: as for `default_recorders`, or the package of a logger is missing.
    """
    sinks = choose_sinks(config.logger_choices)
    yield from default_recorders(config) if own is None else own
    if sinks:
        record = None if config.output is None else str(Storage(config.output))
        every_tensor = partial(ScalarRecorder, _not_written, config.max_tags) if config.log_every_tensor else None
        yield LoggerRecorder(sinks, ComparisonPage(config.report_baseline, record), every_tensor)


def _not_written(tags: object, step: int) -> None:
    """Scalars are asked for, and written by others."""


def default_recorders(config: Config) -> Iterator[Recorder]:
    """A run record, TensorBoard events and a table.

    Raises:
        ConfigError: there is no folder for them, or it cannot be written.
    """
    if config.output is None:
        raise ConfigError('Monitor needs the folder of the record: Monitor(model, "runs/a")')
    record = RunRecord(config.output, config.histogram_interval)
    yield record
    yield TensorBoardRecorder(EventFile(record.storage), config.max_tags, log_losses=True)
    if config.table_rows:
        yield TableRecorder(config.table_rows)
