"""Faults of attention, routers, the residual stream and steps of weights, put into a model; no scale is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: step from which they act
ONSET = 60
#: what acts in a step, given its number and the optimizer
Act = Callable[[int, torch.optim.Optimizer], None]

_QUERIES = ("q_proj", "linear_qkv", ".query")
_GATES = (".gate",)
_BRANCHES = ("down_proj", "linear_fc2", ".w2", ".0.output.dense")


def _modules(model: nn.Module, endings: tuple[str, ...]) -> list[nn.Module]:
    return [module for path, module in model.named_modules() if path.endswith(endings)]


def _changed_from(module: nn.Module, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Act:
    """What the module computes is changed, given the age of the fault."""
    age, inner = [-1], module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        if age[0] < 0:
            return out
        return (change(out[0], age[0]), *out[1:]) if isinstance(out, tuple) else change(out, age[0])

    module.forward = forward  # type: ignore[method-assign]

    def act(step: int, optimizer: torch.optim.Optimizer) -> None:
        age[0] = step - ONSET

    return act


def exploding_queries(model: nn.Module) -> Act | None:
    """Queries of the first layer, and keys where one projection makes both, grow by 6% a step, to at most 256 times."""
    found = _modules(model, _QUERIES)
    return _changed_from(found[0], lambda x, age: x * min(1.06**age, 256.0)) if found else None


def biased_router(model: nn.Module) -> Act | None:
    """One logit of the first router, of all tokens, is 20 higher."""
    return _shifted(model, 20.0)


def silenced_expert(model: nn.Module) -> Act | None:
    """One logit of the first router, of all tokens, is 1000 lower."""
    return _shifted(model, -1000.0)


def _shifted(model: nn.Module, by: float) -> Act | None:
    found = _modules(model, _GATES)
    return _changed_from(found[0], lambda x, _: x + by * (torch.arange(x.shape[-1]) == 0)) if found else None


def outlier_channel(model: nn.Module) -> Act | None:
    """Channel 1 of what the first MLP adds to the residual stream grows by 10% a step, to at most 512 times."""
    found = _modules(model, _BRANCHES)

    def change(x: torch.Tensor, age: int) -> torch.Tensor:
        return torch.where(torch.arange(x.shape[-1]) == 1, x * min(1.1 ** (age + 1), 512.0), x)

    return _changed_from(found[0], change) if found else None


def rate_of_one_weight(model: nn.Module) -> Act | None:
    """The first projection of queries has a learning rate 300 times as high, in a group of its own."""
    weight = next(p for module in _modules(model, _QUERIES)[:1] for p in module.parameters() if p.dim() > 1)

    def act(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == ONSET:
            group = optimizer.param_groups[0]
            group["params"] = [p for p in group["params"] if p is not weight]
            options = {name: value for name, value in group.items() if name != "params"}
            optimizer.add_param_group({**options, "params": [weight], "times": 300})

    return act


FAULTS: dict[str, Callable[[nn.Module], Act | None]] = {
    "exploding_queries": exploding_queries,
    "biased_router": biased_router,
    "silenced_expert": silenced_expert,
    "outlier_channel": outlier_channel,
    "rate_of_one_weight": rate_of_one_weight,
}
#: what a rule has to say, by fault: the rule's name
RULE_OF = {
    "exploding_queries": "attention",
    "biased_router": "router",
    "silenced_expert": "router",
    "outlier_channel": "channels",
    "rate_of_one_weight": "weight steps",
}
