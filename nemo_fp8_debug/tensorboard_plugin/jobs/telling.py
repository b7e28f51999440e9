"""How a job tells what it knows so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Tell = Callable[[Mapping[str, Any]], None]


def to_nobody(partial: Mapping[str, Any]) -> None:
    """Where nobody wants to know."""
