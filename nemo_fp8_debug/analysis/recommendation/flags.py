"""Operands to change, why, and what was changed before they went wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Undo:
    """A recorded setting that an operand is to go back to."""

    #: recipe as the record has it; None: it keeps its own, and gets the FP8 state back that a resume lost
    recipe: str | None
    #: step from which on the run differs; None: the baseline differs
    since: int | None
    #: whether the diagnosis blames this change, so that undoing it helps whatever the figures say
    is_cause: bool = False


@dataclass(frozen=True)
class Flag:
    """Why an operand is looked at."""

    why: str
    #: first and last sample of the first stretch in which it was out of the baseline's band; None: it is not known
    out: tuple[int, int] | None = None
    #: what changed at it; None: nothing that the record shows
    undo: Undo | None = None
    #: whether its scale alone is wrong, so that a scale that follows its values helps
    only_scale: bool = False
