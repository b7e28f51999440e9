"""A sampled step as observers get it: what it looks at, and where they leave what they have to say of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from ..capture.dispatcher import Dispatcher
from ..capture.gemms import Gemm
from ..capture.hooks import CopySink, OperandSink, ProductSink
from ..capture.operand_guard import Fault
from ..capture.operands import Operand
from ..capture.packed_transfer import Move
from ..capture.scan import ScannedModule
from ..capture.weight_gradients import WeightGradients
from ..core.error_guard import ErrorGuard
from ..core.keys import Key
from ..core.observation import Observation
from ..distributed import ShardGroup
from ..options.config import Config
from ..record.dump import TensorDump
from .model_scan import ModelScan


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
