"""Runs over hosts that fail: how long training is held up, which rank says so, and whether losses stay the same.

    python scripts/validation/network_faults.py --output results.json

Hosts are network namespaces (`network_hosts.py`), which takes root. Each rank trains a model of its own, so that training
itself waits for no other host. `--limit` is what the monitor promises, 60 s; a fault lasts longer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas  # noqa: F401  # what writes tables looks for it
import torch
import torch.distributed as dist
from many_ranks.processes import forked
from network_cases import CASES, HOST_OF, STORE_ALONE, WORLD, Case, broken
from network_hosts import INTERFACE, Hosts, hosts
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.distributed import patience
from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.record.reader import find_record, read_table_rows

INTERVAL, PORT = 5, 29600
#: seconds of a step, and those after which a call of the monitor counts as a wait
STEP, A_WAIT = 0.1, 0.5


class Board:
    """What the processes of a run show each other: memory that they share."""

    def __init__(self) -> None:
        self.steps = torch.zeros(WORLD, dtype=torch.int64).share_memory_()
        #: by the clock, 0 before: the store is there, a fault began
        self.served, self.failed = torch.zeros(2, 1, dtype=torch.float64).share_memory_()
        #: steps of the whole run, 0 until they are known
        self.last = torch.zeros(1, dtype=torch.int64).share_memory_()

    def end(self) -> None:
        """Let all ranks end at the same step, with a sample under way."""
        self.last[0] = (int(self.steps.max()) // INTERVAL + 1) * INTERVAL + 1


class Training:
    """A small model that a rank trains alone."""

    def __init__(self, rank: int, lie: str | None = None) -> None:
        """
        Args:
            lie: what differs from other ranks: "other shapes", "other GEMMs", "other dtype" or "other batch"; else nothing.
        """
        torch.manual_seed(rank)
        width = 48 if lie == "other shapes" else 32
        layers = {"first": nn.Linear(16, width), "act": nn.ReLU(), "last": nn.Linear(width, 4)}
        if lie == "other GEMMs":
            layers = {"first": nn.Linear(16, width), "act": nn.ReLU(), "middle": nn.Linear(width, 4)}
        self._dtype = torch.float16 if lie == "other dtype" else torch.bfloat16
        self.model = nn.Sequential()
        for name, layer in layers.items():
            self.model.add_module(name, layer)
        self.model.to(self._dtype)
        self._rows = 24 if lie == "other batch" else 8
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self._data = torch.Generator().manual_seed(rank)
        self.losses: list[float] = []

    def step(self) -> float:
        x = torch.randn(self._rows, 16, generator=self._data).to(self._dtype)
        loss = self.model(x).float().square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]


class Timed:
    """How long calls of the monitor took since a fault."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.waits: list[tuple[str, int, float]] = []
        self.seconds = 0.0

    def call(self, step: int, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        began = time.monotonic()
        call(*arguments, **named)
        took = time.monotonic() - began
        if self._board.failed:
            self.seconds += took
            self.waits += [(call.__name__, step, round(took, 2))] if took > A_WAIT else []


def join(rank: int, address: str, case: Case) -> None:
    """The process group of the run; without a named interface one that needs no gloo, as those of GPUs do not."""
    master = rank == 0 and not case.store_alone
    store = dist.TCPStore(address, PORT, None if case.store_alone else WORLD, is_master=master)
    if case.named:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    else:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401

        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    dist.init_process_group("gloo" if case.named else "fake", store=store, rank=rank, world_size=WORLD)


def train(rank: int, case: Case, board: Board, folder: Path) -> dict[str, Any]:
    """A monitored run until the board says where it ends, and the same steps without a monitor."""
    timed, run, plain, sampled = Timed(board), Training(rank), Training(rank), []
    options: dict[str, Any] = {"triggers": ["loss_spike"]} if case.triggers else {}
    options |= {"interval": INTERVAL, "on_error": "warn", "table_rows": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor, step = Monitor(run.model, str(folder / "run"), **options), 0
        while not board.last or step < board.last:
            timed.call(step, monitor.begin_step, step)
            sampled += [step] if monitor.sampling else []
            loss = run.step()
            timed.call(step, monitor.end_step, loss=loss)
            step += 1
            board.steps[rank] = step
            time.sleep(STEP)
        timed.call(step, monitor.close)
    for _ in range(step):
        plain.step()
    return {
        "rank": rank,
        "steps": step,
        "last_sampled": max(sampled, default=None),
        "held_up_s": round(timed.seconds, 2),
        "waits": timed.waits,
        "warnings": [str(w.message) for w in caught if "nemo_fp8_debug:" in str(w.message)],
        "losses_identical": run.losses == plain.losses,
        "finished": time.time(),
    }


def serve(network: Hosts, board: Board) -> None:
    """Host the store of a run, and nothing else."""
    network.enter(STORE_ALONE)
    store = dist.TCPStore(network.address(STORE_ALONE), PORT, is_master=True, wait_for_workers=False)
    board.served[0] = time.time()
    signal.pause()
    del store


def take_part(rank: int, case: Case, network: Hosts, board: Board, folder: Path) -> None:
    torch.set_num_threads(1)
    network.enter(HOST_OF[rank])
    join(rank, network.address(STORE_ALONE if case.store_alone else 0), case)
    found = train(rank, case, board, folder)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


class Ended:
    """When and how a process ended."""

    def __init__(self, process: int) -> None:
        self.status: int | None = None
        self.time = 0.0
        threading.Thread(target=self._wait, args=(process,), daemon=True).start()

    def _wait(self, process: int) -> None:
        status = os.waitpid(process, 0)[1]
        self.time = time.time()
        self.status = os.waitstatus_to_exitcode(status)


def until(condition: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.05)


def run_case(case: Case, lasts: float, folder: Path) -> dict[str, Any]:
    """One run; what each of its ranks found.

    Args:
        lasts: seconds that processes are stopped, and that a run goes on after a host was cut off.
    """
    board, owner, processes = Board(), os.getpid(), dict[int, int]()
    with hosts(3 if case.store_alone else 2) as network:
        try:
            if case.store_alone:
                processes[-1] = forked(serve, network, board)
                until(lambda: bool(board.served), "the store is there")
            for rank in range(WORLD):
                processes[rank] = forked(take_part, rank, case, network, board, folder)
            ended = [Ended(processes[rank]) for rank in range(WORLD)]
            until(lambda: int(board.steps.min()) > 2 * INTERVAL, "all ranks train")
            until(lambda: not case.named or any((folder / "run").rglob("metrics/*.parquet")), "ranks have met, and recorded")
            fail(case, network, board, processes, lasts)
            until(lambda: all(rank.status is not None for rank in ended), "all ranks end")
        finally:
            for process in processes.values() if os.getpid() == owner else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]
    for rank, end in zip(ranks, ended, strict=True):
        rank |= {"exit": end.status, "ends_after_s": round(end.time - rank.pop("finished"), 2)}
    return {"stopped": case.stopped, "cut": list(case.cut), "ranks": ranks, "recorded": recorded(folder / "run")}


def fail(case: Case, network: Hosts, board: Board, processes: dict[int, int], lasts: float) -> None:
    """The fault, and what follows to the end of the run."""
    for host in case.cut:
        network.cut(host)
    for rank in case.stopped:
        os.kill(processes[rank], signal.SIGSTOP)
    board.failed[0] = time.time()
    if case.closes:
        board.end()
    time.sleep(lasts if case.stopped or case.cut else 0.0)
    for rank in case.stopped:
        os.kill(processes[rank], signal.SIGCONT)
    seen = board.steps.clone()
    until(lambda: bool(board.last) or int((board.steps - seen).min()) > 3 * INTERVAL, "ranks train on")
    if not board.last:
        board.end()


def recorded(run: Path) -> dict[str, Any]:
    """Steps of the record, and of how many ranks its rows are made."""
    rows = list(read_table_rows(find_record(run), "metrics", ["step", "role", "ranks", "ranks_missing"]).rows())
    return {"steps": sorted({row[0] for row in rows}), "ranks": sorted({tuple(row[1:]) for row in rows})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON")
    parser.add_argument("--limit", type=float, default=patience.LONGEST, help="seconds that training waits at the most")
    parser.add_argument("--lasts", type=float, default=100.0, help="seconds that a fault lasts")
    parser.add_argument("--work", type=float, default=0.0, help="seconds that the monitor may work besides")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    given = parser.parse_args()
    patience.LONGEST = given.limit
    count_histogram(torch.zeros(1, dtype=torch.bfloat16))  # compiled once, and imported, for all ranks
    gc.freeze()
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "limit_s": given.limit,
        "lasts_s": given.lasts,
        "work_s": given.work,
    }
    found["cases"] = {}
    for name in given.cases:
        folder = Path(tempfile.mkdtemp())
        result = json.loads(json.dumps(run_case(CASES[name], given.lasts, folder)))
        shutil.rmtree(folder)
        found["cases"][name] = result
        given.output.write_text(json.dumps(found, indent=1) + "\n")
        print(
            name, *({k: r[k] for k in ("held_up_s", "waits", "warnings")} for r in result["ranks"]), sep="\n  ", flush=True
        )
    if wrong := broken(found):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
