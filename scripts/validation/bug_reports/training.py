"""The training loop of every bug report, with one method for each part that a report may get wrong."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from bug_reports.model import GPT, Batch, Data
from nemo_fp8_debug import Emulation, Monitor


class Training:
    """A run without a fault. A report overrides what its bug changed, and acts only if `faulty`."""

    steps: ClassVar[int] = 160
    #: steps between samples
    interval: ClassVar[int] = 5
    micro_batches: ClassVar[int] = 1
    batch_size: ClassVar[int] = 16
    learning_rate: ClassVar[float] = 3e-3
    warmup: ClassVar[int] = 20
    betas: ClassVar[tuple[float, float]] = (0.9, 0.95)
    weight_decay: ClassVar[float] = 0.01
    #: largest gradient norm
    clip: ClassVar[float] = 1.0
    #: loss scale
    scale: ClassVar[float] = 1.0
    #: emulated recipe, and the layers under it; empty: none
    recipe: ClassVar[str] = "delayed(amax_history_len=16)"
    emulated: ClassVar[tuple[str, ...]] = ("layers.*",)
    #: first step that the fault acts in
    since: ClassVar[int] = 0
    #: options of `Monitor` beyond the defaults
    monitor_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, faulty: bool, seed: int = 0, order: int = 0) -> None:
        self.faulty, self.seed, self.data = faulty, seed, Data(order)
        self.step = self.micro_batch = 0
        self.losses: list[float] = []
        self.emulation: Emulation | None = None

    # ------------------------------------------------------------------ what a report may override
    def build_model(self) -> nn.Module:
        """Return the model before anything is attached to it."""
        return GPT(self.seed)

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.AdamW(parameters, lr=self.learning_rate, betas=self.betas, weight_decay=self.weight_decay)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup)

    def prepare_run(self) -> None:
        """Change the model after the emulation is attached and before the monitor is."""

    def prepare_step(self) -> None:
        """Change anything before the forward pass of a step."""

    def draw_batch(self, number: int) -> Batch:
        """Return a micro-batch."""
        return self.data.draw(number, self.batch_size)

    def compute_loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch, without the loss scale."""
        return functional.cross_entropy(self.model(tokens).float().flatten(0, 1), labels.flatten())

    def backpropagate(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a micro-batch."""
        loss.backward()

    def finish_backward(self) -> None:
        """Change gradients before they are clipped."""

    def update_weights(self) -> dict[str, Any]:
        """Clip and take the optimizer's step. Return what the loop reports of both."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return {"grad_norm": norm}

    def clear_gradients(self) -> None:
        """Clear gradients after the step."""
        self.optimizer.zero_grad()

    def update_scales(self) -> None:
        """Move delayed scales on after the backward pass of a step."""
        if self.emulation is not None:
            self.emulation.end_step()

    def describe_step(self) -> dict[str, Any]:
        """Return what else the loop reports of a step."""
        return {}

    # ------------------------------------------------------------------------------------------------
    @property
    def acts(self) -> bool:
        """Return True if the fault acts in the present step."""
        return self.faulty and self.step >= self.since

    def run(self, folder: Path, steps: int | None = None) -> list[float]:
        """Train and record into a folder. Return the loss of every step."""
        shutil.rmtree(folder, ignore_errors=True)
        self.attach()
        self.train(folder, 0, self.steps if steps is None else steps)
        self.detach()
        return self.losses

    def attach(self) -> None:
        """Build the model, its emulation and the optimizer."""
        self.model = self.build_model()
        self.optimizer = self.build_optimizer()
        if self.recipe and self.emulated:
            self.emulation = Emulation(self.model, self.recipe, list(self.emulated))
            self.emulation.attach()
        self.prepare_run()

    def detach(self) -> None:
        """Take the emulation off."""
        if self.emulation is not None:
            self.emulation.detach()
            self.emulation = None

    def train(self, folder: Path, first: int, last: int) -> None:
        """Train a range of steps under a monitor."""
        options = {"interval": self.interval, "table_rows": 0, **self.monitor_options}
        monitor = Monitor(self.model, str(folder), **options)
        try:
            for self.step in range(first, last):
                with monitor.step(self.step) as report:
                    report(**self.train_step(monitor))
        finally:
            monitor.close()

    def train_step(self, monitor: Monitor) -> dict[str, Any]:
        """Train one step. Return what the loop reports of it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate_at(self.step)
        self.prepare_step()
        total = 0.0
        for micro_batch in range(self.micro_batches):
            self.micro_batch = micro_batch
            loss = self.compute_loss(*self.draw_batch(self.step * self.micro_batches + self.micro_batch))
            monitor.watch_loss(loss)
            self.backpropagate(loss * (self.scale / self.micro_batches))
            total += float(loss.detach()) / self.micro_batches
        self.update_scales()
        self.finish_backward()
        reported = self.update_weights()
        self.clear_gradients()
        self.losses.append(total)
        return {"loss": total, "lr": self.rate_at(self.step), **reported, **self.describe_step()}
