"""Where samples go unless the caller says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..core.sample import Recorder
from ..errors import ConfigError
from ..options.config import Config
from ..record.console_table import TableRecorder
from ..record.event_file import EventFile
from ..record.storage import Storage
from ..record.tensorboard import TensorBoardRecorder
from ..record.writer import RunRecord


def chosen_recorders(own: Iterable[Recorder] | None, config: Config) -> Iterable[Recorder]:
    """The caller's recorders, or those by default."""
    return default_recorders(config) if own is None else own


def default_recorders(config: Config) -> Iterator[Recorder]:
    """A run record, TensorBoard events and a table.

    Raises:
        ConfigError: there is no folder for them, or it cannot be written.
    """
    if config.output is None:
        raise ConfigError('Monitor needs the folder of the record: Monitor(model, "runs/a")')
    yield RunRecord(config.output)
    yield TensorBoardRecorder(EventFile(str(Storage(config.output))), config.max_tags, log_losses=True)
    if config.table_rows:
        yield TableRecorder(config.table_rows)
