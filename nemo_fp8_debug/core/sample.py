"""One sampled step as the recorders get it: a table, a row an operand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .keys import SHOWN_AS


@dataclass(frozen=True)
class Sample:
    """The metrics of one step."""

    step: int
    #: columns of equal length: KEYS, then what was measured against, then the metrics; None where a metric cannot be had
    columns: Mapping[str, Sequence[Any]]
    #: of the step as a whole: loss, learning rate, gradient norm, as far as they are known
    scalars: Mapping[str, float]
    #: columns of equal length: KEYS, the scale and format they were cast with, and the occupied bins with their counts
    histograms: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: as `columns`, under recipes that were not in use
    what_if: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: why the step was sampled, where it was not its turn
    trigger: str | None = None
    #: columns of equal length: layer, gemm, product and the errors of what it puts out, where that was asked for
    outputs: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    #: as `columns`, of the copies of operands that other products multiply, with the product
    copies: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: columns of equal length: what rows are about, and how the scales of their blocks are distributed
    block_scales: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: columns of equal length: layer, gemm, product and whether what it returned is right, where that was asked for
    verification: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: as `columns`, of what optimizers keep of weights, in use and under what-if recipes
    states: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: as `histograms`, of the same
    state_histograms: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: as `columns`, of what lies between GEMMs, in use and under what-if recipes, with metrics of its own
    activations: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: as `histograms`, of the same
    activation_histograms: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: columns of equal length: layer, gemm, what, and whether the copies that ranks hold of it are equal
    replicas: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["layer"])

    def first_nonfinite(self) -> str | None:
        """The operand that was the first in the order of execution to hold NaN or infinity, in words."""
        orders = self.columns.get("nonfinite_order", ())
        first = min((i for i, order in enumerate(orders) if order is not None), key=lambda i: orders[i], default=None)
        if first is None:
            return None
        layer, role, nan, inf = (self.columns[name][first] for name in ("layer", "role", "nan", "inf"))
        return f"first with NaN or infinity is {SHOWN_AS[role]} of {layer} ({nan} NaN, {inf} infinite)"

    @property
    def remarks(self) -> str:
        """What is out of the ordinary about the step, in words; empty where nothing is."""
        skipped = "the optimizer skipped this step" if self.scalars.get("skipped") else None
        why = self.trigger and f"sampled because of: {self.trigger}"
        return "; ".join(filter(None, (why, skipped, self.first_nonfinite())))


class Recorder(Protocol):
    """Takes samples somewhere. A fault in one costs that recorder's sample, not the run."""

    #: whether it must be called in the thread of the training loop; others work in the background
    in_callers_thread: bool

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """The run is about to start.

        Raises:
            ConfigError: the place cannot be written.
        """

    def record(self, sample: Sample) -> None:
        """Keep one sampled step."""

    def record_steps(self, steps: Mapping[int, Mapping[str, Any]]) -> None:
        """Keep the scalars of all steps since the last call, by step."""

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Keep the losses of an evaluation, by name."""

    def close(self) -> None:
        """The run is over."""
