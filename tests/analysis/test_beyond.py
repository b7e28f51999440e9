"""What no healthy operand does: for two samples, far beyond in one, from the start on, and behind the first samples."""

from __future__ import annotations

import polars as pl
import pytest

from nemo_fp8_debug.analysis.diagnosis.limits import find_operands_over_limit
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.numerics.limits import LIMITS

STEPS = [0, 5, 10, 15, 20, 25, 30]


def metrics(underflow: list[float], role: str = "weight") -> pl.DataFrame:
    rest = {"layer": ["fc1"] * 7, "role": [role] * 7, "overflow_pct": [0.0] * 7, "scale_ratio_log2": [None] * 7}
    return pl.DataFrame(
        rest | {"step": STEPS, "underflow_pct": underflow}, schema_overrides={"scale_ratio_log2": pl.Float64}
    )


@pytest.mark.parametrize(
    ("underflow", "onset"),
    [
        ([0, 0, 0, 5, 5, 0, 0], 15),
        ([0, 0, 0, 5, 0, 5, 0], None),
        ([0, 0, 0, 0, 13, 0, 0], 20),
        ([9, 9, 0, 0, 0, 0, 0], None),
        ([99, 99, 0, 0, 0, 0, 0], None),
        ([9, 9, 9, 9, 0, 0, 0], 0),
        ([0, 9, 9, 9, 0, 0, 0], 5),
        ([9, 0, 9, 9, 0, 0, 0], 10),
        ([0, 0, 0, 0, 0, 5, 5], 25),
        ([0, 0, 0, 0, 0, 0, 5], None),
        ([float("nan")] * 7, None),
    ],
)
def test_since_when(underflow: list[float], onset: int | None) -> None:
    found = find_operands_over_limit(MetricsTable.from_rows(metrics(underflow)))
    assert found["onset"].to_list() == ([] if onset is None else [onset])
    assert all(excess > 1 for excess in found["excess"])


@pytest.mark.parametrize(("n", "onset"), [(4096, [20]), (300, [20]), (150, [])])
def test_percents_of_few_values_tell_little(n: int, onset: list[int]) -> None:
    found = find_operands_over_limit(MetricsTable.from_rows(metrics([0, 0, 0, 0, 25, 0, 0]).with_columns(n=pl.lit(n))))
    assert found["onset"].to_list() == onset


def test_of_roles_without_limits_and_of_nothing_there_is_none() -> None:
    assert (
        find_operands_over_limit(MetricsTable.from_rows(metrics([99.0] * 7, "query"))).is_empty()
        and find_operands_over_limit(MetricsTable.from_rows(metrics([99.0] * 7).clear())).is_empty()
    )
    assert set(LIMITS) == {"input", "weight", "grad_output"}


def test_fp4_has_no_limits() -> None:
    assert find_operands_over_limit(
        MetricsTable.from_rows(metrics([99.0] * 7).with_columns(format=pl.lit("e2m1")))
    ).is_empty()
    assert (
        len(find_operands_over_limit(MetricsTable.from_rows(metrics([99.0] * 7).with_columns(format=pl.lit("e4m3"))))) == 1
    )
