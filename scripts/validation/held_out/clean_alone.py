"""Clean runs that need care: nothing is wrong with any of them, whatever it looks like.

Each of twelve kinds is trained with two seeds, which are each other's baseline. Adapters start at 0. Losses of reinforcement
learning have either sign. A resume takes all state along. Rates warm up for long, or end at 0. What is learned by heart
brings gradients down by many bits within the history of a delayed scale.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fault_injection.engines import RECIPES
from fault_injection.training import CLIP, WEIGHT_DECAY, Schedule

from held_out.care_tasks import make_task
from held_out.make import LOSSES, TRUTH, finish_place, keep_plan, open_record, read_losses, start_place, train_all
from nemo_fp8_debug import Monitor
from nemo_fp8_debug.interventions.emulate import Emulation

STEPS, INTERVAL = 250, 5


@dataclass(frozen=True)
class LateDecay(Schedule):
    """A warm-up, the same rate for long, and a straight line to the end."""

    #: part of the steps that the line takes
    part: float = 0.2

    def decayed(self, step: int) -> float:
        left = (self.steps - step) / (self.part * self.steps)
        return max(self.least, min(1.0, left))


@dataclass(frozen=True)
class Kind:
    """A kind of run."""

    task: str
    options: dict[str, Any] = field(default_factory=dict)
    engine: str = "delayed"
    schedule: Schedule = field(default_factory=lambda: Schedule(STEPS))
    #: what the task's learning rate is multiplied by
    rate: float = 1.0
    #: step that a checkpoint is written before, and step that the run stops before, to go on from the checkpoint
    resume: tuple[int, int] | None = None


KINDS: dict[str, Kind] = {
    "lora_gpt": Kind("adapted", {"name": "llama", "adapted": ("q_proj", "v_proj", "up_proj", "down_proj")}),
    "lora_mixer": Kind("adapted", {"name": "mixer", "adapted": ("fc1", "fc2")}, "current"),
    "bandit": Kind("bandit"),
    "actor_critic": Kind("carts", engine="current"),
    "long_warm_up": Kind("supervised", {"name": "unet"}, schedule=Schedule(STEPS, 200)),
    "no_warm_up": Kind("supervised", {"name": "mixer"}, "blockwise", Schedule(STEPS, 1, 1.0)),
    "resume": Kind("supervised", {"name": "graph"}, resume=(120, 120)),
    "resume_earlier": Kind("supervised", {"name": "points"}, resume=(103, 131)),
    "cosine_to_zero": Kind("supervised", {"name": "llama"}, schedule=Schedule(STEPS, least=0.0)),
    "late_decay": Kind("supervised", {"name": "operator"}, "mxfp8", LateDecay(STEPS, least=0.0)),
    "gpt_by_heart": Kind("supervised", {"name": "llama", "batches": 2}, rate=2.0),
    "clicks_by_heart": Kind("supervised", {"name": "dlrm", "batches": 1}, rate=3.0),
}


@dataclass(frozen=True)
class CareRun:
    """One of them."""

    name: str
    kind: str
    seed: int
    other: str

    def describe(self) -> dict[str, Any]:
        """Return the run as plain values."""
        of = asdict(KINDS[self.kind])
        return {"name": self.name, "care": self.kind, "seed": self.seed, "baselines": {"other": self.other}, **of}


def draw_care(seed: int) -> list[CareRun]:
    """Return the runs, those of a kind together."""
    chosen = random.Random(f"clean alone {seed}")
    return [
        CareRun(f"{kind}-{end}", kind, chosen.randrange(1, 1 << 30), f"{kind}-{other}")
        for kind in KINDS
        for end, other in ("ab", "ba")
    ]


def make_care(folder: Path, runs: Sequence[CareRun], only: int | None = None, jobs: int = 1) -> None:
    """Train what is not there yet, at most `only` of them, and write that nothing is wrong with any."""
    keep_plan(folder, runs)
    missing = [run for run in runs if not (folder / run.name / LOSSES).exists()][:only]
    for number, line in enumerate(train_all(partial(make_run, folder), missing, jobs), 1):
        print(f"{number} of {len(missing)}: {line}", flush=True)
    for run in runs:
        if (folder / run.name / LOSSES).exists():
            steps = len(read_losses(folder, run.name))
            (folder / run.name / TRUTH).write_text(json.dumps(describe_truth(run, steps), indent=1) + "\n")


def describe_truth(run: CareRun, steps: int) -> dict[str, Any]:
    """Return what is true of a run, as `truths.find_truth` puts it."""
    kind = KINDS[run.kind]
    clean = {"kind": "none", "culprits": [], "onset": 0, "fault": {}, "causes": ["none"], "gap_pct": 0.0}
    unharmed = {"harmful": False, "harmed": "no", "gap_interval_pct": [0.0, 0.0], "effect_since": None, "diverges_at": None}
    named = {"name": run.name, "family": run.kind, "engine": kind.engine, "counterpart": run.name, "part": run.kind}
    return {**named, **clean, **unharmed, "weak": False, "slight": False, "steps": steps, "interval": INTERVAL}


class Session:
    """A run from one start of its program to the end of that."""

    def __init__(self, run: CareRun, place: Path) -> None:
        self._kind = KINDS[run.kind]
        self.task = make_task(self._kind.task, run.seed, self._kind.options)
        self.model = self.task.model
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._masters = [p.detach().float().clone() for p in trained]
        self._trained = trained
        self.optimizer = torch.optim.AdamW(self._masters, 0.0, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
        self.emulation = Emulation(self.model, RECIPES[self._kind.engine], layers=list(self.task.layers))
        self.emulation.attach()
        self.monitor = Monitor(self.model, recorders=[open_record(place)], interval=INTERVAL, table_rows=0)

    def step(self, step: int) -> float:
        """Take a step; return its loss."""
        with self.monitor.step(step) as report:
            loss = self.task.loss(step)
            self.monitor.watch_loss(loss)
            loss.backward()
            self.emulation.end_step()
            for master, parameter in zip(self._masters, self._trained, strict=True):
                master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            norm = torch.nn.utils.clip_grad_norm_(self._masters, CLIP)
            schedule = self._kind.schedule
            rising = min(1.0, (step + 1) / schedule.warm_up)
            rate = self.task.learning_rate * self._kind.rate * rising * schedule.decayed(step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._write_back()
            reported = float(loss.detach())
            report(loss=reported, lr=rate, grad_norm=float(norm), consumed_samples=(step + 1) * self.task.batch)
        return reported

    def _write_back(self) -> None:
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._trained, strict=True):
                parameter.copy_(master)

    def save(self) -> dict[str, Any]:
        """Return all state of the run."""
        parts = {"masters": self._masters, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy({**parts, "emulation": self.emulation.state_dict()})

    def load(self, saved: dict[str, Any]) -> None:
        """Take over the state of a run."""
        self.model.load_state_dict(saved["model"])
        with torch.no_grad():
            for master, other in zip(self._masters, saved["masters"], strict=True):
                master.copy_(other)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.emulation.load_state_dict(saved["emulation"])

    def close(self) -> None:
        """End it."""
        self.monitor.close()
        self.emulation.detach()


def make_run(folder: Path, run: CareRun) -> str:
    """Train a run and keep its record and losses; return what came of it."""
    began, place, kind = time.process_time(), start_place(folder, run.name), KINDS[run.kind]
    losses, session, saved = dict[int, float](), Session(run, place), dict[str, Any]()
    saved_at, stopped_at = kind.resume or (-1, kind.schedule.steps)
    for step in range(stopped_at):
        saved = session.save() if step == saved_at else saved
        losses[step] = session.step(step)
    if kind.resume:
        saved = saved or session.save()
        session.close()
        session = Session(run, place)
        session.load(saved)
        losses |= {step: session.step(step) for step in range(saved_at, kind.schedule.steps)}
    session.close()
    finish_place(folder, run.name, [losses[step] for step in sorted(losses)])
    ends = f"{losses[0]:.4g} to {losses[max(losses)]:.4g}"
    return f"{run.name} ({kind.engine}): loss {ends}, {time.process_time() - began:.1f} s of a core"
