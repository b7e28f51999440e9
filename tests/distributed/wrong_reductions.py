"""Gradients that ranks add up, some wrongly: `wrong_reductions.py FOLDER`; each case trains over processes of its own.

What goes wrong is put where it would: into a summand right before it is added, or into the gradient as a collective left it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import in_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nemo_fp8_debug import Monitor

STEPS, ONSET, MICRO_BATCHES, WORLD = 5, 3, 2, 4
WRONG, WRONG_RANK = "2", 1
FAULTY = ("twice", "twice everywhere", "missing", "stale")


class Faults:
    """Puts one fault into the gradient of a weight from a step on, and notes when it did."""

    def __init__(self, kind: str, model: nn.Module, rank: int) -> None:
        self.kind, self.rank, self.step, self.is_last, self.log = kind, rank, -1, False, list[int]()
        self._earlier: dict[str, torch.Tensor] = {}
        self._model, self._watched = model, set[int]()

    def begin(self, step: int) -> None:
        """A step begins, whose parameters are those that autograd adds to."""
        self.step = step

    def watch(self, weight: torch.Tensor) -> None:
        """Of the layer that goes wrong."""
        if id(weight) in self._watched:
            return
        self._watched.add(id(weight))
        if self.kind == "missing":
            node = weight.expand_as(weight).grad_fn.next_functions[0][0]
            self._node = node  # of which autograd holds no reference
            node.register_prehook(self._lose)
        else:
            weight.register_hook(lambda grad: self._queue())

    def _lose(self, grads: Any) -> Any:
        """A rank's part of a sum is left out."""
        if self.step != ONSET or self.rank != WRONG_RANK:
            return None
        self.log.append(self.step)
        return (torch.zeros_like(grads[0]),)

    def _queue(self) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._reduced))

    def _reduced(self) -> None:
        """What a collective has left is divided again, or that of the step before."""
        if not self.is_last:
            return
        for name, parameter in self._model.named_parameters():
            grad = parameter.grad
            if grad is None or not (self.kind == "twice everywhere" or f"{WRONG}.weight" in name):
                continue
            grad = grad.to_local() if hasattr(grad, "to_local") else grad
            earlier, self._earlier[name] = self._earlier.get(name), grad.clone()
            if self.step == ONSET and self.kind.startswith("twice"):
                grad.div_(WORLD)
            elif self.step == ONSET and self.kind == "stale" and earlier is not None:
                grad.copy_(earlier)
            self.log += [self.step] * (self.step == ONSET)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model.bfloat16())


def fsdp(model: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=policy)
    return model


def by_hand(model: nn.Module) -> nn.Module:
    """Whose gradients the loop adds up, which nobody tells."""
    return model.bfloat16()


ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": ddp, "fsdp": fsdp, "hand": by_hand}
CASES = [("ddp", kind) for kind in ("clean", "twice", "twice everywhere", "missing", "stale", "unsynced")]
CASES += [("fsdp", kind) for kind in ("clean", "twice", "stale")] + [("hand", "clean")]


def train(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for engine, kind in CASES:
        dist.new_group(backend="gloo")
        run(rank, world, folder / f"{engine} {kind}", engine, kind)
    dist.barrier()
    dist.destroy_process_group()


def run(rank: int, world: int, folder: Path, engine: str, kind: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    net = ENGINES[engine](model)
    faults = Faults(kind, net, rank)
    if engine != "fsdp" and kind in FAULTY:
        faults.watch(model[2].weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = Monitor(net, str(folder), interval=1, table_rows=0, on_error="raise", verify_rows=16)
    for step in range(STEPS):
        faults.begin(step)
        optimizer.zero_grad()
        with monitor.step(step) as report:
            for micro in range(MICRO_BATCHES):
                faults.is_last = micro == MICRO_BATCHES - 1
                if engine == "ddp":
                    net.require_backward_grad_sync = faults.is_last and kind != "unsynced"
                x = torch.randn(64, 32, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
                loss = net(x if engine == "fsdp" else x.bfloat16()).float().square().mean()
                if engine == "fsdp" and kind in FAULTY:
                    faults.watch(model[2]._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0]._unsharded_param)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            optimizer.step()
            report(loss=loss)
    monitor.close()
    log = [None] * world
    dist.all_gather_object(log, faults.log)
    if rank == 0:
        (folder / "faults.json").write_text(json.dumps(log))


if __name__ == "__main__":
    in_ranks(WORLD, train, Path(sys.argv[1]), frees_memory=False)
