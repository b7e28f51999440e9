"""A step to recompute, and the parts that it is recomputed from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import polars as pl
import torch

from ...core.keys import Key
from ...core.layer_names import aggregate_key
from ...numerics.block_scaling import BlockRule
from ...numerics.formats import FloatFormat
from ...numerics.histogram import Histogram
from ...numerics.recipe import Recipe
from ...numerics.tensor_scaling import CurrentScaling

#: columns that say which operand a row is about
OPERAND = ["layer", "role"]


@dataclass(frozen=True)
class Job:
    """One step, with all that a process elsewhere needs to recompute it."""

    run: str
    source: str
    #: None: the recorded scales
    recipe: Recipe | None
    step: int
    #: the step's recorded rows
    about: pl.DataFrame
    scales: Mapping[Key, torch.Tensor | CurrentScaling | BlockRule]
    #: of dY in that step
    multiplier: float | None
    #: operands to recompute; None: all
    only: Collection[Key] | None

    def wants(self, key: Key) -> bool:
        """Whether an operand is to be recomputed."""
        return self.only is None or key in self.only or aggregate_key(*key) in self.only


@dataclass(frozen=True)
class Part:
    """Calls of an operand that were cast with one scale: their histogram, or the tensor itself where a histogram is not
    enough."""

    key: Key
    values: Histogram | torch.Tensor
    recipe: str
    format: FloatFormat
    #: NaN where blocks had scales of their own
    scale: float
