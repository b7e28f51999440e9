"""A case: a training that runs with and without a monitor, and all that must be the same in both."""

from __future__ import annotations

import contextlib
import gc
import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn

from nemo_fp8_debug import Monitor

STEPS = 4
#: options of the monitor unless a case is about one
OPTIONS: dict[str, Any] = {
    "interval": 2,
    "on_error": "raise",
    "table_rows": 0,
    "what_if": ("delayed", "mxfp8", "nvfp4"),
    "states": ("weight_gradient", "first_moment", "second_moment", "master_weight", "update"),
    "activations": ("norm", "router", "attention"),
    "verify_rows": 8,
    "output_rows": 8,
    "replicas": True,
    "copies": True,
    "block_scales": True,
    "dump": ["*"],
    "dump_max_bytes": 200_000,
    "dump_min_free_bytes": 0,
    "triggers": ("loss_spike", "nonfinite", "early_warning"),
    "trigger_steps": 2,
}
IDENTICAL, DIFFERENT, RAISED, UNSTABLE, UNSEEN, IMPOSSIBLE = (
    *("identical", "different", "raised", "unstable", "unseen", "impossible"),
)


class Impossible(Exception):
    """Say that an engine or a device does not allow a case."""


class Watch:
    """Run a monitor, or none, and note what the training computes."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.monitor = folder, None
        self.found: list[tuple[str, bytes]] = []

    def start(self, model: nn.Module | list[nn.Module], **options: Any) -> None:
        """Attach the monitor, if there is one.

        Args:
            model: that is watched.
            options: in place of the usual ones.
        """
        if self.folder is not None:
            self.monitor = Monitor(model, str(self.folder), **(OPTIONS | options))

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[Callable[..., None]]:
        """Run a step, and note the state of random numbers after it.

        Args:
            number: of the step.
        """
        if self.monitor is None:
            yield lambda **scalars: None
        else:
            with self.monitor.step(number) as report:
                yield report
        self.note_chance()

    def show(self, loss: torch.Tensor) -> None:
        """Show the loss of a micro-batch to the monitor."""
        if self.monitor is not None:
            self.monitor.watch_loss(loss)

    def note(self, name: str, value: Any) -> None:
        """Keep the bits of a value."""
        self.found.append((name, bits_of(value)))

    def note_chance(self) -> None:
        """Keep the states of all random number generators."""
        self.note("torch's random numbers", torch.get_rng_state())
        self.note("other random numbers", repr((random.getstate(), np.random.get_state()[1].tolist())))  # type: ignore[index]

    def note_gradients(self, model: nn.Module) -> None:
        """Keep all gradients of a model."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.note(f"gradient of {name}", parameter.grad)

    def finish(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Close the monitor, and keep weights, buffers and the states of optimizers."""
        if self.monitor is not None:
            self.monitor.close()
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            self.note(name, value)
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for name, value in state.items() if isinstance(state, dict) else ():
                    if torch.is_tensor(value):
                        self.note(f"{name} of the optimizer", value)


def bits_of(value: Any) -> bytes:
    """Return the bytes of a tensor, of this rank's part of one, or of a number."""
    if not torch.is_tensor(value):
        return repr(value).encode()
    value = value.detach()
    value = getattr(value, "_local_tensor", value)
    value = getattr(value, "_tensor", value)
    if value.layout is not torch.strided:
        value = value.to_dense()
    if hasattr(value, "dequantize") and type(value).__module__.startswith("transformer_engine"):
        value = value.dequantize()
    dense: bytes = value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return str(value.dtype).encode() + dense


Train = Callable[[Watch, int, int], None]


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        name: of the case.
        train: called with a watch, the rank and the number of ranks.
        world: number of ranks.
    """

    name: str
    train: Train
    world: int = 1


class Family:
    """Cases of one subject."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def add(self, name: str, train: Callable[..., None], *worlds: int) -> None:
        """Add a case for each number of ranks; one rank if none is given."""
        for world in worlds or (1,):
            self.cases.append(
                Case(name if len(worlds) < 2 else f"{name}, {world} ranks", _with_ranks(train, bool(worlds)), world)
            )

    def case(self, name: str) -> Callable[[Callable[[Watch], None]], Callable[[Watch], None]]:
        """Return a decorator that adds a case of one rank."""

        def add(train: Callable[[Watch], None]) -> Callable[[Watch], None]:
            self.add(name, train)
            return train

        return add


def _with_ranks(train: Callable[..., None], takes_ranks: bool) -> Train:
    return train if takes_ranks else lambda watch, rank, world: train(watch)


def run_case(
    case: Case, folder: Path, rank: int, world: int, between: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Train a case without a monitor and with one, and return the outcome.

    Args:
        case: that is trained.
        folder: for the record.
        rank: of this process.
        world: number of ranks.
        between: called before each training.
    """
    try:
        bare = _train(case, None, rank, world, between)
        watched = _train(case, folder, rank, world, between)
        differing = list_differences(bare, watched)
        if differing and list_differences(bare, _train(case, None, rank, world, between)):
            return {"outcome": UNSTABLE, "why": "two runs without the monitor differ"}
        rows = _count_rows(folder) if rank == 0 else None
    except Impossible as error:
        return {"outcome": IMPOSSIBLE, "why": str(error)}
    except Exception as error:
        traceback.print_exc()
        if world > 1:
            raise  # other ranks would wait for this one
        told = {"outcome": RAISED, "why": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        return told | {"if_it_warns": _warn_instead(case, folder, between)}
    finally:
        if world == 1:  # other ranks may still write there
            shutil.rmtree(folder, ignore_errors=True)
    if differing:
        return {"outcome": DIFFERENT, "why": f"{len(differing)} of {len(bare)} values, first {differing[0]}"}
    if rows == 0:
        return {"outcome": UNSEEN, "why": "the monitor saw nothing"}
    return {"outcome": IDENTICAL, "values": len(bare)} | ({} if rows is None else {"rows": rows})


def _train(case: Case, folder: Path | None, rank: int, world: int, between: Callable[[], object]) -> list[tuple[str, bytes]]:
    between()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    watch = Watch(folder)
    case.train(watch, rank, world)
    gc.collect()
    return watch.found


def list_differences(one: list[tuple[str, bytes]], other: list[tuple[str, bytes]]) -> list[str]:
    """Return the names of values that do not have the same bits, or that only one training has."""
    if len(one) != len(other):
        return [f"{len(one)} values against {len(other)}"]
    return [a[0] for a, b in zip(one, other, strict=True) if a != b]


def _warn_instead(case: Case, folder: Path, between: Callable[[], object]) -> str:
    """Return what comes of a case whose monitor only warns, as it does in users' runs."""
    shutil.rmtree(folder, ignore_errors=True)
    before = OPTIONS["on_error"]
    OPTIONS["on_error"] = "warn"
    try:
        bare, watched = (_train(case, place, 0, 1, between) for place in (None, folder))
        return DIFFERENT if list_differences(bare, watched) else IDENTICAL
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        OPTIONS["on_error"] = before


def _count_rows(folder: Path) -> int:
    return sum(pq.ParquetFile(path).metadata.num_rows for path in folder.glob("metrics/*.parquet"))
