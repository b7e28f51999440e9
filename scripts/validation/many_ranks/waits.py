"""Trains a small model on many processes of this machine, and measures what training waits for in the monitor.

    .venv/bin/python -m many_ranks.waits [--ranks 1 2 4 8 16] [--output waits.json]

Data-parallel over gloo, with and without a monitor in the same processes: losses and weights must have the same bits. The
record must say what that of one process says that sees all batches. Of each rank and sampled step the seconds are noted
that its training thread waits in the monitor, and how many of them the kernel's scheduler let it wait for a core
(`/proc/self/task/TID/schedstat`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.core.waits import WaitTimes
from nemo_fp8_debug.monitor import monitor
from nemo_fp8_debug.record.reader import find_record, read_table_rows

from .model import DataParallel
from .processes import forked, free_port, prepare, statuses, temporary_folder

RESULTS = Path(__file__).with_suffix(".json")
INTERVAL = 10
#: what the record says that depends on how many ranks and calls there were, or on when it was
LAYOUT = ("ranks", "calls", "consumed_samples")
#: milliseconds that the training thread may wait in the median, on so many processes
LIMIT_MS = 50.0
#: relative difference of metrics, which are float64 sums in another order
ROUNDING = 1e-9


class Scheduled(WaitTimes):
    """Notes beside each wait what the scheduler made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.by_step: dict[int, list[float]] = {}
        self._number = -1

    def start_step(self, step: int) -> None:
        super().start_step(step)
        self._number = step

    @property
    def without_a_core(self) -> float:
        """Seconds in all."""
        return sum(core for _, core in self.by_step.values())

    @contextlib.contextmanager
    def measure_wait(self, what: str) -> Iterator[None]:
        before, total = waited_for_core(), self.total_seconds
        with super().measure_wait(what):
            yield
        found = self.by_step.setdefault(self._number, [0.0, 0.0])
        found[0] += self.total_seconds - total
        found[1] += waited_for_core() - before


def waited_for_core() -> float:
    """Seconds that this thread could have run and had no core, since its start."""
    return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9


def run(rank: int, world: int, port: int, steps: int, folder: Path) -> None:
    """What a rank does; of a world of 0 one process that sees the batches of `rank` ranks."""
    if world:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
        dist.init_process_group("gloo")
    batches = [rank] if world else list(range(rank))
    found: dict[str, Any] = {}
    for watched in (False, True):
        training = DataParallel(batches, world or rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found[f"waits_{watched}"] = train(training, steps, folder / "run" if watched else None)
        found[f"outcome_{watched}"] = [training.losses, training.weights]
        found["warnings"] = [str(w.message) for w in caught if "nemo_fp8_debug:" in str(w.message)]
    result = {
        "outcome": found["outcome_True"],
        "identical": found["outcome_True"] == found["outcome_False"],
        "waits": found["waits_True"],
        "warnings": found["warnings"],
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    if world:
        dist.barrier()
        dist.destroy_process_group()


def train(training: DataParallel, steps: int, folder: Path | None) -> dict[int, list[float]]:
    """Seconds of waits and of those without a core, by sampled step."""
    if folder is None:
        for step in range(steps):
            training.step(step)
        return {}
    monitor.WaitTimes = Scheduled  # type: ignore[misc]
    watching = Monitor(training.model, folder, interval=INTERVAL, table_rows=0, what_if=["current-e4m3", "delayed"])
    waits = watching._waits
    assert isinstance(waits, Scheduled)
    for step in range(steps):
        with watching.step(step) as report:
            report(loss=training.step(step))
    watching.close()
    return {step: waits.by_step.get(step, [0.0, 0.0]) for step in range(0, steps, INTERVAL)}


def of_world(world: int, steps: int, folder: Path) -> dict[str, Any]:
    """A run on so many processes, beside one process that sees all its batches."""
    port, many, one = free_port(), folder / "many", folder / "one"
    for each in (many, one):
        each.mkdir()
    ended = statuses([forked(run, rank, world, port, steps, many) for rank in range(world)])
    assert ended == [0] * world, ended
    assert statuses([forked(run, world, 0, port, steps, one)]) == [0]
    ranks = [json.loads((many / f"rank-{rank}.json").read_text()) for rank in range(world)]
    whole = json.loads((one / f"rank-{world}.json").read_text())
    return {
        "losses_and_weights_identical": all(r["identical"] and r["outcome"] == whole["outcome"] for r in ranks),
        "warnings": [message for r in ranks for message in r["warnings"]],
        **{f"{name}_ms": of for name, of in milliseconds(ranks).items()},
        **differences(many / "run", one / "run"),
    }


def milliseconds(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks and sampled steps but the first: median, 95th percentile and largest of what was waited for."""
    found = [pair for rank in ranks for step, pair in rank["waits"].items() if int(step) > 0]
    kinds = {"waited": [w for w, _ in found], "without_a_core": [c for _, c in found], "net": [w - c for w, c in found]}
    return {name: spread(values) for name, values in kinds.items()}


def spread(seconds: list[float]) -> dict[str, float]:
    values = sorted(1e3 * s for s in seconds)
    at = {"median": statistics.median(values), "p95": values[int(0.95 * (len(values) - 1))], "most": values[-1]}
    return {name: round(value, 2) for name, value in at.items()}


def differences(many: Path, one: Path) -> dict[str, Any]:
    """How far the record of many ranks is from that of one process: rows of histograms, counts, metrics."""
    found: dict[str, Any] = {"histograms_identical": rows(many, "histograms") == rows(one, "histograms")}
    farthest, counts = 0.0, True
    for table in ("metrics", "what_if"):
        ours, theirs = rows(many, table), rows(one, table)
        assert ours.keys() == theirs.keys() and ours, table
        for key, values in ours.items():
            for name, value in values.items():
                other = theirs[key][name]
                if isinstance(value, float) and isinstance(other, float) and value != other:
                    both_nan = math.isnan(value) and math.isnan(other)
                    farthest = max(farthest, 0.0 if both_nan else abs(value - other) / max(abs(value), abs(other)))
                elif value != other:
                    counts = False
    return found | {"counts_identical": counts, "metrics_differ_by": farthest}


def rows(run: Path, table: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """By step, layer, role and recipe."""
    found = read_table_rows(find_record(run), table).to_dicts()
    return {
        (row["step"], row["layer"], row["role"], row.get("recipe")): {k: v for k, v in row.items() if k not in LAYOUT}
        for row in found
    }


def broken(found: dict[str, Any], limit_ms: float = LIMIT_MS) -> list[str]:
    """What results do not keep of what is promised."""
    wrong = []
    for world, of in found["worlds"].items():
        told = [
            name for name in ("losses_and_weights_identical", "histograms_identical", "counts_identical") if not of[name]
        ]
        wrong += [f"{world} ranks: not {name.replace('_', ' ')}" for name in told]
        wrong += [f"{world} ranks: {message}" for message in of["warnings"]]
        if of["metrics_differ_by"] > ROUNDING:
            wrong.append(f"{world} ranks: metrics differ by {of['metrics_differ_by']:.1e}")
        kind = "waited_ms" if int(world) <= 2 else "net_ms"
        if of[kind]["median"] > limit_ms:
            wrong.append(f"{world} ranks: {kind} is {of[kind]['median']} in the median")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--samples", type=int, default=30, help="sampled steps beside the first one")
    parser.add_argument("--limit-ms", type=float, default=LIMIT_MS, help="that training may wait in the median")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    prepare()
    found: dict[str, Any] = {"torch": torch.__version__, "cores": os.cpu_count(), "samples": given.samples}
    found["worlds"] = {}
    for world in given.ranks:
        with temporary_folder() as folder:
            found["worlds"][str(world)] = of_world(world, given.samples * INTERVAL + 1, folder)
        print(world, json.dumps(found["worlds"][str(world)]), flush=True)
        given.output.write_text(json.dumps(found, indent=1) + "\n")
    if wrong := broken(found, given.limit_ms):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
