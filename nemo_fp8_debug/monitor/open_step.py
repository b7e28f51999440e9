"""A run and a sampled step as observers get them, and which tensors this rank counts."""

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
    """What is the same for all sampled steps of a run."""

    config: Config
    ranks: Ranks
    shard_group: ShardGroup
    scales: Scales
    #: into how many parts ranks may split a tensor, by what it is
    parts: Mapping[str, int]

    @property
    def gemms(self) -> list[str]:
        """Names of the GEMMs of all ranks that reduce together."""
        return [name for name, kind in self.shard_group.kinds.items() if list_roles(kind) == ROLES]


@dataclass(frozen=True)
class Watched:
    """What the sampled steps of a run have in common."""

    model: ModelScan
    shard_group: ShardGroup
    rank: int
    world: int
    #: of this run's record
    attempt: int
    dump: TensorDump | None
    errors: ErrorGuard
    #: features that are looked at
    observations: Sequence[Observation]


class StepObserver:
    """What one feature looks at in one sampled step; by default at nothing."""

    def subscribe(self, step: OpenStep) -> None:
        """Look at the step from now on; asked once all observers are made, and only if the step is looked at."""

    def close(self) -> Collection[Key]:
        """Say what was not seen; asked when the step is over and no hook is left.

        Returns:
            Operands that were expected, and that this run does not have.
        """
        return ()

    def move(self, to: Move) -> None:
        """Replace each tensor that was collected by what `to` gives for it."""


@dataclass
class OpenStep:
    """A sampled step that opens."""

    number: int
    #: options in force
    config: Config
    watched: Watched
    #: GEMMs that hooks can see
    known: Sequence[Gemm]
    #: names of those that are looked at, and of those that are dumped
    chosen: Collection[str]
    dumped: Collection[str]
    #: modules of the model as they are now, and the ids of those that run inside torch.compile
    scanned: Sequence[ScannedModule]
    compiled: Collection[int]
    dispatcher: Dispatcher
    #: told of a fault that costs an operand
    lose: Fault
    gradients: WeightGradients
    #: tensors that are counted
    operands: dict[Key, Operand] = field(default_factory=dict)
    #: what gets each operand of a GEMM,
    sinks: dict[Key, OperandSink] = field(default_factory=dict)
    #: those of GEMMs by name and role, of which another rank may count some,
    seen: dict[str, dict[str, Operand]] = field(default_factory=dict)
    #: and what else gets them: by GEMM, and of all
    products: dict[str, ProductSink] = field(default_factory=dict)
    copies: CopySink | None = None
    #: by feature
    observers: dict[str, StepObserver] = field(default_factory=dict)

    @property
    def guard(self) -> Callable[[str], AbstractContextManager[None]]:
        """A context that keeps an exception out of the training loop, named by what it guards."""
        return self.watched.errors.guard


def counted_parts(gemms: Sequence[Gemm], config: Config, dumped: Sequence[str], group: ShardGroup, rank: int) -> set[Key]:
    """Operands of which this rank counts a part.

    Args:
        dumped: patterns of layers that are looked at beside those of the options.
    """
    chosen = match_gemms(gemms, None if config.layers is None else [*config.layers, *dumped])
    copied = {(g.name, role): copied_elsewhere(g, role) for g in chosen for role in config.roles if is_shown(g, role)}
    return {key for key, of in copied.items() if (group.first[key[0]] == rank if of is None else not of)}


def compiled_parts(compiled: Sequence[Gemm], config: Config, group: ShardGroup) -> set[Key]:
    """What is compiled here and is seen on another rank lacks this one's part."""
    return {
        (gemm.name, role)
        for gemm in match_gemms(compiled, config.layers)
        for role in config.roles
        if role != "weight" and gemm.name in group.kinds and not gemm.backend.copied(gemm.module, role)
    }


def copied_elsewhere(gemm: Gemm, role: str) -> bool | None:
    """Whether another rank counts it; None: the first rank that has it does."""
    stored = gemm.backend.stored(gemm.module, gemm.part) if role == "weight" else None
    if stored is not None and getattr(stored.parameter, "main_param_sharded", False):
        return find_copied_part(gemm.module)
    return gemm.backend.copied(gemm.module, role)


def is_shown(gemm: Gemm, role: str) -> bool:
    """Whether anything shows an operand to hooks."""
    return role not in gemm.unseen


def counts_weight(shard_group: ShardGroup, rank: int, gemm: Gemm) -> Callable[[torch.Tensor], bool]:
    """Whether this rank counts a tensor that lies as a weight does: a part that no other has, or the first of copies."""
    is_copy, weight = find_copied_part(gemm.module), find_weight(gemm)
    if getattr(weight, "main_param_sharded", False):
        return lambda x: not is_copy
    copied = gemm.backend.copied(gemm.module, "weight")
    first = shard_group.first[gemm.name] if copied is None else None
    if copied:
        return is_never_counted
    # An engine may split states only after the monitor was made.
    return lambda x: not is_copy if is_split_by_zero(find_weight(gemm)) else is_counted(x, rank, first)
