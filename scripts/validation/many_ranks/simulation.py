"""Simulates the reduction of a sample over many ranks, event by event, and compares it with real processes of this machine.

    .venv/bin/python -m many_ranks.simulation             # the table of docs/scaling.md, anew
    .venv/bin/python -m many_ranks.simulation --compare   # measures constants and real runs anew; on a quiet machine

Ranks take turns on the cores of their machine, a few milliseconds each, and meet before each part. A rank packs its
histograms, takes part in two ring all-reduces and lays out its sums in between; the first rank takes whole tensors out of
them. A ring is that of gloo: two segments are under way at a time, and a rank passes on what it has added up. Then each rank
has a thread ask the store for the first one's message, and rows are gathered. Constants come from `constants.py`, which runs
two processes; nothing is fitted to what is predicted. Both what is measured and what is predicted are in simulation.json. In
a ring of equal ranks all do the same, so that one of `RING` ranks stands for a longer one: it is gone round as often.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

import simpy
from benchmarks.reduction import ROWS

from nemo_fp8_debug.distributed.gloo import pause_after

from .constants import TENSORS, Constants, ring

RESULTS = Path(__file__).with_suffix(".json")
#: seconds that a core works for one of several ranks before it is another one's turn
TURN = 3e-3
#: ranks that a ring of more is simulated by
RING = 16
#: bytes of the histogram of a tensor in the rows that the writer gathers: 3,000 occupied bins
HISTOGRAM = 30_000
#: times that constants and real processes are measured
TURNS = 5
#: how far a prediction may be from what is measured
LIMIT = 0.25
PARTS = ("packing", "reducing", "message", "gathering")
WHOLE = "packing and reducing"

Steps = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Place:
    """Where ranks are."""

    #: that ranks share; None: each has one of its own
    cores: int | None
    #: seconds on the way of a message; None: as measured
    latency: float | None = None
    #: bytes a second that a rank can send
    bandwidth: float = float("inf")
    #: seconds of the store for a request; None: as measured, half of it
    store: float | None = None


#: hosts with eight ranks each that share a link of 100 Gb/s
NETWORK = Place(cores=None, latency=50e-6, bandwidth=1e9, store=50e-6)


class Ranks:
    """Some ranks, each of which does one thing at a time."""

    def __init__(self, count: int, place: Place, constants: Constants, tensors: int) -> None:
        self.count, self.place, self.cost, self.tensors = count, place, constants, tensors
        self.env = simpy.Environment()
        self._cores = simpy.Resource(self.env, place.cores) if place.cores else None
        #: whether ranks share cores
        self.crowded = place.cores is not None and count > place.cores
        #: seconds on the way of a message: in a ring, and to the store or back
        self.latency = constants.latency if place.latency is None else place.latency
        self.store_latency = constants.store_latency if place.latency is None else place.latency
        self.byte_latency = constants.byte_latency if place.latency is None else 0.0

    def work(self, seconds: float) -> Steps:
        """Have a core for so long, in turns."""
        if self._cores is None:
            yield self.env.timeout(seconds)
            return
        while seconds > 0:
            with self._cores.request() as turn:
                yield turn
                yield self.env.timeout(min(TURN, seconds))
            seconds -= TURN

    def take(self, of_rank: Callable[[int], Steps]) -> list[float]:
        """Seconds that each rank takes for its steps, from the moment at which it has met the others."""
        took, barrier = [0.0] * self.count, Barrier(self)

        def timed(rank: int) -> Steps:
            if self._cores is not None:
                yield from barrier.steps(rank)
            began = self.env.now
            yield from of_rank(rank)
            took[rank] = float(self.env.now - began)

        self.env.run(simpy.AllOf(self.env, [self.env.process(timed(rank)) for rank in range(self.count)]))
        return took

    def is_idle(self, rank: int) -> bool:
        """Whether a rank has waited on a core of its own while the first one worked."""
        return rank > 0 and self._cores is not None and not self.crowded

    def handed_over(self, rank: int) -> Steps:
        """From one thread of a rank to another one, which goes on while the first one goes to sleep."""
        if self.is_idle(rank):
            yield from self.work(self.cost.idle_asking / 2)
            return
        self.env.process(self.work(self.cost.asking_beside / 2))
        yield from self.work(self.cost.asking / 2)
        yield self.env.timeout(self.cost.hand_over)

    def polled(self, began: float) -> Steps:
        """A rank looks whether a collective has ended, after pauses."""
        ended, at = self.env.now, began
        while at < ended:
            at += pause_after(at - began) + self.cost.nap
        yield self.env.timeout(at - ended)


class Barrier:
    """Ranks meet: in each of log2(ranks) rounds a rank hears of twice as many others."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._rounds = [2**i for i in range((ranks.count - 1).bit_length())]
        self._inbox = [[simpy.Store(ranks.env) for _ in self._rounds] for _ in range(ranks.count)]

    def _send(self, rank: int, number: int) -> Steps:
        yield self._ranks.env.timeout(self._ranks.latency)
        self._inbox[(rank + self._rounds[number]) % self._ranks.count][number].put(None)

    def steps(self, rank: int) -> Steps:
        """What a rank does, to the moment at which it knows that all are there."""
        for number in range(len(self._rounds)):
            self._ranks.env.process(self._send(rank, number))
            yield self._inbox[rank][number].get()
            yield from self._ranks.work(self._ranks.cost.message)
        yield self._ranks.env.timeout(self._ranks.cost.hand_over)


class Collective:
    """A ring all-reduce: each rank goes through `steps`."""

    def __init__(self, ranks: Ranks, size: float, per_byte: float, stands_for: int, message: float) -> None:
        """
        Args:
            size: bytes that each rank brings.
            per_byte, message: seconds of a core.
            stands_for: ranks of the ring.
        """
        self._ranks, self._per_byte, self._message = ranks, per_byte, message
        self._messages, self._bytes = ring(round(size), stands_for)
        self._inbox = [simpy.Store(ranks.env) for _ in range(ranks.count)]
        self._link = [simpy.Resource(ranks.env, 1) for _ in range(ranks.count)]

    def _send(self, rank: int) -> Steps:
        with self._link[rank].request() as link:
            yield link
            yield self._ranks.env.timeout(self._bytes / self._ranks.place.bandwidth)
        yield self._ranks.env.timeout(self._ranks.latency)
        self._inbox[(rank + 1) % self._ranks.count].put(None)

    def steps(self, rank: int) -> Steps:
        """What a rank does, to the moment at which it knows the sums."""
        env, began = self._ranks.env, self._ranks.env.now
        for _ in range(2):
            env.process(self._send(rank))
        yield from self._ranks.work(self._ranks.cost.collective)
        for received in range(self._messages):
            yield self._inbox[rank].get()
            yield env.timeout(self._bytes * self._ranks.byte_latency)
            yield from self._ranks.work(self._message + self._bytes * self._per_byte)
            if received + 2 < self._messages:
                env.process(self._send(rank))
        yield from self._ranks.polled(began)


def packing(ranks: Ranks) -> float:
    """Seconds until the first rank has packed; all do."""
    return ranks.take(lambda _: ranks.work(ranks.tensors * ranks.cost.packing))[0]


def reducing(ranks: Ranks, stands_for: int) -> float:
    """Seconds until the first rank knows whole tensors."""
    cost, n = ranks.cost, ranks.tensors
    maxima = Collective(ranks, n * cost.maxima_bytes, cost.byte_of_maxima, stands_for, cost.message)
    of_tensor = cost.sums_bytes + log2(stands_for) * cost.sums_bytes_of_twice
    sums = Collective(ranks, n * of_tensor, cost.byte_of_sums, stands_for, cost.message)

    def of_rank(rank: int) -> Steps:
        yield from maxima.steps(rank)
        yield from ranks.work(n * cost.laying_out)
        yield from sums.steps(rank)
        if rank == 0:
            yield from ranks.work(n * cost.taking_out)

    return ranks.take(of_rank)[0]


def message(ranks: Ranks) -> float:
    """Seconds until the last rank knows what the first one says.

    Each has a thread ask the store twice, which serves one request at a time.
    """
    env, server, said = ranks.env, simpy.Resource(ranks.env, 1), ranks.env.event()

    def request(rank: int) -> Steps:
        idle = ranks.is_idle(rank)
        half = (ranks.cost.idle_request if idle else ranks.cost.request) / 2
        latency = 0.0 if idle else ranks.store_latency
        yield from ranks.work(half)
        yield env.timeout(latency)
        with server.request() as turn:
            yield turn
            if ranks.place.store is None:
                yield from ranks.work(half)
            else:
                yield env.timeout(ranks.place.store)
        if rank == 0 and not said.triggered:
            said.succeed()
        yield said  # until then the store does not answer
        yield env.timeout(latency)

    def of_rank(rank: int) -> Steps:
        yield from ranks.handed_over(rank)
        yield from request(rank)
        yield from request(rank)
        yield from ranks.handed_over(rank)

    return max(ranks.take(of_rank))


def gathering(ranks: Ranks, senders: int, of_tensor: int) -> float:
    """Seconds until the writer has the rows of so many other ranks; first all tell how many bytes theirs are.

    Args:
        of_tensor: bytes of its rows.
    """
    env, cost, size = ranks.env, ranks.cost, of_tensor * ranks.tensors
    small = cost.shared_message if ranks.crowded else cost.message
    lengths = Collective(ranks, 8, cost.byte_of_sums, ranks.count, small)
    inbox, link = simpy.Store(env), simpy.Resource(env, 1)

    def send() -> Steps:
        with link.request() as turn:
            yield turn
            yield env.timeout(size / ranks.place.bandwidth)
        yield env.timeout(ranks.latency)
        inbox.put(None)

    def of_rank(rank: int) -> Steps:
        yield from ranks.work(cost.gathering / 2)
        yield from lengths.steps(rank)
        yield from ranks.work(cost.gathering / 2)
        if rank > 0:
            yield from ranks.work(size * cost.byte_sent)
            env.process(send())
            return
        began = env.now
        for _ in range(senders):
            yield inbox.get()
            yield from ranks.work(cost.message + size * cost.byte_received)
        yield from ranks.polled(began)

    return ranks.take(of_rank)[0]


def simulate(world: int, stages: int, place: Place, constants: Constants, of_tensor: int = ROWS) -> dict[str, float]:
    """Seconds of each part of a sample.

    Args:
        stages: of a pipeline, each with `TENSORS`; its ranks reduce together.
        of_tensor: bytes of its rows, which are gathered.
    """
    of_stage = world // stages
    count = of_stage if place.cores else min(of_stage, RING)

    def some(ranks: int) -> Ranks:
        return Ranks(ranks, place, constants, TENSORS)

    leaders = world if place.cores else stages
    return {
        "packing": packing(some(count)),
        "reducing": reducing(some(count), of_stage) if of_stage > 1 else 0.0,
        "message": message(some(world)),
        "gathering": gathering(some(leaders), leaders - 1, of_tensor) if leaders > 1 else 0.0,
    }


def compare(worlds: list[int], rounds: int) -> dict[str, Any]:
    """Predicted and measured seconds by number of processes, and the load of the machine at the time.

    Constants and processes are measured in turns, since a machine is not equally fast all the time; medians of all.
    """
    from benchmarks.reduction import launch

    from .constants import measure
    from .processes import prepare

    prepare()
    load, constants, measured = list[float](), list[dict[str, float]](), dict[str, list[dict[str, float]]]()
    for _ in range(TURNS):
        load.append(os.getloadavg()[0])
        constants.append(measure().plain())
        for world in worlds:
            ranks = [each["times"] for each in launch(world, TENSORS, rounds, alone=True)]
            times = {part: ranks[0][part] for part in PARTS} | {"message": max(each["message"] for each in ranks)}
            measured.setdefault(str(world), []).append(times)
    typical, cores = Constants(**medians(constants)), os.cpu_count() or 1
    return {
        "cores": cores,
        "constants": typical.plain(),
        "load": load,
        "worlds": {
            world: {
                "predicted": simulate(int(world), 1, Place(cores), typical),
                "measured": medians(times),
            }
            for world, times in measured.items()
        },
    }


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def table(constants: Constants) -> list[dict[str, Any]]:
    """Samples of runs that nobody here has seen."""
    rows = []
    for world, stages in ((1024, 8), (1024, 1), (16384, 16), (16384, 1)):
        seconds = simulate(world, stages, NETWORK, constants, ROWS + HISTOGRAM)
        rows.append({"ranks": world, "stages": stages, "of_a_stage": world // stages, **seconds})
    return rows


def off_by(predicted: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    """How far predictions are off, as a share of what was measured: of each part, and of the reduction as a whole."""
    parts: dict[str, tuple[str, ...]] = {part: (part,) for part in PARTS}
    parts[WHOLE] = "packing", "reducing"
    return {
        name: round(sum(predicted[part] for part in of) / sum(measured[part] for part in of) - 1, 3)
        for name, of in parts.items()
    }


def broken(found: dict[str, Any]) -> list[str]:
    """Predictions that are farther off than they may be."""
    off = {world: off_by(of["predicted"], of["measured"]) for world, of in found["worlds"].items()}
    return [
        f"{part} of {world} processes: off by {by:+.0%}"
        for world, parts in off.items()
        for part, by in parts.items()
        if abs(by) > LIMIT
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="measure constants and real processes anew")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = compare(given.ranks, given.rounds) if given.compare else json.loads(given.output.read_text())
    found["table"] = table(Constants(**found["constants"]))
    for world, of in found["worlds"].items():
        of["off_by"] = off = off_by(of["predicted"], of["measured"])
        parts = [f"{part} {of['predicted'][part]:.4f} ({of['measured'][part]:.4f}, {off[part]:+.0%})" for part in PARTS]
        print(f"{world} processes, predicted (measured) s: {', '.join(parts)}; {WHOLE}: {off[WHOLE]:+.0%}")
    for row in found["table"]:
        print(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    given.output.write_text(json.dumps(found, indent=1) + "\n")
    if wrong := broken(found):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
