"""A run whose record's file system goes away and comes back; test_torture.py runs it in a mount namespace of its own.

    outages.py FOLDER OUTAGE...

Prints a JSON object a line, what became of each run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem
from processes import GUARD, in_turn
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from nemo_fp8_debug import FP8DebugWarning, Monitor
from nemo_fp8_debug.monitor import recorder_queue
from nemo_fp8_debug.record.dump import dumped_files, read_dump
from nemo_fp8_debug.record.reader import find_record, read_table_rows

STEPS = 30
#: before these steps; before `STEPS` is before the record is closed
LEAVES, COMES_BACK = 10, 20
BEFORE: dict[int, Callable[[], None]] = {}


def train(run: Path | str | None, before: dict[int, Callable[[], None]] = BEFORE) -> tuple[list[float], bytes]:
    """Losses, and the final weights bit for bit; recorded in `run`, if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    monitor = Monitor(model, run, interval=1, dump=["*"], dump_min_free_bytes=0, table_rows=0) if run else None
    losses = []
    for step in range(STEPS + 1):
        if step in before:
            if monitor:
                monitor.flush()  # so that it is known which steps the outage hits
            before[step]()
        if step == STEPS:
            break
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        if monitor:
            monitor.begin_step(step)
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor.end_step(loss=loss)
        losses.append(loss.item())
    if monitor:
        monitor.close()
    weights = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters())
    return losses, weights


def outcome(run: Path | str, before: dict[int, Callable[[], None]]) -> dict[str, Any]:
    """What became of a run, and what is in its record."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, weights = train(run, before)
    storage = find_record(run)
    dumped = {step for _, step, _, name in dumped_files(storage) if read_dump(storage, name)}
    return {
        "undisturbed": (losses, weights) == train(None),
        "warnings": [str(w.message) for w in caught if issubclass(w.category, FP8DebugWarning)],
        **{
            table: read_table_rows(storage, table)["step"].unique().to_list() for table in ("metrics", "histograms", "steps")
        },
        "dumps": sorted(dumped),
        "events": losses_in_tensorboard(str(storage)),
        "status": json.loads(storage.read_file("status.json")) if "status.json" in storage.list_names() else None,
        "leftovers": [
            name for folder in ("", "metrics", "histograms") for name in storage.list_names(folder) if ".part" in name
        ],
    }


def losses_in_tensorboard(folder: str) -> list[int]:
    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars("loss")] if "loss" in events.Tags()["scalars"] else []


class Hanging(MemoryFileSystem):
    """Stands for a network file system: while it is not there, who opens a file on it waits."""

    protocol = "hanging"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    is_there = threading.Event()
    is_full = False

    def _open(self, *arguments: Any, **options: Any) -> Any:
        self.is_there.wait()
        if self.is_full:
            raise OSError("no space left")
        return super()._open(*arguments, **options)


fsspec.register_implementation("hanging", Hanging)


#: the step before which the record begins to hang
HANGS = {"in mid-run": LEAVES, "in the last step": STEPS - 1, "when closed": STEPS}


def hang_in_turn() -> None:
    """Each of `HANGS` in a process of its own; prints what each said, and their statuses."""
    print(json.dumps(in_turn(lambda begins: hang_for_ever(HANGS[begins]), HANGS)))


def hang_for_ever(begins: int) -> None:
    """A run that says whether it was undisturbed, and what it warned of; nothing is left to do after it but to exit."""
    recorder_queue.STUCK = GUARD  # until something hangs
    Hanging.is_there.set()

    def fill() -> None:
        Hanging.is_full = True  # so that something waits to be written when the record is closed

    def hang() -> None:
        Hanging.is_full = False
        Hanging.is_there.clear()
        recorder_queue.STUCK = 2.0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        undisturbed = train("hanging://server/run", {COMES_BACK: fill, begins: hang}) == train(None)
    print(json.dumps([undisturbed, *(str(w.message) for w in caught if issubclass(w.category, FP8DebugWarning))]))


def command(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


def full(folder: Path) -> tuple[Path, Callable[[], None], Callable[[], None]]:
    command("mount", "-t", "tmpfs", "-o", "size=16m", "none", folder)
    filler = folder / "filler"

    def fill() -> None:
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert "No space left" in str(error)

    return folder / "run", fill, filler.unlink


def read_only(folder: Path) -> tuple[Path, Callable[[], None], Callable[[], None]]:
    command("mount", "-t", "tmpfs", "none", folder)
    return (
        folder / "run",
        lambda: command("mount", "-o", "remount,ro", folder),
        lambda: command("mount", "-o", "remount,rw", folder),
    )


def unmounted(folder: Path, below: str) -> tuple[Path, Callable[[], None], Callable[[], None]]:
    """The mount point stays there, empty."""
    server, point = folder / "server", folder / "mount"
    server.mkdir()
    point.mkdir()

    def mount() -> None:
        assert not [p for p in point.rglob("*") if p.is_file() and not p.name.startswith("events")], (
            "what is written here is hidden by the mount"
        )
        command("mount", "--bind", server, point)

    mount()
    return point / below, lambda: command("umount", point), mount


def replaced(folder: Path) -> tuple[Path, Callable[[], None], Callable[[], None]]:
    run, away = folder / "run", folder / "away"

    def leave() -> None:
        run.rename(away)
        run.write_text("in the way")

    def come_back() -> None:
        run.unlink()
        away.rename(run)

    return run, leave, come_back


def deleted(folder: Path) -> tuple[Path, Callable[[], None], Callable[[], None]]:
    return folder / "run", lambda: shutil.rmtree(folder / "run"), lambda: None


OUTAGES: dict[str, Callable[[Path], tuple[Path, Callable[[], None], Callable[[], None]]]] = {
    "full": full,
    "read-only": read_only,
    "unmounted": lambda folder: unmounted(folder, "run"),
    "unmounted at the run's own folder": lambda folder: unmounted(folder, ""),
    "replaced": replaced,
    "deleted": deleted,
}


def main() -> None:
    recorder_queue.PATIENCE = GUARD
    base = Path(sys.argv[1])
    for name in sys.argv[2:]:
        folder = base / name
        os.makedirs(folder)
        run, leave, come_back = OUTAGES[name](folder)
        print(json.dumps({"outage": name, **outcome(run, {LEAVES: leave, COMES_BACK: come_back})}), flush=True)


if __name__ == "__main__":
    main()
