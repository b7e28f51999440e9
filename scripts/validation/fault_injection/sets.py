"""Which runs set thresholds, and which do not.

Parts below 100 have set thresholds from the start. Those from 100 to 199, and then those from 200 to 299, were held out,
judged once (held_out.log), and then released, but for the family and the kinds of fault that never set any. Those from 300
on are held out.
"""

from __future__ import annotations

#: parts from here on have fewer faults, of all kinds; what else differs from part to part begins anew
ALL_KINDS = 100
#: parts from here on set no threshold
HELD_OUT = 300
#: the bands that come with the package are learned from parts below it; figures of later ones were measured with them
LEARNED_FROM = 200
#: of which no part sets one
HELD_OUT_FAMILIES = ("vit",)
#: of fault, which set none; wrong labels have been looked at since the parts below 300 were released
HELD_OUT_KINDS = ("stale", "two_at_once", "wrong_labels")


def has_all_kinds(family: str, part: int) -> bool:
    """Whether any kind of fault is drawn in a part."""
    return part >= ALL_KINDS or family in HELD_OUT_FAMILIES


def set_of(family: str, part: int, kind: str) -> str:
    """`tune`, `held-out`, or `spent`: judged once already, and never used to set a threshold.

    Args:
        kind: of the run's fault.
    """
    if part >= HELD_OUT:
        return "held-out"
    return "spent" if family in HELD_OUT_FAMILIES or kind in HELD_OUT_KINDS else "tune"
