"""The coverage ledger as plain data: a model's multiply-adds per token, and the share of them that we observe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Status of an entry. Transformer Engine decides at each call whether to quantize. So the status of its GEMMs is only
#: `observed`, and the column `scale_source` of the record shows how each operand was cast.
OBSERVED = "observed"
QUANTIZED_OBSERVED = "quantized and observed"
QUANTIZED_UNOBSERVED = "quantized and not observed"
HIGH_PRECISION = "high precision"
UNKNOWN = "unknown"
STATUSES = (OBSERVED, QUANTIZED_OBSERVED, QUANTIZED_UNOBSERVED, HIGH_PRECISION, UNKNOWN)

KINDS = ("linear", "experts", "attention", "convolution", "head", "other")

#: unit of entries whose multiply-adds can be added up
TOKEN = "token"
POSITION = "output position"


@dataclass(frozen=True)
class CoverageEntry:
    """One module, or several modules that differ only in the numbers in their names."""

    #: name of the module; for several modules, their name with `*` in place of numbers
    name: str
    #: one of KINDS
    kind: str
    #: one of STATUSES
    status: str
    #: why the entry is not observed, or which operands are not observed; empty if all operands are observed
    reason: str = ""
    #: number of modules
    count: int = 1
    #: shape of one module's parameter on this rank; empty if the module multiplies no parameter
    shape: tuple[int, ...] = ()
    #: multiply-adds of one module's forward product per `unit`, or None if unknown; for an expert, the mean over all tokens
    multiply_adds: float | None = None
    unit: str = TOKEN
    #: whether the parameter needs a gradient, so that the backward computes a wgrad
    trained: bool = True
    #: full name of the first module
    first: str = ""

    @property
    def observed(self) -> bool:
        """Return whether the entry's operands are observed."""
        return self.status in (OBSERVED, QUANTIZED_OBSERVED)

    @property
    def forward(self) -> float | None:
        """Return the multiply-adds per unit of the forward products, summed over the entry's modules."""
        return None if self.multiply_adds is None else self.multiply_adds * self.count

    @property
    def backward(self) -> float | None:
        """Return the multiply-adds per unit of dgrad and wgrad.

        We assume a dgrad for every layer, although the first layer of a model has none.
        """
        return None if self.forward is None else self.forward * (1 + self.trained)


@dataclass(frozen=True)
class CoverageLedger:
    """The products of this rank's part of a model, as far as its modules show them."""

    entries: Sequence[CoverageEntry]

    def forward(self, status: str | None = None, unit: str = TOKEN) -> float:
        """Return the total multiply-adds per unit of forward products. Entries of unknown size are left out."""
        return math.fsum(e.forward or 0 for e in self._sized(unit) if status in (None, e.status))

    def backward(self, status: str | None = None, unit: str = TOKEN) -> float:
        """Return the total multiply-adds per unit of dgrad and wgrad. Entries of unknown size are left out."""
        return math.fsum(e.backward or 0 for e in self._sized(unit) if status in (None, e.status))

    def _sized(self, unit: str) -> list[CoverageEntry]:
        return [e for e in self.entries if e.unit == unit and e.multiply_adds is not None]

    def share_not_observed(self) -> float | None:
        """Return which share of the multiply-adds per token, in forward and backward, we do not observe.

        Entries of unknown size are left out. Return None if no size is known.
        """
        total = self.forward() + self.backward()
        seen = math.fsum((e.forward or 0) + (e.backward or 0) for e in self._sized(TOKEN) if e.observed)
        return (total - seen) / total if total else None

    def _by_status(self) -> dict[str, float | None]:
        """Return the total multiply-adds of each status, or None for a status whose entries all have an unknown size."""
        sized = {e.status for e in self._sized(TOKEN)}
        return {
            s: _shortest(self.forward(s)) if s in sized else None
            for s in STATUSES
            if any(e.status == s for e in self.entries)
        }

    def _unsized(self) -> dict[str, int]:
        """Return the number of unobserved layers of unknown size, by kind. `share_not_observed` leaves these layers out."""
        found: Counter[str] = Counter()
        for e in self.entries:
            if e.shape and e.kind != "other" and not e.observed and (e.multiply_adds is None or e.unit != TOKEN):
                found[e.kind] += e.count
        return dict(found)

    def summarize_coverage(self) -> dict[str, Any]:
        """Return values for the fingerprint: totals by status, and unobserved entries by reason."""
        return {
            "multiply_adds_per_token": self._by_status(),
            "share_not_observed": _shortest(self.share_not_observed()),
            "layers_of_unknown_size": self._unsized(),
            "not_observed": _by_reason(e for e in self.entries if not e.observed),
            "partly_observed": _by_reason(e for e in self.entries if e.observed and e.reason),
        }


def _by_reason(entries: Iterable[CoverageEntry]) -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, list[CoverageEntry]] = {}
    for entry in entries:
        found.setdefault(entry.reason, []).append(entry)
    return {reason: _told(of) for reason, of in found.items()}


def _shortest(value: float | None) -> float | None:
    """Return a whole number as an int, so that the record and the TensorBoard tab show the same digits."""
    return int(value) if value is not None and value == int(value) else value


def _told(entries: Sequence[CoverageEntry]) -> dict[str, Any]:
    """Describe entries with the same reason. If the size of any entry is unknown, `multiply_adds_per_token` is None."""
    sizes = [e.forward if e.unit == TOKEN else None for e in entries]
    known = None if None in sizes else math.fsum(s or 0 for s in sizes)
    return {"count": sum(e.count for e in entries), "first": entries[0].first, "multiply_adds_per_token": _shortest(known)}
