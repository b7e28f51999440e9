"""Numbers of steps, as the training thread notes them and as they are read in the background."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.arguments import nearest
from ..record.schema import STEP_SCALARS


def usable(scalars: Mapping[str, Any], warn: Callable[[str], None], in_record: bool = True) -> dict[str, Any]:
    """The scalars of a step that can be recorded: numbers, and tensors of one element, which are not looked at.

    Args:
        warn: told of each of the others, and what is valid.
        in_record: whether a run record takes them, which has no place for other names. Recorders of the user get all, and
            then only a name that is nearly one of `STEP_SCALARS` is warned of.
    """
    found: dict[str, Any] = {}
    for name, value in scalars.items():
        number = _number(value)
        if number is not None:
            found[name] = number
        elif value is not None:
            warn(f"{name} of a step is not recorded: it is not a scalar but {_described(value)}")
    for name in sorted(found.keys() - STEP_SCALARS):
        meant = _meant(name)
        if meant or in_record:
            warn(f"{name} of a step is not in the record{meant}; the record takes {', '.join(STEP_SCALARS)}")
    return found


def usable_losses(losses: Mapping[str, Any], warn: Callable[[str], None]) -> dict[str, Any]:
    """Those of an evaluation that can be recorded; `warn` is told of the others."""
    found = {name: _number(value) for name, value in losses.items()}
    for name in losses:
        if found[name] is None:
            warn(f"{name} of an evaluation is not recorded: it is not a scalar but {_described(losses[name])}")
    return {name: value for name, value in found.items() if value is not None}


@functools.lru_cache(maxsize=256)
def _meant(name: str) -> str:
    return nearest(name, STEP_SCALARS)


def _number(value: Any) -> Any:
    """A number or a tensor of one element; None if it is neither."""
    if torch.is_tensor(value):
        return value if value.numel() == 1 and not value.is_complex() and not value.is_meta else None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except Exception:  # more than one element, or more than a float holds
        return None
    return value if isinstance(value, (int, float)) else number


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of {value.numel()} elements" if torch.is_tensor(value) and value.numel() != 1 else kind


@dataclass
class StepScalars:
    """The scalars of one step on their way to the record: noted in the training thread, read in the background."""

    #: seconds since the epoch
    time: float
    #: numbers, and tensors of one element that stay on their device until they are read
    values: Mapping[str, Any]
    #: why the step was sampled out of turn
    trigger: str | None = None
    #: numbers that only other ranks know, as the last stage of a pipeline its loss
    of_others: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def noted(cls, scalars: Mapping[str, Any]) -> StepScalars:
        """Scalars as they are now, whatever becomes of their tensors."""
        values = {name: value.detach().clone() if torch.is_tensor(value) else value for name, value in scalars.items()}
        return cls(time.time(), values)

    def numbers(self) -> dict[str, float]:
        """Waits for the device if they are still there."""
        numbers = {**self.of_others, "time": self.time, **{name: float(value) for name, value in self.values.items()}}
        scale = numbers.get("grad_scale", 1.0)
        if not math.isfinite(scale) or scale == 0:  # of micro-batches that differ, or of an overflow
            del numbers["grad_scale"]
        return numbers

    def row(self) -> dict[str, Any]:
        """Columns of the `steps` table."""
        return self.numbers() | ({"trigger": self.trigger} if self.trigger else {})


def rows(steps: Mapping[int, StepScalars]) -> dict[int, dict[str, Any]]:
    """By step, columns of the `steps` table."""
    return {step: scalars.row() for step, scalars in steps.items()}
