"""Are the metrics of a record those that a CPU finds? Of dumped operands they are computed once more and compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from nemo_fp8_debug.kernels import count_histogram, quantization_sums
from nemo_fp8_debug.numerics import metrics
from nemo_fp8_debug.numerics.block_scaling import BlockScalingRule
from nemo_fp8_debug.numerics.formats import FORMATS, FloatFormat
from nemo_fp8_debug.numerics.histogram import Histogram, HistogramBatch
from nemo_fp8_debug.numerics.metric_columns import make_metric_columns
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.record.dump import DumpedTensorInfo, dumped_files, read_dump
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.storage import FolderStorage


@dataclass
class Compared:
    """Metrics of a record, and how many of them a CPU finds bit by bit as well."""

    metrics: int = 0
    equal: int = 0
    #: the largest relative difference of the others
    apart: float = 0.0

    def add(self, recorded: float | None, found: float | None) -> None:
        self.metrics += 1
        self.equal += recorded == found
        if recorded != found:
            known = recorded is not None and found is not None
            self.apart = max(self.apart, abs(recorded - found) / max(abs(recorded), abs(found)) if known else math.inf)


@dataclass
class Operands:
    """Dumped operands, held against what a CPU finds in them."""

    all: int = 0
    #: whose histogram is the same, count by count
    histograms: int = 0
    #: from histograms: integers, added up on the host
    counted: Compared = field(default_factory=Compared)
    #: from sums over float32 values or blocks, taken on the device in an order of its own
    summed: Compared = field(default_factory=Compared)


def compare_with_cpu(run: Path) -> Operands:
    """Every operand that a run of one call a step and one rank has dumped, against its rows in the record."""
    operands, storage = Operands(), FolderStorage(run)
    tables = [read_table_rows(run, name) for name in ("metrics", "histograms")]
    for _, _, _, name in dumped_files(storage):
        about, tensors = read_dump(storage, name)
        row, recorded = (_row_of(about, table) for table in tables)
        found = count_histogram(tensors["value"])
        bins, counts = found.occupied_bins
        operands.all += 1
        operands.histograms += np.array_equal(bins, recorded["bins"]) and np.array_equal(counts, recorded["counts"])
        rule = parse_recipe(row["recipe"]).scaling
        scaling = rule if isinstance(rule, BlockScalingRule) else tensors["scale"]
        kind = operands.summed if found.rounded or scaling is rule else operands.counted
        fmt = FORMATS[row["format"]]  # a dump under a block recipe has that of current scaling
        for metric, value in _found_by_cpu(about.role, fmt, tensors["value"], found, scaling).items():
            kind.add(row[metric], value)
    return operands


def _row_of(about: DumpedTensorInfo, table: pl.DataFrame) -> dict[str, Any]:
    same = (pl.col("step") == about.step) & (pl.col("layer") == about.layer) & (pl.col("role") == about.role)
    return table.row(by_predicate=same, named=True)


def _found_by_cpu(
    role: str, fmt: FloatFormat, x: torch.Tensor, counted: Histogram, scaling: torch.Tensor | BlockScalingRule
) -> dict[str, float | None]:
    batch = HistogramBatch.pack_histograms([counted])
    moments = metrics.compute_histogram_moments(batch)
    if counted.rounded:
        moments = metrics.compute_float32_moments(x).with_median(moments.median)
    scale = torch.tensor([torch.nan]) if isinstance(scaling, BlockScalingRule) else scaling[None]
    if counted.rounded or isinstance(scaling, BlockScalingRule):
        sums = quantization_sums(x, scaling, role, fmt)
    else:
        sums = metrics.quantization_sums_of_histograms(batch, scale, [fmt])
    columns = make_metric_columns(moments, sums, scale, [fmt])
    return {name: values[0] for name, values in columns.items() if name != "format"}
