"""Rows of histograms as the tab's server gives them, and what numerics makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from nemo_fp8_debug.numerics.formats import FloatFormat
from nemo_fp8_debug.numerics.histogram import Histogram, HistogramBatch
from nemo_fp8_debug.numerics.metrics import (
    QuantizationSums,
    ValueMoments,
    compute_histogram_moments,
    compute_metrics,
    merge_moments,
    quantization_sums_of_histograms,
)
from nemo_fp8_debug.numerics.tensor_scaling import compute_scale

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: metrics that the page shows
SHOWN = ("underflow_pct", "overflow_pct", "mse", "relative_error", "sqnr_db", "cosine")
Row = dict[str, Any]


def row(dtype: str, counts_by_bin: dict[int, int]) -> Row:
    """A row of a histogram as the server gives it."""
    bins = sorted(counts_by_bin)
    return {"dtype": dtype, "bins": bins, "counts": [counts_by_bin[b] for b in bins]}


#: rows of a histogram, a scale a row, format
Question = tuple[Sequence[Row], Sequence[float], FloatFormat]


def by_numerics(rows: Sequence[Row], scales: Sequence[float], fmt: FloatFormat) -> dict[str, float]:
    """The metrics of all rows together, each cast with its own scale, and the counts behind them."""
    return all_by_numerics([(rows, scales, fmt)])[0]


def all_by_numerics(questions: Sequence[Question]) -> list[dict[str, float]]:
    """`by_numerics` of many at once."""
    batch = HistogramBatch.pack_histograms([_histogram(row) for rows, _, _ in questions for row in rows])
    scale = torch.tensor([scale for _, scales, _ in questions for scale in scales], dtype=torch.float32)
    formats = [fmt for rows, _, fmt in questions for _ in rows]
    ends = torch.tensor([0] + [len(rows) for rows, _, _ in questions]).cumsum(0).tolist()
    mine = [slice(*ends) for ends in pairwise(ends)]
    of_rows, sums_of_rows = compute_histogram_moments(batch), quantization_sums_of_histograms(batch, scale, formats)
    known = ValueMoments.concat([merge_moments(of_rows.rows(storage)) for storage in mine])
    sums = QuantizationSums.concat([sums_of_rows.rows(storage).sum_rows() for storage in mine])
    limits = torch.tensor([fmt.max for _, _, fmt in questions], dtype=torch.float32)
    current = compute_scale(known.amax.float(), limits)
    columns = compute_metrics(known, sums, current, current)
    columns |= {"n": known.n, "nan": known.nan, "inf": known.inf, "amax": known.amax, "current": current}
    columns |= {"underflows": sums.underflows, "overflows": sums.overflows}
    return [{name: float(values[i]) for name, values in columns.items()} for i in range(len(questions))]


def _histogram(row: Row) -> Histogram:
    histogram = Histogram(DTYPES[row["dtype"]])
    histogram.counts[torch.tensor(row["bins"], dtype=torch.int64)] = torch.tensor(row["counts"], dtype=torch.int64)
    return histogram
