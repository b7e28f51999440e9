"""What torchao's Float8Linear cast, seen where it is multiplied, beside the values before the cast."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.float8_training_tensor import Float8TrainingTensor


class Casts(TorchDispatchMode):
    """By (layer, role): squared errors and squares of an operand, number of scales of a cast, and formats.

    X and W are those of the forward product and dY that of dgrad. What is recomputed is left out.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.errors: dict[tuple[str, str], torch.Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
        self.scales: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._now: list[tuple[str, dict[str, torch.Tensor]]] = []
        self._handles = []
        for name, module in model.named_modules():
            if hasattr(module, "weight") and isinstance(module, nn.Linear):
                name = name.replace("_checkpoint_wrapped_module.", "").removeprefix("0.")
                self._handles += [
                    module.register_forward_pre_hook(self._before(name)),
                    module.register_forward_hook(self._after(name)),
                ]

    def _before(self, name: str) -> Any:
        def see(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if torch._C._current_graph_task_id() == -1:
                self._now = [(name, {"input": args[0].detach(), "weight": module.weight.detach()})]

        return see

    def _after(self, name: str) -> Any:
        def see(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            if torch._C._current_graph_task_id() != -1:
                return
            self._now = []
            if out.requires_grad:
                out.register_hook(lambda grad: self._now.append((name, {"grad_output": grad.detach()})))

        return see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and self._now and isinstance(args[0], Float8TrainingTensor):
            roles = [getattr(getattr(x, "_gemm_input_role", None), "value", "") for x in args[:2]]
            # A forward that is done again comes between a gradient and its product.
            if roles in (["input", "weight"], ["grad_output", "weight"]) and roles[0] in self._now[0][1]:
                self._add(*self._now.pop(0), dict(zip(roles, args[:2], strict=True)))
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, given: dict[str, torch.Tensor], cast: dict[str, Any]) -> None:
        for role, x in given.items():
            codes, scale = (
                (cast[role]._data.t(), cast[role]._scale.t())
                if role == "weight"
                else (
                    cast[role]._data,
                    cast[role]._scale,
                )
            )
            values = codes.double() / scale.double()
            x = x.reshape(values.shape).double()
            self.errors[name, role] += torch.stack([(values - x).square().sum(), x.square().sum()])
            fmt = str(codes.dtype).removeprefix("torch.float8_").removesuffix("fn")
            self.scales[name, role].add(f"{fmt}, {'by row' if scale.numel() > 1 else 'by tensor'}")

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
