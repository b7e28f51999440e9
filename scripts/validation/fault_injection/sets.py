"""Which parts set thresholds, and which do not."""

from __future__ import annotations

#: parts from here on set no threshold
HELD_OUT = 100
#: of which no part sets one
HELD_OUT_FAMILIES = ("vit",)


def is_held_out(family: str, part: int) -> bool:
    """Whether a part sets no threshold."""
    return part >= HELD_OUT or family in HELD_OUT_FAMILIES
