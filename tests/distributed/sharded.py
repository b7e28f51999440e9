"""The same training under each of torch's sharding engines: `sharded.py FOLDER WORLD:MODE,MODE...`, for some worlds."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import Samples
from processes import in_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.scan import scan_modules

STEPS, MICRO_BATCHES, SEQUENCE, WIDTH = 3, 4, 8, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.relu(self.up(self.drop(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Experts(nn.Module):
    """Two experts in one parameter of three dimensions, each for half of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, WIDTH // 2, WIDTH // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (2, -1)).flatten(0, 1).transpose(0, 1)
        return torch.bmm(parts, self.weights).transpose(0, 1).reshape(x.shape)


class InsideBlock(Block):
    """A block that multiplies inside of forwards too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = nn.MultiheadAttention(WIDTH, 2, batch_first=True), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return super().forward(x + self.experts(x))


class InsideModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InsideBlock() for _ in range(2))


def model(exact: bool, inside: bool = False) -> Model:
    """Exact: so few bits that all arithmetic is, in whatever order sums are taken."""
    torch.manual_seed(0)
    made = InsideModel() if inside else Model()
    if exact:
        for parameter in made.parameters():
            kept = torch.rand(parameter.shape) < 0.15
            parameter.data = torch.randint(-2, 3, parameter.shape) * kept * 0.5
    return made


def batches(exact: bool, step: int) -> list[torch.Tensor]:
    """float32 [1, S, W] of bfloat16 numbers each."""
    generator = torch.Generator().manual_seed(step)
    shape = MICRO_BATCHES, 1, SEQUENCE, WIDTH
    x = torch.randint(-2, 3, shape, generator=generator) if exact else torch.randn(shape, generator=generator)
    return list(x.bfloat16().float())


def plain(net: Model) -> nn.Module:
    return net.bfloat16()


def ddp(net: Model) -> nn.Module:
    return DistributedDataParallel(net.bfloat16())


def _linears(net: nn.Module) -> list[nn.Module]:
    return [m for m in net.modules() if isinstance(m, nn.Linear)]


def fsdp2(parts: Callable[[Model], list[nn.Module]], **options: Any) -> Callable[[Model], nn.Module]:
    def wrap(net: Model) -> nn.Module:
        net = net if "mp_policy" in options else net.bfloat16()
        for part in [*parts(net), net]:
            fully_shard(part, **options)
        return net

    return wrap


def unsharded(net: Model) -> nn.Module:
    """As explicit prefetching leaves it: gathered before its forward, whose hook casts what comes in float32 to bfloat16."""
    net = fsdp2(_linears, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))(net)
    net.register_forward_pre_hook(lambda module, args: [linear.unshard() for linear in _linears(net)] and None)
    return net


def hsdp(net: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp2(_linears, mesh=mesh)(net)


def fsdp1(**options: Any) -> Callable[[Model], nn.Module]:
    def wrap(net: Model) -> nn.Module:
        return FullyShardedDataParallel(net.bfloat16(), device_id=torch.device("cpu"), **options)

    return wrap


def plan(of_sequence: bool) -> dict[str, Any]:
    between = Shard(1) if of_sequence else Replicate()
    layers = {
        "blocks.*.up": ColwiseParallel(input_layouts=between),
        "blocks.*.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    return layers | ({"blocks.*.drop": SequenceParallel()} if of_sequence else {})


def tp(of_sequence: bool = False) -> Callable[[Model], nn.Module]:
    def wrap(net: Model) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        return parallelize_module(net.bfloat16(), mesh, plan(of_sequence))

    return wrap


def partial(net: Model) -> nn.Module:
    """The head gets a DTensor that is the sum of what ranks have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def summands(module: nn.Module, args: tuple[torch.Tensor], mesh: Any) -> Any:
        return DTensor.from_local(args[0] / mesh.size(), mesh, [Partial()])

    def added_up(module: nn.Module, out: Any, mesh: Any) -> Any:
        return out.redistribute(mesh, [Replicate()]).to_local()

    net = net.bfloat16()
    distribute_module(net.head, mesh, input_fn=summands, output_fn=added_up)
    return net


def fsdp2_tp(parts: Callable[[Model], list[nn.Module]]) -> Callable[[Model], nn.Module]:
    def wrap(net: Model) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net.bfloat16(), mesh["tp"], plan(False))
        return fsdp2(parts, mesh=mesh["dp"])(net)

    return wrap


def _blocks(net: Model) -> list[nn.Module]:
    return list(net.blocks)


def _none(net: Model) -> list[nn.Module]:
    return []


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
POLICY = ModuleWrapPolicy({Block})
MODES: dict[str, Callable[[Model], nn.Module]] = {
    "plain": plain,
    "plain-exact": plain,
    "ddp": ddp,
    "fsdp2-block": fsdp2(_blocks, reshard_after_forward=True),
    "fsdp2-block-kept": fsdp2(_blocks, reshard_after_forward=False),
    "fsdp2-linear": fsdp2(_linears, reshard_after_forward=True),
    "fsdp2-linear-kept": fsdp2(_linears, reshard_after_forward=False),
    "fsdp2-root": fsdp2(_none),
    "fsdp2-block-bf16": fsdp2(_blocks, mp_policy=BF16),
    "fsdp2-linear-bf16": fsdp2(_linears, mp_policy=BF16),
    "fsdp2-unsharded": unsharded,
    "early": fsdp2(_linears),
    "hsdp": hsdp,
    "fsdp1": fsdp1(auto_wrap_policy=POLICY, use_orig_params=False),
    "fsdp1-orig": fsdp1(auto_wrap_policy=POLICY, use_orig_params=True),
    "fsdp1-linear": fsdp1(auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=False),
    "fsdp1-grad-op": fsdp1(auto_wrap_policy=POLICY, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "inside-plain": plain,
    "inside-ddp": ddp,
    "inside-fsdp2": fsdp2(_blocks),
    "inside-fsdp2-bf16": fsdp2(_blocks, mp_policy=BF16),
    "tp-exact": tp(),
    "tp-sequence-exact": tp(of_sequence=True),
    "partial-exact": partial,
    "fsdp2-tp-exact": fsdp2_tp(_blocks),
    "fsdp2-tp-linear-exact": fsdp2_tp(_linears),
}
#: ranks that split the batch, where it is not all of them
DATA_PARALLEL = {"tp-exact": 1, "tp-sequence-exact": 1, "partial-exact": 1, "fsdp2-tp-exact": 2, "fsdp2-tp-linear-exact": 2}


def mine(mode: str, parts: list[torch.Tensor], rank: int, world: int) -> list[torch.Tensor]:
    """This rank's micro-batches, of those that the plain run takes one by one."""
    ways = DATA_PARALLEL.get(mode, world)
    each, number = len(parts) // ways, rank * ways // world
    parts = parts[number * each : (number + 1) * each]
    return [x.chunk(world, 1)[rank] for x in parts] if "sequence" in mode else parts


def loss_of(y: torch.Tensor, exact: bool) -> torch.Tensor:
    """A sum, so that dY is the same whatever else is in the batch."""
    if exact:
        y = y * torch.randint(-1, 2, y.shape, generator=torch.Generator().manual_seed(7))
        return y.sum() / 64
    return y.square().sum() / 64


def train(mode: str, rank: int, world: int, watched: bool) -> dict[str, Any]:
    exact, samples = mode.endswith("exact"), Samples()
    bare = model(exact, mode.startswith("inside"))
    options = {"interval": 2, "recorders": [samples], "on_error": "warn" if "partial" in mode else "raise"}
    monitor = Monitor(bare, **options) if watched and mode == "early" else None
    net = MODES[mode](bare)
    if watched and monitor is None:
        monitor = Monitor(net, **options)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=2.0**-6), []
    fp32 = next(net.parameters()).dtype == torch.float32
    for step in range(STEPS):
        true_weights = whole_weights(net)
        if monitor:
            monitor.begin_step(step)
        for x in mine(mode, batches(exact, step), rank, world):
            loss = loss_of(net(x if fp32 else x.bfloat16()).float(), exact)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor.end_step(loss=loss)
    if monitor:
        monitor.close()
    return {"losses": losses, "weights": digest(net), "samples": list(metrics_of(samples)), "last": true_weights}


def metrics_of(samples: Samples) -> Iterator[tuple[int, str, str, dict[str, Any]]]:
    for step, sample in samples.samples.items():
        recorded = sample.get_table("histograms")
        keys = zip(recorded["layer"], recorded["role"], strict=True)
        histograms = dict(zip(keys, histograms_of(sample), strict=True))
        for i, key in enumerate(zip(sample.operand_columns["layer"], sample.operand_columns["role"], strict=True)):
            row = {name: column[i] for name, column in sample.operand_columns.items()}
            yield step, *key, row | {"histogram": histograms[key]}


def histograms_of(sample: Any) -> Iterator[dict[int, int]]:
    for bins, counts in zip(sample.get_table("histograms")["bins"], sample.get_table("histograms")["counts"], strict=True):
        yield dict(zip(bins.tolist(), counts.tolist(), strict=True))


def whole_weights(net: nn.Module) -> dict[str, dict[int, int]]:
    """How often each magnitude occurs in the weights as they are multiplied, by the names that a monitor gives them."""
    with FullyShardedDataParallel.summon_full_params(net, writeback=False):
        found = {
            one.global_name: one.module.weight.detach() for one in scan_modules([net]) if isinstance(one.module, nn.Linear)
        }
        return {name: magnitudes(w.full_tensor() if hasattr(w, "full_tensor") else w) for name, w in found.items()}


def magnitudes(x: torch.Tensor) -> dict[int, int]:
    bits = x.bfloat16().contiguous().view(torch.int16).flatten().int() & 0x7FFF
    return dict(zip(*(column.tolist() for column in bits.unique(return_counts=True)), strict=True))


def digest(net: nn.Module) -> str:
    """Of what this rank holds of the weights."""
    held = hashlib.sha256()
    for parameter in net.parameters():
        part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        held.update(part.detach().float().numpy().tobytes())
    return held.hexdigest()


def main(rank: int, world: int, folder: Path, modes: Sequence[str]) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    result, groups = {}, []
    for mode in modes:
        if world > 1:
            # torch names a group after how many there are: a monitor's would meet the addresses of one that is closed.
            groups.append(dist.new_group(backend="gloo"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watched = train(mode, rank, world, watched=True)
        told = [str(w.message) for w in caught if "nemo_fp8_debug:" in str(w.message)]
        result[mode] = watched | {"warnings": told, "unwatched": train(mode, rank, world, watched=False)}
    torch.save(result, folder / f"rank-{rank}-of-{world}.pt")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    for world, modes in (of.split(":") for of in sys.argv[2:]):
        in_ranks(int(world), main, Path(sys.argv[1]), modes.split(","), frees_memory=False)
