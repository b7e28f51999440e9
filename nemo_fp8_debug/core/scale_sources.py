"""Name the sources of scales in a record, and conclude from them whether the run quantizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .keys import MIXED

#: see `CastInUse.source`
ENGINE, UNKNOWN = "engine", "unknown"
#: sources of operands that are not quantized
_NOT_CAST = frozenset({"current", "emulated", "not quantized"})
#: sources of operands that we did not see quantized. Their metrics show what a recipe would do to them
_AS_IF = _NOT_CAST | {UNKNOWN, None}

#: what is known about a run: it quantizes something, it quantizes nothing, or its casts were not read
QUANTIZED, HIGH_PRECISION, NOT_READ = "quantized", "high precision", "not read"


def classify_run_quantization(sources: Iterable[str | None], fingerprint: Mapping[str, Any] | None = None) -> str:
    """Return whether the run quantizes anything, as far as a record's column `scale_source` shows.

    Args:
        sources: the column, or its distinct values. An aggregate's source may be "mixed"; the rows of its experts show the
                source of each.
        fingerprint: fingerprint of the run. If it names a recipe for the metrics, the run's own casts were not read.

    Returns:
        QUANTIZED, HIGH_PRECISION or NOT_READ. An imported log names other tools as sources, and counts as quantized.
    """
    found = set(sources) - {MIXED}
    if not found <= _AS_IF:
        return QUANTIZED
    recipe = (fingerprint or {}).get("recipe")
    asked = recipe.get("asked", "auto") if isinstance(recipe, Mapping) else "auto"
    return HIGH_PRECISION if found and not found & {UNKNOWN, None} and asked == "auto" else NOT_READ


def select_quantized_sources(sources: Iterable[str | None]) -> list[str | None]:
    """Return the sources of operands that are quantized, or for which this is unknown.

    Example:
        >>> select_quantized_sources(["engine", "current", None])
        ['engine', None]
    """
    return [source for source in sources if source not in _NOT_CAST]


def make_unquantized_note(source: str | None, known: str) -> str:
    """Return a note for an operand that is not quantized although its run quantizes others. For other operands, return "".

    Args:
        source: source of the operand's scale, as in the column `scale_source`.
        known: the result of `classify_run_quantization`.

    Example:
        >>> make_unquantized_note("not quantized", QUANTIZED), make_unquantized_note("engine", QUANTIZED)
        ('not quantized', '')
    """
    if known != QUANTIZED or source not in _AS_IF:
        return ""
    return "unknown" if source in (UNKNOWN, None) else "not quantized"


def describe_quantization(known: str, name: str = "the run") -> str | None:
    """Return a sentence on how to read a run's metrics, or None if the run is quantized.

    Args:
        known: what `classify_run_quantization` returned.
        name: name of the run in the sentence.
    """
    if known == HIGH_PRECISION:
        return f"Nothing in {name} is quantized, so the metrics show what FP8 would do to it."
    if known == NOT_READ:
        return f"We could not read whether {name} quantizes, so the metrics show what FP8 would do to it."
    return None
