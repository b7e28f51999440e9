"""Events of Megatron-Bridge's `pretrain(..., callbacks=[...])` -> Monitor; nothing else.

Bridge logs the losses of a step under the number of steps that are then complete, which is one more than are when it starts.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ..core.arguments import checks_arguments
from ..options.config import Config
from .session import HostRun

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import Callback, CallbackContext
else:
    # Bridge calls any object that has methods of these names, and to import it takes Transformer Engine.
    Callback = object


@checks_arguments(options_of=Config)
class FP8DebugBridgeCallback(Callback):  # type: ignore[misc]
    """Looks at the operands of linear layers every `interval` steps; takes the fields of `Config` as arguments.

    The record goes to `fp8_debug` beside the TensorBoard events, or the checkpoints if there are none.

    Args:
        options: fields of `Config`, as `interval=100`.

    Raises:
        ConfigError: when constructed, or before the first step: a value cannot be used, no GEMM matches, or the output
            folder cannot be written. Nothing after the first step stops the run.

    Example:
        >>> from nemo_fp8_debug import FP8DebugBridgeCallback
        >>> callback = FP8DebugBridgeCallback(interval=100)

        and then `pretrain(config, forward_step, callbacks=[callback])`.
    """

    def __init__(self, **options: Any) -> None:
        self._run = HostRun(options)
        self._lr: Any = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Find the GEMMs and open the record."""
        folder, steps = None, None
        with self._run.errors.guard("while looking for the output folder"):
            config = context.state.cfg
            folder = config.logger.tensorboard_dir or config.checkpoint.save
        with contextlib.suppress(Exception):  # it is only known so that a warning can come early
            steps = context.state.train_state.step + 1, int(context.state.cfg.train.train_iters)
        self._run.start(context.model, folder, steps)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Open a sample where one is due."""
        with self._run.errors.guard("while looking for the learning rate"):
            self._lr = context.optimizer.param_groups[0]["lr"]
        self._run.begin_step(context.state.train_state.step + 1)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Close the sample; where there is a pipeline, its last stage alone has the loss."""
        loss = next(iter((context.loss_dict or {}).values()), None)
        self._run.end_step(loss=loss, grad_norm=context.grad_norm, skipped=context.skipped_iter, lr=self._lr)

    def on_eval_end(self, context: CallbackContext) -> None:
        """Record the losses of an evaluation."""
        with self._run.errors.guard("while looking for the losses of an evaluation"):
            self._run.report_validation(context.state.train_state.step, context.total_loss_dict or {})

    def on_train_end(self, context: CallbackContext) -> None:
        """Record what is left."""
        self._run.close()
