"""Numbers of steps, as the training thread notes them and as they are read in the background."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch


def noted(scalars: Mapping[str, Any], warn: Callable[[str], None]) -> dict[str, Any]:
    """Scalars as they are now; tensors stay on their device until they are read."""
    found: dict[str, Any] = {}
    for name, value in scalars.items():
        if torch.is_tensor(value) and value.numel() == 1:
            found[name] = value.detach().clone()
        elif isinstance(value, (int, float)):
            found[name] = value
        elif value is not None:
            warn(f"{name} of a step is not recorded: it is no scalar but {type(value).__name__}")
    return found


def read_all(steps: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Numbers of steps, and why they were sampled out of turn."""
    return {step: read(scalars) | {k: scalars[k] for k in ("trigger",) if k in scalars} for step, scalars in steps.items()}


def read(scalars: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a step; waits for the device where they are still there."""
    numbers = {name: float(value) for name, value in scalars.items() if name != "trigger"}
    multiplier = numbers.get("grad_multiplier", 1.0)
    if not math.isfinite(multiplier) or multiplier == 0:  # of micro-batches that differ, or of an overflow
        del numbers["grad_multiplier"]
    return numbers
