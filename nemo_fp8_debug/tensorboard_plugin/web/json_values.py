"""Values as JSON has them: null for NaN and infinities."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Containers and numbers of any kind, without what JSON cannot say."""
    if isinstance(value, Mapping):
        return {str(key): plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(held) for held in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers(values: Any) -> list[float | None]:
    """float64 [N], null where it is not finite."""
    values = np.asarray(values, np.float64)
    listed = values.tolist()
    for i in np.flatnonzero(~np.isfinite(values)).tolist():
        listed[i] = None
    return listed  # type: ignore[no-any-return]


def encoded(answer: Any) -> str:
    """The text of an answer that `plain` or `numbers` went over."""
    return json.dumps(answer, allow_nan=False, separators=(",", ":"))
