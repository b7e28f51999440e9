"""The rule that stands for a monitor of norms and NaN, as training codes and dashboards have one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from nemo_fp8_debug import read_record

#: steps before it judges, steps that it looks back, and how far a value may be from their median
QUIET, BACK, NORM_FACTOR, LOSS_FACTOR = 20, 50, 10.0, 1.5
#: losses above the limit in a row that count
IN_A_ROW = 3


def watch_run(folder: Path) -> str:
    """Return what the monitor says of a run: the first alarm, or "silent"."""
    table = read_record(str(folder), "steps", ["step", "loss", "grad_norm"])
    losses = [math.nan if value is None else float(value) for value in table["loss"]]
    norms = None if table["grad_norm"] is None else [None if v is None else float(v) for v in table["grad_norm"]]
    return find_alarm([int(step) for step in table["step"]], losses, norms)


def find_alarm(steps: Sequence[int], losses: Sequence[float], norms: Sequence[float | None] | None) -> str:
    """Return the first alarm: a value that is not finite, a norm far from its median, or losses far above theirs."""
    above = 0
    for i, step in enumerate(steps):
        norm = norms[i] if norms is not None else None
        if not math.isfinite(losses[i]):
            return f"NaN loss at {step}"
        if norm is not None and not math.isfinite(norm):
            return f"NaN gradient norm at {step}"
        if norm == 0:
            return f"gradient norm 0 at {step}"
        if i < QUIET:
            continue
        before = [n for n in norms[max(0, i - BACK) : i] if n is not None] if norms is not None else []
        if norm is not None and before and norm > NORM_FACTOR * median(before):
            return f"gradient norm up at {step}"
        if norm is not None and before and norm < median(before) / NORM_FACTOR:
            return f"gradient norm down at {step}"
        above = above + 1 if losses[i] > LOSS_FACTOR * median(losses[max(0, i - BACK) : i]) else 0
        if above == IN_A_ROW:
            return f"loss up at {step - IN_A_ROW + 1}"
    return "silent"
