"""How a number is written."""

from __future__ import annotations


def number(value: float | None, unit: str = "", prefix: str = "") -> str:
    """Three digits of a metric; `-` where it is absent."""
    return "-" if value is None else f"{prefix}{value:.3g}{unit}"
