"""nemo_fp8_debug: see what FP8 does to a training run, tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import ConfigError, FP8DebugWarning, RecordError
from .monitor import Monitor

if TYPE_CHECKING:
    from .callback import FP8DebugCallback, FP8EmulationCallback


__all__ = [
    "ConfigError",
    "FP8DebugCallback",
    "FP8DebugWarning",
    "FP8EmulationCallback",
    "Monitor",
    "RecordError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Lightning is only imported by those who use its callbacks.
    if name in ("FP8DebugCallback", "FP8EmulationCallback"):
        from . import callback

        return getattr(callback, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
