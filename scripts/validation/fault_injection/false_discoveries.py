"""How far out of the band tensors of clean runs are, each against a clean run of another seed and other data.

What `discoveries` takes for chance must be no less: `tests/analysis/test_discoveries.py` holds it against these runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fault_injection.judge import baseline_of
from fault_injection.records import read_run
from nemo_fp8_debug.analysis.comparison import onset
from nemo_fp8_debug.analysis.comparison.onset import CHANCE, FALLS
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable, select_common_tensors

Floats = npt.NDArray[np.float64]


def strongest(baseline: MetricsTable, run: MetricsTable) -> Floats:
    """[T]: how many times the least rise that counts each tensor shows at most, by any metric; below 1 it is within."""
    pair = onset.AlignedRunSamples(*(metrics.grid for metrics in select_common_tensors(baseline, run)))
    found = np.zeros(len(pair.tensors))
    for evidence in onset.EVIDENCE:
        if evidence.metric != "nonfinite":
            excess = onset.measure_band_excess(evidence, pair)[2]
            lasting = np.lib.stride_tricks.sliding_window_view(excess, onset.IN_A_ROW, axis=1).min(-1).max(axis=1)
            alone = excess[:, onset.FIRST :].max(axis=1) / evidence.transient
            found = np.fmax(found, np.fmax(lasting, alone))
    return found


def of_pairs(runs: Iterable[Mapping[str, Any]]) -> Iterator[Floats]:
    """Of each clean run against the baseline of another seed."""
    by_name = {(told["part"], told["name"]): told for told in runs if told["kind"] == "none"}

    @lru_cache(maxsize=16)  # the runs of a part, most of which are the baseline of another too
    def metrics_of(part: str, name: str) -> MetricsTable:
        return read_run(by_name[part, name]).metrics

    for (part, name), told in by_name.items():
        other = str(baseline_of(told, "other"))
        if (part, other) in by_name:
            yield strongest(metrics_of(part, other), metrics_of(part, name))


def bound(excess: Floats) -> Floats:
    """The chance that is assumed of that much or more."""
    return np.minimum(CHANCE * np.exp(-FALLS * (excess - 1)), 1.0)
