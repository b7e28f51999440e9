"""Copies that ranks hold are compared bit by bit; a rank that is apart is named, and so is one whose kernel is wrong."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
import torch
from copies_apart import ONSET, STEPS, WORLD, WRONG_RANK
from hypothesis import given
from hypothesis import strategies as st
from processes import run_script

from nemo_fp8_debug import diagnose, read_record
from nemo_fp8_debug.observations.replicas.comparison import ReplicaReduction
from nemo_fp8_debug.observations.replicas.observer import compute_checksum


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    run_script(Path(__file__).with_name("copies_apart.py"), folder)
    return folder


def apart(folder: Path) -> list[tuple[int, str, str, int | None]]:
    rows = read_record(str(folder), "replicas").filter(pl.col("outcome") == "apart")
    return sorted(rows.select("step", "layer", "what", "rank").rows())


# Long tests rest on nemo_fp8_debug/distributed/*.py.
# Long tests rest on nemo_fp8_debug/observations/replicas/*.py.
@pytest.mark.long
def test_equal_copies_are_equal_and_parts_are_no_copies(trained: Path) -> None:
    rows = read_record(str(trained / "clean"), "replicas")
    assert len(rows) == STEPS * 2 * 2 and set(rows["outcome"]) == {"equal"}
    assert set(rows["ranks"]) == {WORLD} and set(rows["what"]) == {"weight", "weight_gradient"}
    sharded = read_record(str(trained / "gathered"), "replicas")
    assert set(sharded["what"]) == {"weight"}  # gradients are parts, and no rank has a copy of them


@pytest.mark.long
def test_a_weight_with_one_bit_flipped_is_named_with_its_rank(trained: Path) -> None:
    found = apart(trained / "weight")
    assert found[0] == (ONSET, "2", "weight", WRONG_RANK)
    assert {(layer, what) for _, layer, what, _ in found} == {("2", "weight")}  # gradients are reduced, and stay equal
    diagnosis = diagnose(str(trained / "weight"))
    assert (diagnosis.cause, diagnosis.confidence) == ("replicas", "high")
    assert f"W of 2 is not the same on the 4 ranks that hold copies: rank {WRONG_RANK} differs" in diagnosis.verdict()
    assert f"equal up to step {ONSET - 1}" in diagnosis.verdict()


@pytest.mark.long
def test_a_gradient_that_was_not_reduced_is_named_with_its_rank(trained: Path) -> None:
    assert apart(trained / "gradient")[0] == (ONSET, "0", "weight_gradient", WRONG_RANK)
    assert (ONSET + 1, "0", "weight", WRONG_RANK) in apart(trained / "gradient")


@pytest.mark.long
def test_a_gathered_weight_that_is_stale_is_named_with_its_rank(trained: Path) -> None:
    assert apart(trained / "gathered") == [(ONSET, "2", "weight", WRONG_RANK)]


@pytest.mark.long
def test_a_weight_that_missed_an_update_is_held_against_its_master(trained: Path) -> None:
    assert apart(trained / "master")[:2] == [(ONSET, "2", "master", WRONG_RANK), (ONSET, "2", "weight", WRONG_RANK)]
    rows = read_record(str(trained / "master"), "replicas").filter(pl.col("what") == "master")
    assert set(rows["ranks"]) == {WORLD} and set(rows.filter(pl.col("step") != ONSET)["outcome"]) == {"equal"}
    verdict = diagnose(str(trained / "master")).verdict()
    assert f"W of 2 is not what its master weight is cast to, on 1 of 4 ranks: rank {WRONG_RANK} differs" in verdict


@pytest.mark.long
def test_a_kernel_that_is_wrong_on_one_rank_is_named_with_it(trained: Path) -> None:
    rows = read_record(str(trained / "kernel"), "verification").filter(pl.col("outcome") == "beyond")
    assert rows.select("step", "layer", "product", "rank", "ranks", "ranks_beyond").rows() == [
        (ONSET, "2", "fprop", WRONG_RANK, WORLD, 1)
    ]
    assert f"Y of 2 on rank {WRONG_RANK}" in diagnose(str(trained / "kernel")).verdict()
    assert not apart(trained / "kernel")


@given(st.integers(0, 1 << 30), st.integers(0, 999), st.integers(0, 15))
def test_any_single_bit_changes_the_checksum(seed: int, place: int, bit: int) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(seed)).bfloat16()
    other = x.clone()
    other.view(torch.int16)[place] ^= (1 << bit) - (1 << 16 if bit == 15 else 0)
    assert compute_checksum(x) != compute_checksum(other) and compute_checksum(x) == compute_checksum(x.clone())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
def test_the_checksum_goes_by_place_and_by_sign(dtype: torch.dtype) -> None:
    x = torch.arange(3_000_000).remainder(120).to(dtype)
    assert compute_checksum(x) != compute_checksum(x.flip(0))
    if dtype != torch.uint8:
        assert compute_checksum(x) != compute_checksum(-x)


def test_of_several_parts_each_is_compared_alone() -> None:
    """Two parts of W on six ranks: rank 3 is apart in the second one."""
    found = [{("fc", "weight"): (rank % 2, 7 + rank % 2 + 100 * (rank == 3))} for rank in range(6)]
    made = [ReplicaReduction(["fc"], {"weight": 2}, rank) for rank in range(6)]
    slots = [one.list_slot_checksums(of) for one, of in zip(made, found, strict=True)]
    largest = torch.stack([one.collect_maxima(of) for one, of in zip(made, slots, strict=True)]).amax(0)
    added = torch.stack([one.collect_sums(of, largest) for one, of in zip(made, slots, strict=True)]).sum(0)
    (compared,) = made[0].unpack_all_ranks(added.flatten(), largest).values()
    assert (compared.outcome, compared.ranks, compared.apart, compared.rank) == ("apart", 6, 1, 3)
