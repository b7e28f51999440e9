"""Compare sampled with unsampled steps of the recipe's GPT under real NeMo, and count hooks in both.

`OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 .venv/bin/python scripts/benchmarks/step.py`. Every fourth step is sampled, with
everything recorded: the run record, TensorBoard and the printed table. Recording continues in the background of the next
step. So the cost of a sample is the additional time of these two steps, compared with the two steps after them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import Any

import lightning.pytorch as pl
import nemo.lightning as nl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron_on_cpu import megatron_on_cpu
from nemo_gpt import DELAYED, VARIANTS, model
from text import Text

from nemo_fp8_debug import FP8DebugCallback, FP8EmulationCallback

STEPS, WARMUP = 64, 4


class Clock(pl.Callback):
    """A callback that times batches. One is the first callback and one the last, so times include all callbacks."""

    started = 0.0
    step = 0
    times: dict[int, float] = {}  # noqa: RUF012  (shared by both instances)
    hooks: dict[int, int] = {}  # noqa: RUF012

    def __init__(self, first: bool) -> None:
        self.first = first

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self.first:
            Clock.step, Clock.started = trainer.global_step, time.perf_counter()
        else:
            Clock.hooks[Clock.step] = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.first:
            Clock.times[Clock.step] = time.perf_counter() - Clock.started


def run(folder: str, emulate: bool) -> None:
    """Train once, and print the medians of sampled and unsampled steps."""
    Clock.times, Clock.hooks = {}, {}
    emulation: list[pl.Callback] = [FP8EmulationCallback(DELAYED)] if emulate else []
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        strategy=nl.MegatronStrategy(ckpt_async_save=False),
        plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"),
        callbacks=[Clock(True), *emulation, FP8DebugCallback(interval=4), Clock(False)],
        logger=TensorBoardLogger(folder, name="", version=str(emulate)),
        log_every_n_steps=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with megatron_on_cpu():
        trainer.fit(model(VARIANTS["baseline"], STEPS, te=False), Text())
    groups = [[Clock.times[i + j] for j in range(4)] for i in range(WARMUP, STEPS, 4)]
    sampled, following, *rest = (1e3 * statistics.median(times) for times in zip(*groups, strict=True))
    ratio = statistics.median((a + b) / (c + d) for a, b, c, d in groups) * 2 - 1
    hooks = {kind: max(Clock.hooks[i] for i in range(WARMUP, STEPS) if (i % 4 == 0) == kind) for kind in (True, False)}
    print(
        f"{'FP8 by emulation' if emulate else 'BF16':16}  "
        f"unsampled {statistics.mean(rest):6.1f} ms   sampled {sampled:6.1f} ms   "
        f"the step after {following:6.1f} ms   a sampled step costs {ratio:.2f} of an unsampled one   "
        f"hooks: {hooks[False]} unsampled, {hooks[True]} sampled",
        file=sys.stderr,
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        for emulate in (False, True):
            run(folder, emulate)
