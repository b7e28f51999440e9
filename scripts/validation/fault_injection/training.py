"""A tiny model trained from its first step on in emulated FP8 on a CPU; faults act under it, between it and its engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fault_injection.engines import RECIPES, EmulatedEngine, TransformerEngine
from fault_injection.families import family
from fault_injection.fault import Fault
from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.gemms import find_gemms, require_matching_gemms
from nemo_fp8_debug.core.sample import Recorder
from nemo_fp8_debug.plan.plan import NO_CHANGES, Plan

STEPS, WARM_UP, INTERVAL = 300, 25, 5
#: losses in a row that are not finite, after which a run is ended
GIVEN_UP = 40
LEAST = 0.1
WEIGHT_DECAY, CLIP = 0.01, 1.0
#: what a host scales the loss by, where it scales it
LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class Setup:
    """All that a run without a fault is made of."""

    family: str
    engine: str
    #: of the weights
    seed: int
    #: of the data
    order: int
    depth: int
    #: `plain`, `skipping`: the host skips steps whose gradient is not finite; `scaled`: it scales the loss, too
    host: str = "plain"
    #: what the family's learning rate is multiplied by
    rate: float = 1.0
    #: weights are changed by a random part of themselves, 2^-9, drawn from this; 0: they are not
    shaken: int = 0


@dataclass(frozen=True)
class Schedule:
    """How long a run is, and what its learning rate is multiplied by: a warm-up, then a cosine."""

    steps: int = STEPS
    warm_up: int = WARM_UP
    #: part of the learning rate that is left in the end
    least: float = LEAST

    def decayed(self, step: int) -> float:
        """Return what the cosine leaves of the learning rate."""
        done = max(0.0, (step - self.warm_up) / (self.steps - self.warm_up))
        return self.least + (1 - self.least) * (1 + math.cos(math.pi * done)) / 2


class Training:
    """A run that can be stepped.

    Column 0 of every quantized weight is zero and stays so: what a fault puts into channel 0 of an X changes nothing but X.
    So are the biases, so that an output that is divided is that of an X that is divided.
    The parameters and their gradients are views of one tensor each, as in Megatron's distributed optimizer.
    """

    def __init__(
        self, setup: Setup, fault: Fault, plan: Plan = NO_CHANGES, resumed_at: int = 0, schedule: Schedule | None = None
    ) -> None:
        """
        Args:
            plan: what is done about the fault.
            resumed_at: step from which the plan is carried out.
            schedule: None: that of the benchmark.
        """
        self.schedule = schedule or Schedule()
        self.setup, self.fault, self.family, self.plan = setup, fault, family(setup.family), NO_CHANGES
        self._planned, self._resumed_at = plan, resumed_at
        self.model = self.family.build(setup.seed, setup.depth, setup.engine)
        self.site_of = self.family.site_of
        self.gemms = require_matching_gemms(find_gemms([self.model]), list(self.family.layers))
        self._flatten()
        if setup.shaken:
            generator = torch.Generator().manual_seed(setup.shaken)
            self._master *= 1 + 2.0**-9 * torch.randn(self._master.shape, generator=generator)
            self._write_back()
        self.optimizer = torch.optim.AdamW([self._master], lr=0.0, betas=(0.9, 0.95), fused=True)
        self.engine: EmulatedEngine | TransformerEngine = (
            EmulatedEngine(self.gemms, RECIPES[setup.engine]) if setup.engine in RECIPES else TransformerEngine(self.gemms)
        )
        self._handles = fault.build_into(self)

    def _carry_out_the_plan(self) -> None:
        """Cast as the plan says from here on; the fault's hooks stay behind those of the engine."""
        assert isinstance(self.engine, EmulatedEngine)
        self.plan = self._planned
        for handle in self._handles:
            handle.remove()
        self.engine.follow(self.plan)
        self._handles = self.fault.build_into(self)

    def _flatten(self) -> None:
        parameters = list(self.model.parameters())
        self._weights = torch.cat([p.detach().flatten() for p in parameters])
        self._gradients, self._kept = torch.zeros_like(self._weights), torch.ones(len(self._weights))
        quantized, end = {id(gemm.module.weight) for gemm in self.gemms}, 0
        biases = {id(getattr(gemm.module, "bias", None)) for gemm in self.gemms}
        for parameter in parameters:
            start, end = end, end + parameter.numel()
            parameter.data = self._weights[start:end].view(parameter.shape)
            parameter.grad = self._gradients[start:end].view(parameter.shape)
            if id(parameter) in quantized:
                self._kept[start:end].view(parameter.shape)[:, 0] = 0
            elif id(parameter) in biases:
                self._kept[start:end] = 0
        self._master = self._weights.float() * self._kept
        self._write_back()

    def _write_back(self) -> None:
        self._weights.copy_(self._master)

    def learning_rate(self, step: int) -> float:
        """Warm-up, then a cosine; the fault's part in it."""
        schedule = self.schedule
        rising = min(1.0, (step + 1) / schedule.warm_up)
        usual = self.family.learning_rate * self.setup.rate * rising * schedule.decayed(step)
        return usual * self.fault.learning_rate_factor(step)

    def step(self, i: int, monitor: Monitor) -> dict[str, Any]:
        """One optimizer step; returns what a host reports."""
        fault, scale = self.fault, LOSS_SCALE if self.setup.host == "scaled" else 1.0
        if i == self._resumed_at and self._planned.changes:
            self._carry_out_the_plan()
        fault.before_step(i, self)
        batch = fault.batch(i, lambda step: self.family.draw(self.setup.order, step))
        loss = fault.of_loss(self.family.loss(self.model, batch, fault.masked(i)), i)
        monitor.watch_loss(loss)
        self._gradients.zero_()
        (loss * fault.backpropagated(i, scale)).backward()
        self.engine.end_step()
        fault.after_backward(i, self)
        report = {"loss": float(loss.detach()), "lr": self.learning_rate(i), "consumed_samples": (i + 1) * self.family.batch}
        report |= self._optimize(i, report["lr"], fault.unscaled_by(i, scale))
        return report | ({"loss_scale": scale} if self.setup.host == "scaled" else {})

    def _optimize(self, i: int, rate: float, divided_by: float) -> dict[str, float]:
        gradient = self._gradients.float().mul_(self._kept).div_(divided_by)
        norm = float(gradient.norm())
        skips = self.setup.host != "plain" and not math.isfinite(norm)
        if not skips:
            self._master.grad = gradient.mul_(1.0 if norm <= CLIP else CLIP / norm)  # NaN if the norm is
            for group in self.optimizer.param_groups:
                group["lr"], group["weight_decay"] = rate, self.fault.weight_decay(i, WEIGHT_DECAY)
            self.optimizer.step()
            self._write_back()
        return {"grad_norm": norm} | ({} if self.setup.host == "plain" else {"skipped": float(skips)})


def train(
    setup: Setup,
    fault: Fault,
    recorder: Recorder | None,
    steps: int = STEPS,
    plan: Plan = NO_CHANGES,
    resumed_at: int = 0,
    schedule: Schedule | None = None,
    interval: int = INTERVAL,
) -> list[float]:
    """Train a run, recorded; returns its losses, of which the last `GIVEN_UP` may not be finite.

    Args:
        recorder: None: it is not recorded.
        plan: what is done about the fault.
        resumed_at: step from which the plan is carried out.
        schedule: None: that of the benchmark.
        interval: steps from one sample to the next.
    """
    run = Training(setup, fault, plan, resumed_at, schedule)
    monitor = Monitor(run.model, recorders=[recorder] if recorder else [], interval=interval, table_rows=0)
    losses = list[float]()
    for step in range(steps):
        with monitor.step(step) as report:
            scalars = run.step(step, monitor)
            report(**scalars)
        losses.append(scalars["loss"])
        if len(losses) >= GIVEN_UP and not any(map(math.isfinite, losses[-GIVEN_UP:])):
            break
    monitor.close()
    run.engine.detach()
    return losses
