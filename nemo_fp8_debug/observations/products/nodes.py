"""Where the gradients that a GEMM returns come out: at the autograd node of its product, before anything is done to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...capture.dispatcher import Dispatcher, Guard

#: by name of a node: where X and W are among its inputs, and whether W is transposed there
_PLACES = {
    "AddmmBackward0": (1, 2, True),
    "MmBackward0": (0, 1, True),
    "LinearBackward0": (0, 1, False),
    "LinearWithGradAccumulationAndAsyncCommunicationBackward": (0, 1, False),
    "LinearWithFrozenWeightBackward": (0, 1, False),
}
#: of Transformer Engine's, whose inputs are told by what they are: the gradient of X is dX
_OF_X = {"_LinearBackward", "_GroupedLinearBackward"}
#: those that compute more than the product of what they are given, as a norm before it
_WITHOUT_X = {"_LayerNormLinearBackward", "_LayerNormMLPBackward"}
#: nodes that may lie between what a module returns and its product: views, an added bias, sums over ranks. Behind any other
#: lies what is not known here, and may be the product of the layer before.
_BETWEEN = {
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0", "AddBackward0"),
    *("_ReduceFromModelParallelRegionBackward", "_ReduceScatterToSequenceParallelRegionBackward"),
    *("_ReduceScatterToTensorParallelRegionBackward", "_GatherFromModelParallelRegionBackward"),
}


@dataclass(frozen=True)
class ProductNode:
    """The node of a product, and where among its inputs X and W are; None: what is returned there is no gradient of it."""

    node: Any
    x: int | None
    weight: int | None
    turned: bool = False

    def needs(self, place: int) -> bool:
        """Whether the gradient of an input is asked for."""
        return self.node.next_functions[place][0] is not None


def find_product_node(y: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None) -> ProductNode | None:
    """The node that multiplies, from what a module returned; None: none that is known here.

    Args:
        x, weight: as the module was given them.
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
    """Where a tensor is among the inputs of a node of Python's."""
    for place, (earlier, number) in enumerate(node.next_functions):
        if earlier is None or x is None:
            continue
        if getattr(earlier, "variable", None) is x or (earlier is x.grad_fn and number == x.output_nr):
            return place
    return None


def watch_node(
    dispatcher: Dispatcher,
    guard: Guard,
    found: ProductNode,
    take: Callable[[str, torch.Tensor | None], None],
    begin: Callable[[Any], None],
    end: Callable[[], None],
) -> None:
    """Have `take` called with dX and dW as the node returns them, dW as W lies; None if it returns none.

    Does not hold the node.

    Args:
        begin, end: called before the node runs, with the gradients that it gets, and after it has run.
    """
    places, turned = {"dgrad": found.x, "wgrad": found.weight}, found.turned

    def after(grads: Any, _: Any) -> None:
        end()
        for product, place in places.items():
            if place is not None:
                grad = grads[place]
                take(product, grad.t() if turned and product == "wgrad" and grad is not None else grad)

    dispatcher.watch_node(found.node, guard, begin, after)


def find_bias(module: nn.Module) -> torch.Tensor | None:
    """What a module adds to its product in what it returns; None: nothing."""
    if getattr(module, "skip_bias_add", False) or getattr(module, "return_bias", False):
        return None
    bias = module._parameters.get("bias")
    return bias if bias is not None and bias.numel() else None
