"""Find parameters that FSDP2 has sharded, and the DistributedDataParallel module whose forward is running."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from .scan import ScannedModule


def find_active_ddp() -> Any:
    """Return torch's DistributedDataParallel module whose forward is running, or None."""
    of: Any = sys.modules.get("torch.nn.parallel.distributed")
    return getattr(getattr(of, "DistributedDataParallel", None), "_active_ddp_module", None)


class FSDP2Parameters:
    """The sharded parameters of FSDP2. Each replaces a weight of a module while the weight is not gathered."""

    def __init__(self, scanned: Iterable[ScannedModule]) -> None:
        self._of: dict[tuple[int, str], tuple[Any, Any]] = {}
        for group in [group for one in scanned for group in _groups_of(one.module)]:
            for one in group.fsdp_params:
                info = one._module_info
                self._of[id(info.module), info.param_name] = one, group

    def find_fsdp_states(self, module: nn.Module, name: str) -> tuple[Any, Any]:
        """Return FSDP2's states of a parameter, and of the group of parameters that are gathered together with it."""
        return self._of[id(module), name]

    def find_parameter(self, module: nn.Module, name: str) -> Any:
        """Return the sharded parameter, a DTensor, or None if the parameter is not sharded."""
        found = self._of.get((id(module), name))
        return found and found[0].sharded_param

    def has_gradient(self, module: nn.Module, name: str) -> bool:
        """Return True if the parameter has a gradient from earlier backward passes."""
        one, _ = self._of[id(module), name]
        own = getattr(one, "_unsharded_param", None)
        kept = (one.sharded_param.grad, one.unsharded_accumulated_grad, None if own is None else own.grad)
        return any(grad is not None for grad in kept)

    def will_reduce_gradient(self, module: nn.Module, name: str) -> bool:
        """Return True if the next backward pass sums the parameter's gradient over all ranks."""
        _, group = self._of[id(module), name]
        return bool(group.reduce_grads and group.all_reduce_grads)


def _groups_of(module: nn.Module) -> Sequence[Any]:
    if not hasattr(type(module), "_get_fsdp_state"):  # a miss on the module would search its parameters
        return ()
    get: Any = module._get_fsdp_state
    state = get()
    group = getattr(state, "_fsdp_param_group", None)  # before torch 2.12
    return getattr(state, "_fsdp_param_groups", () if group is None else (group,))
