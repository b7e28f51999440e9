"""Pass a GEMM's results to the checks of its products: Y from the module's output, dX and dW from the autograd node.

If a result is summed over ranks inside the module, a dispatch mode takes the result just before the collective.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...capture.backends.base import Args, Kwargs, read_raw_weight
from ...capture.backends.parallel import find_sequence_split, is_summed_over_ranks
from ...capture.backends.transformer_engine.casts import find_backward_state, is_quantized_tensor
from ...capture.dispatcher import EventDispatcher
from ...capture.dispatcher import Guard as StepGuard
from ...capture.gemms import Gemm
from ...capture.operator_mode import CollectiveMode
from ...capture.patching import find_emulation
from ...capture.tensors import cast_like_autocast, is_dtensor, take_local_part
from ...capture.weight_gradients import adds_to_main_grad
from ...numerics.block_scaling import view_as_matrix
from .checks import ProductChecks
from .verification import ADDED_UP, HOOKED, INSIDE, NOT_SEEN, UNKNOWN_CAST

_LOOKING = "while looking at what a GEMM returned"
_OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
Guard = Callable[[str], AbstractContextManager[None]]


class ResultObserver:
    """Observes the results of one GEMM in a forward call and its backward. Keeps no activation and no node alive."""

    def __init__(
        self, gemm: Gemm, checks: ProductChecks, args: Args, kwargs: Kwargs, guard: Guard, dispatcher: EventDispatcher
    ) -> None:
        """
        Args:
            args, kwargs: arguments of the call, which is about to run.
            guard: returns a context that keeps an exception out of the training loop.
            dispatcher: dispatcher of the step.
        """
        self._gemm, self._checks, self._guard, self._dispatcher = gemm, checks, guard, dispatcher
        # This object lives until the backward, so we keep only arguments that are not activations.
        self._args = tuple(None if torch.is_tensor(a) and a.requires_grad else a for a in args)
        self._kwargs = kwargs
        for product, roles in _OPERANDS.items():
            if set(roles) & set(gemm.unobserved_roles):
                checks.mark_uncheckable(product, INSIDE)
        why = UNKNOWN_CAST if gemm.backend.foreign(gemm.module) else HOOKED if changes_operands(gemm.module) else 0
        for product in _OPERANDS if why else ():
            checks.mark_uncheckable(product, why)
        #: shape of Y as this rank computes it
        self.shape = self._shape(args, kwargs)

    def _shape(self, args: Args, kwargs: Kwargs) -> tuple[int, int]:
        """Return the shape from X and W."""
        backend, module, part = self._gemm.backend, self._gemm.module, self._gemm.part
        x, weight = backend.input(module, args, kwargs, part), backend.weight(module, args, kwargs, part)
        if x is None or weight is None or is_dtensor(x) or weight.dim() != 2:
            return 0, 0
        return x.numel() // max(x.shape[-1], 1), weight.shape[0]

    def observe_output(self, given: tuple[Args, Kwargs], weight: torch.Tensor | None, out: Any) -> None:
        """Observe the output and the node in the autograd graph that made it.

        Args:
            given: arguments of the module.
            weight: weight that the module multiplied.
            out: output of the module.
        """
        y = self._gemm.backend.output(out)
        self._see_output(y)
        if not y.requires_grad:
            return
        stored = self._gemm.backend.stored(self._gemm.module, self._gemm.part)
        self._see_gradients(y, _first_tensor(given), stored.parameter if stored else weight)

    def _see_output(self, y: torch.Tensor) -> None:
        if is_quantized_tensor(y) or self._gemm.part.startswith("fc1"):
            self._checks.mark_uncheckable("fprop", INSIDE)
        elif is_summed_over_ranks(self._gemm.module, "fprop"):
            if not self._checks.has_result("fprop"):
                self._checks.mark_uncheckable("fprop", ADDED_UP)
        elif (mine := self._part_of_sequence("column", self._mine(y))) is not None:
            bias = find_added_bias(self._gemm.module)
            self._checks.add_product_result("fprop", mine, None if bias is None else cast_like_autocast(bias))

    def _see_gradients(self, y: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        found = find_product_node(y, x, weight)
        if found is None:
            for product in ("dgrad", "wgrad"):
                self._checks.mark_uncheckable(product, NOT_SEEN)
            return
        for product, place in (("dgrad", found.x), ("wgrad", found.weight)):
            if product == "dgrad" and x is not None and not x.requires_grad:
                self._checks.mark_not_computed(product)
            elif place is None:
                self._checks.mark_uncheckable(product, INSIDE)
            elif not found.needs_input_gradient(place):
                self._checks.mark_not_computed(product)
        mode = None
        if is_summed_over_ranks(self._gemm.module, "dgrad") and weight is not None and weight.dim() == 2:
            mode = UnreducedResultMode(self._checks, "dgrad", (y.numel() // max(y.shape[-1], 1), weight.shape[1]))
        fused = (
            MainGradWatcher(self._gemm, self._checks, find_backward_state(y))
            if adds_to_main_grad(self._gemm.module)
            else None
        )
        around = [part for part in (mode, fused) if part is not None]

        def begin(grads: Any) -> None:
            self._see_multiplied_gradient(grads)
            for part in around:
                part.begin()

        def end() -> None:
            with self._guard(_LOOKING):
                for part in around:
                    part.end()

        watch_product_gradients(self._dispatcher, partial(self._guard, _LOOKING), found, self._take, begin, end)

    def _see_multiplied_gradient(self, grads: Any) -> None:
        if find_emulation(self._gemm.module) is None and grads and isinstance(grads[0], torch.Tensor):
            mine = self._mine(grads[0])
            if mine is not None:
                self._checks.add_multiplied_gradient(mine)

    def _mine(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the rows that belong to this GEMM, if the module runs several GEMMs."""
        return self._gemm.backend.grad(x, self._gemm.module, self._args, self._kwargs, self._gemm.part)

    def _part_of_sequence(self, kind: str, x: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's rows of a result that has the rows of all ranks that split the sequence."""
        part = find_sequence_split(self._gemm.module, kind)
        if part is None or x is None:
            return x
        rank, size = part
        m = view_as_matrix(take_local_part(x.detach()))
        return m.reshape(size, -1, m.shape[1])[rank] if m.shape[0] % size == 0 else m

    def _take(self, product: str, grad: torch.Tensor | None) -> None:
        with self._guard(_LOOKING):
            if self._checks.has_result(product):
                return
            mine = grad if grad is None or product == "wgrad" else self._part_of_sequence("row", self._mine(grad))
            if mine is None:
                self._checks.mark_uncheckable(product, NOT_SEEN)
            elif is_summed_over_ranks(
                self._gemm.module, product
            ):  # and we saw no collective before which we could take the result
                self._checks.mark_uncheckable(product, ADDED_UP)
            else:
                self._checks.add_product_result(product, mine)


class UnreducedResultMode(CollectiveMode):
    """Takes a result before it is summed over ranks."""

    def __init__(self, checks: ProductChecks, product: str, shape: tuple[int, int] = (0, 0)) -> None:
        """
        Args:
            shape: shape of the result as this rank computes it.
        """
        super().__init__()
        self._checks, self._product, self.shape = checks, product, shape

    def on_collective_start(self, func: Any, args: Any) -> None:
        """Take the first tensor of the result's shape."""
        for x in tree_leaves(args) if "reduce" in func.overloadpacket.__name__ else ():
            is_matrix = isinstance(x, torch.Tensor) and x.dim() > 1 and x.is_floating_point() and x.element_size() > 1
            if is_matrix and tuple(view_as_matrix(x).shape) == self.shape:
                self._checks.add_product_result(self._product, x)


class MainGradWatcher:
    """The gradient of a weight that a GEMM adds to `main_grad` instead of passing it to autograd."""

    def __init__(self, gemm: Gemm, checks: ProductChecks, call: Any) -> None:
        self._module, self._checks = gemm.module, checks
        self._overwrites = bool(getattr(call, "is_first_microbatch", False))
        self._before: torch.Tensor | None = None

    def _gradient(self) -> torch.Tensor | None:
        grad = getattr(read_raw_weight(self._module), "main_grad", None)
        return view_as_matrix(take_local_part(grad.detach())) if isinstance(grad, torch.Tensor) else None

    def begin(self) -> None:
        """Copy the gradient before the GEMM runs."""
        grad = self._gradient()
        self._before = None if grad is None or self._overwrites else self._checks.copy_compared_block(grad)

    def end(self) -> None:
        """Pass on the gradient after the GEMM has run."""
        if (grad := self._gradient()) is not None:
            self._checks.add_product_result("wgrad", grad, before=self._before)
        self._before = None


def _first_tensor(given: tuple[Args, Kwargs]) -> torch.Tensor | None:
    """Return the first tensor argument, which is X of all GEMMs of the module."""
    args, kwargs = given
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)


#: packages whose forward pre-hooks gather or count operands, but do not change them
_HARMLESS = ("torch", "megatron", "transformer_engine", "deepspeed", "lightning", "nemo", "nemo_fp8_debug")


def changes_operands(module: Any) -> bool:
    """Return True if a foreign forward pre-hook may change the module's arguments or weight."""
    hooks = getattr(module, "_forward_pre_hooks", {}).values()
    return any(_package_of(hook) not in _HARMLESS for hook in hooks)


def _package_of(hook: Any) -> str:
    function = getattr(hook, "func", hook)  # if the hook is a partial
    name = getattr(function, "__module__", None) or type(function).__module__
    return str(name).partition(".")[0]


# Autograd nodes of products --------------------------------------------------------------------------------------------


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
    guard: StepGuard,
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
