"""Observe operands of Transformer Engine's FP8 attention, if its unfused emulation shows them.

With `NVTE_UnfusedDPA_Emulate_FP8=1`, `UnfusedDotProductAttention` passes Q, K, V, S and O through autograd nodes that
quantize and dequantize them. In the backward, such nodes do the same with dO, dP, dQ, dK and dV. We read the cast from the
quantizer that each node keeps. A hook on each node receives gradients in the backward. A node does not keep its inputs of
the forward. To find these inputs, a torch mode observes the results of all functions during the call of the attention. The
mode calls each function unchanged.

The fused kernels do not show operands. If an attention ran in FP8 with these kernels, we warn.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from ..core.error_guard import Fault, OperandGuard
from ..numerics.block_scaling import BlockScalingRule
from ..numerics.metrics import compute_amax
from ..numerics.tensor_scaling import CurrentScaling
from .backends.base import Args, CastInUse, FrameworkBackend, Kwargs, UnknownCastError, make_unknown_cast
from .backends.transformer_engine.environment import explain_unsupported_release
from .backends.transformer_engine.quantizers import make_quantizer_cast
from .dispatcher import EventDispatcher, ForwardPass
from .gemms import Gemm
from .hooks import OperandSink
from .scan import ScannedModule

#: the roles of each node, by Transformer Engine's name for the quantizer of the node
FORWARD = {"QKV_quantizer": ("query", "key", "value"), "S_quantizer": ("probabilities",), "O_quantizer": ("context",)}
BACKWARD = {
    "dO_quantizer": ("grad_context",),
    "dP_quantizer": ("grad_scores",),
    "dQKV_quantizer": ("grad_query", "grad_key", "grad_value"),
}
_NODE = "FP8EmulationFuncBackward"
#: number of recent function results to remember. A node runs soon after the function that computes its input
_REMEMBERED = 4
#: number of consecutive nodes of the emulation
_CHAIN = 2
#: quantizers with one scale for a tensor; their operands may have any layout
_PER_TENSOR = ("Float8Quantizer", "Float8CurrentScalingQuantizer", "IdentityQuantizer")
#: quantizers whose blocks run along the dimension that a product sums over. For V and dV, this is the token dimension
_IN_BLOCKS = ("MXFP8Quantizer",)
_ALONG_TOKENS = ("value", "grad_value")
_BACKEND = FrameworkBackend(
    "Transformer Engine attention", lambda module: False, lambda *_: None, lambda *_: None, lambda out: out
)


def find_attentions(scanned: Iterable[ScannedModule]) -> list[Gemm]:
    """Return every attention of Transformer Engine in a model, except attentions inside torch.compile."""
    return [Gemm(one.global_name, one.module, _BACKEND) for one in scanned if is_attention(one.module) and not one.compiled]


def is_attention(module: nn.Module) -> bool:
    """Return True for Transformer Engine's `DotProductAttention`, and for Megatron's subclass of it."""
    return any(
        base.__name__ == "DotProductAttention" and base.__module__.partition(".")[0] == "transformer_engine"
        for base in type(module).__mro__
    )


def _recipe_of(module: Any) -> Any:
    """Return Transformer Engine's recipe of the module's last call."""
    return getattr(module, "fp8_meta", {}).get("recipe")


def runs_in_fp8(module: nn.Module) -> bool | None:
    """Return whether an attention runs in FP8, from its last call or its configuration. Return None if unknown."""
    recipe = _recipe_of(module)
    config: Any = getattr(module, "config", None)
    if getattr(module, "fp8_initialized", False) and recipe is not None:
        return _asks(recipe) if getattr(module, "fp8", False) else False
    if hasattr(config, "fp8_dot_product_attention") and hasattr(config, "fp8"):
        asked = config.fp8_dot_product_attention or getattr(config, "fp8_multi_head_attention", False)
        return bool(config.fp8 and asked)
    return None


def _asks(recipe: Any) -> bool:
    return bool(getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False))


def is_fp8_emulation_enabled() -> bool:
    """Return True if the environment enables the emulation and disables the faster attention kernels."""
    get = os.environ.get
    return get("NVTE_UnfusedDPA_Emulate_FP8") == "1" and get("NVTE_FLASH_ATTN") == get("NVTE_FUSED_ATTN") == "0"


class AttentionCapture:
    """An observer of attentions in one sampled step."""

    def __init__(
        self,
        found: Sequence[Gemm],
        sinks: Mapping[tuple[str, str], OperandSink],
        on_fault: Fault,
        dispatcher: EventDispatcher,
    ) -> None:
        """
        Args:
            found: attentions to observe.
            sinks: receive the operands, by (name, role).
            dispatcher: dispatcher of the step.
        """
        self._found, self._sinks, self._on_fault, self._dispatcher = found, sinks, on_fault, dispatcher
        self._emulated: set[str] = set()
        self._untold = explain_unsupported_release()
        #: names of attentions that ran in FP8 without showing operands
        self.unseen: dict[str, None] = {}

    def subscribe(self) -> None:
        """Observe calls from now on."""
        for gemm in self._found:
            unfused, guard = gemm.module._modules.get("unfused_attention"), partial(self._guarded, gemm)
            self._dispatcher.watch_output(gemm.module, guard, partial(self._see_attention, gemm))
            if unfused is not None and self._sinks:
                enter, leave = partial(self._enter, gemm), partial(self._leave, gemm)
                self._dispatcher.watch_calls(unfused, guard, enter, leave, partial(self._is_emulated, gemm))

    def _guarded(self, gemm: Gemm) -> OperandGuard:
        return OperandGuard(self._on_fault, gemm.name, "input", True)

    def _is_emulated(self, gemm: Gemm, kwargs: Kwargs) -> bool:
        if kwargs.get("fp8"):
            self._emulated.add(gemm.name)
        return bool(kwargs.get("fp8"))

    def _enter(self, gemm: Gemm, counted: ForwardPass, args: Args, kwargs: Kwargs) -> None:
        if counted.counts:
            counted.kept = _Watching([*args, *kwargs.values()], partial(self._take_node, gemm))
            counted.enter_mode(counted.kept)

    def _leave(self, gemm: Gemm, counted: ForwardPass, args: Args, kwargs: Kwargs, out: Any) -> None:
        mode, counted.kept = counted.kept, None
        if mode is not None:
            mode.look_at(out if isinstance(out, tuple) else (out,))
            lost = [role for name, roles in (FORWARD | BACKWARD).items() if name not in mode.names for role in roles]
            mode.forget()
            for role in lost:
                self._on_fault(gemm.name, role, LookupError("its node in the graph of autograd could not be found"), True)

    def _see_attention(self, gemm: Gemm, out: Any) -> None:
        module, recipe = gemm.module, _recipe_of(gemm.module)
        if getattr(module, "fp8", False) and recipe is not None and _asks(recipe) and gemm.name not in self._emulated:
            self.unseen[gemm.name] = None

    def _take_node(self, gemm: Gemm, node: Any, inputs: Callable[[], Sequence[torch.Tensor | None]]) -> None:
        """Observe the operands of an emulation node that a forward has made.

        Args:
            inputs: returns the input tensors of the node.
        """
        name, quantizer = node.quantizer_name, node.quantizer
        if roles := FORWARD.get(name):
            self._take(gemm, roles, quantizer, inputs())
        elif roles := BACKWARD.get(name):
            # Do not keep the node alive, because it holds tensors that are saved for the backward.
            take = partial(self._take, gemm, roles, quantizer)
            self._dispatcher.watch_autograd_node(node, partial(self._guarded, gemm), before=take)

    def _take(self, gemm: Gemm, roles: Sequence[str], quantizer: Any, tensors: Sequence[torch.Tensor | None]) -> None:
        sinks = [self._sinks.get((gemm.name, role)) for role in roles]
        if not all(sinks):
            return
        mine = tensors[: len(roles)]
        with_tensor = [x for x in mine if x is not None]
        use = self._cast_of(gemm, roles, with_tensor, quantizer)
        for role, x, sink in zip(roles, mine, sinks, strict=True):
            try:
                if x is None:
                    raise LookupError("the input of the emulation could not be found")
                if sink is not None:
                    sink.add_tensor(_as_cast(x.detach(), role, use), next(self._dispatcher.order), use)
            except Exception as error:
                self._on_fault(gemm.name, role, error, True)

    def _cast_of(self, gemm: Gemm, roles: Sequence[str], tensors: Sequence[torch.Tensor], quantizer: Any) -> CastInUse:
        """Return the cast of operands that are cast together as one tensor: Q, K and V, or their gradients."""
        like = "grad_output" if roles[0].startswith("grad") else "input"
        try:
            if self._untold:
                raise UnknownCastError(self._untold)
            kind = type(quantizer).__name__
            if quantizer is not None and kind not in (*_PER_TENSOR, *_IN_BLOCKS):
                raise UnknownCastError(f"its quantizer is a {kind}, which is not supported for attention")
            use = make_quantizer_cast(quantizer, _recipe_of(gemm.module), like)
            if use.amax_group is not None:
                raise UnknownCastError("ranks share its amax, and their reduction was not seen")
            if len(roles) == 1 or use.source != "engine" or not isinstance(use.scale, CurrentScaling):
                return use
            if len(tensors) != len(roles):
                raise UnknownCastError("some tensors that are cast together could not be found")
            amax = torch.stack([compute_amax(x) for x in tensors]).max()
            return replace(use, scale=use.scale.compute_scale(amax, use.format.max))
        except Exception as error:
            for role in roles:
                self._on_fault(gemm.name, role, error, False)
            return make_unknown_cast(like)


def _as_cast(x: torch.Tensor, role: str, use: CastInUse) -> torch.Tensor:
    """Return the tensor transposed so that blocks run along the last dimension.

    Args:
        x: Q, K, V or a gradient, [tokens, batch, heads, features] as in the emulation.
    """
    if isinstance(use.scale, BlockScalingRule) and role in _ALONG_TOKENS:
        return x.permute(1, 2, 0, 3).flatten(0, 2).t().contiguous()
    return x


class _Watching(TorchFunctionMode):
    """A mode that calls every function unchanged, and finds emulation nodes through the functions' arguments."""

    def __init__(self, given: Sequence[Any], found: Callable[[Any, Callable[[], Any]], None]) -> None:
        super().__init__()
        self._found, self._seen = found, set[int]()
        self._given = [x for x in given if isinstance(x, torch.Tensor)]
        self._recent: deque[torch.Tensor] = deque(maxlen=_REMEMBERED)
        self._nodes: list[Any] = []
        #: names of the quantizers of all nodes found
        self.names: set[str] = set()
        self._on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._on:
            self.look_at(args)
        out = func(*args, **(kwargs or {}))
        if self._on:
            # Functions inside a node receive the node's inputs, and their results have no gradients.
            self._remember(*args[:1], out)
        return out

    def _remember(self, *values: Any) -> None:
        for x in values:
            if isinstance(x, torch.Tensor) and x.grad_fn is not None and all(x is not known for known in self._recent):
                self._recent.append(x)

    def begin(self) -> None:
        """Observe from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop observing after the call."""
        if _get_current_function_mode() is self:
            self.__exit__(None, None, None)
        self._on = False

    def forget(self) -> None:
        """Release all tensors and nodes."""
        self._given, self._nodes, self._seen = [], [], set()
        self._recent.clear()

    def look_at(self, tensors: Sequence[Any]) -> None:
        """Report each emulation node that made one of these tensors, but each node only once."""
        for x in tensors:
            node = x.grad_fn if isinstance(x, torch.Tensor) else None
            for made in reversed(list(_chain(node))):
                if id(made) not in self._seen:
                    self._seen.add(id(made))
                    self._nodes.append(made)  # keeps the node alive, so that its id stays unique
                    self.names.add(made.quantizer_name)
                    self._found(made, partial(self._inputs, made))

    def _inputs(self, node: Any) -> list[torch.Tensor | None]:
        return [self._made_by(*earlier) for earlier in node.next_functions[:3]]

    def _made_by(self, node: Any, number: int) -> torch.Tensor | None:
        if node is None:
            return None
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            return leaf
        candidates = [*reversed(self._recent), *self._given]
        return next((x for x in candidates if x.grad_fn is node and x.output_nr == number), None)


def _chain(node: Any) -> Iterator[Any]:
    """Yield consecutive emulation nodes from `node` backwards. Skip the additional node of an output in FP8."""
    if type(node).__name__ == "_QuantizeFuncBackward":
        node = node.next_functions[0][0]
    for _ in range(_CHAIN):
        if node is None or type(node).__name__ != _NODE:
            return
        yield node
        node = node.next_functions[0][0]
