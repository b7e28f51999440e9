"""Lightning events -> Monitor; nothing else.

A sample opens in `on_train_batch_start` and takes the step number under which Lightning will log this batch's loss
(`_batches_that_stepped`, which unlike `global_step` does not move before the batch ends). It closes in
`on_train_batch_end` of the batch that the next one does not accumulate onto, so that accumulated batches are one sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from ...capture.grad_scale import scale_of, was_skipped
from ...capture.patching import Watcher, patched
from ...core.arguments import checks_arguments
from ...core.keys import ROLES
from ...core.sample import Recorder
from ...errors import ConfigError, warn
from ...monitor.monitor import Monitor
from ...options.config import Config
from ...plan.environment import is_rescue
from ...record.console_table import TableRecorder
from ...record.histogram_budget import HistogramBudget
from ...record.tensorboard import TensorBoardRecorder
from ...record.writer import RunRecord
from .interventions import FP8EmulationCallback, FP8PlanCallback
from .loggers import with_loggers_of
from .trainer import accumulates, roots

#: names that modules log the losses of an evaluation under, as val_loss or eval/loss
_OF_VALIDATION = re.compile(r"(reduced_)?(val|valid|validation|eval|dev|test)[_/.].*loss", re.IGNORECASE)
_SCALARS = ("lr", "grad_norm", "consumed_samples")


@checks_arguments()
class FP8DebugCallback(pl.Callback):
    """Looks at the operands of linear layers every `interval` steps of a Lightning or NeMo run, without disturbing it.

    It writes the run record, scalars `fp8/METRIC/ROLE` into the run's TensorBoard events, and a table.

    Example:
        >>> from nemo_fp8_debug import FP8DebugCallback
        >>> callback = FP8DebugCallback(interval=200, layers=["*.mlp.*"], what_if=["current", "mxfp8"])

        and then `Trainer(callbacks=[callback])`.
    """

    def __init__(
        self,
        interval: int = 100,
        first_step: int = 0,
        last_step: int | None = None,
        layers: Sequence[str] | None = None,
        roles: Sequence[str] = ROLES,
        recipe: str | Mapping[str, Any] = "auto",
        what_if: Sequence[str | Mapping[str, Any]] = (),
        dump: Sequence[str] = (),
        dump_max_bytes: int = 10 << 30,
        dump_min_free_bytes: int = 20 << 30,
        triggers: Sequence[str] = (),
        trigger_steps: int = 5,
        trigger_dump: Sequence[str] = (),
        output: str | None = None,
        on_error: str = "warn",
        max_tags: int = 5000,
        table_rows: int = 12,
        output_rows: int = 0,
        verify_rows: int = 0,
        replicas: bool = False,
        states: Sequence[str] = (),
        activations: Sequence[str] = (),
        copies: bool = False,
        block_scales: bool = False,
        histogram_interval: int | Mapping[str, int] = 1,
        expert_histograms: str = "all",
        eager: bool = False,
        loggers: Sequence[Any] = (),
        log_every_tensor: bool = False,
        report_baseline: str | None = None,
    ) -> None:
        """
        Args:
            interval: steps from one sampled step to the next: those that it divides are sampled. An int, at least 1.
                Default: `100`.
            first_step: the first step that may be sampled. An int. Default: `0`.
            last_step: the last step that may be sampled, itself included. An int, not less than `first_step`; None: no
                limit. Default: `None`.
            layers: GEMMs to look at. A list of patterns for their global names, each a glob (`decoder.layers.3.*`,
                `linear_fc2`) or `re:` and a regular expression; None: all GEMMs. Default: `None`.
            roles: operands to look at. A list of `input` (X), `weight` (W) and `grad_output` (dY).
                Default: `("input", "weight", "grad_output")`.
            recipe: the FP8 recipe to measure under. "auto": the one that the run itself uses; otherwise a name, perhaps with
                options (`current-e4m3`, `delayed(margin=1)`, `mxfp8`), or a dict (`{"name": "delayed", "margin": 1}`).
                Default: `"auto"`.
            what_if: what-if recipes: each sample is measured under these too, although the run does not use them. A list,
                at most 16, each a name or a dict as in `recipe`. Default: `()`.
            dump: layers whose tensors are dumped at each sampled step. A list of patterns as in `layers`. Default: `()`.
            dump_max_bytes: bytes that all dumps of a rank may take, those of earlier starts of the run included. An int, at
                least 0. Default: `10 << 30` (10 GiB).
            dump_min_free_bytes: bytes that a dump leaves free on the disk. An int, at least 0. Default: `20 << 30` (20 GiB).
            triggers: conditions under which the next steps are sampled. A list of `loss_spike`, `nonfinite`,
                `early_warning`, and limits of metrics (`underflow_pct/input > 20`). Default: `()`.
            trigger_steps: steps that are sampled after a trigger. An int, at least 1. Default: `5`.
            trigger_dump: layers whose tensors are dumped at those steps. A list of patterns as in `layers`. Default: `()`.
            output: folder of the run record, a path or any fsspec address; None, which callbacks and adapters take:
                `fp8_debug` beside the run's TensorBoard events, or in its output folder. Default: `None`.
            on_error: what an error of the monitor does. "warn": it costs a sample and one warning; "raise": it stops the
                run, which is for tests. Default: `"warn"`.
            max_tags: scalar tags of single tensors in TensorBoard, at most; if more are needed, only the worst tensors of
                each role get one. An int, at least 0. Default: `5000`.
            table_rows: rows of the table that is printed at each sampled step, worst first. An int, at least 0, which prints
                nothing. Default: `12`.
            output_rows: rows, and as many columns, of each GEMM's outputs whose error is measured too. An int, at least 0,
                which measures none. Default: `0`.
            verify_rows: rows, and as many columns, of what each GEMM returns (Y, dX, dW) that are compared with the exact
                product of its operands. An int, at least 0, which verifies nothing; with `output_rows`, the greater serves
                both. Default: `0`.
            replicas: whether copies that ranks hold of W, of its gradient and, under tensor parallelism, of X are compared,
                bit by bit. A sampled step reads those tensors once more. Default: `False`.
            states: tensors of the optimizer's to look at too, of the weights of all GEMMs. A list of `weight_gradient`,
                `first_moment`, `second_moment`, `master_weight` and `update`. Default: `()`.
            activations: what to look at between GEMMs. A list of `norm` (inputs, before a pre-norm the residual stream, and
                outputs), `router` (logits of a mixture of experts) and `attention` (logits of some rows). Default: `()`.
            copies: whether the copies that dgrad and wgrad multiply are measured too, where a block recipe makes them
                differ. A sampled step reads such operands once more, and holds one of them transposed. Default: `False`.
            block_scales: whether the distribution of the scales of blocks is recorded, where operands are cast in blocks. A
                sampled step reads such operands twice more. Default: `False`.
            histogram_interval: steps from one recorded histogram of a tensor to the next, among sampled steps. An int, or a
                mapping by role (`{"weight": 1000}`) that leaves other roles at each sample. What is sampled out of turn, or
                has NaN or infinity, keeps its histograms, and each sample its metrics. Default: `1`.
            expert_histograms: whose histograms of a layer's experts are recorded. "all"; or "worst": one of all experts
                added up, and that of the worst expert. Default: `"all"`.
            eager: whether layers inside torch.compile are looked at: the sampled steps run in eager mode then, whose results
                may differ from those of the compiled graphs in their last bits. Default: `False`.
            loggers: experiment trackers that get a summary too, besides the loggers of a Lightning trainer. A list of
                `wandb`, `mlflow` and `comet`, of mappings with settings of a run to start
                (`{"wandb": {"project": "fp8"}}`), or of runs and loggers that you made. Default: `()`.
            log_every_tensor: whether loggers get the metrics of single tensors too, up to `max_tags` scalars, and not only
                the summary of at most 60. Default: `False`.
            report_baseline: record of a baseline run. At the end, loggers get the HTML page that compares the run with it.
                A path; None: no page. Default: `None`.

        Raises:
            ConfigError: now, or before the first step: a value cannot be used, no GEMM matches, or the output folder cannot
                be written. Nothing after the first step stops the run.
        """
        self._options = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        Config(**self._options)
        self._monitor: Monitor | None = None
        #: ends what a step began; None between steps
        self._leave: Callable[[], None] | None = None
        self._scale: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """In a run that `nemo-fp8-debug rescue` has started, see to it that the plan is applied."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if is_rescue() and not any(isinstance(c, (FP8EmulationCallback, FP8PlanCallback)) for c in callbacks):
            callbacks.insert(callbacks.index(self) + 1, FP8PlanCallback())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the GEMMs and open the record."""
        self._monitor = None
        self._stop_watching()
        try:
            options = {**self._options, "output": self._options["output"] or self._default_output(trainer)}
            options["loggers"] = with_loggers_of(trainer, options["loggers"])
            recorders = _recorders(trainer, Config(**options))
            self._monitor = Monitor(roots(trainer, pl_module), recorders=recorders, **options)
            if trainer.max_steps > 0:
                self._monitor.expect_steps(_logged_step(trainer), trainer.max_steps - 1)
        except ConfigError:  # on all ranks, or none: one that went on alone would wait for the others for ever
            raise
        except Exception as error:
            if self._options["on_error"] == "raise":
                raise
            warn(f"this run is not monitored, because of an error at its start: {type(error).__name__}: {error}")

    def _default_output(self, trainer: pl.Trainer) -> str:
        """`fp8_debug` beside the TensorBoard events; a second callback of the same trainer gets a folder of its own."""
        own = [c for c in trainer.callbacks if isinstance(c, FP8DebugCallback)].index(self)  # type: ignore[attr-defined]
        beside = (logger.log_dir for logger in trainer.loggers if isinstance(logger, TensorBoardLogger))
        return str(Path(next(beside, trainer.default_root_dir)) / ("fp8_debug" + (f"_{own + 1}" if own else "")))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Open a sample where one is due."""
        if self._monitor and self._leave is None:
            self._monitor.begin_step(_logged_step(trainer))
            self._scale = scale_of(_scaler(trainer))
            self._leave = self._watch(trainer) if self._monitor.sampling else _nothing

    def _watch(self, trainer: pl.Trainer) -> Callable[[], None]:
        """See the losses of the step's batches: no event hands them over before Lightning divides and scales them."""
        assert self._monitor
        return patched(trainer.strategy, "training_step", _training_step, self._monitor.watch_loss)

    def _stop_watching(self) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the sample, unless the next batch accumulates onto this one."""
        if self._monitor and not accumulates(trainer):
            scalars = _scalars(trainer) if self._monitor.sampling else {}
            if self._scale is not None:
                scalars |= {"loss_scale": self._scale, "skipped": was_skipped(self._scale, _scaler(trainer))}
            self._monitor.end_step(loss=_loss(trainer, pl_module, outputs), **scalars)
            self._stop_watching()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the losses of an evaluation."""
        if self._monitor and not trainer.sanity_checking:
            losses = {name: value for name, value in trainer.callback_metrics.items() if _OF_VALIDATION.match(name)}
            self._monitor.report_validation(None, **losses)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what is left."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The run failed: record what is left."""
        self._close()

    def _close(self) -> None:
        self._stop_watching()
        if self._monitor:
            self._monitor.close()


def _logged_step(trainer: pl.Trainer) -> int:
    """The step number that Lightning logs this batch's loss under."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def _recorders(trainer: pl.Trainer, config: Config) -> Iterator[Recorder]:
    assert config.output is not None
    yield RunRecord(config.output, HistogramBudget(config.histogram_interval, config.expert_histograms))
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            yield TensorBoardRecorder(logger.experiment, config.max_tags)
    if config.table_rows:
        yield TableRecorder(config.table_rows)


def _loss(trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any) -> Any:
    """The loss of a batch as the model computed it: Lightning hands it over divided by the accumulated batches."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    divided = pl_module.automatic_optimization and trainer.accumulate_grad_batches > 1
    return loss * trainer.accumulate_grad_batches if divided and loss is not None else loss


def _scalars(trainer: pl.Trainer) -> dict[str, Any]:
    """Learning rate, gradient norm and consumed samples as the host logs them."""
    return {name: trainer.callback_metrics[name] for name in _SCALARS if name in trainer.callback_metrics}


def _training_step(original: Callable[..., Any], tell: Watcher, *arguments: Any, **options: Any) -> Any:
    """Of a strategy: what it returns is the loss, or has it."""
    output = original(*arguments, **options)
    tell(output.get("loss") if isinstance(output, Mapping) else output)
    return output


def _scaler(trainer: pl.Trainer) -> Any:
    """The GradScaler of mixed precision in FP16."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


def _nothing() -> None:
    """Nothing was begun that has to end."""
