"""Turn events of Megatron-Bridge, and calls of `forward_step` in a Megatron-LM script, into calls of a Monitor.

Megatron-Bridge logs a step's losses under the number of completed steps, which includes this step.

Megatron-LM's `pretrain()` does not signal when a step begins or ends. It calls the script's function for every micro-batch,
and stores the number of completed steps in `args.curr_iteration`. A step begins with the first call after this number has
changed, and ends when the next step or an evaluation begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..capture.grad_scale import read_loss_and_tokens
from ..core.arguments import reject_unknown_arguments
from ..errors import ConfigError
from ..options.config import Config
from .session import FrameworkRun

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import Callback, CallbackContext
else:
    # Megatron-Bridge accepts any object with these methods. Importing its class Callback would require Transformer Engine.
    Callback = object


@reject_unknown_arguments(options_of=Config)
class FP8DebugBridgeCallback(Callback):  # type: ignore[misc]
    """A callback that measures operands of linear layers every `interval` steps. Arguments are the fields of `Config`.

    The record goes to `fp8_debug` next to the TensorBoard events, or next to the checkpoints if there are no events.

    Args:
        options: fields of `Config`, such as `interval=100`.

    Raises:
        ConfigError: on construction or before the first step, if a value cannot be used, no GEMM matches, or the output
            folder cannot be written. After the first step, no error of the callback stops the run.

    Example:
        >>> from nemo_fp8_debug import FP8DebugBridgeCallback
        >>> callback = FP8DebugBridgeCallback(interval=100)

        and then `pretrain(config, forward_step, callbacks=[callback])`.
    """

    def __init__(self, **options: Any) -> None:
        self._run = FrameworkRun(options)
        self._lr: Any = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Find the GEMMs and open the record."""
        folder, steps = None, None
        with self._run.errors.guard("while looking for the output folder"):
            config = context.state.cfg
            folder = config.logger.tensorboard_dir or config.checkpoint.save
        with contextlib.suppress(Exception):  # only the early warning needs these numbers
            steps = context.state.train_state.step + 1, int(context.state.cfg.train.train_iters)
        self._run.start(context.model, folder, steps)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Begin a sample if one is due."""
        with self._run.errors.guard("while looking for the learning rate"):
            self._lr = context.optimizer.param_groups[0]["lr"]
        self._run.begin_step(context.state.train_state.step + 1)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """End the sample. In a pipeline, only the last stage has the loss."""
        loss = next(iter((context.loss_dict or {}).values()), None)
        self._run.end_step(loss=loss, grad_norm=context.grad_norm, skipped=context.skipped_iter, lr=self._lr)

    def on_eval_end(self, context: CallbackContext) -> None:
        """Record the losses of an evaluation."""
        with self._run.errors.guard("while reading the losses of an evaluation"):
            self._run.report_validation(context.state.train_state.step, context.total_loss_dict or {})

    def on_train_end(self, context: CallbackContext) -> None:
        """Record all remaining data."""
        self._run.close()


@reject_unknown_arguments(options_of=Config)
class FP8DebugForwardStep:
    """A wrapper of a script's `forward_step` function that measures operands in its calls.

    The record goes to `fp8_debug` next to the TensorBoard events, or next to the checkpoints if there are no events. Steps
    are numbered from 1, as Megatron-LM logs them. If you do not call `close`, the last step may be missing.

    Args:
        forward_step: the script's `forward_step` function.
        options: fields of `Config`, such as `interval=100`.

    Raises:
        ConfigError: on construction or before the first forward pass, if a value cannot be used, no GEMM matches, the output
            folder cannot be written, or a virtual pipeline splits the model. Later, no error of the monitor stops the run.

    Example:
        >>> def forward_step(data_iterator, model):  # the script's own
        ...     raise NotImplementedError
        >>> from nemo_fp8_debug import FP8DebugForwardStep
        >>> watched = FP8DebugForwardStep(forward_step, interval=100)

        and then `pretrain(..., watched, ...)` and `watched.close()`.
    """

    def __init__(self, forward_step: Callable[..., Any], **options: Any) -> None:
        if not callable(forward_step):
            raise ConfigError(f"forward_step is {forward_step!r}; it must be the script's function of that name")
        self._run = FrameworkRun(options)
        self._forward_step = forward_step
        self._step: int | None = None
        self._open = False
        self._losses: list[tuple[torch.Tensor, Any]] = []

    def __call__(self, data_iterator: Any, model: torch.nn.Module, *rest: Any, **options: Any) -> Any:
        """Call the script's function for a micro-batch, and return its result."""
        if not torch.is_grad_enabled():
            self._end_step()
            return self._forward_step(data_iterator, model, *rest, **options)
        from megatron.training import get_args

        args = get_args()
        if self._step is None:
            self._start(args, model)
        if self._step != args.curr_iteration + 1:
            self._end_step()
            self._step = args.curr_iteration + 1
            self._open, self._losses = True, []
            self._run.begin_step(self._step)
        output, loss_function = self._forward_step(data_iterator, model, *rest, **options)
        return output, self._watched(loss_function)

    def _start(self, args: Any, model: torch.nn.Module) -> None:
        if getattr(args, "virtual_pipeline_model_parallel_size", None):
            raise ConfigError(
                "a virtual pipeline splits the model, and forward_step receives one part at a time; "
                "use a Monitor with all parts in a loop of your own, or train without a virtual pipeline"
            )
        first, last = args.curr_iteration + 1, getattr(args, "train_iters", None)
        self._run.start(model, args.tensorboard_dir or args.save, (first, last) if last else None)

    def _watched(self, loss_function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loss function that also records the loss. The last pipeline stage calls it after `forward_step`."""

        def watched(*arguments: Any, **options: Any) -> Any:
            result = loss_function(*arguments, **options)
            with self._run.errors.guard("while reading the loss"):
                # Copy the loss, because Megatron later divides it in place.
                loss, tokens = result[0].detach().clone(), result[1] if len(result) == 3 else 1
                self._losses.append((loss, tokens))
                self._run.watch_loss(*read_loss_and_tokens(result))
            return result

        return watched

    def _end_step(self) -> None:
        if self._open:
            self._open, losses, loss = False, self._losses, None
            with self._run.errors.guard("while adding up the loss"):
                loss = sum(loss for loss, _ in losses) / sum(tokens for _, tokens in losses) if losses else None
            self._run.end_step(loss=loss)

    def close(self) -> None:
        """Record all remaining data. Call this when training has ended."""
        self._end_step()
        self._run.close()
