"""Time the packed reduction of a sampled step between local processes, compared with one all-reduce for each tensor.

`.venv/bin/python scripts/benchmarks/reduction.py [--ranks 2 4] [--tensors 500 5000] [--packed-alone]`

The package's own code reduces histograms of normal and heavy-tailed BF16 tensors, sends the first rank's message to all
ranks, and gathers rows. In turns with it, we time an all-reduce of four float64 for each tensor, as metrics that are sums
would need, and an all-reduce of each whole histogram. We print medians of one run. We also count all collectives of a
sample, which must be two, and their bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from many_ranks.processes import forked, free_port, prepare, statuses, temporary_folder

from nemo_fp8_debug.capture.operand_stats import CastDescription, OperandStats
from nemo_fp8_debug.core.keys import ROLES
from nemo_fp8_debug.core.observation import AgreedSampleSettings
from nemo_fp8_debug.distributed import MonitoredRanks, ShardGroup, ShardGroupReduction
from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.numerics.histogram import BINS
from nemo_fp8_debug.observations.operands.tensors import TensorObservation

VALUES, KINDS = 1 << 16, 24
CAST = CastDescription("current-HYBRID", "E4M3", "current", "bfloat16")


class Counted(dist.ProcessGroupGloo):
    """A gloo process group that notes the bytes and the seconds of each all-reduce."""

    asked: ClassVar[list[tuple[int, float]]] = []

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        start = time.perf_counter()
        done = super().allreduce(tensors, options)
        done.wait()
        self.asked.append((tensors[0].nbytes, time.perf_counter() - start))
        return done


def memory(field: str) -> int:
    """Return memory in MiB: the current `VmRSS`, or `VmHWM`, the peak since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) >> 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def tensors(rank: int) -> list[torch.Tensor]:
    """Return tensors of normal and heavy-tailed values of many magnitudes. They differ between ranks."""
    torch.manual_seed(rank)
    normal = [torch.randn(VALUES) * 2.0 ** (i % 7 - 3) for i in range(KINDS // 2)]
    return [x.bfloat16() for x in [*normal, *(x * torch.randn(VALUES).exp() ** 2 for x in normal)]]


def stats(rank: int, names: list[str], n: int) -> list[OperandStats]:
    keys, kinds = [(name, role) for name in names for role in ROLES][:n], tensors(rank)
    found = [count_histogram(kinds[i % KINDS]) for i in range(n)]
    return [
        OperandStats(key, "linear", CAST, s, 1.0 + i, None, None, calls=1)
        for i, (key, s) in enumerate(zip(keys, found, strict=True))
    ]


def seconds(call: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Operands(TensorObservation):
    """An observation of GEMM operands that keeps no scales."""

    name = "operands"


def tensors_of(names: list[str], ranks: MonitoredRanks) -> Operands:
    return Operands({(name, role): "linear" for name in names for role in ROLES}, ranks)


#: bytes per tensor of the rows that a rank sends to the writer
ROWS = 500


def work(rank: int, world: int, port: int, n: int, rounds: int, alone: bool) -> dict[str, Any]:
    """Run one rank. Return its median times, the bytes of each collective, and its peak memory.

    Args:
        alone: time only the packed reduction.
    """
    dist.ProcessGroupGloo = Counted
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    names = [f"decoder.layers.{i}.mlp.linear_fc{i % 2 + 1}" for i in range(-(-n // len(ROLES)))]
    ranks, kinds = MonitoredRanks(), dict.fromkeys(names, "linear")
    ShardGroup.publish_gemm_names(ranks, kinds)
    ranks.await_all_monitors({})
    group = ShardGroup.find_shard_group(ranks, kinds)
    reduction, rows = ShardGroupReduction(ranks, group, [tensors_of(names, ranks)]), bytes(ROWS * n)
    assert group.group
    group.group.gather_to_first_rank(b"")  # ranks connect to the first rank with their first message
    ranks.broadcast_value({})
    times: dict[str, list[float]] = {}
    before, peaks = memory("VmRSS"), []
    for step in range(rounds):
        forget_peak()
        mine, plan, Counted.asked = stats(rank, names, n), AgreedSampleSettings(step), []
        found: list[Any] = []

        def pack(plan: AgreedSampleSettings = plan, mine: list[OperandStats] = mine, found: list[Any] = found) -> None:
            found.append(reduction.pack_results(plan, {"operands": mine}, [s.key for s in mine]))
            mine.clear()

        times.setdefault("packing", []).append(seconds(pack))
        times.setdefault("reducing", []).append(
            seconds(lambda plan=plan, found=found: found.append(reduction.reduce_over_ranks(plan, found[0])))
        )
        peaks.append(memory("VmHWM") - before)
        asked = Counted.asked
        assert len(asked) == 2, asked
        times.setdefault("collectives", []).append(sum(took for _, took in asked))
        check(found[1], rank, world, n)
        found.clear()
        times.setdefault("message", []).append(seconds(lambda: ranks.broadcast_value({"over": False, "control": None})))
        times.setdefault("gathering", []).append(seconds(lambda: group.group.gather_to_first_rank(rows)))
        dist.barrier()  # no rank prepares the next round while the first rank still gathers
        if alone:
            continue
        numbers, counts = torch.zeros(4, dtype=torch.float64), torch.zeros(BINS, dtype=torch.int64)
        for name, x in (("four_numbers", numbers), ("whole_histograms", counts)):
            times.setdefault(name, []).append(seconds(lambda x=x: [dist.all_reduce(x) for _ in range(n)]))
    dist.barrier()
    dist.destroy_process_group()
    sizes = [size for size, _ in asked]
    return {"times": {k: statistics.median(v) for k, v in times.items()}, "bytes": sizes, "peak": max(peaks)}


def check(whole: dict[str, Any] | None, rank: int, world: int, n: int) -> None:
    """Check that only the first rank has a result, and that it contains all values of all ranks."""
    assert (whole is not None) == (rank == 0)
    if whole is not None:
        assert [s.ranks for s in whole["operands"]] == [world] * n
        assert all(int(s.histogram.counts.sum()) == world * VALUES for s in whole["operands"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tensors", type=int, nargs="+", default=[500, 5000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--packed-alone", action="store_true", help="time only the packed reduction")
    asked = parser.parse_args()
    prepare()
    for world in asked.ranks:
        for n in asked.tensors:
            report(world, n, launch(world, n, asked.rounds, asked.packed_alone))


def launch(world: int, n: int, rounds: int, alone: bool) -> list[dict[str, Any]]:
    """Run `world` ranks with `n` tensors. Return the result of `work` for each rank."""
    port = free_port()
    with temporary_folder() as folder:

        def rank_of(rank: int) -> None:
            (folder / f"{rank}.json").write_text(json.dumps(work(rank, world, port, n, rounds, alone)))

        ended = statuses([forked(rank_of, rank) for rank in range(world)], seconds=3600.0)
        if any(ended):
            sys.exit(f"ranks ended with {ended}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def report(world: int, n: int, found: list[dict[str, Any]]) -> None:
    took, sizes = found[0]["times"], found[0]["bytes"]
    whole = took["packing"] + took["reducing"]
    print(f"{world} ranks, {n} tensors: {whole:.3f} s on the first rank, {took['packing']:.3f} s of it packing and")
    print(f"    {took['collectives']:.3f} s in 2 collectives")
    print(f"    {took['message']:.4f} s for the first rank's message, {took['gathering']:.4f} s for gathering rows")
    for name in ("four_numbers", "whole_histograms"):
        if name not in took:
            continue
        ratios = f"{took[name] / took['collectives']:.1f} times collectives, {took[name] / whole:.1f} times reducing"
        print(f"    one all-reduce a tensor, {name:14} {took[name]:7.3f} s: {ratios}")
    print(f"    {sizes[0] / 1e6:.2f} MB of maxima and {sizes[1] / 1e6:.2f} MB of sums a rank,")
    print(f"    {sum(sizes) / n / 1e3:.1f} KB a tensor; a whole histogram is {8 * BINS / 1e3:.0f} KB")
    print(f"    peak memory, own histograms included: {', '.join(str(f['peak']) for f in found)} MiB by rank")
    if n == 500:
        assert max(f["peak"] for f in found) < 200


if __name__ == "__main__":
    main()
