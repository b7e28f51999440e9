"""Where the scales of a record are known from, and whether that says that anything is quantized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .keys import MIXED

#: see `ScaleInUse.source`
ENGINE, UNKNOWN = "engine", "unknown"
#: of operands that were not seen to be quantized: what a recipe would make of them
_AS_IF = frozenset({"current", "emulated", "not quantized", UNKNOWN, None})

#: what is known of a run: something is quantized; nothing is; it was not read
QUANTIZED, HIGH_PRECISION, NOT_READ = "quantized", "high precision", "not read"


def classify_sources(sources: Iterable[str | None], fingerprint: Mapping[str, Any] | None = None) -> str:
    """Whether anything is quantized, as far as a record's column `scale_source` tells.

    Args:
        sources: the column, or its distinct values. Experts as one may be mixed, and are in the column one by one too.
        fingerprint: of the run. If it asks for a recipe by name, what the run casts with is not read.

    Returns:
        QUANTIZED, HIGH_PRECISION or NOT_READ. An imported log, whose sources are other tools, counts as quantized.
    """
    found = set(sources) - {MIXED}
    if not found <= _AS_IF:
        return QUANTIZED
    recipe = (fingerprint or {}).get("recipe")
    asked = recipe.get("asked", "auto") if isinstance(recipe, Mapping) else "auto"
    return HIGH_PRECISION if found and not found & {UNKNOWN, None} and asked == "auto" else NOT_READ


def describe_quantization(known: str, name: str = "the run") -> str | None:
    """What to bear in mind of a run's metrics, a sentence; None if it is quantized.

    Args:
        known: as `classify_sources` returns it.
        name: what the run is called.
    """
    if known == HIGH_PRECISION:
        return f"Nothing in {name} is quantized: its metrics say what FP8 would do to it."
    if known == NOT_READ:
        return f"Whether {name} quantizes was not read: its metrics say what FP8 would do to it."
    return None
