"""What is known of a run apart from its verdict: its raw losses, its samples, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from fault_injection.raw_losses import ENDS, Apart, Losses, Pair

#: how verdicts write roles that the `metrics` table has
ROLES = {"input": "X", "weight": "W", "grad_output": "dY"}


@dataclass(frozen=True)
class Fault:
    """What is wrong with a run."""

    #: first step that it acts in
    begins: int
    #: step at which a fault that grows has grown
    grown: int
    #: step before which it ends; None: nobody knows, or it stays
    until: int | None = None
    stays: bool = False
    #: patterns of the tensors that it sits in, such as `dY of layers.*.fc1`; empty: it sits in none
    culprits: tuple[str, ...] = ()
    kind: str = ""
    #: log2 of what its scale is off by; None: it is another fault
    bits: float | None = None
    #: what the learning rate or gradients are multiplied by, and whether the loss is; None: it is another fault
    factor: float | None = None
    at_the_loss: bool | None = None

    @classmethod
    def from_truth(cls, told: Mapping[str, Any]) -> Fault | None:
        """Read what the benchmark and the held-out set keep beside a record; None: the run is clean."""
        if told["kind"] == "none":
            return None
        fault = told["fault"]
        parts = fault.get("parts", [fault])
        grown = max(part.get("onset", told["onset"]) + part.get("over", 1) - 1 for part in parts)
        named = tuple(f"{ROLES.get(role, role)} of {layer}" for layer, role in told["culprits"])
        until, *others = (fault.get(name) for name in ("until", "bits", "factor", "at_the_loss"))
        return cls(told["onset"], grown, until, until is None, named, told["kind"], *others)

    def sits_in(self, tensor: str) -> bool:
        """Return True if it sits in a tensor, or in one of several experts that the name stands for."""
        return any(fnmatchcase(tensor, each) or fnmatchcase(each, tensor) for each in self.culprits)


@dataclass(frozen=True)
class Known:
    """What is known of a run apart from its verdict."""

    losses: Losses
    #: of the baseline that the verdict had; None: it had none
    baseline: Losses | None
    same_batches: bool
    #: None: the run is clean
    fault: Fault | None
    #: None: too close to tell
    harmed: bool | None
    #: steps, ascending
    sampled: Sequence[int]
    #: recorded layers; empty: nobody knows
    layers: frozenset[str] = frozenset()
    #: first step from which the loss is clearly above that of the run without the fault; None: it is not, or nobody knows
    leaves: int | None = None
    #: last sample of the baseline
    baseline_end: int | None = None

    @cached_property
    def interval(self) -> int:
        """Return the largest distance between two samples."""
        return max((b - a for a, b in zip(self.sampled, self.sampled[1:], strict=False)), default=1)

    @cached_property
    def pair(self) -> Pair | None:
        """Return the losses of run and baseline; None without one."""
        return None if self.baseline is None else Pair.of(self.losses, self.baseline)

    @cached_property
    def apart(self) -> Apart:
        """Return the gap at the end; a number that agrees with any other if there is none."""
        return (self.pair and self.pair.measure_end(ENDS[0])) or Apart(math.nan, math.nan)
