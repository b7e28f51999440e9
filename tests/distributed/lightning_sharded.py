"""A Lightning run, plain in a CPU process and sharded over two, as Lightning starts them: `lightning_sharded.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from sharded import fully_shard, loss_of, model
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from nemo_fp8_debug import FP8DebugCallback
from nemo_fp8_debug.record.reader import find_record, read_table_rows

STEPS = 2


class Module(pl.LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how, self.losses = model(exact=True), how, list[float]()

    def configure_model(self) -> None:
        if self.how == "fsdp2" and not hasattr(self.net, "unshard"):
            for part in [*self.net.blocks, self.net]:
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        # Lightning divides by the accumulated batches, of which one process has more.
        loss = loss_of(self.net(batch), True) * self.trainer.accumulate_grad_batches
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=2.0**-6)


class OnCPU(FSDPStrategy):
    """Lightning's own, which wants a GPU's number where FSDP would take a CPU."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")


def strategy(how: str) -> dict[str, Any]:
    if how == "plain":
        return {"devices": 1}
    if how == "fsdp1":
        return {"devices": 2, "strategy": OnCPU(auto_wrap_policy={type(model(exact=True).blocks[0])})}
    return {"devices": 2, "strategy": ModelParallelStrategy(2, 1)}


def train(folder: Path, how: str, watched: bool) -> tuple[list[float], int]:
    callbacks = [FP8DebugCallback(interval=1, table_rows=0, output=str(folder / how), on_error="raise")] if watched else []
    x = torch.randint(-2, 3, (STEPS, 8, 16), generator=torch.Generator().manual_seed(0)).float()
    module = Module(how)
    trainer = pl.Trainer(
        accelerator="cpu",
        **strategy(how),
        max_steps=STEPS,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2 if how == "plain" else 1,
    )
    trainer.fit(module, DataLoader(torch.cat([x, x]), batch_size=1))
    return module.losses, trainer.global_rank


def compare(folder: Path, how: str) -> None:
    losses, rank = train(folder, how, True)
    unwatched, _ = train(folder, how, False)
    if rank == 0:
        table = read_table_rows(find_record(folder / how), "metrics").filter(step=0).sort("layer", "role")
        metrics = {f"{row['layer']} {row['role']}": [row[k] for k in ("n", "amax", "amin")] for row in table.to_dicts()}
        (folder / f"{how}.json").write_text(json.dumps({"metrics": metrics, "losses": losses, "unwatched": unwatched}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if "LOCAL_RANK" not in os.environ:  # which is that of a process that Lightning starts
        compare(folder, "plain")
    for how in ("fsdp2", "fsdp1"):
        compare(folder, how)
