"""What the dY of a sampled step are multiplied by: measured at the loss, since nobody who scales it says so.

Loss scaling and gradient accumulation multiply the loss on its way into backward, some engines more than once. What arrives
at the loss itself, d(what is backpropagated)/d(loss), is what every gradient of that loss is multiplied by.

Losses are found where a root module returns one, where Megatron's schedules compute one, and where a host or the user shows
one. Tensor hooks see their gradients; nothing is replaced, and nothing waits for a device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .dispatcher import Dispatcher
from .patching import Watcher, watch_calls

#: relative; a multiplier that is made of several factors is rounded by each
_ROUNDING = 1e-6


class GradScale:
    """Of one sampled step."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        compiled: Collection[int],
        guarded: Callable[[], AbstractContextManager[None]],
        dispatcher: Dispatcher,
    ) -> None:
        """
        Args:
            roots: the model, or its chunks.
            compiled: as `compiled_by_now` has them.
            guarded: a context that keeps an exception within out of the training loop.
            dispatcher: of the step.
        """
        self._guarded, self._dispatcher = guarded, dispatcher
        self._roots = [root for root in roots if id(root) not in compiled]
        self._of_roots: list[torch.Tensor] = []
        self._of_shown: list[torch.Tensor] = []

    def subscribe(self) -> None:
        """Look for losses from now on."""
        for root in self._roots:
            self._dispatcher.watch_returned(root, self._guarded, self._see_output)
        schedules: Any = sys.modules.get("megatron.core.pipeline_parallel.schedules")
        if schedules is not None:
            self._dispatcher.at_close(watch_calls(schedules, "forward_step", _forward_step, self._see_result))

    def show(self, loss: Any, tokens: torch.Tensor | float = 1) -> None:
        """A loss that is going to be backpropagated; has precedence over those that root modules return.

        Args:
            loss: anything but a scalar tensor with gradient is passed over.
            tokens: where `loss` is a sum over so many, and their mean is the loss that is meant.
        """
        with self._guarded():
            self._watch(loss, tokens, self._of_shown)

    def value(self) -> torch.Tensor | None:
        """A float64 scalar on the device of the loss, NaN where micro-batches differ or overflow; None: no loss was seen."""
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
            self.show(*read_loss_and_tokens(result))

    def _watch(self, loss: Any, tokens: torch.Tensor | float, seen: list[torch.Tensor]) -> None:
        if not (torch.is_tensor(loss) and loss.requires_grad and loss.numel() == 1):
            return
        # The hook of a view is lost once that is divided in place; the one of the tensor that it is all of is not.
        base = loss._base
        whole = base if base is not None and base.numel() == 1 and base.requires_grad else loss

        def see(gradient: torch.Tensor) -> None:
            seen.append(gradient.detach().double().sum() * tokens)

        self._dispatcher.watch_gradient(whole, self._guarded, see)


def _forward_step(original: Callable[..., Any], tell: Watcher, step: Callable[..., Any], *rest: Any, **options: Any) -> Any:
    """Of Megatron's schedules, which divide the loss of a micro-batch in place as soon as its function has returned it."""

    def with_loss(*arguments: Any, **more: Any) -> Any:
        output, loss_function = step(*arguments, **more)

        def told(*tensors: Any, **flags: Any) -> Any:
            result = loss_function(*tensors, **flags)
            tell(result)
            return result

        return output, told

    return original(with_loss, *rest, **options)


def _loss_of(output: Any) -> Any:
    """The loss among what a model returns."""
    if isinstance(output, Mapping):  # as Hugging Face's models do
        return output.get("loss")
    if isinstance(output, (tuple, list)):
        return output[0] if output else None
    return getattr(output, "loss", output)


def read_loss_and_tokens(result: Any) -> tuple[Any, Any]:
    """Of what a Megatron loss function returns: a mean and numbers to log, or a sum, the number of its tokens, and those."""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        return None, 1
    return result[0], result[1].detach().clone() if len(result) == 3 else 1


def read_scale(scaler: Any) -> Any:
    """The loss scale of a `torch.amp.GradScaler` at this moment, on its device; None where it scales nothing."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale = getattr(scaler, "_scale", None)  # made by the first loss
    return scaler._init_scale if scale is None else scale.detach().clone()


def was_skipped(before: Any, scaler: Any) -> Any:
    """Whether the optimizer did not step since the scale was `before`: only then does it fall. On its device."""
    return read_scale(scaler) < before
