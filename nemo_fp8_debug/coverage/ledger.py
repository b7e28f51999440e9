"""The coverage ledger: what a model multiplies for each token, and what of that is observed. Plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: what is known of an entry. Whether Transformer Engine quantizes is decided at each call, so what it multiplies is
#: `observed`, and the record's `scale_source` says how it was cast.
OBSERVED = "observed"
QUANTIZED_OBSERVED = "quantized and observed"
QUANTIZED_UNOBSERVED = "quantized and not observed"
HIGH_PRECISION = "high precision"
UNKNOWN = "unknown"
STATUSES = (OBSERVED, QUANTIZED_OBSERVED, QUANTIZED_UNOBSERVED, HIGH_PRECISION, UNKNOWN)

KINDS = ("linear", "experts", "attention", "convolution", "head", "other")

#: of which entries multiply-adds can be added up
TOKEN = "token"
POSITION = "output position"


@dataclass(frozen=True)
class Entry:
    """Modules of one pattern that multiply the same way."""

    #: the name of a module or, with `*` for numbers, of several
    name: str
    #: one of KINDS
    kind: str
    #: one of STATUSES
    status: str
    #: why it is not observed, or which operands are not; empty: all are
    reason: str = ""
    #: modules
    count: int = 1
    #: of one module's parameter on this rank; empty: it multiplies no parameter
    shape: tuple[int, ...] = ()
    #: of the forward product of one module, for each `unit`; of an expert the mean over tokens; None: not known
    multiply_adds: float | None = None
    unit: str = TOKEN
    #: whether the parameter has a gradient; without it there is no wgrad
    trained: bool = True
    #: the first module, by its whole name
    first: str = ""

    @property
    def observed(self) -> bool:
        """Whether operands are looked at."""
        return self.status in (OBSERVED, QUANTIZED_OBSERVED)

    @property
    def forward(self) -> float | None:
        """Multiply-adds of all its modules' forward products, for each unit."""
        return None if self.multiply_adds is None else self.multiply_adds * self.count

    @property
    def backward(self) -> float | None:
        """The same of dgrad and wgrad; a first layer, whose input needs no gradient, runs no dgrad and is not told apart."""
        return None if self.forward is None else self.forward * (1 + self.trained)


@dataclass(frozen=True)
class Ledger:
    """What this rank's part of a model multiplies, as far as its modules show."""

    entries: Sequence[Entry]

    def forward(self, status: str | None = None, unit: str = TOKEN) -> float:
        """Multiply-adds of forward products for each token, of entries whose size is known."""
        return math.fsum(e.forward or 0 for e in self._sized(unit) if status in (None, e.status))

    def backward(self, status: str | None = None, unit: str = TOKEN) -> float:
        """The same of dgrad and wgrad."""
        return math.fsum(e.backward or 0 for e in self._sized(unit) if status in (None, e.status))

    def _sized(self, unit: str) -> list[Entry]:
        return [e for e in self.entries if e.unit == unit and e.multiply_adds is not None]

    def share_not_observed(self) -> float | None:
        """Of the multiply-adds for each token whose size is known, forward and backward; None: none is known."""
        total = self.forward() + self.backward()
        seen = math.fsum((e.forward or 0) + (e.backward or 0) for e in self._sized(TOKEN) if e.observed)
        return (total - seen) / total if total else None

    def _by_status(self) -> dict[str, float | None]:
        """Of what is known in size; None: nothing of a status is."""
        sized = {e.status for e in self._sized(TOKEN)}
        return {
            s: _shortest(self.forward(s)) if s in sized else None
            for s in STATUSES
            if any(e.status == s for e in self.entries)
        }

    def _unsized(self) -> dict[str, int]:
        """How many layers are not observed and left out of the share, by kind: it may be far too low."""
        found: Counter[str] = Counter()
        for e in self.entries:
            if e.shape and e.kind != "other" and not e.observed and (e.multiply_adds is None or e.unit != TOKEN):
                found[e.kind] += e.count
        return dict(found)

    def compact(self) -> dict[str, Any]:
        """For the fingerprint: totals by status, and by reason what is not observed."""
        return {
            "multiply_adds_per_token": self._by_status(),
            "share_not_observed": _shortest(self.share_not_observed()),
            "layers_of_unknown_size": self._unsized(),
            "not_observed": _by_reason(e for e in self.entries if not e.observed),
            "partly_observed": _by_reason(e for e in self.entries if e.observed and e.reason),
        }


def _by_reason(entries: Iterable[Entry]) -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.reason, []).append(entry)
    return {reason: _told(of) for reason, of in found.items()}


def _shortest(value: float | None) -> float | None:
    """Whole numbers as such, so that a record and the tab show them alike."""
    return int(value) if value is not None and value == int(value) else value


def _told(entries: Sequence[Entry]) -> dict[str, Any]:
    """`multiply_adds_per_token` is None if that of any entry is not known: it is unknown then, and never 0."""
    sizes = [e.forward if e.unit == TOKEN else None for e in entries]
    known = None if None in sizes else math.fsum(s or 0 for s in sizes)
    return {"count": sum(e.count for e in entries), "first": entries[0].first, "multiply_adds_per_token": _shortest(known)}
