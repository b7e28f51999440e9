"""Split the error of an Adam or AdamW step into errors from the gradient, the stored moments, and the final addition.

All computations are in float64 and use a sample of a weight's values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: names of the sums that `compute_update_sums` returns, in order
UPDATE_SUMS = (
    "n",
    "error2",
    "weight_gradient_error2",
    "first_moment_error2",
    "second_moment_error2",
    "weight_error2",
    "update2",
    "parts",
    "parts_with_gradient",
)
#: largest relative difference between a gradient and a multiple of the product dW, somewhat above BF16 rounding errors
_FITS = 2.0**-6
#: largest relative difference of a moment, or of a float32 weight's change, from Adam's formula
_IS_ADAM = 0.5


@dataclass(frozen=True)
class Adam:
    """Adam's rule for one step. Numbers are Python numbers, or scalar tensors on any device.

    Example:
        >>> adam = Adam(rate=0.1, betas=(0.9, 0.99), eps=0.0, decay=0.0, decoupled=True, step=1)
        >>> zero, gradient = torch.zeros(2, dtype=torch.float64), torch.tensor([2.0, -4.0], dtype=torch.float64)
        >>> adam.compute_weight_change(*adam.update_moments(zero, zero, gradient, zero), zero)
        tensor([-0.1000,  0.1000], dtype=torch.float64)
    """

    rate: float | torch.Tensor
    betas: tuple[float, float]
    eps: float
    decay: float
    #: whether weight decay is separate from the gradient, as in AdamW
    decoupled: bool
    #: number of the step, starting at 1; None if the optimizer does not correct the bias of moments that start at zero
    step: float | torch.Tensor | None

    def update_moments(
        self, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both moments after a step, from the moments before it. All are float64 of one shape."""
        gradient = gradient if self.decoupled else gradient + self.decay * weight
        one, two = self.betas
        return one * first + (1 - one) * gradient, two * second + (1 - two) * gradient.square()

    def compute_weight_change(self, first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight's change in a step, computed from the moments after the step."""
        corrections = (1.0, 1.0) if self.step is None else tuple(1 - beta**self.step for beta in self.betas)
        of_moments = first / corrections[0] / ((second / corrections[1]).sqrt() + self.eps)
        return -self.rate * (of_moments + self.decay * weight if self.decoupled else of_moments)


@dataclass(frozen=True)
class AdamValues:
    """Some values of a weight and of its moments, float64 of one shape."""

    weight: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor


def compute_update_sums(
    adam: Adam,
    before: AdamValues,
    after: AdamValues,
    gradient: torch.Tensor,
    products: tuple[torch.Tensor, torch.Tensor] | None,
    adds_exactly: bool,
) -> torch.Tensor:
    """Return sums over values, float64 in the order of `UPDATE_SUMS`. The sums of a weight are the totals over its parts.

    All sums are zero if the step does not follow Adam's formula. The step starts from the stored moments. Its error is the
    sum of four errors and of their joint effect. Errors from storing moments in earlier steps are not included.

    Args:
        before: the weight and its moments before the step, as stored.
        after: the weight and its moments after the step, as stored.
        gradient: gradient of the optimizer's step.
        products: dW of one call, computed exactly and from quantized operands, or None if unknown.
        adds_exactly: whether the weight is stored in float32. If so, its change must also follow Adam's formula.
    """
    exact = gradient
    known = torch.zeros((), dtype=torch.float64, device=gradient.device)
    if products is not None and products[0].shape == gradient.shape:
        exact, known = _exact_gradient(gradient, *products)
    first, second = adam.update_moments(before.first, before.second, gradient, before.weight)
    right = adam.compute_weight_change(
        *adam.update_moments(before.first, before.second, exact, before.weight), before.weight
    )
    of_gradient = adam.compute_weight_change(first, second, before.weight)
    of_first, of_second = (
        adam.compute_weight_change(after.first, second, before.weight),
        adam.compute_weight_change(first, after.second, before.weight),
    )
    stored = adam.compute_weight_change(after.first, after.second, before.weight)
    added = after.weight - before.weight
    # Some optimizers compute the step from the moments before rounding, others from the rounded moments.
    meant = torch.where(_norm2(added - of_gradient) < _norm2(added - stored), of_gradient, stored)
    errors = [of_gradient - right, of_first - of_gradient, of_second - of_gradient, added - meant]
    total = stored - right + errors[3]
    sums = torch.stack([torch.full_like(known, total.numel()), *map(_norm2, (total, *errors, right)), known * 0 + 1, known])
    is_adam = _is_near(after.first, first) & _is_near(after.second, second)
    if adds_exactly:
        is_adam = is_adam & _is_near(added, meant)
    return torch.where(is_adam & sums.isfinite().all(), sums, 0.0)


def _exact_gradient(
    gradient: torch.Tensor, exact: torch.Tensor, quantized: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient without its product's quantization error, and 1.0. If that is impossible, return (gradient, 0.0).

    The gradient must be a multiple of the quantized product, or of the exact product if the run does not quantize. This is
    not the case if the gradient is also summed over other calls or ranks.
    """
    fits = []
    for product in (quantized, exact):
        factor = (gradient * product).sum() / _norm2(product)
        fits.append((factor, _norm2(gradient - factor * product)))
    quantizes = fits[0][1] <= fits[1][1]
    factor, rest = (torch.where(quantizes, a, b) for a, b in zip(*fits, strict=True))
    known = rest <= _FITS**2 * _norm2(gradient)
    return torch.where(known, factor * exact, gradient), known.double()


def _norm2(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()


def _is_near(x: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return _norm2(x - expected) <= _IS_ADAM**2 * _norm2(expected)
