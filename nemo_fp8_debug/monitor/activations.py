"""Activations in a sampled step: which modules are looked at, and what is captured of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..capture.activations.capture import ActivationCapture
from ..capture.activations.sites import Site, sites_in
from ..capture.backends.base import not_quantized
from ..capture.dispatcher import Dispatcher
from ..capture.dtensor import is_counted
from ..capture.operand_guard import Fault
from ..capture.operands import Operand
from ..capture.scan import ScannedModule, scan_modules
from ..capture.tracing import compiled_by_now
from ..capture.uncast import UncastOperand
from ..core.error_guard import ErrorGuard
from ..core.keys import ACTIVATIONS, Key
from ..core.layer_names import compile_patterns
from ..coverage.modules import find_scores
from ..options.config import Config


def find_sites(scanned: Sequence[ScannedModule], kinds: Sequence[str], errors: ErrorGuard) -> list[Site]:
    """The modules whose activations are looked at; says what is left out.

    Args:
        kinds: as of `Config.activations`.
    """
    if not kinds:
        return []
    sites, compiled = sites_in(scanned, kinds, find_scores(scanned))
    if compiled:
        errors.warn(
            f"the activations of {len(compiled)} modules (first {compiled[0]}) are not looked at: they run inside "
            "torch.compile, where a hook would change the graph"
        )
    roles = {role for site in sites for role in site.roles}
    for kind in kinds:
        if not compiled and not roles & {*ACTIVATIONS[kind]}:
            errors.warn(f"activations asks for {kind!r}, and the model has no module that is known as such here")
    return sites


def activation_capture(
    found: Sequence[Site], plan: Config, operands: dict[Key, Operand], lose: Fault, dispatcher: Dispatcher, rank: int
) -> ActivationCapture | None:
    """What looks at activations in this step; None: there are none to look at.

    Args:
        found: all modules whose activations can be looked at.
        operands: what is captured in the step; those of activations are added.
        lose: told of a fault.
        dispatcher: of the step.
    """
    if not found:
        return None
    chosen, compiled = compile_patterns(plan.layers), compiled_by_now(scan_modules(site.gemm.module for site in found))
    sites = [site for site in found if chosen(site.gemm.name) and id(site.gemm.module) not in compiled]
    counts = partial(is_counted, rank=rank, first=None)
    mine: dict[Key, Operand] = {
        (site.gemm.name, role): UncastOperand(
            site.gemm, role, not_quantized(role), plan.what_if_recipes, _never if site.is_copied else counts
        )
        for site in sites
        for role in site.roles
    }
    operands |= mine
    return ActivationCapture(sites, mine, lose, dispatcher) if mine else None


def _never(x: torch.Tensor) -> bool:
    """Another rank counts it."""
    return False
