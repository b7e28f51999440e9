"""Where activations are looked at in a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...capture.attention import is_attention
from ...capture.backends import parallel
from ...capture.gemms import Gemm
from ...capture.operands import NO_GEMM
from ...capture.scan import ScannedModule, find_inside
from ...core.keys import ACTIVATIONS
from .norms import roles_of_norm
from .routers import Router, find_routers

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
    scanned: Sequence[ScannedModule], kinds: Collection[str], scores: Collection[int]
) -> tuple[list[Site], list[str]]:
    """Return the modules of a model whose activations are looked at, and the names of those that torch.compile runs.

    Args:
        kinds: of activations, as the option has them.
        scores: the ids of modules that compute attention scores.
    """
    roles = {role for kind in kinds for role in ACTIVATIONS[kind]}
    left_out = {id(one.module) for one in scanned if one.compiled}
    sites: list[Site] = []
    compiled: list[str] = []
    for _, of_root in groupby(scanned, key=lambda one: id(one.root)):
        for one, found, router in _found(list(of_root), scores):
            mine = [role for role in found if role in roles]
            if mine and id(one.module) in left_out:
                compiled.append(one.name)
            elif mine:
                sites.append(Site(Gemm(one.name, one.module, NO_GEMM), mine, router))
    return sites, compiled


def _found(
    scanned: Sequence[ScannedModule], scores: Collection[int]
) -> Iterator[tuple[ScannedModule, Sequence[str], Router | None]]:
    for one, router in find_routers(scanned):
        yield one, ("router_logits",), router
    inner = {key for one in scanned if is_attention(one.module) for key in find_inside(one.module)}
    for one in scanned:
        if id(one.module) in inner:
            continue
        if found := roles_of_norm(one.module):
            yield one, found, None
        elif id(one.module) in scores:
            yield one, ("attention_logits",), None
