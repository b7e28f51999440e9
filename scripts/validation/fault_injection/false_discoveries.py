"""How far out of the band tensors of clean runs are, each against a clean run of another seed and other data:
`fault_injection/false_discoveries.py`. What `discoveries` takes for chance must be no less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fault_injection.judge import baseline_of
from fault_injection.records import read_run, truths
from nemo_fp8_debug.analysis.comparison import onset
from nemo_fp8_debug.analysis.comparison.onset import CHANCE, FALLS
from nemo_fp8_debug.analysis.runs.metrics import Metrics, select_common

Floats = npt.NDArray[np.float64]


def strongest(baseline: Metrics, run: Metrics) -> Floats:
    """[T]: how many times the least rise that counts each tensor shows at most, by any metric; below 1 it is within."""
    pair = onset.Pair(*(metrics.grid for metrics in select_common(baseline, run)))
    found = np.zeros(len(pair.tensors))
    for evidence in onset.EVIDENCE:
        if evidence.metric != "nonfinite":
            excess = onset.measure_excess(evidence, pair)[2]
            lasting = np.lib.stride_tricks.sliding_window_view(excess, onset.IN_A_ROW, axis=1).min(-1).max(axis=1)
            alone = excess[:, onset.FIRST :].max(axis=1) / evidence.transient
            found = np.fmax(found, np.fmax(lasting, alone))
    return found


def of_pairs(runs: Iterable[Mapping[str, Any]], kind: str = "other", interval: int = 5) -> Iterator[Floats]:
    """Of each clean run against its baseline of a kind."""
    by_name = {(told["part"], told["name"]): told for told in runs if told["kind"] == "none"}

    @lru_cache(maxsize=16)  # the runs of a part, most of which are the baseline of another too
    def metrics_of(part: str, name: str) -> Metrics:
        return read_run(by_name[part, name], interval).metrics

    for (part, name), told in by_name.items():
        other = str(baseline_of(told, kind))
        if (part, other) in by_name:
            yield strongest(metrics_of(part, other), metrics_of(part, name))


def bound(excess: Floats) -> Floats:
    """The chance that is assumed of that much or more."""
    return np.minimum(CHANCE * np.exp(-FALLS * (excess - 1)), 1.0)


def main() -> None:
    for kind in ("other", "depth"):
        for interval in (5, 20):
            values = np.concatenate(list(of_pairs(truths("tune"), kind, interval)))
            shares = ", ".join(
                f"{x}: {np.mean(values >= x):.2e} (assumed {bound(x):.2e})" for x in (0.4, 0.5, 0.6, 0.7, 0.8)
            )
            print(f"{kind}, every {interval} steps, {len(values)} tensors, largest {values.max():.2f}; share of {shares}")


if __name__ == "__main__":
    main()
