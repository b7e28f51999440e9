"""Turn Lightning events into calls of a Monitor.

A sample begins in `on_train_batch_start`. Its step number is `_batches_that_stepped`, under which Lightning logs the loss of
this batch. Unlike `global_step`, this number does not change before the batch ends. The sample ends in
`on_train_batch_end` of the last accumulated batch, so all accumulated batches are one sample.

After a resume, Lightning's count can be off by one, depending on its version and on when the checkpoint was saved.
We correct the count, so that a resumed run has the same step numbers as an uninterrupted run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from ...capture.grad_scale import read_loss_scale, was_optimizer_step_skipped
from ...capture.patching import Watcher, watch_function_calls
from ...core.arguments import reject_unknown_arguments
from ...core.sample import Recorder
from ...errors import warn
from ...monitor.monitor import Monitor
from ...options.config import Config
from ...plan.plan import is_rescue_run
from ...record.console_table import ConsoleTableRecorder
from ...record.tensorboard import TensorBoardRecorder
from ...record.writer import RunRecordWriter
from ..session import start_monitor
from .interventions import FP8EmulationCallback, FP8PlanCallback, find_root_modules, is_accumulating

#: logger classes to which another thread can write; and the value of our option `loggers` that selects each, or None
_KNOWN = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow", "CometLogger": "comet", "CSVLogger": None}


def with_loggers_of(trainer: pl.Trainer, asked: Sequence[Any]) -> list[Any]:
    """Return the requested loggers and the trainer's supported loggers. If the trainer has a logger of a
    requested name, use this logger.

    Leave out TensorBoard's loggers, because TensorBoard has its own recorder. Leave out unsupported loggers with a warning,
    because they may not allow calls from two threads.
    """
    own = [logger for logger in trainer.loggers if not isinstance(logger, TensorBoardLogger)]
    known = [logger for logger in own if _class_of(logger) and not any(logger is given for given in asked)]
    for logger in own:
        if trainer.is_global_zero and _class_of(logger) is None and not any(logger is given for given in asked):
            warn(
                f"{type(logger).__name__} gets nothing, because it may not allow calls from two threads. If it allows them, "
                "pass it to the callback: loggers=[logger]"
            )
    names = {_KNOWN[_class_of(logger) or ""] for logger in known}
    return [*(item for item in asked if not (isinstance(item, str) and item in names)), *known]


def _class_of(logger: Logger) -> str | None:
    return next((kind.__name__ for kind in type(logger).__mro__ if kind.__name__ in _KNOWN), None)


#: pattern of names under which modules log losses of an evaluation, such as val_loss or eval/loss
_OF_VALIDATION = re.compile(r"(reduced_)?(val|valid|validation|eval|dev|test)[_/.].*loss", re.IGNORECASE)
#: names of the logged metrics that we record: learning rate, gradient norm and consumed samples
_SCALARS = ("lr", "grad_norm", "consumed_samples")


@reject_unknown_arguments(options_of=Config)
class FP8DebugCallback(pl.Callback):
    """A Lightning callback that measures the operands of linear layers every `interval` steps, without disturbing the run.

    Arguments are the fields of `Config`. The callback writes the run record, prints a table, and adds scalars
    `fp8/METRIC/ROLE` to the run's TensorBoard events.

    Args:
        options: fields of `Config`, such as `interval=100`.

    Raises:
        ConfigError: on construction or before the first step, if a value cannot be used, no GEMM matches, or the output
            folder cannot be written. After the first step, no error of the callback stops the run.

    Example:
        >>> from nemo_fp8_debug import FP8DebugCallback
        >>> callback = FP8DebugCallback(interval=200, layers=["*.mlp.*"], what_if=["current", "mxfp8"])

        and then `Trainer(callbacks=[callback])`.
    """

    def __init__(self, **options: Any) -> None:
        self._config = Config(**options)
        self._monitor: Monitor | None = None
        #: function that ends the current step, or None between steps
        self._leave: Callable[[], None] | None = None
        self._scale: Any = None
        #: number of steps by which Lightning's count is below the optimizer's count, or None before a fit's first batch
        self._lag: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Apply the plan if `nemo-fp8-debug rescue` started the run."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if is_rescue_run() and not any(isinstance(c, (FP8EmulationCallback, FP8PlanCallback)) for c in callbacks):
            callbacks.insert(callbacks.index(self) + 1, FP8PlanCallback())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the GEMMs and open the record."""
        self._monitor = None
        self._stop_watching()
        self._lag = None
        self._monitor = start_monitor(lambda: self._make_monitor(trainer, pl_module), self._config.on_error == "raise")
        if self._monitor and trainer.max_steps > 0:  # an error here must not disable the monitor
            self._monitor.expect_steps(_logged_step(trainer), trainer.max_steps - 1)

    def _make_monitor(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Monitor:
        output = self._config.output or self._default_output(trainer)
        config = replace(self._config, output=output, loggers=with_loggers_of(trainer, self._config.loggers))
        options = {option.name: getattr(config, option.name) for option in fields(config)}
        return Monitor(find_root_modules(trainer, pl_module), recorders=_recorders(trainer, config), **options)

    def _default_output(self, trainer: pl.Trainer) -> str:
        """Return `fp8_debug` next to the TensorBoard events. A second callback of the trainer gets its own folder."""
        own = [c for c in trainer.callbacks if isinstance(c, FP8DebugCallback)].index(self)  # type: ignore[attr-defined]
        beside = (logger.log_dir for logger in trainer.loggers if isinstance(logger, TensorBoardLogger))
        return str(Path(next(beside, trainer.default_root_dir)) / ("fp8_debug" + (f"_{own + 1}" if own else "")))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a sample if one is due."""
        if self._lag is None:  # Lightning 2.5 and later correct their count only after `on_train_start`
            self._lag = _find_lag(trainer, pl_module)
        if self._monitor and self._leave is None:
            self._monitor.begin_step(_logged_step(trainer) + self._lag)
            self._scale = read_loss_scale(_scaler(trainer))
            self._leave = self._watch(trainer) if self._monitor.sampling else _nothing

    def _watch(self, trainer: pl.Trainer) -> Callable[[], None]:
        """Watch the losses of the step's batches, and return a function that stops watching.

        No Lightning event provides the losses before they are divided and scaled.
        """
        assert self._monitor
        return watch_function_calls(trainer.strategy, "training_step", _training_step, self._monitor.watch_loss)

    def _stop_watching(self) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the sample, unless the next batch adds its gradients to this batch's gradients."""
        if self._monitor and not is_accumulating(trainer):
            logged = trainer.callback_metrics if self._monitor.sampling else {}
            scalars: dict[str, Any] = {name: logged[name] for name in _SCALARS if name in logged}
            if self._scale is not None:
                scalars |= {"loss_scale": self._scale, "skipped": was_optimizer_step_skipped(self._scale, _scaler(trainer))}
            self._monitor.end_step(loss=_loss(trainer, pl_module, outputs), **scalars)
            self._stop_watching()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the losses of an evaluation."""
        if self._monitor and not trainer.sanity_checking:
            losses = {name: value for name, value in trainer.callback_metrics.items() if _OF_VALIDATION.match(name)}
            self._monitor.report_validation(None, **losses)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record all remaining data."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Record all remaining data, because the run failed."""
        self._close()

    def _close(self) -> None:
        self._stop_watching()
        if self._monitor:
            self._monitor.close()


def _logged_step(trainer: pl.Trainer) -> int:
    """Return the step number under which Lightning logs this batch's loss."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def _find_lag(trainer: pl.Trainer, pl_module: pl.LightningModule) -> int:
    """Return the optimizer's step count minus Lightning's step count (-1, 0, 1), or 0 if they count different things."""
    lag: int = trainer.global_step - _logged_step(trainer)
    return lag if pl_module.automatic_optimization and len(trainer.optimizers) == 1 and abs(lag) == 1 else 0


def _recorders(trainer: pl.Trainer, config: Config) -> Iterator[Recorder]:
    assert config.output is not None
    yield RunRecordWriter(config.output, config.histogram_interval)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            yield TensorBoardRecorder(logger.experiment, config.max_tags)
    if config.table_rows:
        yield ConsoleTableRecorder(config.table_rows)


def _loss(trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any) -> Any:
    """Return the loss that the model computed for a batch. Lightning has divided it by the number of accumulated batches."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    divided = pl_module.automatic_optimization and trainer.accumulate_grad_batches > 1
    return loss * trainer.accumulate_grad_batches if divided and loss is not None else loss


def _training_step(original: Callable[..., Any], tell: Watcher, *arguments: Any, **options: Any) -> Any:
    """Call a strategy's training step, which returns the loss or a mapping with the loss. Report the loss."""
    output = original(*arguments, **options)
    tell(output.get("loss") if isinstance(output, Mapping) else output)
    return output


def _scaler(trainer: pl.Trainer) -> Any:
    """Return the GradScaler of FP16 mixed precision."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


def _nothing() -> None:
    """Do nothing."""
