"""Makes the parts of a monitor, and connects them."""

from __future__ import annotations

from dataclasses import dataclass

from ..capture.gemms import select
from ..core.error_guard import ErrorGuard
from ..core.keys import ROLES
from ..distributed import Ranks, ShardGroup
from ..errors import ConfigError
from ..options.config import Config
from ..options.control_file import Control
from ..options.trigger_rules import parse_rule
from ..record.dump import TensorDump
from ..record.storage import Storage
from .delivery import Delivery
from .live_control import LiveControl
from .model_scan import ModelScan
from .pipeline import Pipeline, meet
from .recorder_queue import Recording
from .run_summary import Summary
from .sampled_step import Watched
from .schedule import Schedule
from .triggers import Triggers


@dataclass(frozen=True)
class Parts:
    """What a monitor works with once all ranks have started."""

    #: the ranks that hold parts of the same tensors
    shard_group: ShardGroup
    #: which steps are sampled,
    schedule: Schedule
    #: and what changes that
    live_control: LiveControl
    pipeline: Pipeline
    delivery: Delivery
    watched: Watched


def assemble(
    config: Config,
    model: ModelScan,
    ranks: Ranks,
    recording: Recording,
    summary: Summary,
    storage: Storage | None,
    attempt: int,
    errors: ErrorGuard,
) -> Parts:
    """The parts of a monitor.

    Args:
        storage: folder of the record, the same on all ranks.
        attempt: of the record, the same on all ranks.

    Raises:
        ConfigError: tensors are to be dumped, and there is no folder.
    """
    if storage is None and (config.dump or config.trigger_dump):
        raise ConfigError("dump and trigger_dump need an output folder")
    limits = config.dump_max_bytes, config.dump_min_free_bytes
    dump = TensorDump(storage, ranks.rank, *limits, recording.submit_job) if storage else None

    def check(control: Control) -> None:
        """Refuse a control file that names no layer of this model; on several ranks another one may have it."""
        if ranks.world == 1:
            for name in ("layers", "dump"):
                if control.changes.get(name):
                    select(model.known, control.changes[name])

    schedule = Schedule(config)
    triggers = Triggers([parse_rule(rule) for rule in config.triggers], ranks)
    live_control = LiveControl(schedule, triggers, ranks, storage, check, summary.say)
    recording.submit_job(live_control.read)
    shard_group, over = meet(ranks, model.kinds, errors)
    model.scales.emulate(shard_group.keys(ROLES))
    pipeline = Pipeline(ranks, shard_group, model.scales, errors, config.output_rows > 0)
    pipeline.over = over
    delivery = Delivery(ranks, recording, pipeline, live_control, dump, errors, config.layers)
    delivery.report(None)
    watched = Watched(model, shard_group, ranks.rank, ranks.world, attempt, dump, errors)
    return Parts(shard_group, schedule, live_control, pipeline, delivery, watched)
