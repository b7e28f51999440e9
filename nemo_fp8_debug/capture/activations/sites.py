"""Where activations are looked at in a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ...core.keys import ACTIVATIONS
from ..attention import is_attention
from ..backends import parallel
from ..gemms import Gemm, global_name, is_compiled
from ..uncast import NO_GEMM
from .norms import roles_of_norm
from .routers import Router, routers_in

#: norms of queries and keys, of which tensor-parallel ranks have heads of their own
_OF_HEADS = re.compile(r"(^|\.)[qk]_?(layer)?_?norm\Z")


@dataclass(frozen=True)
class Site:
    """A module whose activations are looked at."""

    gemm: Gemm
    roles: Sequence[str]
    router: Router | None = None

    @property
    def is_copied(self) -> bool:
        """Whether another rank counts what this one has."""
        if "attention_logits" in self.roles or _OF_HEADS.search(self.gemm.name):
            return False
        return bool(parallel.copied(self.gemm.module, "input"))


def sites_in(
    roots: Sequence[nn.Module], kinds: Collection[str], computes_scores: Callable[[nn.Module], bool]
) -> tuple[list[Site], list[str]]:
    """The modules of a model whose activations are looked at, and the names of those that torch.compile runs.

    Args:
        kinds: of activations, as the option has them.
        computes_scores: whether a module is an attention.
    """
    roles = {role for kind in kinds for role in ACTIVATIONS[kind]}
    sites: list[Site] = []
    compiled: list[str] = []
    for root in roots:
        left_out = {id(inner) for outer in root.modules() if is_compiled(outer) for inner in outer.modules()}
        for path, module, found, router in _found(root, computes_scores):
            name, mine = global_name(root, path), [role for role in found if role in roles]
            if mine and id(module) in left_out:
                compiled.append(name)
            elif mine:
                sites.append(Site(Gemm(name, module, NO_GEMM), mine, router))
    return sites, compiled


def _found(
    root: nn.Module, computes_scores: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module, Sequence[str], Router | None]]:
    for path, router in routers_in(root):
        yield path, router.module, ("router_logits",), router
    inner = {id(m) for outer in root.modules() if is_attention(outer) for m in outer.modules() if m is not outer}
    for path, module in root.named_modules():
        if id(module) in inner:
            continue
        if found := roles_of_norm(module):
            yield path, module, found, None
        elif computes_scores(module):
            yield path, module, ("attention_logits",), None
