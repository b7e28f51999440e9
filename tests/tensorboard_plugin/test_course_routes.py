"""A metric over all steps and the changes that count, against the record as `read_table` has it."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from samples import sample
from tab import Tab, start, unpacked_flat

from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.tensorboard_plugin.records.metadata import find_worse_sign, order_layers

LAYERS = ["layers.0.linear_proj", "layers.0.linear_qkv", "layers.1.linear_proj", "layers.1.linear_qkv"]


def asked(tab: Tab, route: str, **parameters: Any) -> tuple[dict[str, Any], Any]:
    response = tab.get(route, **parameters)
    assert response.status_code == 200, response.text
    header, values = unpacked_flat(response.data)
    return header, values.reshape((2, -1) if route == "spread" else (len(header["layer"]), len(header["first"])))


@pytest.mark.parametrize("columns", [1, 7, 50, 2000])
@pytest.mark.parametrize("bounds", [{}, {"from_": 95, "to": 640}])
@pytest.mark.parametrize("metric", ["mse", "underflow_pct", "cosine", "nonfinite", "scale_ratio_log2", "amax"])
def test_a_course_has_the_worst_of_each_stretch(
    two_runs: Path, tab: Tab, columns: int, bounds: dict[str, int], metric: str
) -> None:
    header, values = asked(tab, "course", run="odd", metric=metric, columns=columns, **bounds)
    rows = read_table_rows(two_runs / "odd/fp8_debug", "metrics").with_columns(nonfinite=pl.col("nan") + pl.col("inf"))
    begin, end = bounds.get("from_", 0), bounds.get("to", 700)
    rows = rows.filter(pl.col("step").is_between(begin, end))
    assert len(header["first"]) <= columns and header["from"] == begin
    assert list(header["first"]) == sorted(header["first"]) and header["width"] == -(-(end - begin + 1) // columns)
    steps = rows["step"].unique().sort().to_list()
    place = {step: (step - begin) // header["width"] for step in steps}
    stretches = sorted(set(place.values()))
    assert [[s for s in steps if place[s] == k] for k in stretches] == [
        [s for s in steps if first <= s <= last] for first, last in zip(header["first"], header["last"], strict=True)
    ]
    assert sum(header["samples"]) == len(steps)
    sampled = read_table_rows(two_runs / "odd/fp8_debug", "metrics")["step"].unique().sort()
    assert header["warm_up"] == sampled[math.ceil(len(sampled) / 10) - 1]  # of the run, whatever is looked at
    worse = find_worse_sign(metric)
    badness = {1: float, -1: lambda v: -v, None: abs}[worse]
    expected: dict[tuple[str, str, int], float] = {}
    for layer, role, step, value in rows.select("layer", "role", "step", pl.col(metric).cast(pl.Float64)).iter_rows():
        key = layer, role, stretches.index(place[step])
        if value is not None and not np.isnan(value) and (key not in expected or badness(value) > badness(expected[key])):
            expected[key] = value
    for i, (layer, role) in enumerate(zip(header["layer"], header["role"], strict=True)):
        for j in range(len(stretches)):
            with np.errstate(over="ignore"):
                want = np.float32(expected.get((layer, role, j), np.nan))
            assert values[i, j] == want or (np.isnan(values[i, j]) and np.isnan(want))


def running_median(values: list[float]) -> list[float]:
    windows = [max(0, min(i - 4, len(values) - 9)) for i in range(len(values))]
    return [statistics.median_low(values[at : at + 9]) for at in windows]


def test_the_changes_that_count_are_those_of_compare(tmp_path: Path) -> None:
    """What counts however steady a baseline is, six spreads of it, or the most that it moves by."""
    random, record = np.random.default_rng(0), start(tmp_path / "run")
    underflow = np.stack([np.full(40, 2.0), 20 + 2 * random.normal(size=40), 3 + 0.01 * random.normal(size=40)])
    underflow[2, 20] = 9.0
    for step, values in enumerate(underflow.T):
        rows = [{"layer": layer, "underflow_pct": float(v)} for layer, v in zip(LAYERS, values, strict=False)]
        record.record(sample(step, rows))
    record.close()
    header, (rises, falls) = asked(Tab(tmp_path), "spread", run="run", metric="underflow_pct")
    assert header["layer"] == [LAYERS[1], LAYERS[0], LAYERS[2]] and header["least"] == 1.0 and not header["log2"]
    for layer, rise, fall in zip(header["layer"], rises, falls, strict=True):
        values = underflow[LAYERS.index(layer)].tolist()
        medians = running_median(values)
        moves = [abs(v - m) for v, m in zip(values, medians, strict=True)]
        usual = statistics.median_low(medians)
        spread = 6 * 1.4826 * statistics.median_low(moves)
        assert rise == pytest.approx(max(1.0, 0.5 * usual, spread, max(moves[2:])), rel=1e-6) and fall == rise
    assert dict(zip(header["layer"], rises.tolist(), strict=True))[LAYERS[2]] == pytest.approx(6.0, abs=0.1)


def test_a_scale_that_is_too_small_counts_sooner_than_one_that_is_too_large(tab: Tab) -> None:
    header, (rises, falls) = asked(tab, "spread", run="odd", metric="scale_ratio_log2")
    assert len(header["layer"]) == len(rises) and set(rises.tolist()) == {1.0} and set(falls.tolist()) == {6.0}


def test_layers_are_in_order_of_execution() -> None:
    made = ["embedding", *LAYERS, "moe.w1", "moe.w2", "moe.w3", "mlp.w1", "mlp.w2", "output_layer"]
    assert order_layers(made) == [
        "embedding",
        *(LAYERS[i] for i in (1, 0, 3, 2)),
        *("moe.w1", "moe.w3", "moe.w2", "mlp.w1", "mlp.w2", "output_layer"),
    ]


@pytest.mark.parametrize("columns", ["0", "2001", "-1", "1e3", ""])
def test_a_number_of_columns_is_checked(tab: Tab, columns: str) -> None:
    status, why = tab.error("course", run="odd", metric="mse", columns=columns)
    assert status == 400 and "columns" in why
