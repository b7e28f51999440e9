"""nemo_fp8_debug: see what FP8 does to a training run, tensor by tensor."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import ConfigError, FP8DebugWarning, RecordError

if TYPE_CHECKING:
    from .adapters.lightning.callback import FP8DebugCallback
    from .adapters.lightning.interventions import FP8EmulationCallback, FP8PlanCallback
    from .capture.backends.transformer_engine import inspection
    from .interventions.apply import apply_plan
    from .monitor.monitor import Monitor

#: where names are from: Lightning is only imported by those who use its callbacks, torch by those who look at a run
_FROM = {
    "FP8DebugCallback": "adapters.lightning.callback",
    "FP8EmulationCallback": "adapters.lightning.interventions",
    "FP8PlanCallback": "adapters.lightning.interventions",
    "Monitor": "monitor.monitor",
    "apply_plan": "interventions.apply",
    "inspection": "capture.backends.transformer_engine",
}

__all__ = [
    "ConfigError",
    "FP8DebugCallback",
    "FP8DebugWarning",
    "FP8EmulationCallback",
    "FP8PlanCallback",
    "Monitor",
    "RecordError",
    "__version__",
    "apply_plan",
    "inspection",
]


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(f".{_FROM[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
