"""Lightning events -> Monitor and Emulation; nothing else.

A sample opens in `on_train_batch_start` and takes the step number under which Lightning will log this batch's loss
(`_batches_that_stepped`, which unlike `global_step` does not move before the batch ends). It closes in
`on_train_batch_end` of the batch that stepped the optimizer, so that accumulated batches belong to one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from .capture.layers import compile_patterns, find_gemms, select, without_ends
from .config import Config
from .errors import ConfigError
from .interventions.emulate import Emulation
from .monitor import Monitor
from .numerics.scaling import ROLES, parse_recipe
from .record.store import RunRecord
from .record.table import TableRecorder
from .record.tensorboard import ScalarRecorder, TensorBoardRecorder
from .sample import Recorder

_LOSSES = ("reduced_train_loss", "train_loss", "loss")
_SCALARS = ("lr", "grad_norm", "consumed_samples")


class FP8DebugCallback(pl.Callback):
    """Looks at every GEMM's operands every `interval` steps; see `Config` for the arguments.

    Raises:
        ConfigError: when constructed, or before the first step: a value cannot be used, no GEMM layer matches, the output
            folder cannot be written. Nothing after the first step stops the run.
    """

    def __init__(
        self,
        interval: int = 100,
        first_step: int = 0,
        last_step: int | None = None,
        layers: Sequence[str] | None = None,
        roles: Sequence[str] = ROLES,
        recipe: str | Mapping[str, Any] = "auto",
        output: str | None = None,
        on_error: str = "warn",
        max_tags: int = 5000,
        table_rows: int = 12,
    ) -> None:
        self._options = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        Config(**self._options)
        self._monitor: Monitor | None = None
        self._opened_at = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the GEMMs and open the record."""
        if not trainer.is_global_zero:
            return  # figures are those of the writing rank
        options = {**self._options, "output": self._options["output"] or _default_output(trainer)}
        recorders = _recorders(trainer, Config(**options))
        self._monitor = Monitor(_roots(trainer, pl_module), recorders=recorders, **options)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Open a sample where one is due."""
        if self._monitor and not self._monitor.sampling:
            self._opened_at = trainer.global_step
            self._monitor.begin_step(_logged_step(trainer))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the sample once the optimizer has stepped."""
        if self._monitor and trainer.global_step != self._opened_at:
            scalars = _scalars(trainer) if self._monitor.sampling else {}
            self._monitor.end_step(**{"loss": _loss(outputs), **scalars})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what is left."""
        if self._monitor:
            self._monitor.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The run failed: record what is left."""
        if self._monitor:
            self._monitor.close()


class FP8EmulationCallback(pl.Callback):
    """Trains with FP8-quantised GEMM operands and high-precision GEMMs, without editing the model.

    Raises:
        ConfigError: when constructed or before the first step, as for `FP8DebugCallback`.
    """

    def __init__(
        self,
        recipe: str | Mapping[str, Any] = "delayed",
        layers: Sequence[str] = ("layers.*",),
        first_layers_bf16: int = 0,
        last_layers_bf16: int = 0,
    ) -> None:
        """
        Args:
            recipe: see `numerics.scaling.parse_recipe`.
            layers: which GEMMs are quantised; by default those of the transformer layers and not the output layer, as
                Megatron's FP8 does.
            first_layers_bf16: transformer layers at the start of the model that are left alone.
            last_layers_bf16: likewise at its end.
        """
        self._recipe = parse_recipe(recipe)
        self._layers = list(layers)
        self._ends = (first_layers_bf16, last_layers_bf16)
        if min(self._ends) < 0:
            raise ConfigError("first_layers_bf16 and last_layers_bf16 cannot be negative")
        compile_patterns(self._layers)
        self._emulation: Emulation | None = None
        self._resumed: dict[str, Any] | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach."""
        gemms = select(find_gemms(_roots(trainer, pl_module)), self._layers)
        self._emulation = Emulation(without_ends(gemms, *self._ends), self._recipe)
        if self._resumed:
            self._emulation.state.load_state_dict(self._resumed)
        self._emulation.attach()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move delayed scales on."""
        if self._emulation:
            self._emulation.end_step()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Detach."""
        if self._emulation:
            self._emulation.detach()

    def state_dict(self) -> dict[str, Any]:
        """Scales and amax histories."""
        return self._emulation.state.state_dict() if self._emulation else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the scales of a checkpoint."""
        self._resumed = state_dict
        if self._emulation and state_dict:
            self._emulation.state.load_state_dict(state_dict)


def _roots(trainer: pl.Trainer, pl_module: pl.LightningModule) -> list[nn.Module]:
    """The model; under NeMo's MegatronStrategy the chunks of the pipeline."""
    chunks = getattr(trainer.strategy, "megatron_parallel", None)
    return list(chunks) if chunks is not None else [pl_module]


def _logged_step(trainer: pl.Trainer) -> int:
    """The step number that Lightning logs this batch's loss under."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def _default_output(trainer: pl.Trainer) -> str:
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            return str(Path(logger.log_dir) / "fp8_debug")
    return str(Path(trainer.default_root_dir) / "fp8_debug")


def _recorders(trainer: pl.Trainer, config: Config) -> Iterator[Recorder]:
    assert config.output is not None
    yield RunRecord(config.output)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            yield TensorBoardRecorder(logger.experiment, config.max_tags)
        else:
            yield ScalarRecorder(logger.log_metrics, config.max_tags)
    if config.table_rows:
        yield TableRecorder(config.table_rows)


def _loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _scalars(trainer: pl.Trainer) -> dict[str, Any]:
    """Loss, learning rate, gradient norm and consumed samples as the host logs them."""
    metrics = trainer.callback_metrics
    found = {name: metrics[name] for name in _SCALARS if name in metrics}
    loss = next((metrics[tag] for tag in _LOSSES if tag in metrics), None)
    return found if loss is None else {"loss": loss, **found}
