"""Among many tensors the few that are out by chance are not told; what is assumed of chance holds in clean runs."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from fault_injection.false_discoveries import bound, of_pairs
from fault_injection.records import truths
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control

from nemo_fp8_debug.analysis.comparison.onset import CHANCE, FALLS, RATE, drop_false_discoveries, highest_chance


def rows(excess: list[float], metric: str = "underflow_pct") -> pl.DataFrame:
    names = [f"layers.{i}" for i in range(len(excess))]
    return pl.DataFrame({"layer": names, "role": "input", "metric": metric, "excess": excess})


@pytest.mark.parametrize(("tensors", "least"), [(60, 1.2), (3_000, 1.8), (133_000, 2.5)])
def test_the_more_tensors_are_looked_at_the_farther_out_one_must_be(tensors: int, least: float) -> None:
    assert len(drop_false_discoveries(rows([least]), tensors)) == 1
    assert len(drop_false_discoveries(rows([least - 0.2]), tensors)) == 0


def test_several_that_are_far_out_let_others_count() -> None:
    assert len(drop_false_discoveries(rows([1.4]), 3_000)) == 0
    assert len(drop_false_discoveries(rows([1.4, *[9.0] * 300]), 3_000)) == 301


def test_of_tensors_that_are_out_by_chance_hardly_any_is_told() -> None:
    """As many runs of 3,000 tensors as make the expected number of false ones 10."""
    generator = np.random.default_rng(0)
    told = 0
    for _ in range(1000):
        out = generator.uniform(size=3_000) < CHANCE
        told += len(drop_false_discoveries(rows(list(1 + generator.exponential(1 / FALLS, int(out.sum())))), 3_000))
    assert told <= 1.8 * RATE * 1000


@given(st.lists(st.floats(-12, 0).map(lambda exponent: 10**exponent), max_size=40), st.integers(0, 400))
def test_discoveries_are_those_of_scipy(below_1: list[float], others: int) -> None:
    chances, all_of_them = np.array(below_1), np.array([*below_1, *[1.0] * others])
    adjusted = false_discovery_control(all_of_them)[: len(chances)] if len(all_of_them) else chances
    assert (chances <= highest_chance(chances, len(all_of_them))).tolist() == (adjusted <= RATE).tolist()


def test_nonfinite_is_no_chance() -> None:
    assert (
        len(drop_false_discoveries(rows([1.0], "nonfinite"), 133_000)) == 1
        and drop_false_discoveries(rows([]), 5).is_empty()
    )


# Long tests rest on nemo_fp8_debug/analysis/comparison/onset.py.
@pytest.mark.long
def test_what_is_assumed_of_chance_holds_in_clean_runs_of_other_seeds() -> None:
    values = np.concatenate(list(of_pairs(truths("tune"))))
    at = np.array([0.4, 0.5, 0.6, 0.7, 0.8])
    assert len(values) > 2_000 and (np.array([np.mean(values >= x) for x in at]) <= bound(at)).all()
