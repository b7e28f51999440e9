"""How many experts a token meets: read from classes and options that are known, and otherwise not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

#: where a router or its layer keeps how many experts a token is given to,
_OF_MODULES = ("top_k", "topk", "num_experts_per_tok")
#: and a configuration; the `top_k` of transformers' is how many tokens text is sampled from
_OF_OPTIONS = ("num_experts_per_tok", "moe_router_topk")
#: options under which experts multiply something else than the tokens given to them
_CAPACITY = ("moe_expert_capacity_factor", "expert_capacity", "capacity_factor")

#: classes that hold all experts in parameters of three dimensions, experts first: whether a token meets all of them
WHOLE_EXPERTS = {
    ("transformers", "GptOssExperts"): False,  # in training; in eval mode on a GPU all experts multiply
    ("transformers", "Llama4TextExperts"): True,  # given every token once for each expert
    ("torchtitan", "GroupedExperts"): False,
}


def experts_of_a_token(path: Sequence[nn.Module]) -> int | None:
    """How many experts a token is given to; None: nothing that is known says so.

    Args:
        path: the modules around an expert, innermost first.
    """
    for module in path:
        config = getattr(module, "config", None)
        if any(getattr(holder, name, None) for holder in (module, config) for name in _CAPACITY):
            return None
        values: list[Any] = [getattr(m, name, None) for m in (module, *module._modules.values()) for name in _OF_MODULES]
        values += [getattr(config, name, None) for name in _OF_OPTIONS]
        found = next(filter(_is_count, values), None)
        if found is not None:
            return int(found)
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def meets_all(module: nn.Module) -> bool | None:
    """Whether a token meets all experts of a module that is known to hold them in parameters of three dimensions."""
    kind = type(module)
    return WHOLE_EXPERTS.get((kind.__module__.partition(".")[0], kind.__name__))
