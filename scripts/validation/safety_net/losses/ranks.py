"""Cases about torch's ways to train on several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from safety_net.losses.case import STEPS, Family, Watch
from safety_net.losses.learning import build_mlp, draw, learn, make_adam, predict
from safety_net.models import GPT, Layer, add_low_rank, build_gpt

family = Family()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Wrap = Callable[[GPT], nn.Module]


def _train(wrap: Wrap, watch: Watch, rank: int, world: int, build: Callable[[], GPT] = build_gpt, **options: Any) -> None:
    model = wrap(build())
    learn(watch, model, loss_of=predict(model, rank), **options)


def _ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def _with_hook(hook: Any, state: Callable[[], Any], model: GPT) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state(), hook)
    return wrapped


def _checkpointed(reentrant: bool) -> GPT:
    model = build_gpt(dropout=0.1)
    model.checkpoint = partial(checkpoint, use_reentrant=reentrant)
    return model


def _add(name: str, wrap: Wrap, *worlds: int, **options: Any) -> None:
    family.add(name, partial(_train, wrap, **options), *(worlds or (2,)))


_add("DDP", _ddp, 2, 8, micro_batches=2)
_add("DDP in BF16", lambda model: _ddp(model.bfloat16()))
_add("DDP, static graph", partial(_ddp, static_graph=True), build=partial(_checkpointed, False))
_add("DDP, static graph and reentrant", partial(_ddp, static_graph=True), build=partial(_checkpointed, True))
_add("DDP, gradients as views", partial(_ddp, gradient_as_bucket_view=True, bucket_cap_mb=1))
_add("DDP and LoRA", _ddp, build=lambda: add_low_rank(build_gpt()))
_add("DDP and experts", partial(_ddp, find_unused_parameters=True), build=partial(build_gpt, num_experts=4))
_add("DDP under autocast", _ddp, dtype=torch.bfloat16)
_add("DDP, gradients sent in FP16", partial(_with_hook, default_hooks.fp16_compress_hook, lambda: None))
_add(
    "DDP with PowerSGD",
    partial(_with_hook, powerSGD_hook.powerSGD_hook, lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)),
    steps=6,
)


def _train_unsynced(watch: Watch, rank: int, world: int) -> None:
    """Gradients are summed over ranks at the last micro-batch only."""
    model = DistributedDataParallel(build_gpt())
    optimizer = make_adam(model)
    watch.start(model)
    for step in range(STEPS):
        with watch.step(step) as report:
            for number in range(3):
                with model.no_sync() if number < 2 else contextlib.nullcontext():
                    loss = predict(model, rank)(step, number)
                    loss.backward()
                    watch.note("loss", loss)
            watch.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            report(loss=loss)
    watch.finish(model, optimizer)


class _Halves(nn.Module):
    """Each step uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))
        self.which = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers[self.which](x)
        return y


def _train_unused(watch: Watch, rank: int, world: int) -> None:
    inner = _Halves()
    model = DistributedDataParallel(inner, find_unused_parameters=True)

    def loss(step: int, number: int) -> torch.Tensor:
        inner.which = step // 2 % 2
        return model(draw(step, rank)).square().mean()

    learn(watch, model, loss_of=loss)


def _train_uneven(watch: Watch, rank: int, world: int) -> None:
    """Ranks have different numbers of rows."""
    model = DistributedDataParallel(build_mlp())
    with Join([model]):
        learn(watch, model, loss_of=lambda step, number: model(draw(step, rank, 4 + 4 * rank, 32)).square().mean())


def _train_sharded_optimizer(watch: Watch, rank: int, world: int, **options: Any) -> None:
    model = DistributedDataParallel(build_gpt())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, **options)
    learn(watch, model, optimizer, predict(model, rank), micro_batches=2)


def _train_pipeline(watch: Watch, rank: int, world: int) -> None:
    """Two stages by hand, which send activations and gradients."""
    stage = build_mlp()
    optimizer = make_adam(stage)
    watch.start(nn.ModuleDict({f"stage{rank}": stage}))
    for step in range(STEPS):
        with watch.step(step) as report:
            loss = None
            if rank == 0:
                y = stage(draw(step, 0))
                dist.send(y.detach(), 1)
                gradient = torch.empty_like(y)
                dist.recv(gradient, 1)
                y.backward(gradient)
            elif rank == 1:
                x = torch.empty(8, 32)
                dist.recv(x, 0)
                x.requires_grad_()
                loss = stage(x).square().mean()
                loss.backward()
                assert x.grad is not None
                dist.send(x.grad, 0)
            watch.note("loss", loss)
            watch.note_gradients(stage)
            optimizer.step()
            optimizer.zero_grad()
            report(loss=loss)
    watch.finish(stage, optimizer)


family.add("DDP without sync", _train_unsynced, 2)
family.add("DDP with unused parameters", _train_unused, 2)
family.add("DDP with uneven ranks", _train_uneven, 2)
family.add("ZeroRedundancyOptimizer", _train_sharded_optimizer, 2, 8)
family.add("ZeroRedundancyOptimizer in buckets", partial(_train_sharded_optimizer, parameters_as_bucket_view=True), 2)
family.add("pipeline by hand", _train_pipeline, 2)


def _linears(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _shard(
    model: GPT, parts: Callable[[GPT], list[nn.Module]] = lambda model: list(model.layers), **options: Any
) -> nn.Module:
    for part in [*parts(model), model]:
        fully_shard(part, **options)
    return model


def _shard_hybrid(model: GPT) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return _shard(model, mesh=mesh)


_add("FSDP2", _shard, 2, 8, micro_batches=2)
_add("FSDP2 in BF16", partial(_shard, mp_policy=BF16))
_add("FSDP2 of each layer", partial(_shard, parts=_linears))
_add("FSDP2, gathered once", partial(_shard, reshard_after_forward=False))
_add("FSDP2 of the root alone", partial(_shard, parts=lambda model: []))
_add("FSDP2, hybrid", _shard_hybrid, 8)
_add("FSDP2 and checkpoints", _shard, build=partial(_checkpointed, False))
_add("FSDP2 and experts", partial(_shard, mp_policy=BF16), build=partial(build_gpt, num_experts=4))
_add("FSDP2 with offload", partial(_shard, offload_policy=CPUOffloadPolicy(pin_memory=False)))


def _train_fsdp2_accumulated(watch: Watch, rank: int, world: int) -> None:
    model: Any = _shard(build_gpt(), mp_policy=BF16)
    loss_of = predict(model, rank)

    def loss(step: int, number: int) -> torch.Tensor:
        model.set_requires_gradient_sync(number == 2)
        return loss_of(step, number)

    learn(watch, model, loss_of=loss, micro_batches=3)


def _train_fsdp1(watch: Watch, rank: int, world: int, original: bool, on_error: str = "raise") -> None:
    policy = ModuleWrapPolicy({Layer})
    device = torch.device("cpu")
    model = FullyShardedDataParallel(build_gpt(), auto_wrap_policy=policy, use_orig_params=original, device_id=device)
    learn(watch, model, loss_of=predict(model, rank), states=(), on_error=on_error)


def _train_split(watch: Watch, rank: int, world: int, of_sequence: bool = False) -> None:
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    plan: dict[str, Any] = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    if of_sequence:
        plan |= {"0": SequenceParallel()}
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, plan)
    learn(watch, model, make_adam(model, foreach=False), lambda step, n: model(draw(step, n, 2, 8, 32)).square().mean())


family.add("FSDP2, accumulated", _train_fsdp2_accumulated, 2)
family.add("FSDP1", partial(_train_fsdp1, original=False), 2)
family.add("FSDP1, warned of", partial(_train_fsdp1, original=False, on_error="warn"), 2)
family.add("FSDP1 with original parameters", partial(_train_fsdp1, original=True), 2)
family.add("tensor parallelism", _train_split, 2, 8)
