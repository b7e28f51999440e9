"""How many harmed runs show anything without a baseline: `fault_injection/alone_limit.py --set tune`.

Each recorded quantity is reduced to the farthest that any operand of a role is, and to the most that it rises above its own
past. How far a run is out is the most that any of these is above all clean runs of its engine in the other parts, in units
of what those stand above their median. The limit on that is chosen with the truth in hand.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt
import polars as pl

from fault_injection.judge import share
from fault_injection.records import StoredRun, read_run, truths
from nemo_fp8_debug.analysis.loss.smoothing import running_median
from nemo_fp8_debug.analysis.runs.grid import lower_median
from nemo_fp8_debug.core.keys import ROLES

Floats = npt.NDArray[np.float64]
_METRICS = (
    *("underflow_pct", "overflow_pct", "relative_error", "cosine", "scale_ratio_log2", "outlier_log2", "kurtosis"),
    "amax",
)
#: metrics whose ratios mean the same, and not their differences
_RATIOS = ("relative_error", "kurtosis", "amax")
#: samples whose scales are still made up, and samples before one that it is compared with
FIRST, _PAST = 2, 8
#: shares of clean runs that may be above the limit
ACCUSED = (0.0, 0.02)
#: steps on either side that losses and gradient norms are smoothed over, and of the last part
_HALF, _LAST = 5, 60


def shown(run: StoredRun) -> Floats:
    """[Q]: how far each quantity is out, more is farther; -inf where there is none."""
    grid, roles = run.grid, run.grid.tensors["role"].to_numpy()
    found = [float(np.max(grid.of("nonfinite"), initial=0.0))]
    for metric in _METRICS:
        values = grid.of(metric)
        with np.errstate(divide="ignore", invalid="ignore"):
            values = (np.log2(values) if metric in _RATIOS else values)[:, FIRST:]
            rises = _rises(values)
        for role in ROLES:
            for of_role in (values[roles == role], rises[roles == role]):
                found += [_largest(of_role), _largest(-of_role)]
    return np.array(found + _of_steps(run))


def _rises(values: Floats) -> Floats:
    """[T, S] -> [T, S - _PAST]: by how much each sample lies above the median of those before."""
    if values.shape[1] <= _PAST:  # the run ended in NaN
        return values[:, :0]
    past = np.lib.stride_tricks.sliding_window_view(values, _PAST, axis=1)[:, :-1]
    rises: Floats = values[:, _PAST:] - lower_median(past)
    return rises


def _of_steps(run: StoredRun) -> list[float]:
    """Of the loss, the gradient norm, the learning rate and skipped steps."""
    steps, found = run.steps, list[float]()
    for name in ("loss", "grad_norm", "lr"):
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.log2(steps[name].to_numpy().astype(np.float64))
        lost = ~np.isfinite(values)
        smooth = running_median(np.where(lost, np.inf, values), _HALF)
        with np.errstate(invalid="ignore"):
            past = np.fmin.accumulate(smooth)
            found += [_largest(smooth - past), _largest(np.fmax.accumulate(smooth) - smooth), _largest(values - smooth)]
        found += [float(lost.sum()), float(np.median(values[-_LAST:])), -float(np.median(values[-_LAST:]))]
    skipped = steps["skipped"].fill_null(0.0).to_numpy()
    return [*found, float(skipped.sum())]


def _largest(values: Floats) -> float:
    return float(np.max(values, where=~np.isnan(values), initial=-np.inf))


def out(runs: Floats, clean: Floats) -> Floats:
    """[R]: how far each run is out; above 0, some quantity is beyond that of all clean ones.

    Args:
        runs: [R, Q].
        clean: [C, Q].
    """
    most, usual = clean.max(axis=0), np.median(clean, axis=0)
    with np.errstate(invalid="ignore"):
        spread = np.maximum(most - usual, 1e-6 * np.abs(most) + 1e-12)
        beyond: Floats = np.max(np.nan_to_num((runs - most) / spread, nan=-1.0), axis=1)
    return beyond


def scores(rows: pl.DataFrame) -> pl.DataFrame:
    """`rows` (engine, part, harmful, shown) with `out`, of engines that have clean runs in other parts."""
    found = []
    for (engine, part), mine in rows.group_by("engine", "part", maintain_order=True):
        others = rows.filter(pl.col("engine") == engine, pl.col("part") != part, ~pl.col("harmful"))
        if len(others):
            both = [np.array(of["shown"].to_list()) for of in (mine, others)]
            found.append(mine.with_columns(out=pl.Series(out(*both))))
    return pl.concat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("tune", "held-out"), default="tune")
    rows = [
        {name: told[name] for name in ("engine", "part", "harmful")} | {"shown": shown(read_run(told)).tolist()}
        for told in truths(parser.parse_args().set)
        if told["harmful"] or told["kind"] == "none"
    ]
    found = scores(pl.DataFrame(rows))
    harmed, clean = (found.filter(pl.col("harmful") == which)["out"].to_numpy() for which in (True, False))
    print(f"{len(harmed)} harmed runs, {len(clean)} clean ones, {len(rows[0]['shown'])} quantities")
    for most in ACCUSED:
        limit = np.sort(clean)[len(clean) - 1 - int(most * len(clean))]
        told = f"harmed above it {share(list(harmed > limit))}, clean {share(list(clean > limit))}"
        print(f"at most {most:.0%} of clean runs above the limit: {told}")
    print(f"beyond all clean runs of other parts: harmed {share(list(harmed > 0))}, clean {share(list(clean > 0))}")


if __name__ == "__main__":
    main()
