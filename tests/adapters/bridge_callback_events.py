# Copyright (c) 2025, NVIDIA CORPORATION.  All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
#
# Changed here: this is the first part of Megatron-Bridge's callbacks.py; the rest is in bridge_callbacks.py.

"""The events of Megatron-Bridge's callbacks, the context that they are given, and their base class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer import MegatronModule

    from megatron.bridge.training.state import GlobalState


VALID_EVENTS: frozenset[str] = frozenset(
    {
        "on_data_init_start",
        "on_train_start",
        "on_train_step_start",
        "on_train_step_end",
        "on_train_end",
        "on_eval_start",
        "on_eval_step_start",
        "on_eval_step_end",
        "on_eval_end",
        "on_test_start",
        "on_test_step_start",
        "on_test_step_end",
        "on_test_end",
        "on_checkpoint_save",
    }
)


@dataclass
class CallbackContext:
    """Context passed to callbacks.

    Contains framework state and a persistent user_state dict.
    Modifying framework objects is at the user's own risk.

    Attributes:
        state: Global training state (config, train_state, timers, loggers).
        model: List of model chunks.
        user_state: Mutable dict for storing user data across callback invocations.
        optimizer: Optimizer instance. Available during training events only.
        scheduler: Learning rate scheduler. Available during training events only.
        loss_dict: Reduced losses from training step. Available in on_train_step_end.
        grad_norm: Gradient norm. Available in on_train_step_end if computed.
        skipped_iter: Whether the iteration was skipped. Available in on_train_step_end.
        total_loss_dict: Aggregated eval losses. Available in on_eval_end.

    Field Availability by Event:
        All events: state, model, user_state
        Training events: optimizer, scheduler
        on_data_init_start: optimizer, scheduler
        on_train_step_end: loss_dict, grad_norm, skipped_iter
        on_eval_end, on_test_end: total_loss_dict
    """

    # Always available
    state: GlobalState
    model: list[MegatronModule]
    user_state: dict = field(default_factory=dict)

    # Training events only
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None

    # on_train_step_end
    loss_dict: dict[str, torch.Tensor] | None = None
    grad_norm: float | None = None
    skipped_iter: bool | None = None

    # on_eval_end
    total_loss_dict: dict[str, torch.Tensor] | None = None


class Callback:
    """Base class for organizing callbacks.

    Subclass and override methods for events you want to handle.
    All methods are no-ops by default.

    Example:
        ```python
        class MyCallback(Callback):
            def on_train_start(self, context):
                context.user_state['start_time'] = time.time()

            def on_train_end(self, context):
                elapsed = time.time() - context.user_state['start_time']
                print(f"Training took {elapsed:.2f}s")

        pretrain(config, forward_step_func, callbacks=[MyCallback()])
        ```
    """

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Called after model/optimizer/checkpoint are ready, before dataset files are opened.

        This is the correct place to run JIT warmup with mock data and to log
        MLPerf init_stop/run_start markers, ensuring no real dataset I/O occurs
        before run_start is recorded.
        """
        pass

    def on_train_start(self, context: CallbackContext) -> None:
        """Called after model.train(), before training loop begins."""
        pass

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Called at the start of each training step."""
        pass

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Called after each training step completes."""
        pass

    def on_train_end(self, context: CallbackContext) -> None:
        """Called after training loop completes."""
        pass

    def on_eval_start(self, context: CallbackContext) -> None:
        """Called after model.eval(), before evaluation loop begins."""
        pass

    def on_eval_step_start(self, context: CallbackContext) -> None:
        """Called at the start of each evaluation step."""
        pass

    def on_eval_step_end(self, context: CallbackContext) -> None:
        """Called after each evaluation step completes."""
        pass

    def on_eval_end(self, context: CallbackContext) -> None:
        """Called after evaluation completes, before model.train()."""
        pass

    def on_test_start(self, context: CallbackContext) -> None:
        """Called after model.eval(), before test loop begins."""
        pass

    def on_test_step_start(self, context: CallbackContext) -> None:
        """Called at the start of each test step."""
        pass

    def on_test_step_end(self, context: CallbackContext) -> None:
        """Called after each test step completes."""
        pass

    def on_test_end(self, context: CallbackContext) -> None:
        """Called after test completes, before model.train()."""
        pass

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Called after checkpoint was saved"""
        pass
