"""Measure the factor by which a sampled step's gradients are multiplied. Code that scales the loss does not report it.

Loss scaling and gradient accumulation multiply the loss before its backward, in some engines more than once. We read this
multiplier from the gradient that arrives at the loss: d(backpropagated value)/d(loss).

We find losses in the output of a root module and in Megatron's schedules. A framework or the user may also pass a loss to
`add_loss`. Tensor hooks receive the gradients of losses. We replace no tensors, and do not wait for a device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .dispatcher import EventDispatcher
from .patching import Watcher, watch_function_calls

#: relative rounding error of a multiplier, which is a product of rounded factors
_ROUNDING = 1e-6


class GradientMultiplier:
    """The gradient multiplier of one sampled step."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        compiled: Collection[int],
        guarded: Callable[[], AbstractContextManager[None]],
        dispatcher: EventDispatcher,
    ) -> None:
        """
        Args:
            roots: the model, or its chunks.
            compiled: the result of `find_compiled_modules`.
            guarded: returns a context that keeps an exception out of the training loop.
            dispatcher: dispatcher of the step.
        """
        self._guarded, self._dispatcher = guarded, dispatcher
        self._roots = [root for root in roots if id(root) not in compiled]
        self._of_roots: list[torch.Tensor] = []
        self._of_shown: list[torch.Tensor] = []

    def subscribe(self) -> None:
        """Watch for losses from now on."""
        for root in self._roots:
            self._dispatcher.watch_output(root, self._guarded, self._see_output)
        schedules: Any = sys.modules.get("megatron.core.pipeline_parallel.schedules")
        if schedules is not None:
            self._dispatcher.call_after_step(
                watch_function_calls(schedules, "forward_step", _forward_step, self._see_result)
            )

    def add_loss(self, loss: Any, tokens: torch.Tensor | float = 1) -> None:
        """Watch a loss that will be backpropagated. Such losses have precedence over losses in the output of root modules.

        Args:
            loss: ignored unless it is a scalar tensor with gradient.
            tokens: number of tokens that `loss` is summed over, if the reported loss is the mean over tokens.
        """
        with self._guarded():
            self._watch(loss, tokens, self._of_shown)

    def compute_multiplier(self) -> torch.Tensor | None:
        """Return the multiplier, a float64 scalar on the loss's device. It is NaN if micro-batches differ or overflow.

        Return None if no loss was seen."""
        seen = self._of_shown or self._of_roots
        if not seen:
            return None
        values = torch.stack(seen)
        same = values.amax() - values.amin() <= _ROUNDING * values.abs().amax()
        return torch.where(same & values.isfinite().all(), values[0], torch.nan)

    def _see_output(self, output: Any) -> None:
        self._watch(_loss_of(output), 1, self._of_roots)

    def _see_result(self, result: Any) -> None:
        with self._guarded():
            self.add_loss(*read_loss_and_tokens(result))

    def _watch(self, loss: Any, tokens: torch.Tensor | float, seen: list[torch.Tensor]) -> None:
        if not (torch.is_tensor(loss) and loss.requires_grad and loss.numel() == 1):
            return
        # A view loses its hook if it is divided in place. A base tensor of the same size keeps its hook.
        base = loss._base
        whole = base if base is not None and base.numel() == 1 and base.requires_grad else loss

        def see(gradient: torch.Tensor) -> None:
            seen.append(gradient.detach().double().sum() * tokens)

        self._dispatcher.watch_gradient(whole, self._guarded, see)


def _forward_step(original: Callable[..., Any], tell: Watcher, step: Callable[..., Any], *rest: Any, **options: Any) -> Any:
    """Call a forward step of Megatron's schedules, and report its loss before the schedule divides it in place."""

    def with_loss(*arguments: Any, **more: Any) -> Any:
        output, loss_function = step(*arguments, **more)

        def told(*tensors: Any, **flags: Any) -> Any:
            result = loss_function(*tensors, **flags)
            tell(result)
            return result

        return output, told

    return original(with_loss, *rest, **options)


def _loss_of(output: Any) -> Any:
    """Return the loss in a model's output."""
    if isinstance(output, Mapping):  # as in Hugging Face's models
        return output.get("loss")
    if isinstance(output, (tuple, list)):
        return output[0] if output else None
    return getattr(output, "loss", output)


def read_loss_and_tokens(result: Any) -> tuple[Any, Any]:
    """Return loss and tokens from the result of a Megatron loss function: (mean, logs) or (sum, tokens, logs)."""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        return None, 1
    return result[0], result[1].detach().clone() if len(result) == 3 else 1


def read_loss_scale(scaler: Any) -> Any:
    """Return the loss scale of a `torch.amp.GradScaler` at this moment, on its device, or None if it is disabled."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale = getattr(scaler, "_scale", None)  # the scaler creates it when it scales the first loss
    return scaler._init_scale if scale is None else scale.detach().clone()


def was_optimizer_step_skipped(before: Any, scaler: Any) -> Any:
    """Return whether the optimizer skipped its step after the scale was `before`. Only a skip makes the scale fall.

    The result is on the scale's device.
    """
    return read_loss_scale(scaler) < before
