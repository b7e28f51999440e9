"""Operands that no hook sees, through Transformer Engine's own inspection API (nvdlfw_inspect): opt-in, it changes numbers.

    nemo_fp8_debug.inspection.enable()  # on every rank, before the first module of Transformer Engine is built

X of fc2 and dY of fc1 exist inside `LayerNormMLP` only. An inspected module takes Transformer Engine's debug path, which
does not fuse casts into other kernels; docs/attach.md says what that changes.

Transformer Engine decides by its count of iterations whether a module asks for features at all. The count here is one of two
numbers, that of sampled steps and that of all others, so that no module asks in a step that is not sampled.

`enable` and `enabled` are for users; the rest is for the monitor.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from .....errors import ConfigError
from ...base import ScaleInUse
from ..quantizers import cast_by


class Inspected(Protocol):
    """What inspection asks of a GEMM."""

    @property
    def name(self) -> str:
        """Unique in the run."""

    @property
    def module(self) -> Any:
        """The module that it is part of."""

    @property
    def part(self) -> str:
        """Which part."""

    @property
    def unseen(self) -> Collection[str]:
        """Roles that no hook sees."""


__all__ = ["enable", "enabled"]

_Gemm = TypeVar("_Gemm", bound=Inspected)

#: the iteration at which a new module asks first
SAMPLED = 0
NOT_SAMPLED = SAMPLED - 1

#: told of (GEMM, role, the tensor, what says how it was cast)
Take = Callable[[_Gemm, str, torch.Tensor, Callable[[], ScaleInUse]], None]

_TENSORS = {"input": "activation", "grad_output": "gradient"}
_CONFIG = {
    "nemo_fp8_debug": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": r"\.fc[12]$"},  # what LayerNormMLP calls its GEMMs
        "transformer_engine": {"NemoFP8DebugOperands": {"enabled": True, "tensors": list(_TENSORS.values())}},
    }
}

_session: Any = None
_logs: Any = None
_watched: dict[tuple[str, str], tuple[Any, str, Take[Any]]] = {}


def enable() -> None:
    """Let Transformer Engine hand over what no hook sees; every `Monitor` of this process makes use of it.

    Raises:
        ConfigError: Transformer Engine cannot do it, has built a module already, or is inspected by somebody else.

    Example:
        >>> from nemo_fp8_debug import ConfigError, inspection
        >>> try:
        ...     inspection.enable()
        ... except ConfigError:
        ...     print("this process trains without Transformer Engine 2.7")
        this process trains without Transformer Engine 2.7
    """
    global _session, _logs
    if enabled():
        return
    try:
        import nvdlfw_inspect.api as api
        from transformer_engine.debug.features.api import TEDefaultFeatures
        from transformer_engine.debug.pytorch.debug_state import TEDebugState
    except ImportError as error:
        raise ConfigError(f"inspection needs Transformer Engine 2.7 or later and nvdlfw_inspect: {error}") from error
    if "quantizer" not in TEDefaultFeatures.inspect_tensor.__code__.co_varnames:
        raise ConfigError("inspection needs Transformer Engine 2.7 or later: this one does not say how it casts a tensor")
    if api.DEBUG_MANAGER is not None:
        raise ConfigError("nvdlfw_inspect is in use already, and has one user a process: leave out one of the two")
    if TEDebugState.debug_enabled is False:
        raise ConfigError("a module of Transformer Engine exists already: call nemo_fp8_debug.inspection.enable() before")
    folder = str(Path(__file__).parent / "feature")
    _logs = tempfile.TemporaryDirectory(prefix="nemo_fp8_debug_")  # it insists on a log; this one is gone with the process
    api.initialize(_CONFIG, feature_dirs=[folder], log_dir=_logs.name, init_training_step=NOT_SAMPLED)
    _session = api.DEBUG_MANAGER


def enabled() -> bool:
    """Whether `enable` was called, and nobody has ended it since.

    Example:
        >>> from nemo_fp8_debug import inspection
        >>> inspection.enabled()
        False
    """
    api = sys.modules.get("nvdlfw_inspect.api")
    return _session is not None and api is not None and api.DEBUG_MANAGER is _session


def check(gemms: Iterable[Inspected]) -> None:
    """Refuse what Transformer Engine would stop the run for, at the first sampled step.

    Raises:
        ConfigError: a module delays its weight gradient.
    """
    delays = (g.name for g in gemms if (store := getattr(g.module, "wgrad_store", None)) and store.delay_wgrad_compute())
    if enabled() and (first := next(delays, None)):
        raise ConfigError(
            f"{first} has delay_wgrad_compute, with which Transformer Engine cannot inspect: leave out one of the two"
        )


def sees(gemm: Inspected, role: str) -> bool:
    """Whether an operand that no hook sees is handed over."""
    return _is_inside(gemm, role) and not _is_split(gemm)


def leaves_out(gemm: Inspected) -> bool:
    """Whether an operand could be handed over, but is not."""
    return any(_is_inside(gemm, role) for role in _TENSORS) and _is_split(gemm)


def _is_inside(gemm: Inspected, role: str) -> bool:
    return role in _TENSORS and enabled() and role in gemm.unseen


def _is_split(gemm: Inspected) -> bool:
    # With tensor parallelism the debug path communicates in another way, and all ranks would have to take it at once.
    return getattr(gemm.module, "tp_size", 1) > 1


def watch(operands: Iterable[tuple[_Gemm, str]], take: Take[_Gemm]) -> None:
    """A sampled step begins: hand these over.

    Raises:
        ConfigError: Transformer Engine has one name for two modules, and cannot tell them apart.
    """
    wanted: dict[tuple[str, str], tuple[_Gemm, str, Take[_Gemm]]] = {}
    for gemm, role in operands:
        key = f"{gemm.module.name}.{gemm.part}", _TENSORS[role]
        if key in wanted:
            raise ConfigError(
                f"{wanted[key][0].name} and {gemm.name} share the `name` {gemm.module.name!r}: give each its own"
            )
        wanted[key] = gemm, role, take
    _watched.update(wanted)
    _count(SAMPLED if wanted else NOT_SAMPLED)


def unwatch() -> None:
    """The sampled step is over."""
    _watched.clear()
    _count(NOT_SAMPLED)


def _count(iteration: int) -> None:
    if enabled():
        _session.initialize_training_step(iteration)


def is_watched(module: Any) -> bool:
    """Whether the module takes Transformer Engine's debug path in this step."""
    return any(gemm.module is module for gemm, *_ in _watched.values())


def wants(layer: str, tensor: str) -> bool:
    """Whether a tensor is to be handed over, by Transformer Engine's names."""
    return (layer, tensor) in _watched


def hand_over(layer: str, tensor: str, x: torch.Tensor, quantizer: Any) -> None:
    """A tensor that Transformer Engine has just cast with `quantizer`."""
    if found := _watched.get((layer, tensor)):
        gemm, role, take = found
        take(gemm, role, x.detach(), lambda: cast_by(quantizer, gemm.module.fp8_meta.get("recipe"), role))
