"""How many harmed runs show anything without a baseline: `fault_injection/alone_limit.py --set tune`.

Each recorded quantity is reduced to the farthest that any operand of a role is, and to the most that it rises above its own
past. A harmed run shows something if one of them is beyond all clean runs of its engine: a limit that is chosen with the
truth in hand. The clean runs that stand in the way of most are then left out, one by one, up to 2 in 100.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

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
#: share of clean runs that may be accused
ACCUSED = 0.02
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


def seen(harmed: Floats, clean: Floats) -> npt.NDArray[np.bool_]:
    """[H]: whether any quantity of a harmed run is beyond that of all clean ones."""
    return np.asarray((harmed > clean.max(axis=0)).any(axis=1))


def most_seen(harmed: Mapping[str, Floats], clean: Mapping[str, Floats]) -> tuple[int, int]:
    """By engine, [H, Q] and [C, Q] -> how many harmed runs are seen, and how many clean ones were left out for that."""
    kept = dict(clean)
    left_out = 0
    for _ in range(int(ACCUSED * sum(map(len, clean.values())))):
        options = []
        for engine, of_clean in kept.items():
            before = int(seen(harmed[engine], of_clean).sum()) if len(of_clean) > 1 else 0
            for i in range(len(of_clean) if len(of_clean) > 1 else 0):
                without = np.delete(of_clean, i, axis=0)
                options.append((int(seen(harmed[engine], without).sum()) - before, engine, i))
        gain, engine, i = max(options)
        if gain <= 0:
            break
        kept[engine] = np.delete(kept[engine], i, axis=0)
        left_out += 1
    return sum(int(seen(harmed[engine], of_clean).sum()) for engine, of_clean in kept.items()), left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("tune", "held-out"), default="tune")
    rows: dict[str, dict[bool, list[Floats]]] = defaultdict(lambda: {True: [], False: []})
    for told in truths(parser.parse_args().set):
        if told["harmful"] or told["kind"] == "none":
            rows[told["engine"]][bool(told["harmful"])].append(shown(read_run(told)))
    both = {engine: of for engine, of in rows.items() if of[True] and of[False]}
    harmed, clean = ({engine: np.array(of[which]) for engine, of in both.items()} for which in (True, False))
    n, of_clean = sum(map(len, harmed.values())), sum(map(len, clean.values()))
    beyond = [bool(one) for engine in harmed for one in seen(harmed[engine], clean[engine])]
    print(f"{n} harmed runs, {of_clean} clean ones, {next(iter(clean.values())).shape[1]} quantities")
    print(f"beyond all clean runs of the engine: {share(beyond)}; not: {share([not one for one in beyond])}")
    k, left_out = most_seen(harmed, clean)
    print(f"with {left_out} clean runs accused: {share([True] * k + [False] * (n - k))}")


if __name__ == "__main__":
    main()
