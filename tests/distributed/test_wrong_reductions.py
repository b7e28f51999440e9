"""A gradient that is not the sum of what ranks have computed is named, and one that is never is."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import run_script
from wrong_reductions import ONSET, STEPS, WORLD, WRONG, WRONG_RANK

from nemo_fp8_debug import diagnose, read_record
from nemo_fp8_debug.observations.products.gradient_parts import compute_summation_error_bound


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reductions")
    run_script(Path(__file__).with_name("wrong_reductions.py"), folder)
    return folder


def reductions(folder: Path) -> pl.DataFrame:
    return read_record(str(folder), "verification").filter(product="reduction")


# Long tests rest on nemo_fp8_debug/distributed/*.py.
# Long tests rest on nemo_fp8_debug/observations/products/*.py.
@pytest.mark.long
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_sums_of_a_run_that_goes_well_are_within_their_bound(trained: Path, engine: str) -> None:
    """With micro-batches that are added up before, and with clipping after it."""
    rows = reductions(trained / f"{engine} clean")
    assert len(rows) == 2 * STEPS and set(rows["outcome"]) == {"within"} and set(rows["ranks"]) == {WORLD}
    assert rows["values"].min() == 64 and rows["error_over_bound"].is_between(0, 1).all()


@pytest.mark.long
@pytest.mark.parametrize("case", ["ddp twice", "ddp missing", "ddp stale", "fsdp twice", "fsdp stale"])
def test_a_wrong_sum_is_named_with_its_gemm_and_step(trained: Path, case: str) -> None:
    """And no other one is, nor any product."""
    log = json.loads((trained / case / "faults.json").read_text())
    assert {step for of_rank in log for step in of_rank} == {ONSET}
    assert case != "ddp missing" or [bool(of_rank) for of_rank in log] == [rank == WRONG_RANK for rank in range(WORLD)]
    beyond = read_record(str(trained / case), "verification").filter(outcome="beyond")
    assert beyond.select("step", "layer", "product").rows() == [(ONSET, WRONG, "reduction")]
    diagnosis = diagnose(str(trained / case))
    assert (diagnosis.cause, diagnosis.confidence) == ("wrong_reduction", "high")
    assert f"reduced dW of {WRONG} is not the sum of what {WORLD} ranks computed" in diagnosis.verdict()


@pytest.mark.long
def test_an_average_that_was_taken_twice_gives_its_factor(trained: Path) -> None:
    for case in ("ddp twice", "fsdp twice", "ddp twice everywhere"):
        wrong = reductions(trained / case).filter(outcome="beyond")
        assert wrong["factor"].to_list() == pytest.approx([1 / WORLD] * len(wrong), rel=0.01)
    assert ", in all of it, by a factor of 0.2" in diagnose(str(trained / "ddp twice")).verdict()


@pytest.mark.long
def test_an_average_of_all_gradients_that_was_taken_twice_is_named(trained: Path) -> None:
    wrong = reductions(trained / "ddp twice everywhere").filter(outcome="beyond")
    assert sorted(wrong.select("step", "layer").rows()) == [(ONSET, "0"), (ONSET, "2")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "reason"), [("ddp unsynced", "did not add up"), ("hand clean", "it is unknown how ranks add up its gradient")]
)
def test_nothing_is_claimed_of_what_cannot_be_told(trained: Path, case: str, reason: str) -> None:
    rows = reductions(trained / case)
    assert len(rows) == 2 * STEPS and set(rows["outcome"]) == {"unknown"} and all(reason in why for why in rows["reason"])


@given(st.integers(0, 1 << 30), st.integers(2, 64), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_the_bound_holds_for_any_order_of_summation(seed: int, summands: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(summands, 16, generator=generator) * torch.randn(summands, 1, generator=generator).exp()).to(dtype)
    total = torch.zeros(16, dtype=dtype)
    for i in torch.randperm(summands, generator=generator):
        total = total + x[i]
    exact, sizes = x.double().sum(0), x.double().abs().sum(0)
    assert ((total.double() - exact).abs() <= compute_summation_error_bound(sizes, summands, [dtype])).all()
