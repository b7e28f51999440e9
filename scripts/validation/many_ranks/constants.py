"""What the parts of a sample cost, measured on two processes of this machine.

CPU seconds, which other work on the machine hardly changes; seconds on the clock for what a core does not do, as to wake a
thread. What ranks do at the same time is measured on two of them at the same time: they share caches and memory.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.reduction import ROWS, stats, tensors_of

from nemo_fp8_debug.capture.operand_stats import OperandStats
from nemo_fp8_debug.core.keys import ROLES
from nemo_fp8_debug.core.observation import AgreedSampleSettings
from nemo_fp8_debug.distributed import MonitoredRanks, ShardGroup, ShardGroupReduction
from nemo_fp8_debug.distributed.gloo import GlooGroup
from nemo_fp8_debug.numerics.histogram import BINS

from .processes import forked, free_port, statuses, temporary_folder

#: tensors of the micro-benchmarks, and times that each is repeated
TENSORS, TIMES = 500, 7
#: elements of the all-reduces that the ring's cost is read from
SIZES = (16, 1 << 14, 1 << 17, 1 << 20, 1 << 21)
#: bytes by which two gatherings differ: the rows of a sample
GATHERED = ROWS * TENSORS
#: times that a short call is timed
SHORT = 50
#: seconds of the pause that is timed
NAP = 1e-4


@dataclass(frozen=True)
class Constants:
    """Seconds of one core, unless it says otherwise."""

    #: a tensor, on every rank: packing it, and laying out its part of the sums
    packing: float
    laying_out: float
    #: a tensor, on the first rank: taking it out of the sums
    taking_out: float
    #: bytes of a tensor in the two collectives: of one rank, and what twice as many ranks have in addition, since each has
    #: values where others have none
    maxima_bytes: float
    sums_bytes: float
    sums_bytes_of_twice: float
    #: a collective, on every rank, whatever it has to pass on
    collective: float
    #: on the rank that receives, a message of a ring, and a byte that it adds up
    message: float
    byte_of_maxima: float
    byte_of_sums: float
    #: a message of a few bytes, of ranks that share a core: one of them wakes once for all that have come meanwhile
    shared_message: float
    #: to gather rows, on every rank, beside collectives and bytes
    gathering: float
    #: a byte that is only gathered, on the rank that sends it and on the one that receives it
    byte_sent: float
    byte_received: float
    #: a request to the store, both sides of it together
    request: float
    #: to have a thread ask the store: until it has answered, and what threads do beside
    asking: float
    asking_beside: float
    #: the same two on the clock, on a rank that has waited on a core of its own: it has kept its caches
    idle_request: float
    idle_asking: float
    #: on the clock: from the end of a message to the start of what waits for it; in a ring, and with the store
    latency: float
    store_latency: float
    #: on the clock: a byte of a message of a ring, beside what cores do for it
    byte_latency: float
    #: on the clock: from one thread to another of the same rank
    hand_over: float
    #: on the clock: by how much a pause is longer than it was asked for
    nap: float

    def plain(self) -> dict[str, float]:
        """As JSON has it."""
        return asdict(self)


class OneRank(GlooGroup):
    """All that a rank does for a collective, and none of the collective."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        #: what the rank brought to the last maximum, and what another one is made to have brought to the next
        self.maxima = torch.empty(0)
        self.others: torch.Tensor | None = None

    def _reduce(self, x: torch.Tensor, operation: Any, seconds: float | None = None) -> None:
        self.sizes.append(x.nbytes)
        if operation == dist.ReduceOp.MAX:
            self.maxima = x.clone()
            if self.others is not None:
                torch.maximum(x, self.others, out=x)


def measure() -> Constants:
    """In processes of their own, which end with it."""
    first, other = in_processes(2, of_ranks_apart)
    two, sharing = in_processes(2, of_two_ranks), in_processes(2, of_ranks_on_one_core)

    def of_both(name: str, at: int) -> Any:
        """Clock (0) or CPU seconds (1) of both ranks, added up."""
        return np.array(two[0][name])[..., at] + np.array(two[1][name])[..., at]

    nothing = of_both("nothing", 1)
    collective = float(of_both("collective", 1) - nothing) / 2
    message, byte_of_sums = line(of_both("sum", 1) - nothing - 2 * collective, 8)
    _, byte_of_maxima = line(of_both("maximum", 1) - nothing - 2 * collective, 4)
    latency, byte_latency = latencies((of_both("sum", 0) - of_both("sum", 1) + nothing) / 2)
    nothing_gathered = (first["gathering"][0] + other["gathering"][0]) / 2
    received, sent = (max(0.0, of["gathering"][1] - of["gathering"][0]) / GATHERED for of in (first, other))
    ask, read = (of_both(name, 1) for name in ("asking", "reading"))
    request, asked, answered = float(read - ask) / 2, two[1]["asking"][0], two[1]["reading"][0]
    asking = min(float(ask - nothing), asked)
    idle_asking, idle_reading = (two[1][name][0] for name in ("asking idle", "reading idle"))
    return Constants(
        packing=first["packing"] / TENSORS,
        laying_out=other["beside"] / TENSORS,
        taking_out=(first["beside"] - other["beside"]) / TENSORS,
        maxima_bytes=first["bytes"][0] / TENSORS,
        sums_bytes=first["bytes"][1] / TENSORS,
        sums_bytes_of_twice=(first["bytes of two"] - first["bytes"][1]) / TENSORS,
        collective=collective,
        message=message,
        byte_of_sums=byte_of_sums,
        byte_of_maxima=byte_of_maxima,
        shared_message=statistics.mean(of["message"] for of in sharing),
        gathering=max(0.0, nothing_gathered - collective - ring(8, 2)[0] * message),
        byte_sent=sent,
        byte_received=received,
        request=request,
        asking=asking,
        asking_beside=max(0.0, float(ask - nothing) - asked),
        idle_request=max(0.0, idle_reading - idle_asking) / 2,
        idle_asking=idle_asking,
        latency=latency,
        store_latency=max(0.0, answered - asked - 2 * request) / 4,
        byte_latency=byte_latency,
        hand_over=(asked - asking) / 2,
        nap=two[0]["nap"],
    )


def latencies(idle: Any) -> tuple[float, float]:
    """Seconds on the clock of a message and of a byte of one, from all-reduces of two ranks.

    Of small messages two are under way at a time, so that half of them follow on one another.

    Args:
        idle: seconds on the clock less those of a core, for each of SIZES.
    """
    (few, _), (many, size) = (ring(8 * n, 2) for n in (SIZES[0], SIZES[-1]))
    return max(0.0, float(idle[0])) / (few / 2), max(0.0, float(idle[-1] - idle[0])) / (many * size)


def line(cpu: Any, item: int) -> tuple[float, float]:
    """CPU seconds of a message and of a byte that passes a rank, by least squares over all-reduces of two ranks.

    Args:
        cpu: of both ranks together, for each of SIZES.
        item: bytes of an element.
    """
    passed = [ring(item * n, 2) for n in SIZES]
    rows = np.array([[2 * messages, 2 * messages * size] for messages, size in passed])
    scale = 1 / cpu  # relative errors count
    found, *_ = np.linalg.lstsq(rows * scale[:, None], cpu * scale, rcond=None)
    return float(max(found[0], 0.0)), float(found[1])


def ring(size: int, ranks: int) -> tuple[int, float]:
    """How many messages a rank receives in gloo's all-reduce of so many bytes, and the bytes of each.

    Segments are at most 1 MiB, and at least two for each rank; each passes the ring twice.
    """
    segments = max(-(-size // (1 << 20)), 2 * ranks)
    segments = -(-segments // ranks) * ranks
    return 2 * (segments - segments // ranks), size / segments


def in_processes(world: int, work: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """What `work(rank)` returns in each of so many processes, which are ranks of a run."""
    port = free_port()
    with temporary_folder() as folder:

        def rank_of(rank: int) -> None:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
            (folder / f"{rank}.json").write_text(json.dumps(work(rank)))
            dist.barrier()
            dist.destroy_process_group()

        ended = statuses([forked(rank_of, rank) for rank in range(world)])
        assert ended == [0] * world, ended
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def of_ranks_apart(rank: int) -> dict[str, Any]:
    """What a rank does outside of reductions, the first one and another at the same time; a sample's CPU seconds."""
    names = [f"decoder.layers.{i}.mlp.linear_fc{i % 2 + 1}" for i in range(-(-TENSORS // len(ROLES)))]
    ranks, group = MonitoredRanks(), OneRank()
    gathering = ranks.make_gloo_group("gathering", [0, 1], 60.0)
    shard_group = ShardGroup([0, 1], dict.fromkeys(names, "linear"), {}, group=group)
    reduction, taken = ShardGroupReduction(ranks, shard_group, [tensors_of(names, ranks)]), dict[str, list[float]]()

    def timed(name: str, call: Callable[[], object]) -> None:
        dist.barrier()
        began = time.process_time()
        call()
        taken.setdefault(name, []).append(time.process_time() - began)

    for step in range(4 * TIMES):
        # As `benchmarks/reduction.py` does it: what memory costs depends on what was held, and is held, beside.
        mine, plan, found = stats(rank, names, TENSORS), AgreedSampleSettings(step), list[Any]()

        def pack(plan: AgreedSampleSettings = plan, mine: list[OperandStats] = mine, found: list[Any] = found) -> None:
            found.append(reduction.pack_results(plan, {"operands": mine}, [s.key for s in mine]))
            mine.clear()  # as the monitor does

        timed("packing", pack)
        timed("beside", lambda plan=plan, found=found: found.append(reduction.reduce_over_ranks(plan, found[0])))
        found.clear()
        rows = bytes(1 + step % 2 * GATHERED)
        timed(f"gathering {step % 2}", lambda rows=rows: gathering.gather_to_first_rank(rows))
    of = {name: statistics.median(each) for name, each in taken.items()}
    of_one, plan = group.sizes[-2:], AgreedSampleSettings(4 * TIMES)
    for each in (1 - rank, rank):
        mine = stats(each, names, TENSORS)
        reduction.reduce_over_ranks(plan, reduction.pack_results(plan, {"operands": mine}, [s.key for s in mine]))
        group.others = group.maxima
    return {
        **of,
        "gathering": [of["gathering 0"], of["gathering 1"]],
        "bytes": of_one,
        "bytes of two": group.sizes[-1],
    }


def of_two_ranks(rank: int) -> dict[str, Any]:
    """Seconds on the clock and of this rank's CPU: of collectives by size, and asking the store."""
    ranks, found = MonitoredRanks(), dict[str, Any]()
    alone, group = ranks.make_gloo_group(f"alone-{rank}", [rank], 60.0), ranks.make_gloo_group("constants", [0, 1], 60.0)
    dense = [torch.ones(BINS, dtype=torch.int64) for _ in range(TENSORS)]
    ranks.publish_value("a", rank)

    def timed(call: Callable[[], object], times: int = TIMES, idle: bool = False) -> list[float]:
        """Medians of a call that a rank or both make, with caches in the state in which a sample leaves them.

        Seconds on the clock to its end, and of this rank's CPU until the other one has ended it as well.

        Args:
            idle: the first rank alone has worked before.
        """
        taken = []
        for _ in range(times):
            for x in dense if rank == 0 or not idle else ():
                x.sum()
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            call()
            ended = time.perf_counter()
            dist.barrier()
            taken.append((ended - began, time.process_time() - worked))
        return [statistics.median(of) for of in zip(*taken, strict=True)]

    def reduced(x: torch.Tensor, operation: Any) -> list[float]:
        """Without the pauses of a rank that waits."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        return timed(lambda: group._gloo.allreduce([x], options).wait(), SHORT if len(x) == SIZES[0] else TIMES)

    for _ in range(2):  # the first time everything takes longer
        found["nothing"] = timed(lambda: None, SHORT)
        found["collective"] = timed(lambda: alone.reduce_sum(dense[0][:1]), SHORT)
        found["sum"] = [reduced(torch.ones(n, dtype=torch.float64), dist.ReduceOp.SUM) for n in SIZES]
        found["maximum"] = [reduced(torch.ones(n, dtype=torch.int32), dist.ReduceOp.MAX) for n in SIZES]
        found["asking"] = timed(lambda: ranks._ask(lambda _: None) if rank == 1 else None, SHORT)
        found["reading"] = timed(lambda: ranks.await_value("a") if rank == 1 else None, SHORT)
        found["asking idle"] = timed(lambda: ranks._ask(lambda _: None) if rank == 1 else None, SHORT, idle=True)
        found["reading idle"] = timed(lambda: ranks.await_value("a") if rank == 1 else None, SHORT, idle=True)
        found["nap"] = timed(lambda: time.sleep(NAP))[0] - NAP
    return found


def of_ranks_on_one_core(rank: int) -> dict[str, float]:
    """Seconds of a message of small all-reduces: what one of both ranks takes beyond those of each rank alone."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of threads that are started from here on
    ranks, x, took = MonitoredRanks(), torch.ones(1, dtype=torch.float64), list[float]()
    for name, of in ((f"sharing-{rank}", [rank]), ("sharing", [0, 1])):
        gloo, each = ranks.make_gloo_group(name, of, 60.0)._gloo, list[float]()
        for _ in range(4 * SHORT):
            dist.barrier()
            began = time.perf_counter()
            gloo.allreduce([x]).wait()
            each.append(time.perf_counter() - began)
        took.append(statistics.median(each))
    return {"message": max(0.0, took[1] - took[0]) / (2 * ring(x.nbytes, 2)[0])}
