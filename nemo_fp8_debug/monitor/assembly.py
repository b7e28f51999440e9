"""Create the parts of a monitor, and connect them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from ..capture.backends.parallel import count_tensor_parts
from ..capture.gemms import require_matching_gemms
from ..core.error_guard import ErrorGuard
from ..core.keys import ROLES
from ..core.sample import Recorder
from ..core.waits import WaitTimes
from ..distributed import MonitoredRanks, ShardGroup
from ..errors import ConfigError
from ..numerics.delayed_state import check_history_memory
from ..options.config import Config
from ..options.control_file import ControlSettings
from ..options.trigger_rules import parse_trigger_rule
from ..record.console_table import ConsoleTableRecorder
from ..record.dump import TensorDumper
from ..record.loggers.recorder import ComparisonPage, LoggerRecorder
from ..record.loggers.sinks import make_logger_sinks
from ..record.scalars import ScalarRecorder
from ..record.storage import FolderStorage
from ..record.tensorboard import EventFileWriter, TensorBoardRecorder
from ..record.writer import RunRecordWriter
from .delivery import SampleDelivery
from .live_control import LiveControl
from .model_scan import ModelScan
from .open_step import RunContext, RunSetup
from .pipeline import SamplePipeline, find_shard_group
from .recorder_queue import RecorderQueue
from .run_summary import RunSummaryPrinter
from .schedule import SamplingSchedule, Triggers


@dataclass(frozen=True)
class MonitorParts:
    """The parts of a monitor, which exist once all ranks have started."""

    #: the ranks that have parts of the same tensors
    shard_group: ShardGroup
    #: decides which steps are sampled
    schedule: SamplingSchedule
    #: changes the schedule during the run
    live_control: LiveControl
    pipeline: SamplePipeline
    delivery: SampleDelivery
    watched: RunContext


@dataclass(frozen=True)
class RecordLocation:
    """The folders that a monitor writes to. After `agreed`, they are the same on all ranks."""

    #: folder of this rank's record, or None if the rank writes no record
    record: str | None
    #: attempt number of the record
    attempt: int
    #: folder of dumps and the control file, or None
    storage: FolderStorage | None

    @classmethod
    def choose_location(cls, config: Config, recording: RecorderQueue) -> RecordLocation:
        """Return the folders that this rank would write to."""
        records = [r for r in recording.recorders if isinstance(r, RunRecordWriter)]
        storage = None if config.output is None else FolderStorage.open_for_writing(config.output)
        storage = next((r.storage for r in records if r.storage == storage), storage)
        attempt = max((r.attempt for r in records), default=0)
        return cls(str(records[0].storage) if records else None, attempt, storage)

    def agreed(self, ranks: MonitoredRanks) -> RecordLocation:
        """Return the first rank's folders on all ranks, because the ranks' working directories may differ."""
        own = None if self.storage is None else str(self.storage)
        told = ranks.await_all_monitors({"attempt": self.attempt, "output": own})
        other = None if told["output"] is None else FolderStorage.open_for_writing(told["output"])
        return RecordLocation(self.record, told["attempt"], self.storage if told["output"] == own else other)


def assemble_monitor(
    config: Config,
    model: ModelScan,
    ranks: MonitoredRanks,
    recording: RecorderQueue,
    summary: RunSummaryPrinter,
    place: RecordLocation,
    errors: ErrorGuard,
    waits: WaitTimes,
) -> MonitorParts:
    """Make the parts of a monitor.

    Args:
        place: the folders of this rank. Only the first rank's folders are used.
        waits: adds up the training thread's waiting times.

    Raises:
        ConfigError: tensors are to be dumped without a folder, or what-if recipes take too much memory.
    """
    place = place.agreed(ranks)
    storage, operands = place.storage, len(model.known) * len(ROLES)
    if storage is None and (config.dump or config.trigger_dump):
        raise ConfigError("dump and trigger_dump need an output folder")
    limits = config.dump_max_bytes, config.dump_min_free_bytes
    dump = TensorDumper(storage, ranks.rank, *limits, recording.submit_job, waits) if storage else None

    check_history_memory(config.what_if_recipes, operands)

    def check(control: ControlSettings) -> None:
        """Reject a control file if it needs too much memory, or matches no layer of this model.

        With several ranks, a layer that is missing here may be on another rank, so it is accepted.
        """
        check_history_memory(replace(Config(), what_if=control.changes.get("what_if", ())).what_if_recipes, operands)
        if ranks.world == 1:
            for name in ("layers", "dump"):
                if control.changes.get(name):
                    require_matching_gemms(model.known, control.changes[name])

    schedule = SamplingSchedule(config)
    triggers = Triggers([parse_trigger_rule(rule) for rule in config.triggers], ranks)
    live_control = LiveControl(schedule, triggers, ranks, storage, check, summary.print_line, waits)
    recording.submit_job(live_control.read_control_file)
    shard_group, over = find_shard_group(ranks, model.kinds_by_name, errors)
    model.scales.start_amax_histories(shard_group.list_operand_keys(ROLES))
    pipeline = SamplePipeline(RunSetup(config, ranks, shard_group, model.scales, count_tensor_parts()), errors)
    pipeline.over = over
    delivery = SampleDelivery(ranks, recording, pipeline, live_control, dump, errors, config.layers)
    delivery.write_status(None)
    watched = RunContext(model, shard_group, ranks.rank, ranks.world, place.attempt, dump, errors, pipeline.observations)
    return MonitorParts(shard_group, schedule, live_control, pipeline, delivery, watched)


def make_chosen_recorders(own: Iterable[Recorder] | None, config: Config) -> Iterator[Recorder]:
    """Yield the caller's recorders, or else the default recorders. Then yield the recorder for loggers.

    Raises:
        ConfigError: as for `default_recorders`, or a logger's package is missing.
    """
    sinks = make_logger_sinks(config.logger_choices)
    yield from default_recorders(config) if own is None else own
    if sinks:
        record = None if config.output is None else str(FolderStorage(config.output))
        every_tensor = partial(ScalarRecorder, _not_written, config.max_tags) if config.log_every_tensor else None
        yield LoggerRecorder(sinks, ComparisonPage(config.report_baseline, record), every_tensor)


def _not_written(tags: object, step: int) -> None:
    """Do nothing, because the caller writes the scalars itself."""


def default_recorders(config: Config) -> Iterator[Recorder]:
    """Yield a run record, TensorBoard events and a table.

    Raises:
        ConfigError: there is no folder for them, or the folder cannot be written.
    """
    if config.output is None:
        raise ConfigError('Monitor needs the folder of the record: Monitor(model, "runs/a")')
    record = RunRecordWriter(config.output, config.histogram_interval)
    yield record
    yield TensorBoardRecorder(EventFileWriter(record.storage), config.max_tags, log_losses=True)
    if config.table_rows:
        yield ConsoleTableRecorder(config.table_rows)
