"""Many ranks on one machine: what they record, what training waits for, faults, and a simulation of more of them."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from many_ranks import fault_cases, simulation, tables, waits
from many_ranks.constants import Constants
from processes import run_script

FOLDER = Path(waits.__file__).parent


def committed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return found


def test_two_ranks_record_what_one_process_does_that_sees_all_batches(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    run_script("-m", "many_ranks.waits", "--ranks", "2", "--samples", "1", "--limit-ms", "inf", "--output", str(results))
    found = json.loads(results.read_text())
    assert list(found["worlds"]) == ["2"]
    assert waits.broken(found, math.inf) == []


def test_results_of_up_to_sixteen_ranks_keep_what_is_promised() -> None:
    found = committed("waits.json")
    assert set(found["worlds"]) == {"1", "2", "4", "8", "16"}
    assert found["samples"] >= 30
    assert waits.broken(found) == []


def test_every_fault_was_survived_twenty_times() -> None:
    found = committed("faults.json")
    assert {name: len(runs) for name, runs in found["faults"].items()} == dict.fromkeys(fault_cases.FAULTS, 20)
    assert found["hogs"] == 2
    assert fault_cases.broken(found) == []


def test_the_table_of_the_simulation_is_what_the_simulation_says() -> None:
    found = committed("simulation.json")
    row = found["table"][0]
    rows, constants = simulation.ROWS + simulation.HISTOGRAM, Constants(**found["constants"])
    again = simulation.simulate(row["ranks"], row["stages"], simulation.NETWORK, constants, rows)
    assert again == pytest.approx({name: row[name] for name in again})


def test_what_was_predicted_for_processes_of_one_machine_was_measured() -> None:
    found = committed("simulation.json")
    assert set(found["worlds"]) == {"2", "4", "8", "16"}
    assert simulation.broken(found) == []
    constants = Constants(**found["constants"])
    again = simulation.simulate(4, 1, simulation.Place(found["cores"]), constants)
    assert again == pytest.approx(found["worlds"]["4"]["predicted"])


@pytest.mark.parametrize("name", tables.TABLES)
def test_the_documentation_has_these_results(name: str) -> None:
    lines = (FOLDER.parents[2] / "docs/scaling.md").read_text().splitlines()
    assert set(tables.TABLES[name]()) <= set(lines)


FREE = Constants(**{field.name: 0.0 for field in fields(Constants)})
CONSTANTS = replace(FREE, packing=1e-4, sums_bytes=8e3)


def test_ranks_share_cores() -> None:
    """0.05 s of a core each."""
    alone, four = (simulation.simulate(n, 1, simulation.Place(2, 0.0), CONSTANTS)["packing"] for n in (2, 4))
    assert alone == pytest.approx(0.05)
    assert four == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_a_ring_passes_each_byte_twice(ranks: int) -> None:
    """2 (n - 1) / n of the bytes through each link, once in each direction of time: the closed form of a ring."""
    place = simulation.Place(None, 0.0, bandwidth=1e9)
    took = simulation.simulate(ranks, 1, place, CONSTANTS)["reducing"]
    assert took == pytest.approx(2 * (ranks - 1) / ranks * 8e3 * 500 / 1e9, rel=0.05, abs=5e-3)


def test_an_unthrottled_ring_costs_a_latency_a_message() -> None:
    """Two segments are under way at a time, so that a latency is paid for each pair of them: 2 (n - 1) times."""
    place = simulation.Place(None, 1e-3)
    took = simulation.reducing(simulation.Ranks(8, place, CONSTANTS, 1), 8)
    assert took == pytest.approx(2 * 2 * (8 - 1) * 1e-3, rel=0.2)


@pytest.mark.parametrize("ranks", [2, 5, 16])
def test_ranks_meet_in_a_logarithm_of_their_number(ranks: int) -> None:
    """Hensgen's barrier: ceil(log2 n) rounds, each a latency on its way."""
    of = simulation.Ranks(ranks, simulation.Place(None, 1e-3), FREE, 1)
    barrier, met = simulation.Barrier(of), list[float]()

    def meet(rank: int) -> simulation.Steps:
        yield from barrier.steps(rank)
        met.append(of.env.now)

    of.take(meet)
    assert met == pytest.approx([math.ceil(math.log2(ranks)) * 1e-3] * ranks)


def test_the_store_serves_one_request_at_a_time() -> None:
    """Two of each rank."""
    took = simulation.message(simulation.Ranks(100, simulation.Place(None, 0.0, store=1e-3), FREE, 1))
    assert took == pytest.approx(2 * 100 * 1e-3, rel=0.02)


@pytest.mark.parametrize("seconds", [1e-4, 1e-3, 5e-3, 0.1])
def test_a_rank_knows_soon_that_a_collective_has_ended(seconds: float) -> None:
    """A quarter of the wait later, or 2 ms, and a pause that is longer than it was asked for."""
    nap = 9e-5
    ranks = simulation.Ranks(1, simulation.Place(None), replace(FREE, nap=nap), 1)

    def wait(_: int) -> simulation.Steps:
        began = ranks.env.now
        yield ranks.env.timeout(seconds)
        yield from ranks.polled(began)

    assert seconds <= ranks.take(wait)[0] <= seconds + min(seconds / 4, 2e-3) + 1e-5 + nap
