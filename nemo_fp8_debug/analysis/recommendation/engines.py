"""Which engine quantizes a run, so that a recommendation is written as that engine's configuration and no other's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.scale_sources import HIGH_PRECISION, NOT_READ
from ..runs.run import Run

TORCHAO, TRANSFORMER_ENGINE, MEGATRON = "torchao", "Transformer Engine", "Megatron"


def engines_of(run: Run) -> frozenset[str]:
    """The frameworks whose configuration decides how a run casts; none if nothing is quantized, or if that was not read.

    A record that does not say what was sampled is of a log of Transformer Engine, or from before that was recorded.
    """
    if run.quantization in (HIGH_PRECISION, NOT_READ):
        return frozenset()
    backends = _backends(run)
    if backends is None:
        return frozenset((MEGATRON, TRANSFORMER_ENGINE))
    found = {engine for engine in (TORCHAO, TRANSFORMER_ENGINE, MEGATRON) if any(b.startswith(engine) for b in backends)}
    if run.fingerprint.get("backend_options") and (found != {TORCHAO} or run.fingerprint["backend_options"].get("fp8")):
        found |= {MEGATRON, TRANSFORMER_ENGINE}
    return frozenset(found)


def why_none(run: Run) -> str | None:
    """Why a run gets no configuration of an engine, a sentence; None if it gets one."""
    if engines_of(run):
        return None
    return f"No configuration of an engine is written: {_reason(run)}."


def _reason(run: Run) -> str:
    if run.quantization == HIGH_PRECISION:
        return "nothing in the run is quantized"
    if run.quantization == NOT_READ:
        return "whether the run quantizes, and by what, was not read"
    kinds = ", ".join(sorted(_backends(run) or ())) or "no layers"
    return f"the run quantizes by emulation over {kinds}, which are layers of no engine"


def _backends(run: Run) -> list[str] | None:
    sampled: Any = run.fingerprint.get("sampled")
    return list(map(str, sampled["backends"])) if isinstance(sampled, Mapping) and "backends" in sampled else None
