"""DDP runs in which something of the monitor or the run goes wrong: `faulty.py FOLDER`, in which each of `RUNS` gets one.

Every scenario but the ends trains the same model twice in the same processes, without a monitor and with one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import in_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nemo_fp8_debug import ConfigError, Monitor
from nemo_fp8_debug.capture.dispatcher import EventDispatcher
from nemo_fp8_debug.capture.operands import OperandAccumulator
from nemo_fp8_debug.distributed import patience, rank_store
from nemo_fp8_debug.monitor import recorder_queue
from nemo_fp8_debug.monitor.sampled_step import SampledStep
from nemo_fp8_debug.record.writer import RunRecordWriter

STEPS, INTERVAL = 9, 2
FAULTS = (
    *("breaks_off", "attach_fails", "a_hook_fails", "hooks_are_lost", "no_gemm_on_0", "no_gemm_on_1", "two_monitors"),
    *("uneven_groups", "differing", "is_blocked", "numbers_of_0_differ", "numbers_of_1_differ", "hanging", "no_group"),
    *("opening_fails", "operands_fail", "never_started"),
)
#: what fails before hooks are installed
BEFORE_HOOKS: dict[str, tuple[type, str]] = {
    "opening_fails": (SampledStep, "_leave_out_compiled"),
    "operands_fail": (OperandAccumulator, "__init__"),
}
#: ways for a process to end
ENDS = ("interrupted", "closed_late", "closed_by_one")
#: ranks, and what they go through in turn
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "faults": (3, FAULTS),
    **{how: (2, (how,)) for how in ENDS},
    "alone": (1, ("two_monitors",)),
}
#: what a scenario does to a run, by step
Act = Callable[["Run", int], None]


class Run:
    """One training run."""

    def __init__(self, rank: int, folder: Path, watched: bool) -> None:
        self.rank, self.folder, self.watched = rank, folder, watched
        self.monitor: Monitor | None = None
        self.others: list[Monitor] = []
        self.number = lambda step: step
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses: list[float] = []

    def start(self, model: nn.Module | None = None, **options: Any) -> None:
        if self.watched:
            options = {"interval": INTERVAL, "on_error": "warn", "table_rows": 0, **options}
            self.monitor = Monitor(model or self.model, str(self.folder), **options)

    def train(self, act: Act) -> None:
        for step in range(STEPS):
            with contextlib.suppress(ArithmeticError), self.step(step) as report:
                act(self, step)
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + self.rank)).bfloat16()
                loss = self.model(x).float().square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                act(self, -step)
                report(loss=loss)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[Callable[..., None]]:
        if self.monitor is None:
            yield lambda **_: None
            return
        with contextlib.ExitStack() as stack:
            for other in self.others:
                stack.enter_context(other.step(self.number(step)))
            yield stack.enter_context(self.monitor.step(self.number(step)))

    def close(self) -> None:
        for monitor in filter(None, [*self.others, self.monitor]):
            monitor.close()

    @property
    def outcome(self) -> tuple[list[float], str]:
        weights = b"".join(p.detach().view(torch.int16).numpy().tobytes() for p in self.model.parameters())
        return self.losses, hashlib.sha256(weights).hexdigest()


@contextlib.contextmanager
def raising(owner: type, method: str) -> Iterator[None]:
    """A fault from outside."""
    real = getattr(owner, method)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("a fault from outside")

    setattr(owner, method, fails)
    try:
        yield
    finally:
        setattr(owner, method, real)


def nothing(run: Run, step: int) -> None:
    pass


def breaks_off(run: Run, step: int) -> None:
    """After all that the step does together with other ranks, which go on."""
    if run.rank == 1 and step in (-2, -3):
        raise ArithmeticError


def a_hook_fails(run: Run, step: int) -> None:
    if run.rank == 1 and run.watched and step == 4:
        run.fault = raising(OperandAccumulator, "add_tensor")
        run.fault.__enter__()
    elif run.rank == 1 and run.watched and step == -4:
        run.fault.__exit__(None, None, None)


def hooks_are_lost(run: Run, step: int) -> None:
    """As torch.compile loses those of a module that it compiled before."""
    if run.rank == 1 and run.watched and step == 4:
        run.monitor._sampled._dispatcher.close()


def is_blocked(run: Run, step: int) -> None:
    if run.rank == 1 and run.watched and step == 4:
        run.monitor._pipeline._worker.submit(threading.Event().wait)


class Hanging(RunRecordWriter):
    """A record whose writes hang from the second sample on, for a while."""

    def record(self, sample: Any) -> None:
        if sample.step == 2:
            time.sleep(1.5)
        super().record(sample)


def start(run: Run, scenario: str) -> Act:
    """Start the monitors of a run; returns what is done to it."""
    acts = {
        "breaks_off": breaks_off,
        "a_hook_fails": a_hook_fails,
        "hooks_are_lost": hooks_are_lost,
        "is_blocked": is_blocked,
    }
    if scenario == "breaks_off":
        run.start(triggers=["loss_spike", "nonfinite"])
    elif scenario == "attach_fails":
        with contextlib.ExitStack() as stack:
            run.start()
            if run.rank == 1:
                stack.enter_context(raising(EventDispatcher, "watch_calls"))
            run.train(nothing)
    elif scenario in BEFORE_HOOKS:
        run.start()
        with raising(*BEFORE_HOOKS[scenario]) if run.rank == 1 and run.watched else contextlib.nullcontext():
            run.train(nothing)
    elif scenario == f"no_gemm_on_{run.rank}":
        run.start(nn.ReLU())
    elif scenario == "never_started" and run.rank == 1:
        if run.watched:  # too late: the others have gone on without it
            time.sleep(rank_store.START + 4)
            run.start(triggers=["loss_spike"])
    elif scenario == "never_started":
        run.start(triggers=["loss_spike"])
    elif scenario == "hanging" and run.rank == 0 and run.watched:
        run.start(recorders=[Hanging(str(run.folder))])
    elif scenario == "no_group" and run.rank == 1:
        with raising(dist.ProcessGroupGloo, "__init__"):
            run.start()
    elif scenario == "two_monitors":
        run.start()
        if run.watched:
            run.others = [Monitor(run.model, f"{run.folder}_other", interval=3, on_error="warn", table_rows=0)]
    elif scenario == "uneven_groups":
        if run.rank == 1:
            dist.new_group([1], use_local_synchronization=True)
        run.start()
    elif scenario == "differing":
        run.start(triggers=["loss_spike"] if run.rank == 1 else [])
    else:
        run.start()
    if scenario == f"numbers_of_{run.rank}_differ":
        run.number = lambda step: step + 1
    return acts.get(scenario, nothing)


def compare(scenario: str, rank: int, folder: Path) -> dict[str, Any]:
    outcomes, told, began = [], {}, time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for watched in (False, True):
            run = Run(rank, folder / scenario, watched)
            try:
                act = start(run, scenario)
            except ConfigError as error:
                told["refused"], act = str(error), nothing
            if not run.losses:
                run.train(act)
            run.close()
            outcomes.append(run.outcome)
            dist.barrier()
    told["warnings"] = [str(w.message) for w in caught if "nemo_fp8_debug:" in str(w.message)]
    return told | {"same": outcomes[0] == outcomes[1], "losses": outcomes[0][0], "seconds": time.monotonic() - began}


def interrupted(run: Run, step: int) -> None:
    if step == 4:
        raise KeyboardInterrupt


def end(how: str, rank: int, folder: Path) -> dict[str, Any]:
    """Train once, and end the process in another way than the monitor is told."""
    run = Run(rank, folder / how, watched=True)
    run.start(interval=1)
    with contextlib.suppress(KeyboardInterrupt):
        run.train(interrupted if how == "interrupted" else nothing)
    if how == "closed_late":
        dist.destroy_process_group()
        run.close()
    elif how == "closed_by_one" and rank == 0:
        run.close()
    return {"losses": run.losses}


def main(rank: int, world: int, folder: Path, scenarios: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = {}
    for scenario in scenarios:
        patience.LONGEST = 10.0 if scenario in ("is_blocked", "no_group") or scenario.startswith("numbers_of") else 60.0
        rank_store.START = 3.0 if scenario == "never_started" else 60.0
        recorder_queue.STUCK = 1.0 if scenario == "hanging" else 60.0
        found[scenario] = (end if scenario in ENDS else compare)(scenario, rank, folder)
        (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    if scenarios[-1] not in ENDS:
        dist.destroy_process_group()


if __name__ == "__main__":
    for name, (world, scenarios) in RUNS.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        in_ranks(world, main, folder, scenarios)
