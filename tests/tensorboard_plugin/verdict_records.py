"""Small runs that learn by heart in emulated FP8: a baseline, one with a fault that only FP8 minds, its reference run
in BF16."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.gemms import find_gemms
from nemo_fp8_debug.interventions.emulate import Emulation
from nemo_fp8_debug.numerics.recipe import parse_recipe

STEPS, EVERY, ONSET = 96, 4, 48
WIDTH = 32
#: names that would do something if they were taken for HTML
HOSTILE = "<img src=x onerror=hack()>"
CULPRIT = "down"


class MLP(nn.Module):
    """Three GEMMs, the last of which has a name that is not to be trusted.

    A channel of the hidden layer is multiplied by zeros, so that nothing in high precision depends on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.add_module(HOSTILE, nn.Linear(WIDTH, WIDTH))
        self.channel = 1.0
        with torch.no_grad():
            self.down.weight[:, 0] = 0
        free = torch.arange(WIDTH) > 0
        self.down.weight.register_hook(lambda gradient: gradient * free)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.before(x)))
        hidden = torch.cat([torch.full_like(hidden[:, :1], self.channel), hidden[:, 1:]], 1)
        last: torch.Tensor = getattr(self, HOSTILE)(torch.tanh(self.down(hidden)))
        return last

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """What the first GEMM gets."""
        return x


class TwoFaults(MLP):
    """One more channel that is multiplied by zeros: the first GEMM's."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.up.weight[:, 0] = 0
        free = torch.arange(WIDTH) > 0
        self.up.weight.register_hook(lambda gradient: gradient * free)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(x[:, :1], self.channel), x[:, 1:]], 1)


def record(folder: Path, fault: bool, fp8: bool, model: type[nn.Module] = MLP, steps: int = STEPS, **options: Any) -> None:
    """Train and record; the fault is that the free channel becomes a hundred million times larger."""
    torch.manual_seed(0)
    net = model().bfloat16()
    emulation = Emulation.from_gemms(find_gemms([net]), parse_recipe("delayed(amax_history_len=4)"))
    if fp8:
        emulation.attach()
    monitor = Monitor(net, str(folder), interval=EVERY, table_rows=0, on_error="raise", **options)
    x, y = (torch.randn(64, WIDTH).bfloat16() for _ in range(2))
    for step in range(steps):
        net.channel = 1e8 if fault and step >= ONSET else 1.0
        with monitor.step(step) as report:
            loss = (net(x) - y).float().square().mean()
            net.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.5 * parameter.grad
            report(loss=loss.item())
        if fp8:
            emulation.end_step()
    monitor.close()
    if fp8:
        emulation.detach()


class Hostile(nn.Module):
    """Of another model, whose names would do something if they were taken for HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("<b>other</b>", nn.Linear(WIDTH, WIDTH))
        self.down = nn.Linear(1, 1)
        self.channel = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(self, "<b>other</b>")(x)
        return y


def record_all(logdir: Path) -> None:
    """baseline, bad, reference, the run again, and a short run all of whose names are hostile."""
    record(logdir / "baseline", fault=False, fp8=True)
    record(logdir / "bad", fault=True, fp8=True, what_if=["current", "mxfp8"])
    record(logdir / "reference", fault=True, fp8=False)
    shutil.copytree(logdir / "bad", logdir / "again")
    record(logdir / HOSTILE, fault=False, fp8=True, model=type(HOSTILE, (Hostile,), {}), steps=4 * EVERY)
