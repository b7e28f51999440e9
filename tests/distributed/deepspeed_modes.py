"""The modes of DeepSpeed, in turn, in two CPU processes, and float16 in two others.

`deepspeed_modes.py FOLDER FOLDER MODE...`
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed_fp16
import lightning.pytorch as pl
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger
from deepspeed_watched import (
    INTERVAL,
    MONITORS,
    RATE,
    ROWS,
    STEPS,
    Calls,
    Watched,
    batch,
    digest,
    histograms,
    layers,
    loss_of,
    plain,
    weights_of,
)
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from processes import in_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.data import DataLoader

from nemo_fp8_debug import FP8DebugCallback
from nemo_fp8_debug.record.reader import find_record, read_table_rows

#: what hides ZeRO-3 on small models: nothing persists, is fetched ahead, or is kept for its next use. DeepSpeed's own linear
#: function rounds before it adds the bias, and stays in place once it is there: it is tried last
PARTITIONED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "memory_efficient_linear": False,
}
ON_CPU = {"device": "cpu", "pin_memory": False}


class OneBit(torch.optim.Optimizer):
    """Averages gradients by itself, a bit for each value and what that lost in the next step: as 1-bit Adam does."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                wanted = p.grad + self.state[p].get("lost", 0.0)
                sent = wanted.sign() * wanted.abs().mean()
                self.state[p]["lost"] = wanted - sent
                torch.distributed.all_reduce(sent)
                p.sub_(sent, alpha=group["lr"])


@dataclass
class Mode:
    """How DeepSpeed splits the run."""

    stage: int
    zero: Mapping[str, Any] = field(default_factory=dict)
    #: when the monitor starts, and with what
    attach: str = "engine"
    #: whether weights are split where they are made
    init: bool = False
    recompute: CheckpointImpl | None = None
    dtype: torch.dtype = torch.bfloat16
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    #: the mode that computes the same; None: it is run once more without a monitor
    same_as: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": 2,
            "bf16": {"enabled": self.dtype == torch.bfloat16},
            "zero_optimization": {"stage": self.stage, **PARTITIONED, **self.zero},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**6,
        }


MODES = {
    "zero-0": Mode(0),
    "zero-0 one-bit": Mode(0, dtype=torch.float32, optimizer=OneBit),
    "zero-1": Mode(1, attach="engine.module"),
    "zero-2": Mode(2, attach="before"),
    "zero-2 offload": Mode(2, {"offload_optimizer": ON_CPU}, same_as="zero-2"),
    "zero-3": Mode(3),
    "zero-3 engine.module": Mode(3, attach="engine.module", same_as="zero-3"),
    "zero-3 before": Mode(3, attach="before", same_as="zero-3"),
    "zero-3 init": Mode(3, attach="before", init=True, same_as="zero-3"),
    "zero-3 offload": Mode(3, {"offload_param": ON_CPU, "offload_optimizer": ON_CPU}, same_as="zero-3"),
    "zero-3 recompute": Mode(3, recompute=CheckpointImpl.NO_REENTRANT),
    "zero-3 reentrant": Mode(3, recompute=CheckpointImpl.REENTRANT),
    "zero-3 float32": Mode(3, dtype=torch.float32),
    "zero-3 own linear": Mode(3, {"memory_efficient_linear": True}),
}


def built(mode: Mode) -> nn.Sequential:
    """The model with the same weights, however they are split."""
    made = nn.Sequential(*layers()).to(mode.dtype)
    if mode.init:
        with deepspeed.zero.Init(config_dict_or_path=mode.config, dtype=mode.dtype):
            split = nn.Sequential(*layers())
        with deepspeed.zero.GatheredParameters(list(split.parameters()), modifier_rank=0):
            if rank() == 0:
                split.load_state_dict(made.state_dict())
        made = split
    if mode.recompute is not None:
        for i in (1, 2):
            made[i] = checkpoint_wrapper(made[i], mode.recompute)
    return made


def zero(mode: Mode, watched: bool) -> dict[str, Any]:
    model, monitor = built(mode), Watched(watched)
    if mode.attach == "before":
        monitor.start(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=mode.optimizer(model.parameters(), lr=RATE), config=mode.config)
    engine.enable_backward_allreduce = mode.optimizer is not OneBit
    if mode.attach != "before":
        monitor.start(engine if mode.attach == "engine" else engine.module)
    losses, sizes, weights, calls = [], set(), {}, Calls()
    for step in range(STEPS):
        weights[step] = {} if watched else weights_of(model)
        monitor.begin_step(step)
        with calls:
            for micro in range(2):
                tokens, labels = batch(step, 2 * rank() + micro)
                sizes.add(dict.__getitem__(model[3]._parameters, "weight").numel())
                loss = loss_of(engine(tokens), labels)
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        monitor.end_step(loss=loss)
    return {
        "losses": losses,
        "digest": digest(model),
        "samples": monitor.samples,
        "weights": weights,
        "calls": calls.counts,
        "sizes": sorted(sizes),
        "external": [name for name, module in model.named_modules() if getattr(module, "_external_params", None)],
    }


def pipeline(watched: bool) -> dict[str, Any]:
    config = Mode(1).config | {"gradient_accumulation_steps": 4}
    model = PipelineModule(layers(), num_stages=2, loss_fn=loss_of, partition_method="uniform").bfloat16()
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), config=config)
    monitor, losses, calls = Watched(watched), [], Calls()
    monitor.start(engine)
    for step in range(STEPS):
        monitor.begin_step(step)
        with calls:
            losses.append(float(engine.train_batch(iter([batch(step, micro) for micro in range(4)]))))
        monitor.end_step(loss=losses[-1])
    deepspeed.utils.groups.mpu = None  # which the next engine would take for its own
    return {"losses": losses, "digest": digest(model), "samples": monitor.samples, "calls": calls.counts}


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers())
        self.losses: list[float] = []

    def training_step(self, taken: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = loss_of(self.layers(taken[0]), taken[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class OnCPU(DeepSpeedStrategy):
    """Lightning's strategy, without its insistence on CUDA."""

    def setup_environment(self) -> None:
        super(DDPStrategy, self).setup_environment()
        self.setup_distributed()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)


def rank() -> int:
    return int(os.environ["RANK"])


def lightning(within: Path, watched: bool) -> dict[str, Any]:
    folder = within / f"lightning-{watched}"
    options = {"interval": INTERVAL, "table_rows": 0, "on_error": "raise", "output": str(folder)}
    config = {key: value for key, value in Mode(3).config.items() if key not in ("gradient_accumulation_steps", "bf16")}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=OnCPU(config=config),
        plugins=[LightningEnvironment()],
        precision="bf16-true",
        max_steps=STEPS,
        callbacks=[FP8DebugCallback(**options)] if watched else [],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Module()
    trainer.fit(module, DataLoader([batch(step, rank()) for step in range(STEPS)], batch_size=None))
    found = {}
    if watched and rank() == 0:
        metrics, kept = (read_table_rows(find_record(folder), table) for table in ("metrics", "histograms"))
        for step in metrics["step"].unique().to_list():
            rows = {f"{row['layer']}/{row['role']}": row for row in metrics.filter(step=step).to_dicts()}
            found[step] = {"rows": rows, "histograms": histograms(kept.filter(step=step).to_dict(as_series=False))}
    return {"losses": module.losses, "digest": digest(module), "samples": found}


def main(rank: int, world: int, folder: Path, modes: Sequence[str]) -> None:
    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    # Its collectives in shared memory would be compiled first; gloo has them all.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Before there is a process group, and DeepSpeed's linear function.
    found = {"plain": plain(2, 2), "plain float32": plain(2, 2, torch.float32)}
    deepspeed.init_distributed("gloo", verbose=False)
    for name in modes:
        mode = MODES.get(name)
        run = partial(zero, mode) if mode else {"pipeline": pipeline, "lightning": partial(lightning, folder)}[name]
        bare = found[mode.same_as]["bare"] if mode and mode.same_as else run(watched=False)
        found[name] = {"bare": bare, "watched": run(watched=True)}
    for monitor in MONITORS:
        monitor.close()
    torch.distributed.destroy_process_group()
    found |= {"plain own linear": plain(2, 2), "plain pipeline": plain(1, 4), "plain lightning": plain(2, 1)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    in_ranks(2, main, Path(sys.argv[1]), sys.argv[3:], frees_memory=False)
    in_ranks(2, deepspeed_fp16.main, Path(sys.argv[2]), frees_memory=False)
