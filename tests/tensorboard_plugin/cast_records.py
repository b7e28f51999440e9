"""Small runs that learn by heart in emulated FP8, two micro-batches a step: with and without a spike."""

from __future__ import annotations

from pathlib import Path

import torch
from samples import sample
from tab import start
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.gemms import find_gemms
from nemo_fp8_debug.interventions.emulate import Emulation
from nemo_fp8_debug.numerics.recipe import parse_recipe

STEPS, EVERY, SPIKE, SKIPPED = 40, 2, 31, 35
WIDTH = 16
#: a name that would do something if it were taken for HTML
HOSTILE = "<img src=x onerror=hack()>"
#: cast with one scale for the whole step, with one for each micro-batch, and kept in float32
DELAYED, CURRENT, FLOAT32 = "delayed", "current", "float32"
#: one whose losses were recorded at other steps than all else; its gradient norm is not a number for a while
SPARSE, SPARSE_STEPS, LOST = "sparse", 400, range(200, 260)
#: one whose recipe is another from a step on
RECAST, RECAST_AT = "recast", 20


class Layers(nn.Module):
    """GEMMs one after the other; what the first one sees has a wide range."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.add_module(HOSTILE, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        last: torch.Tensor = getattr(self, HOSTILE)(hidden)
        return last


def record_casts(logdir: Path) -> None:
    """Runs named after how they cast; `quiet`, delayed without its spike; `other`, of which one layer was looked at; and two
    of one tensor."""
    record(logdir / DELAYED, "delayed(amax_history_len=4)", spikes=True)
    record(logdir / "quiet", "delayed(amax_history_len=4)", spikes=False)
    record(logdir / CURRENT, "current", spikes=False, steps=4)
    record(logdir / FLOAT32, None, spikes=False, steps=4)
    record(logdir / "other", "current", spikes=False, steps=4, layers=["second"])
    record_recast(logdir / RECAST)
    record_sparse(logdir / SPARSE)


def record_sparse(folder: Path) -> None:
    """Rows of one tensor at every tenth step, and a loss at those between."""
    run = start(folder)
    for step in range(0, SPARSE_STEPS, 10):
        run.record(sample(step, [{"layer": "first", "role": "input"}]))
    between = [step for step in range(SPARSE_STEPS) if step % 10]
    norms = {step: float("nan") if step in LOST else 1.0 + step / 100 for step in between}
    run.record_steps({step: {"loss": 2.0 + step / 100, "grad_norm": norms[step]} for step in between})
    run.record_steps({step: {"lr": 1e-3} for step in range(0, SPARSE_STEPS, 10)})
    run.close()


def record_recast(folder: Path) -> None:
    """Rows of one tensor, under two recipes one after the other."""
    run = start(folder)
    for step in range(0, 2 * RECAST_AT, 10):
        recipe = "delayed-hybrid" if step < RECAST_AT else "current-hybrid"
        run.record(sample(step, [{"layer": "first", "role": "input", "recipe": recipe}]))
        run.record_steps({step: {"loss": 2.0}})
    run.close()


def record(folder: Path, recipe: str | None, spikes: bool, steps: int = STEPS, layers: list[str] | None = None) -> None:
    """Train and record; float32 throughout where no recipe is named."""
    torch.manual_seed(0)
    model = Layers() if recipe is None else Layers().bfloat16()
    emulation = Emulation.from_gemms(find_gemms([model]), parse_recipe(recipe or "current"))
    if recipe:
        emulation.attach()
    watched = {"interval": EVERY, "layers": layers, "triggers": ["loss_spike"], "trigger_steps": 1}
    monitor = Monitor(model, str(folder), table_rows=0, on_error="raise", **watched)
    spread = torch.exp2(torch.linspace(-30, 3, WIDTH))
    x, y = torch.randn(2, 32, WIDTH) * spread, torch.randn(2, 32, WIDTH)
    for step in range(steps):
        with monitor.step(step) as report:
            micro = [(1 + i) * x[i].to(model.first.weight.dtype) for i in range(2)]
            target = 40 * y if spikes and step == SPIKE else y
            loss = torch.stack([(model(micro[i]).float() - target[i]).square().mean() for i in range(2)]).sum()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if (spikes and step == SPIKE) or parameter.grad is None:
                        continue
                    parameter -= 0.1 * parameter.grad
            report(loss=float(loss), grad_norm=float(step), skipped=float(spikes and step == SKIPPED))
        if recipe:
            emulation.end_step()
    monitor.close()
    if recipe:
        emulation.detach()
