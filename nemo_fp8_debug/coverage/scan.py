"""Build the ledger of a model by scanning its modules before the first step. Nothing is run or changed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from ..capture.attention import is_attention, is_fp8_emulation_enabled, runs_in_fp8
from ..capture.backends.base import is_plain_tensor
from ..capture.gemms import Gemm, list_scanned_gemms
from ..capture.patching import find_emulation
from ..capture.scan import ScannedModule, scan_modules
from ..core.keys import ROLES
from .ledger import (
    HIGH_PRECISION,
    OBSERVED,
    QUANTIZED_OBSERVED,
    QUANTIZED_UNOBSERVED,
    UNKNOWN,
    CoverageEntry,
    CoverageLedger,
)
from .modules import (
    FP8_SCORES,
    FUNCTIONS,
    IF_MULTIPLIED,
    SCORES,
    count_experts_per_token,
    count_matrix_parts_over_ranks,
    find_attention_score_modules,
    list_coverage_entries,
    needs_gradient,
    read_linear_shape,
)

_HEADS = ("lm_head", "output_layer", "embed_out", "classifier", "head", "score")
_EXPERT_LISTS = ("experts", "local_experts")


def ledger_of(
    roots: Sequence[nn.Module], gemms: Sequence[Gemm] | None = None, roles: Collection[str] = ROLES
) -> CoverageLedger:
    """Return the ledger of a model, which lists its products and shows which of them we observe.

    Args:
        roots: the model, or its chunks.
        gemms: the observed GEMMs, or None for all GEMMs that hooks can observe.
        roles: the observed operands.
    """
    return build_coverage_ledger(scan_modules(roots), gemms, roles)


def build_coverage_ledger(
    scanned: Sequence[ScannedModule], gemms: Sequence[Gemm] | None, roles: Collection[str]
) -> CoverageLedger:
    """Return the ledger of a model that is already scanned."""
    every = list_scanned_gemms(scanned, in_forward=True)
    found = [g for g in every if not g.backend.in_forward]
    inside = {g.name: g for g in every if g.backend.in_forward}
    observed = {g.name for g in (every if gemms is None else gemms) if not g.compiled}
    around = {id(one.module): one.enclosing_modules for one in scanned}
    scores = find_attention_score_modules(scanned)
    parts = Counter(id(g.module) for g in found)
    entries = [_of_gemm(g, around[id(g.module)], parts[id(g.module)], g.name in observed, roles) for g in found]
    for one in scanned:
        if id(one.module) not in parts:
            for entry in list_coverage_entries(one.global_name, one.module, around[id(one.module)]):
                gemm = inside.get(entry.name)
                entries.append(entry if gemm is None else _of_product(entry, gemm, entry.name in observed, roles))
        if id(one.module) in scores:
            entries.append(_of_scores(one.global_name, one.module, roles))
    return CoverageLedger((*_grouped(entries), CoverageEntry("*", "other", UNKNOWN, FUNCTIONS, first="*")))


def _of_scores(name: str, module: nn.Module, roles: Collection[str]) -> CoverageEntry:
    """Return the entry of attention scores, which are products of two activations. They may be computed in FP8."""
    quantized = runs_in_fp8(module) if is_attention(module) else None
    seen = is_fp8_emulation_enabled() and {"input", "grad_output"} <= {*roles}
    status = (QUANTIZED_OBSERVED if seen else QUANTIZED_UNOBSERVED) if quantized else UNKNOWN
    reason = SCORES if not quantized else "" if seen else FP8_SCORES
    return CoverageEntry(f"{name} (scores)", "attention", status, reason, first=name)


def _of_gemm(gemm: Gemm, around: Sequence[nn.Module], parts: int, observed: bool, roles: Collection[str]) -> CoverageEntry:
    shape = read_linear_shape(gemm.module, gemm.part)
    split = count_matrix_parts_over_ranks(gemm.module, around)
    size = None if shape is None or split is None else math.prod(shape) / split
    kind = "head" if gemm.kind in _HEADS else "linear"
    if (siblings := _experts(gemm, around, parts)) is not None:
        met = count_experts_per_token(around)
        size = None if met is None or size is None or not siblings else size * met / siblings
        kind = "experts"
    adapter = _is_idle_adapter(gemm, around)
    reason = "the adapter is merged or not active" if adapter else _reason(gemm, observed, roles)
    return CoverageEntry(
        name=gemm.name,
        kind=kind,
        status=_status(gemm, observed),
        reason=reason,
        shape=shape or (),
        multiply_adds=0.0 if adapter else size,
        trained=needs_gradient(gemm.module),
        first=gemm.name,
    )


def _of_product(entry: CoverageEntry, gemm: Gemm, observed: bool, roles: Collection[str]) -> CoverageEntry:
    """Complete the entry of a product inside a forward. For an unknown class, only a step shows if it is computed."""
    reason = _reason(gemm, observed, roles)
    if not observed:
        return replace(entry, reason=reason)
    if entry.status == UNKNOWN:
        return replace(entry, reason=IF_MULTIPLIED)
    return replace(entry, status=OBSERVED, reason=reason)


def _experts(gemm: Gemm, around: Sequence[nn.Module], parts: int) -> int | None:
    """Return how many experts with such a GEMM this rank has.

    Return None if the GEMM is not part of an expert. Return 0 if the number is unknown, or if a capacity pads the tokens.
    """
    if gemm.part.isdigit():
        return parts
    found = re.search(r"(?:^|\.)(\w+)\.\d+\.", gemm.name + ".")
    lists = [m for m in around if isinstance(m, nn.ModuleList)]
    if "deepspeed_experts." in gemm.name:
        return 0
    if found is None or not re.search(rf"(?:^|\.)(?:{'|'.join(_EXPERT_LISTS)})\.\d+(?:\.|$)", gemm.name):
        return None
    return len(lists[0]._modules) if lists else 0


def _status(gemm: Gemm, observed: bool) -> str:
    override = find_emulation(gemm.module)
    if override is not None and any(map(override.quantizes, ROLES)):
        return QUANTIZED_OBSERVED if observed else QUANTIZED_UNOBSERVED
    if observed:
        return OBSERVED
    plain = is_plain_tensor(gemm.module._parameters.get("weight")) and type(gemm.module).__module__.startswith(
        ("torch.nn.modules.", "megatron.core.tensor_parallel.")
    )
    return HIGH_PRECISION if plain else UNKNOWN


def _reason(gemm: Gemm, observed: bool, roles: Collection[str]) -> str:
    if not observed:
        compiled = "runs inside torch.compile, where a hook would change the graph"
        return compiled if gemm.compiled else "left out by the option layers"
    unseen = [r for r in ROLES if r not in roles or r in gemm.unobserved_roles]
    if unseen:
        return f"operands not observed: {', '.join(unseen)}"
    return gemm.backend.foreign(gemm.module)


def _is_idle_adapter(gemm: Gemm, around: Sequence[nn.Module]) -> bool:
    """Return whether a module is a PEFT adapter that is currently not multiplied."""
    found = re.search(r"\.lora_[AB]\.([^.]+)$", gemm.name)
    owner = next((m for m in around if hasattr(m, "lora_A")), None)
    if not found or owner is None:
        return False
    active = getattr(owner, "active_adapters", None)
    off = bool(getattr(owner, "merged", False)) or bool(getattr(owner, "disable_adapters", False))
    return off or (isinstance(active, (list, tuple, set)) and found[1] not in active)


def _grouped(entries: Sequence[CoverageEntry]) -> list[CoverageEntry]:
    """Return the entries, after merging entries that differ only in the numbers in their names."""
    groups: dict[CoverageEntry, list[CoverageEntry]] = {}
    for entry in entries:
        pattern = re.sub(r"(^|\.)\d+(?=\.|$| )", r"\1*", entry.name)
        groups.setdefault(replace(entry, name=pattern, first=""), []).append(entry)
    return [
        replace(group, name=of[0].name if len(of) == 1 else group.name, count=sum(e.count for e in of), first=of[0].first)
        for group, of in groups.items()
    ]
