"""Names for runs that are given as folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...record.schema import attempt_of_fingerprint
from ...record.storage import Storage
from ..records.logdir import Root

#: the folder that a callback puts its record into, which says nothing in a name
_USUAL = "fp8_debug"


def roots_of(addresses: Sequence[str]) -> list[Root]:
    """Folders under the names that their runs get: a folder above several runs adds nothing to theirs."""
    if len(addresses) == 1 and not _is_record(addresses[0]):
        return [Root("", addresses[0])]
    return [Root(name, address) for name, address in zip(names_of(addresses), addresses, strict=True)]


def names_of(addresses: Sequence[str]) -> list[str]:
    """The ends of addresses, as long as it takes to tell them apart; of equal ones the later are numbered.

    Example:
        >>> names_of(["runs/a/bad/fp8_debug", "runs/b/bad", "runs/baseline"])
        ['a/bad', 'b/bad', 'baseline']
    """
    parts = [_parts(address) for address in addresses]
    names = ["/".join(_end(part, parts)) for part in parts]
    met: Counter[str] = Counter()
    for i, name in enumerate(names):
        met[name] += 1
        if met[name] > 1:
            names[i] = f"{name} ({met[name]})"
    return names


def _parts(address: str) -> list[str]:
    parts = [part for part in Storage(address).path("").split("/") if part]
    return (parts[:-1] if len(parts) > 1 and parts[-1] == _USUAL else parts) or ["."]


def _end(part: list[str], parts: list[list[str]]) -> list[str]:
    others = [other for other in parts if other != part]
    lengths = (n for n in range(1, len(part)) if all(other[-n:] != part[-n:] for other in others))
    return part[-next(lengths, len(part)) :]


def _is_record(address: str) -> bool:
    root = Storage(address)
    return any(attempt_of_fingerprint(name) is not None for place in (root, root.below(_USUAL)) for name in place.names())
