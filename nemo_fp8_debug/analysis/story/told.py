"""Words that several parts of the story share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.keys import SHOWN_AS


def tensor_of(layer: str, role: str) -> str:
    """A tensor in words.

    Example:
        >>> tensor_of("layers.0.fc1", "grad_output")
        'dY of layers.0.fc1'
    """
    return f"{SHOWN_AS[role]} of {layer}"


def value_of(metric: str, value: float | None) -> str:
    """A value of a metric in its unit; bits as a factor.

    Example:
        >>> value_of("outlier_log2", 3.0), value_of("underflow_pct", 12.34), value_of("amax", None)
        ('x8', '12.3%', '-')
    """
    if value is None:
        return "-"
    if metric.endswith("_log2"):
        return f"x{_factor(value)}"
    return f"{value:.3g}{'%' if metric.endswith('_pct') else ''}"


def died(row: Mapping[str, Any], zero_since: int | None) -> bool:
    """Whether all values of a tensor are zero at its onset, so that what the format loses of it tells nothing.

    Args:
        row: of a tensor, with `onset` or, as the story has it, `since`.
    """
    onset = row.get("onset", row.get("since"))
    return zero_since is not None and onset is not None and onset >= zero_since


def _factor(bits: float) -> str:
    """2 to the power of some bits, as far as a float has it."""
    return f"{2.0**bits:.3g}" if abs(bits) < 1000 else f"2^{bits:.0f}"


def sentence(text: str) -> str:
    """With a capital, unless it begins with the name of a tensor, and a full stop.

    Example:
        >>> sentence("values are lost"), sentence("dY of fc1 is out of band")
        ('Values are lost.', 'dY of fc1 is out of band.')
    """
    first = text[:1] if text[1:2].isupper() else text[:1].upper()
    return f"{first}{text[1:].rstrip('.')}."


def steps_apart(step: int, other: int, unit: str) -> str:
    """Where a step lies from another, in words.

    Example:
        >>> steps_apart(48, 49, "step"), steps_apart(60, 49, "step"), steps_apart(49, 49, "step")
        ('1 step before', '11 steps after', 'with')
    """
    by = step - other
    if by == 0:
        return "with"
    return f"{abs(by)} {unit}{'' if abs(by) == 1 else 's'} {'before' if by < 0 else 'after'}"
