"""What every mode of DeepSpeed trains and is watched by, what is told of it, and the same without DeepSpeed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import deepspeed
import torch
from helpers import Samples
from plain_loop import Layer
from torch import nn

from nemo_fp8_debug import Monitor

STEPS, INTERVAL = 3, 2
ROWS, SEQUENCE, WIDTH, WORDS, RATE = 2, 16, 32, 64, 0.5
#: closed together at the end: torch names groups by how many there are, and a name taken twice leads to stale addresses
MONITORS: list[Monitor] = []


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(WORDS, WIDTH), Layer(WIDTH, 4), Layer(WIDTH, 4), nn.Linear(WIDTH, WORDS, bias=False)]


def batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [rows, sequence]; the same for all modes, whoever takes it."""
    numbers = torch.Generator().manual_seed(1000 * step + micro)
    tokens = torch.randint(WORDS, (ROWS, SEQUENCE + 1), generator=numbers)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Watched:
    """A monitor of this package, or none; keeps what it records."""

    def __init__(self, wanted: bool) -> None:
        self._wanted, self.kept, self._monitor = wanted, Samples(), None

    def start(self, model: nn.Module) -> None:
        if self._wanted:
            self._monitor = Monitor(model, recorders=[self.kept], interval=INTERVAL, on_error="raise", what_if=["delayed"])
            MONITORS.append(self._monitor)

    def begin_step(self, step: int) -> None:
        if self._monitor:
            self._monitor.begin_step(step)

    def end_step(self, **scalars: Any) -> None:
        if self._monitor:
            self._monitor.end_step(**scalars)

    @property
    def samples(self) -> dict[int, Any]:
        return {
            step: {
                "rows": {"/".join(key): row for key, row in self.kept.rows(step).items()},
                "histograms": histograms(self.kept.samples[step].get_table("histograms")),
            }
            for step in self.kept.samples
        }


def histograms(columns: Mapping[str, Any]) -> dict[str, dict[int, int]]:
    """Counts of occupied bins by layer and role, over all calls."""
    found: dict[str, Counter[int]] = {}
    for layer, role, bins, counts in zip(*(columns[name] for name in ("layer", "role", "bins", "counts")), strict=True):
        found.setdefault(f"{layer}/{role}", Counter()).update(dict(zip(map(int, bins), map(int, counts), strict=True)))
    return {key: dict(sorted(counts.items())) for key, counts in found.items()}


def plain(ranks: int, accumulated: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """What one process without DeepSpeed computes: the same batches, and losses divided as there."""
    model, monitor = nn.Sequential(*layers()).to(dtype), Watched(True)
    masters, losses = [p.detach().float() for p in model.parameters()], [[] for _ in range(ranks)]
    monitor.start(model)
    for step in range(STEPS):
        monitor.begin_step(step)
        for rank in range(ranks):
            for micro in range(accumulated):
                tokens, labels = batch(step, accumulated * rank + micro)
                loss = loss_of(model(tokens), labels)
                losses[rank].append(loss.item())
                (loss / accumulated).backward()
        monitor.end_step(loss=loss)
        for p, master in zip(model.parameters(), masters, strict=True):
            master -= RATE * p.grad.float() / ranks
            p.data.copy_(master)
        model.zero_grad()
    return {"losses": losses[0], "digest": digest(model), "samples": monitor.samples}


class Calls:
    """Counts what DeepSpeed asks of its communication library."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> None:
        backend = deepspeed.comm.comm.cdb
        kinds = ("all_", "broadcast", "reduce", "gather", "send", "recv", "isend", "irecv")
        self._names = [n for n in dir(type(backend)) if n.startswith(kinds) and callable(getattr(backend, n))]
        for name in self._names:
            setattr(backend, name, partial(self._called, name, getattr(backend, name)))

    def _called(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.counts[name] += 1
        return function(*args, **kwargs)

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            delattr(deepspeed.comm.comm.cdb, name)


def whole(model: nn.Module) -> Any:
    parameters = list(model.parameters())
    return deepspeed.zero.GatheredParameters(parameters) if hasattr(parameters[0], "ds_id") else nullcontext()


def weights_of(model: nn.Module) -> dict[str, dict[int, int]]:
    """How often each magnitude occurs in each weight, rounded to bfloat16, in this very moment."""
    found = {}
    with whole(model):
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                name = name.replace("._checkpoint_wrapped_module", "")
                bits = module.weight.detach().bfloat16().flatten().view(torch.int16).int() & 0x7FFF
                bins, counts = bits.unique(return_counts=True)
                found[f"{name}/weight"] = dict(zip(bins.tolist(), counts.tolist(), strict=True))
    return found


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    with whole(model):
        for p in model.parameters():
            found.update(p.detach().float().numpy().tobytes())
    return found.hexdigest()
