"""Where to look if values are wrong before anything casts them: at what computes the tensor, and not at its recipe."""

from __future__ import annotations

from ...core.keys import SHOWN_AS

_OF_OPTIMIZER = "the optimizer, or the gradient of that weight"
_BY_ROLE = {
    "input": "what runs before that GEMM in the forward pass, such as a norm, an activation, attention or a mask",
    "weight": "the optimizer, the gradient of that weight, or the checkpoint that it was loaded from",
    "grad_output": "the backward pass of what follows that GEMM, up to the loss function",
    "weight_gradient": "the backward pass of that GEMM, or the reduction over ranks",
    **dict.fromkeys(("first_moment", "second_moment", "master_weight", "update"), _OF_OPTIMIZER),
}


def look_at_producer(layer: str, role: str) -> str:
    """Return a sentence that says where a tensor comes from, and so where to look.

    Example:
        >>> look_at_producer("layers.0.fc1", "grad_output")
        'Look at what computes dY of layers.0.fc1: the backward pass of what follows that GEMM, up to the loss function.'
    """
    producer = _BY_ROLE.get(role)
    return f"Look at what computes {SHOWN_AS[role]} of {layer}{f': {producer}' if producer else ''}."


def advise_on_nonfinite(layer: str | None, role: str | None, what: str = "") -> str:
    """Return where to look for the source of NaN or infinity, and how to sample the step at which more comes up.

    Args:
        what: has them first, if no tensor of a layer does.
    """
    look = look_at_producer(layer, role) if layer and role else f"Look at what computes {what}."
    return f"No recipe fixes NaN. {look} `triggers=['nonfinite']` samples the step after a loss or gradient norm of NaN."
