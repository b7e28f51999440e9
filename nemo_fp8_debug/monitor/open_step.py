"""A run and a sampled step as observers receive them, and the tensors that this rank counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from ..capture.backends.parallel import find_copied_part
from ..capture.device_to_host import Move
from ..capture.dispatcher import Dispatcher
from ..capture.gemms import Gemm, match_gemms
from ..capture.hooks import CopySink, OperandSink, ProductSink
from ..capture.operands import Operand
from ..capture.optimizer_weights import find_weight, is_split_by_zero
from ..capture.scales import Scales
from ..capture.scan import ScannedModule
from ..capture.tensors import is_counted, is_never_counted
from ..capture.weight_gradients import WeightGradients
from ..core.error_guard import ErrorGuard, Fault
from ..core.keys import ROLES, Key, list_roles
from ..core.observation import Observation
from ..distributed import Ranks, ShardGroup
from ..options.config import Config
from ..record.dump import TensorDump
from .model_scan import ModelScan


@dataclass(frozen=True)
class RunSetup:
    """Values that are the same for all sampled steps of a run."""

    config: Config
    ranks: Ranks
    shard_group: ShardGroup
    scales: Scales
    #: number of parts that ranks may split a tensor into, by kind of tensor
    parts: Mapping[str, int]

    @property
    def gemms(self) -> list[str]:
        """Return names of the GEMMs of all ranks that reduce together."""
        return [name for name, kind in self.shard_group.kinds.items() if list_roles(kind) == ROLES]


@dataclass(frozen=True)
class Watched:
    """Values that the sampled steps of a run share."""

    model: ModelScan
    shard_group: ShardGroup
    rank: int
    world: int
    #: attempt number in this run's record
    attempt: int
    dump: TensorDump | None
    errors: ErrorGuard
    #: features that are observed
    observations: Sequence[Observation]


class StepObserver:
    """Observes a sampled step for one feature. The base class observes nothing."""

    def subscribe(self, step: OpenStep) -> None:
        """Start observing. Called after all observers exist, and only if the step is measured."""

    def close(self) -> Collection[Key]:
        """Stop observing. Called when the step is over and no hook is left.

        Returns:
            Expected operands that this run does not have.
        """
        return ()

    def move(self, to: Move) -> None:
        """Replace each collected tensor with the result of `to`."""


@dataclass
class OpenStep:
    """A sampled step that is about to begin."""

    number: int
    #: options in force
    config: Config
    watched: Watched
    #: GEMMs that hooks can see
    known: Sequence[Gemm]
    #: names of GEMMs that are measured or dumped
    chosen: Collection[str]
    dumped: Collection[str]
    #: modules of the model at this step, and ids of those inside torch.compile
    scanned: Sequence[ScannedModule]
    compiled: Collection[int]
    dispatcher: Dispatcher
    #: reports an error that costs an operand
    lose: Fault
    gradients: WeightGradients
    #: tensors that are counted
    operands: dict[Key, Operand] = field(default_factory=dict)
    #: receivers of the operands of each GEMM
    sinks: dict[Key, OperandSink] = field(default_factory=dict)
    #: operands of GEMMs, by name and role; other ranks may count some of them
    seen: dict[str, dict[str, Operand]] = field(default_factory=dict)
    #: other receivers of operands: one for each GEMM, and one for all
    products: dict[str, ProductSink] = field(default_factory=dict)
    copies: CopySink | None = None
    #: observers by feature
    observers: dict[str, StepObserver] = field(default_factory=dict)

    @property
    def guard(self) -> Callable[[str], AbstractContextManager[None]]:
        """A context that keeps an exception out of the training loop. Its argument names the guarded action."""
        return self.watched.errors.guard


def counted_parts(gemms: Sequence[Gemm], config: Config, dumped: Sequence[str], group: ShardGroup, rank: int) -> set[Key]:
    """Return operands of which this rank counts a part.

    Args:
        dumped: patterns of layers that are dumped, in addition to the options' layers.
    """
    chosen = match_gemms(gemms, None if config.layers is None else [*config.layers, *dumped])
    copied = {(g.name, role): copied_elsewhere(g, role) for g in chosen for role in config.roles if is_shown(g, role)}
    return {key for key, of in copied.items() if (group.first[key[0]] == rank if of is None else not of)}


def compiled_parts(compiled: Sequence[Gemm], config: Config, group: ShardGroup) -> set[Key]:
    """Return operands that are compiled here and seen on another rank. They lack this rank's part."""
    return {
        (gemm.name, role)
        for gemm in match_gemms(compiled, config.layers)
        for role in config.roles
        if role != "weight" and gemm.name in group.kinds and not gemm.backend.copied(gemm.module, role)
    }


def copied_elsewhere(gemm: Gemm, role: str) -> bool | None:
    """Return whether another rank counts the operand. None: the first rank that has it counts it."""
    stored = gemm.backend.stored(gemm.module, gemm.part) if role == "weight" else None
    if stored is not None and getattr(stored.parameter, "main_param_sharded", False):
        return find_copied_part(gemm.module)
    return gemm.backend.copied(gemm.module, role)


def is_shown(gemm: Gemm, role: str) -> bool:
    """Return whether hooks can see an operand."""
    return role not in gemm.unseen


def counts_weight(shard_group: ShardGroup, rank: int, gemm: Gemm) -> Callable[[torch.Tensor], bool]:
    """Return a function that decides whether this rank counts a tensor with the layout of a weight.

    A rank counts its own part, or the first of several copies.
    """
    is_copy, weight = find_copied_part(gemm.module), find_weight(gemm)
    if getattr(weight, "main_param_sharded", False):
        return lambda x: not is_copy
    copied = gemm.backend.copied(gemm.module, "weight")
    first = shard_group.first[gemm.name] if copied is None else None
    if copied:
        return is_never_counted
    # An engine may split states after the monitor was made.
    return lambda x: not is_copy if is_split_by_zero(find_weight(gemm)) else is_counted(x, rank, first)
