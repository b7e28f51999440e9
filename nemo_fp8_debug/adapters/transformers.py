"""Turn events of Hugging Face's Trainer into calls of a Monitor.

A sample begins in `on_step_begin`. Its step number is `global_step + 1`, under which the Trainer logs the loss. The sample
ends in `on_step_end` or, if the Trainer logs this step, in the next `on_log`, which receives the gradient norm. These events
occur once per optimizer step, so accumulated batches are one sample.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..capture.grad_scale import read_loss_scale, was_optimizer_step_skipped
from ..capture.tracing import CopySafeHook
from ..core.arguments import reject_unknown_arguments
from ..errors import ConfigError
from ..options.config import Config
from .session import FrameworkRun


@reject_unknown_arguments(options_of=Config)
class FP8DebugTrainerCallback(TrainerCallback):
    """A callback that measures operands of linear layers every `interval` steps. Arguments are the fields of `Config`.

    The record goes to `fp8_debug` in `args.output_dir`. A resumed run continues the record.

    Args:
        options: fields of `Config`, such as `interval=100`.

    Raises:
        ConfigError: on construction or before the first step, if a value cannot be used, no GEMM matches, or the output
            folder cannot be written. After the first step, no error of the callback stops the run.

    Example:
        >>> from nemo_fp8_debug import FP8DebugTrainerCallback
        >>> callback = FP8DebugTrainerCallback(interval=100)

        and then `Trainer(..., callbacks=[callback])`.
    """

    def __init__(self, **options: Any) -> None:
        self._run = FrameworkRun(options)
        self._hook: Any = None
        self._losses: list[torch.Tensor] = []
        self._summed = False
        self._lr: Any = None
        self._scale: Any = None
        #: scalars of a step that has ended but is not logged yet
        self._scalars: dict[str, Any] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **rest: Any
    ) -> None:
        """Find the GEMMs and open the record."""
        self._close()
        # torch_compile=True and `accelerate launch` can set this variable. The model that callbacks receive does not show
        # that the Trainer compiles it.
        if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
            raise ConfigError(
                "the Trainer compiles the whole model (torch_compile, or dynamo_backend of accelerate), where a hook would "
                "change the graph; train without that, or compile parts of the model yourself"
            )
        if self._run.start(model, args.output_dir, (state.global_step + 1, state.max_steps)):
            self._hook = model.register_forward_hook(CopySafeHook(self._see_loss, model), with_kwargs=True)

    def _see_loss(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Store the loss of a batch. The Trainer passes only averaged losses to callbacks, and waits for the device to
        compute them.
        """
        with self._run.errors.guard("while reading the loss"):
            first = output[0] if isinstance(output, tuple) else None
            loss = output.get("loss") if isinstance(output, Mapping) else first
            if torch.is_tensor(loss) and loss.requires_grad and loss.numel() == 1:
                # Copy the loss, because the Trainer changes it in place.
                self._losses.append(loss.detach().clone().reshape(()))
                self._summed = kwargs.get("num_items_in_batch") is not None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **rest: Any
    ) -> None:
        """Begin a sample if one is due."""
        self._end_step()
        self._losses = []
        with self._run.errors.guard("while reading the learning rate and the loss scale"):
            self._lr = optimizer.param_groups[0]["lr"]
            self._scale = read_loss_scale(_scaler(optimizer))
        self._run.begin_step(state.global_step + 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **rest: Any
    ) -> None:
        """End the sample, unless the Trainer logs this step. Then `on_log` ends the sample."""
        self._scalars = {"lr": self._lr, "loss_scale": self._scale}
        if self._scale is not None:
            self._scalars["skipped"] = was_optimizer_step_skipped(self._scale, _scaler(optimizer))
        if self._losses:
            # If the model divides the loss, it divides by the step's number of tokens, perhaps over all processes. Otherwise
            # the Trainer divides the loss by the number of batches.
            shared = self._summed and getattr(args, "average_tokens_across_devices", False)
            losses = torch.stack(self._losses) * (args.world_size if shared else 1)
            self._scalars["loss"] = losses.sum() if self._summed else losses.mean()
        if not control.should_log:
            self._end_step()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **rest: Any
    ) -> None:
        """End the sample of the step that is logged."""
        logged = {"grad_norm": (logs or {}).get("grad_norm")}
        if args.logging_steps == 1:  # the logged average is then this step's loss, used if the model returns no loss
            logged["loss"] = (logs or {}).get("loss")
        self._end_step(**logged)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **rest: Any
    ) -> None:
        """Record the losses of an evaluation: `eval_loss`, or `eval_NAME_loss` if there are several evaluation sets."""
        losses = {name: value for name, value in (metrics or {}).items() if name.endswith("_loss")}
        self._run.report_validation(state.global_step, losses)

    def _end_step(self, **logged: Any) -> None:
        if self._scalars is not None:
            self._run.end_step(**{**logged, **self._scalars})
            self._scalars = None

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        """Record all remaining data."""
        self._close()

    def _close(self) -> None:
        self._end_step()
        self._run.close()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _scaler(optimizer: Any) -> Any:
    """Return Accelerate's GradScaler if Accelerate scales losses, otherwise None."""
    return getattr(optimizer, "scaler", None)
