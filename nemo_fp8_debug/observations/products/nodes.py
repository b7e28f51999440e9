"""Find the autograd node of a product, which returns the gradients of a GEMM before anything changes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...capture.dispatcher import EventDispatcher, Guard

#: positions of X and W among a node's inputs, and whether W is transposed there, by name of the node
_PLACES = {
    "AddmmBackward0": (1, 2, True),
    "MmBackward0": (0, 1, True),
    "LinearBackward0": (0, 1, False),
    "LinearWithGradAccumulationAndAsyncCommunicationBackward": (0, 1, False),
    "LinearWithFrozenWeightBackward": (0, 1, False),
}
#: nodes of Transformer Engine. We identify their inputs by object. The gradient of X is dX
_OF_X = {"_LinearBackward", "_GroupedLinearBackward"}
#: nodes that compute more than a product, such as a norm of X before it
_WITHOUT_X = {"_LayerNormLinearBackward", "_LayerNormMLPBackward"}
#: nodes that may be between a module's output and its product: views, an added bias, sums over ranks. Any other node is
#: unknown, and a product before such a node may belong to the previous layer.
_BETWEEN = {
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0", "AddBackward0"),
    *("_ReduceFromModelParallelRegionBackward", "_ReduceScatterToSequenceParallelRegionBackward"),
    *("_ReduceScatterToTensorParallelRegionBackward", "_GatherFromModelParallelRegionBackward"),
}


@dataclass(frozen=True)
class ProductNode:
    """The node of a product, and the positions of X and W among its inputs. None if it does not return this gradient."""

    node: Any
    x: int | None
    weight: int | None
    turned: bool = False

    def needs_input_gradient(self, place: int) -> bool:
        """Return True if the gradient of an input is required."""
        return self.node.next_functions[place][0] is not None


def find_product_node(y: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None) -> ProductNode | None:
    """Return the autograd node of a module's product, found from the module's output, or None if its kind is unknown.

    Args:
        x, weight: operands as the module received them.
    """
    node: Any = y.grad_fn
    while node is not None and (x is None or node is not x.grad_fn):
        if (places := _PLACES.get(name := node.name())) is not None:
            return ProductNode(node, *places)
        if name in _OF_X | _WITHOUT_X:
            return ProductNode(node, _place_of(node, x) if name in _OF_X else None, _place_of(node, weight))
        if name not in _BETWEEN:
            return None
        node = node.next_functions[0][0]
    return None


def _place_of(node: Any, x: torch.Tensor | None) -> int | None:
    """Return the position of a tensor among the inputs of a node defined in Python."""
    for place, (earlier, number) in enumerate(node.next_functions):
        if earlier is None or x is None:
            continue
        if getattr(earlier, "variable", None) is x or (earlier is x.grad_fn and number == x.output_nr):
            return place
    return None


def watch_product_gradients(
    dispatcher: EventDispatcher,
    guard: Guard,
    found: ProductNode,
    take: Callable[[str, torch.Tensor | None], None],
    begin: Callable[[Any], None],
    end: Callable[[], None],
) -> None:
    """Call `take` with dX and dW as the node returns them, or with None for a gradient that the node does not return.

    dW has the layout of W. The node is not kept alive.

    Args:
        begin: called before the node runs, with the gradients that the node receives.
        end: called after the node has run.
    """
    places, turned = {"dgrad": found.x, "wgrad": found.weight}, found.turned

    def after(grads: Any, _: Any) -> None:
        end()
        for product, place in places.items():
            if place is not None:
                grad = grads[place]
                take(product, grad.t() if turned and product == "wgrad" and grad is not None else grad)

    dispatcher.watch_autograd_node(found.node, guard, begin, after)


def find_added_bias(module: nn.Module) -> torch.Tensor | None:
    """Return the bias that a module adds to its output, or None."""
    if getattr(module, "skip_bias_add", False) or getattr(module, "return_bias", False):
        return None
    bias = module._parameters.get("bias")
    return bias if bias is not None and bias.numel() else None
