"""Find the routers of a mixture of experts: their logits, and how many tokens each expert receives.

A router is a module with "router" in its class name (Megatron's `TopKRouter`, routers of transformers). In Mixtral or Qwen,
the router is the linear layer with one output for each expert in a block of experts. We watch the torch operators inside the
router, and call them unchanged. The logits are the first tensor with a number for each token and expert that these operators
read. The chosen experts are in the last top-k over all experts, or in the map that the router returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.operator_mode import OperatorMode, is_dtensor_call
from ...capture.scan import ScannedModule, list_inner_module_ids
from ...core.error_guard import leave_dispatch_modes, restore_dispatch_modes

_ROUTER = re.compile(r"(Router|MoE\w*Gate|TopKGate)\Z")
#: attributes of a module or its configuration with the number of experts
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "num_moe_experts", "moe_num_experts")
#: attributes of a block of experts that may contain the router
_GATES = ("gate", "router")
#: operators that read logits without multiplying a weight
_READERS = ("view", "_unsafe_view", "_to_copy", "_softmax", "sigmoid", "topk", "detach", "clone", "logsumexp", "alias")


@dataclass(frozen=True)
class Router:
    """The modules that choose experts."""

    #: module that returns the logits: a router, or a linear layer
    module: nn.Module
    #: module whose forward chooses the experts, often the same module
    chooser: nn.Module
    experts: int


def find_routers(scanned: Iterable[ScannedModule]) -> Iterator[tuple[ScannedModule, Router]]:
    """Yield the routers of a root, and the modules that return their logits."""
    found: set[int] = set()
    for one in scanned:
        module = one.module
        experts = _own_experts(module)
        if experts is not None and id(module) not in found:
            found |= {id(module), *list_inner_module_ids(module)}
            yield one, Router(module, module, experts)
        for name in _GATES if experts is None else ():
            gate = module._modules.get(name)
            of_block = _number_of_experts(module)
            if gate is not None and of_block and _outputs(gate) == of_block and not _ROUTER.search(type(gate).__name__):
                found.add(id(gate))
                yield ScannedModule(gate, one, name), Router(gate, module, of_block)


def _own_experts(module: nn.Module) -> int | None:
    """Return the number of experts of a module with "router" in its class name."""
    if not _ROUTER.search(type(module).__name__):
        return None
    layers = [module, *module.children()]
    return next((n for layer in layers if (n := _outputs(layer)) and n > 1), None)


def _outputs(module: nn.Module) -> int | None:
    weight = module._parameters.get("weight")
    told = getattr(module, "out_features", None)
    if isinstance(told, int):
        return told
    return int(weight.shape[0]) if weight is not None and weight.dim() == 2 else None


def _number_of_experts(module: nn.Module) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in _EXPERTS:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                return value
    return None


class RouterWatcher(OperatorMode):
    """Watches one forward of a router or of its block of experts."""

    def __init__(self, experts: int, logits: Callable[[torch.Tensor], None] | None, ends: bool) -> None:
        """
        Args:
            logits: function to call once with the logits, or None if they are observed elsewhere.
            ends: whether to stop watching after the first top-k over all experts.
        """
        super().__init__()
        self._experts, self._logits, self._ends, self._on = experts, logits, ends, True
        #: experts of each token, int64 [..., k]
        self.chosen: torch.Tensor | None = None
        #: error of observing the logits
        self.failed: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` unchanged, after looking at its arguments and result."""
        if is_dtensor_call(types):
            return NotImplemented
        name = func.overloadpacket.__name__ if getattr(func, "namespace", "") == "aten" else ""
        x = args[0] if self._on and name in _READERS and args else None
        if not isinstance(x, torch.Tensor) or not self._is_of_all_experts(x):
            return func(*args, **(kwargs or {}))
        if self._logits is not None:
            self._give(x)
        out = func(*args, **(kwargs or {}))
        if name == "topk" and (args[2] if len(args) > 2 else -1) in (-1, x.dim() - 1):
            self.chosen = out[1]
            self._on = not self._ends
        return out

    def _is_of_all_experts(self, x: torch.Tensor) -> bool:
        return x.dim() > 1 and x.shape[-1] == self._experts and x.is_floating_point() and not isinstance(x, FakeTensor)

    def _give(self, logits: torch.Tensor) -> None:
        give, self._logits = self._logits, None
        modes = leave_dispatch_modes()
        try:
            if give is not None:
                give(logits)
        except Exception as error:
            self.failed = error
        finally:
            restore_dispatch_modes(modes)


def sum_router_entropies(experts: int, logits: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens, the sum of the entropies of their softmax (nats), and zeros: float64 [3 + experts].

    Args:
        logits: [..., experts]
    """
    entropies: torch.Tensor = torch.special.entr(logits.reshape(-1, experts).double().softmax(-1)).sum(-1)
    found = entropies.new_zeros(3 + experts)
    found[0], found[1] = float(len(entropies)), entropies.sum()
    return found


def sum_expert_loads(router: Router, chosen: torch.Tensor | None, out: Any) -> torch.Tensor:
    """Return two zeros, the number of requested experts (0 if unknown), and each expert's tokens: float64 [3 + experts].

    Args:
        chosen: experts of each token before any token is dropped, or None if they were not seen.
        out: output of the router, perhaps with a map of tokens to experts.

    Raises:
        LookupError: neither `chosen` nor `out` shows which expert received which token.
    """
    found = next((x for x in _tensors(out) if x.dtype == torch.bool and x.shape[1:2] == (router.experts,)), None)
    if found is not None:  # a map from tokens to experts, and perhaps to the tokens' places in each expert
        load = found.flatten(2).sum((0, 2), dtype=torch.float64) if found.dim() > 2 else found.sum(0, dtype=torch.float64)
        asked = len(found) * (_experts_of_a_token(router) if chosen is None else chosen.shape[-1])
    elif chosen is not None:
        flat = chosen.reshape(-1)
        load = torch.zeros(router.experts, dtype=torch.float64, device=flat.device)
        load = load.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float64))
        asked = len(flat)
    else:
        raise LookupError("the experts that it chooses could not be observed")
    sums: torch.Tensor = torch.cat([load.new_tensor([0.0, 0.0, float(asked)]), load])
    return sums


def _experts_of_a_token(router: Router) -> int:
    """Return the number of experts of each token, or 0 if unknown."""
    for name in ("topk", "top_k", "k"):
        value = getattr(router.chooser, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    for value in out if isinstance(out, tuple) else (out,):
        if isinstance(value, torch.Tensor):
            yield value
