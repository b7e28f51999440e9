"""See what FP8 does to a training run, tensor by tensor.

Import all public names from this module: `from nemo_fp8_debug import Monitor`. `__all__` lists the names, and `help`
explains each of them. The subpackages are marked "Internal." and may change without notice.

- Watch a run: `FP8DebugCallback` (Lightning, NeMo), `FP8DebugTrainerCallback` (Hugging Face), `FP8DebugBridgeCallback`
  (Megatron-Bridge), `FP8DebugForwardStep` (Megatron-LM), `Monitor` (any loop), and their options in `Config`.
- Read the record of a run: `read_record`, `dumped_files`, `read_dump`; `sql_views` for DuckDB and Spark.
- Explain a record: `compare`, `diagnose` and its `story`, `recommend` with a `Budget`, `replay`; `audit` for a checkpoint;
  `on_cluster` for long records.
- Change a run: `Plan` and `Change`, `apply_plan`, `name_modules`, `FP8PlanCallback`, `Emulation`,
  `FP8EmulationCallback`.
- Errors and warnings: `ConfigError`, `RecordError`, `FP8DebugWarning`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import ConfigError, FP8DebugWarning, RecordError

if TYPE_CHECKING:
    from .adapters.lightning.callback import FP8DebugCallback
    from .adapters.lightning.interventions import FP8EmulationCallback, FP8PlanCallback
    from .adapters.megatron import FP8DebugBridgeCallback, FP8DebugForwardStep
    from .adapters.transformers import FP8DebugTrainerCallback
    from .analysis.checkpoint.audit import audit
    from .analysis.comparison.compare import compare
    from .analysis.diagnosis.diagnose import diagnose, recommend
    from .analysis.recommendation.options import Budget
    from .analysis.replay.replay import replay
    from .analysis.runs.cluster import on_cluster
    from .analysis.story.story import story
    from .interventions.apply import apply_plan, name_modules
    from .interventions.emulate import Emulation
    from .monitor.monitor import Monitor
    from .options.config import Config
    from .plan.plan import Change, Plan
    from .record.dump import dumped_files, read_dump
    from .record.reader import read_record
    from .record.views import sql_views

#: module of each public name. We import this module on first use, so that Lightning and torch are imported only if needed
_FROM = {
    "Budget": "analysis.recommendation.options",
    "Change": "plan.plan",
    "Config": "options.config",
    "Emulation": "interventions.emulate",
    "FP8DebugBridgeCallback": "adapters.megatron",
    "FP8DebugCallback": "adapters.lightning.callback",
    "FP8DebugForwardStep": "adapters.megatron",
    "FP8DebugTrainerCallback": "adapters.transformers",
    "FP8EmulationCallback": "adapters.lightning.interventions",
    "FP8PlanCallback": "adapters.lightning.interventions",
    "Monitor": "monitor.monitor",
    "Plan": "plan.plan",
    "apply_plan": "interventions.apply",
    "audit": "analysis.checkpoint.audit",
    "compare": "analysis.comparison.compare",
    "diagnose": "analysis.diagnosis.diagnose",
    "dumped_files": "record.dump",
    "name_modules": "interventions.apply",
    "on_cluster": "analysis.runs.cluster",
    "read_dump": "record.dump",
    "read_record": "record.reader",
    "recommend": "analysis.diagnosis.diagnose",
    "replay": "analysis.replay.replay",
    "sql_views": "record.views",
    "story": "analysis.story.story",
}

__all__ = [
    "Budget",
    "Change",
    "Config",
    "ConfigError",
    "Emulation",
    "FP8DebugBridgeCallback",
    "FP8DebugCallback",
    "FP8DebugForwardStep",
    "FP8DebugTrainerCallback",
    "FP8DebugWarning",
    "FP8EmulationCallback",
    "FP8PlanCallback",
    "Monitor",
    "Plan",
    "RecordError",
    "__version__",
    "apply_plan",
    "audit",
    "compare",
    "diagnose",
    "dumped_files",
    "name_modules",
    "on_cluster",
    "read_dump",
    "read_record",
    "recommend",
    "replay",
    "sql_views",
    "story",
]


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(f".{_FROM[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
