"""What the parts of a sample cost one core, measured on one and on two processes of this machine.

CPU seconds, which other work on the machine hardly changes; seconds on the clock only for what a core does not do.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.reduction import PARTS, stats

from nemo_fp8_debug.capture.output_samples import Chosen
from nemo_fp8_debug.core.keys import ROLES
from nemo_fp8_debug.distributed import Ranks, Reduction, ShardGroup
from nemo_fp8_debug.distributed.gloo import Group
from nemo_fp8_debug.distributed.reduction import Plan
from nemo_fp8_debug.measurement.operand_stats import Collected

from .processes import forked, free_port, statuses, temporary_folder

#: tensors of the micro-benchmarks, and times that each is repeated
TENSORS, TIMES = 500, 7
#: elements of the all-reduces that the ring's cost is read from
SIZES = (16, 1 << 14, 1 << 17, 1 << 20)
#: bytes by which two gatherings differ
GATHERED = 8 << 20


@dataclass(frozen=True)
class Constants:
    """Seconds of one core, unless it says otherwise."""

    #: a tensor, on every rank: packing it, and laying out its part of the sums
    packing: float
    laying_out: float
    #: a tensor, on the first rank: taking it out of the sums
    taking_out: float
    #: bytes of a tensor in the two collectives
    maxima_bytes: float
    sums_bytes: float
    #: a collective, on every rank, whatever it has to pass on
    collective: float
    #: on the rank that receives, a message of a ring, and a byte that it adds up
    message: float
    byte_of_maxima: float
    byte_of_sums: float
    #: on the rank that receives, a byte that is only passed on
    byte: float
    #: a request to the store, both sides of it together
    request: float
    #: on the clock: from the end of a message to the start of what waits for it
    latency: float

    def plain(self) -> dict[str, float]:
        """As JSON has it."""
        return asdict(self)


class OneRank(Group):
    """All that a rank does for a collective, and none of the collective."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def _reduce(self, x: torch.Tensor, operation: Any, seconds: float | None = None) -> None:
        self.sizes.append(x.nbytes)


def measure() -> Constants:
    """In processes of their own, which end with it."""
    alone, two = in_processes(1, of_one_rank)[0], in_processes(2, of_two_ranks)
    gathered = [more - less for less, more in (of["gather"] for of in two)]
    beside = 2 * alone["collective"]
    sums, maxima = (
        [sum(pair) - beside for pair in zip(two[0][name], two[1][name], strict=True)] for name in ("sum", "maximum")
    )
    (message, byte_of_sums), (_, byte_of_maxima) = line(sums, 8), line(maxima, 4)
    return Constants(
        **alone,
        message=message,
        byte_of_sums=byte_of_sums,
        byte_of_maxima=byte_of_maxima,
        byte=max(0.0, sum(gathered)) / GATHERED,
        request=(two[0]["requests"] + two[1]["requests"]) / 2,
        latency=two[0]["latency"],
    )


def line(cpu: list[float], item: int) -> tuple[float, float]:
    """CPU seconds of a message and of a byte that passes a rank, by least squares over all-reduces of two ranks.

    Args:
        cpu: of both ranks together, for each of SIZES.
        item: bytes of an element.
    """
    passed = [ring(item * n, 2) for n in SIZES]
    rows = np.array([[2 * messages, 2 * messages * size] for messages, size in passed])
    scale = 1 / np.array(cpu)  # relative errors count
    found, *_ = np.linalg.lstsq(rows * scale[:, None], np.array(cpu) * scale, rcond=None)
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


def cpu_of(call: Callable[[], object], times: int = TIMES) -> float:
    """CPU seconds of this process, all threads, in the median."""
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return statistics.median(found)


def of_one_rank(rank: int) -> dict[str, Any]:
    """A tensor's share of what a rank does outside of collectives."""
    names = [f"decoder.layers.{i}.mlp.linear_fc{i % 2 + 1}" for i in range(-(-TENSORS // len(ROLES)))]
    packing, beside, group = list[float](), dict[int, list[float]]({0: [], 1: []}), OneRank()
    for step in range(TIMES):
        for first in (0, 1):  # whether another rank is the first one
            shard_group = ShardGroup([first, 1 - first], dict.fromkeys(names, "linear"), {}, group=group)
            reduction, plan = Reduction(Ranks(), shard_group, Chosen(), PARTS), Plan(step, [])
            mine = stats(0, names, TENSORS)
            found = Collected(mine)
            began = time.process_time()
            packed = reduction.pack(plan, found, [s.key for s in mine])
            mine.clear()  # as the monitor does, which frees the memory of histograms
            packing.append(time.process_time() - began)
            began = time.process_time()
            reduction.reduce(plan, packed)
            beside[first].append(time.process_time() - began)
    whole, others = statistics.median(beside[0]), statistics.median(beside[1])
    return {
        "collective": of_a_collective(),
        "packing": statistics.median(packing) / TENSORS,
        "laying_out": others / TENSORS,
        "taking_out": (whole - others) / TENSORS,
        "maxima_bytes": group.sizes[-2] / TENSORS,
        "sums_bytes": group.sizes[-1] / TENSORS,
    }


def of_a_collective() -> float:
    """CPU seconds of one that has nobody to talk to."""
    group, x = Ranks().group("alone", [0], 60.0), torch.ones(SIZES[0], dtype=torch.float64)
    return cpu_of(lambda: [group.add_up(x) for _ in range(100)]) / 100


def of_two_ranks(rank: int) -> dict[str, Any]:
    """CPU seconds of this rank: all-reduces by size, gathering, requests to the store; and the latency of a message."""
    ranks, found = Ranks(), dict[str, Any]()
    group = ranks.group("constants", [0, 1], 60.0)
    for name, call, dtype in (("sum", group.add_up, torch.float64), ("maximum", group.maximum, torch.int32)):
        buffers = [torch.ones(n, dtype=dtype) for n in SIZES]
        for buffer in buffers:
            call(buffer)
        found[name] = [cpu_of(lambda b=b, call=call: call(b)) for b in buffers]
    found["gather"] = [cpu_of(lambda size=size: group.gather(bytes(size))) for size in (1, 1 + GATHERED)]
    ranks.publish("a", rank)
    found["requests"] = cpu_of(lambda: [ranks.is_set("a") for _ in range(200)], times=3) / 200
    found["latency"] = latency(group._gloo)
    return found


def latency(gloo: Any) -> float:
    """Seconds on the clock of one message of a smallest all-reduce, without what this rank's cores did.

    Two messages are under way at a time, so that half of them follow on one another.
    """
    x, took, cpu = torch.ones(SIZES[0], dtype=torch.float64), list[float](), list[float]()
    for _ in range(300):
        began, worked = time.perf_counter(), time.process_time()
        gloo.allreduce([x]).wait()
        took.append(time.perf_counter() - began)
        cpu.append(time.process_time() - worked)
    messages, _ = ring(x.nbytes, 2)
    return max(0.0, (statistics.median(took) - statistics.median(cpu)) / (messages / 2))
