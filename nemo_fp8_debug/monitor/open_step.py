"""The descriptions of a run and of a sampled step that observers receive, and the tensors that this rank measures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from ..capture.backends.parallel import is_duplicate_master_weight
from ..capture.device_to_host import Move
from ..capture.dispatcher import EventDispatcher
from ..capture.gemms import Gemm, match_gemms_by_name
from ..capture.hooks import OperandSink, ProductSink, ReplicaSink
from ..capture.operands import OperandAccumulator
from ..capture.optimizer_weights import find_gemm_parameter, is_optimizer_state_sharded
from ..capture.scales import CastChooser
from ..capture.scan import ScannedModule
from ..capture.tensors import is_counted_here, never_count_here
from ..capture.weight_gradients import WeightGradientCapture
from ..core.error_guard import ErrorGuard, Fault
from ..core.keys import ROLES, Key, list_roles
from ..core.observation import FeatureObservation
from ..distributed import MonitoredRanks, ShardGroup
from ..options.config import Config
from ..record.dump import TensorDumper
from .model_scan import ModelScan


@dataclass(frozen=True)
class RunSetup:
    """Values that are the same for all sampled steps of a run."""

    config: Config
    ranks: MonitoredRanks
    shard_group: ShardGroup
    scales: CastChooser
    #: largest number of parts that ranks may split a tensor into, by kind of tensor
    parts: Mapping[str, int]

    @property
    def gemm_names(self) -> list[str]:
        """Return the names of the GEMMs of all ranks in the shard group."""
        return [name for name, kind in self.shard_group.kinds.items() if list_roles(kind) == ROLES]


@dataclass(frozen=True)
class RunContext:
    """Values that the sampled steps of a run share."""

    model: ModelScan
    shard_group: ShardGroup
    rank: int
    world: int
    #: attempt number in this run's record
    attempt: int
    dump: TensorDumper | None
    errors: ErrorGuard
    #: features that are observed
    observations: Sequence[FeatureObservation]


class StepObserver:
    """Observes a sampled step for one feature. The base class observes nothing."""

    def subscribe(self, step: OpenStep) -> None:
        """Start observing. This is called once all observers exist, and only if the step is measured."""

    def stop_observing(self) -> Collection[Key]:
        """Stop observing. This is called after the step, when all hooks are removed.

        Returns:
            Expected operands that do not exist in this run.
        """
        return ()

    def move_tensors(self, to: Move) -> None:
        """Replace each collected tensor with the result of `to`."""


@dataclass
class OpenStep:
    """A sampled step that is about to begin."""

    number: int
    #: current options
    config: Config
    watched: RunContext
    #: GEMMs that hooks can see
    known: Sequence[Gemm]
    #: names of GEMMs that are measured or dumped
    chosen: Collection[str]
    dumped: Collection[str]
    #: modules of the model at this step, and ids of the modules inside torch.compile
    scanned: Sequence[ScannedModule]
    compiled: Collection[int]
    dispatcher: EventDispatcher
    #: function that reports the error because of which an operand is missing
    lose: Fault
    gradients: WeightGradientCapture
    #: tensors that this rank measures
    operands: dict[Key, OperandAccumulator] = field(default_factory=dict)
    #: objects that receive the operands, by GEMM and role
    sinks: dict[Key, OperandSink] = field(default_factory=dict)
    #: operands of GEMMs, by name and role; other ranks may measure some of them
    seen: dict[str, dict[str, OperandAccumulator]] = field(default_factory=dict)
    #: other objects that receive operands: one for each GEMM, and one for all GEMMs
    products: dict[str, ProductSink] = field(default_factory=dict)
    copies: ReplicaSink | None = None
    #: observers by feature
    observers: dict[str, StepObserver] = field(default_factory=dict)

    @property
    def guard(self) -> Callable[[str], AbstractContextManager[None]]:
        """Returns a context that keeps exceptions out of the training loop. The argument describes the guarded action."""
        return self.watched.errors.guard


def list_measured_operands(
    gemms: Sequence[Gemm], config: Config, dumped: Sequence[str], group: ShardGroup, rank: int
) -> set[Key]:
    """Return the operands of which this rank measures a part.

    Args:
        dumped: patterns of layers that are dumped, in addition to the options' layers.
    """
    chosen = match_gemms_by_name(gemms, None if config.layers is None else [*config.layers, *dumped])
    copied = {
        (g.name, role): is_duplicate_operand(g, role) for g in chosen for role in config.roles if is_hook_visible(g, role)
    }
    return {key for key, of in copied.items() if (group.first[key[0]] == rank if of is None else not of)}


def list_operands_lost_to_compile(compiled: Sequence[Gemm], config: Config, group: ShardGroup) -> set[Key]:
    """Return operands that are compiled on this rank but observed on another rank, so that this rank's part is missing."""
    return {
        (gemm.name, role)
        for gemm in match_gemms_by_name(compiled, config.layers)
        for role in config.roles
        if role != "weight" and gemm.name in group.kinds and not gemm.backend.copied(gemm.module, role)
    }


def is_duplicate_operand(gemm: Gemm, role: str) -> bool | None:
    """Return whether another rank measures the operand, or None if the first rank that has the operand measures it."""
    stored = gemm.backend.stored(gemm.module, gemm.part) if role == "weight" else None
    if stored is not None and getattr(stored.parameter, "main_param_sharded", False):
        return is_duplicate_master_weight(gemm.module)
    return gemm.backend.copied(gemm.module, role)


def is_hook_visible(gemm: Gemm, role: str) -> bool:
    """Return whether hooks can see an operand."""
    return role not in gemm.unobserved_roles


def make_weight_filter(shard_group: ShardGroup, rank: int, gemm: Gemm) -> Callable[[torch.Tensor], bool]:
    """Return a function of a tensor with the layout of the GEMM's weight. It returns whether this rank measures the tensor.

    A rank measures its own part of a split tensor. If ranks have copies, only the first rank measures.
    """
    is_copy, weight = is_duplicate_master_weight(gemm.module), find_gemm_parameter(gemm)
    if getattr(weight, "main_param_sharded", False):
        return lambda x: not is_copy
    copied = gemm.backend.copied(gemm.module, "weight")
    first = shard_group.first[gemm.name] if copied is None else None
    if copied:
        return never_count_here
    # An engine may split optimizer states after the monitor was created.
    return lambda x: (
        not is_copy if is_optimizer_state_sharded(find_gemm_parameter(gemm)) else is_counted_here(x, rank, first)
    )
