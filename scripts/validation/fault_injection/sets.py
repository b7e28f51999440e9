"""Which parts of the benchmark have which kinds of fault, and which runs set thresholds first."""

from __future__ import annotations

#: parts from here on have fewer faults, of all kinds; what else differs from part to part begins anew
ALL_KINDS = 100
#: parts from here on are not in `tune`
LATER = 300
#: the bands that come with the package are learned from parts below it; figures of later ones were measured with them
LEARNED_FROM = 200
#: of which no part is in `tune`
RARE_FAMILIES = ("vit",)
#: of fault, which parts below `ALL_KINDS` do not have
RARE_KINDS = ("stale", "two_at_once", "wrong_labels")


def has_all_kinds(family: str, part: int) -> bool:
    """Return True if any kind of fault is drawn in a part."""
    return part >= ALL_KINDS or family in RARE_FAMILIES


def is_tune(family: str, part: int, kind: str) -> bool:
    """Return True if a run with a kind of fault set thresholds before any other did."""
    return part < LATER and family not in RARE_FAMILIES and kind not in RARE_KINDS
