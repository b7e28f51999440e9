"""Features of Transformer Engine's debug tools (nvdlfw_inspect), for a try without changing the run's configuration.

Source: `transformer_engine/debug/features/` of release 2.20 and `nvdlfw_inspect/config_manager.py` of 0.2.2, which refuses a
layer that two sections match; so a layer has one section, and no GEMM of it two features.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from ....core.keys import ROLES, Key
from ....numerics.tensor_scaling import CurrentScaling
from ..flops import OPERANDS, READERS
from ..options import Option
from ..recommend import Finding, Recommendation
from .snippet import Snippet, commented, module_of

NAME = "te_debug.yaml"
_HOW = (
    "nvdlfw_inspect.api.initialize(config_file=THIS_FILE, ...) before the first module of Transformer Engine is built, then "
    "infer_and_assign_layer_names(model), which numbers Megatron's blocks from 1, as the patterns here do. Transformer "
    "Engine 2.13 or later; before, write DisableFP8GEMM for DisableQuantizationGEMM."
)
_TENSORS = {"input": "activation", "weight": "weight", "grad_output": "gradient"}
_FORMATS = {"e4m3": "FP8E4M3", "e5m2": "FP8E5M2"}


def features(found: Recommendation) -> Snippet | None:
    """The file; None where nothing changes."""
    modules: dict[str, list[tuple[Finding, Option]]] = {}
    for finding in found.to_change:
        modules.setdefault(module_of(finding.layer), []).append((finding, _first(finding)))
    coarser = [sentence for options in modules.values() for sentence in _coarser(options)]
    if not modules:
        return None
    formats = {(layer, role): fmt for layer, role, fmt in found.run.metrics.last(["format"]).iter_rows()}
    megatron = bool(found.run.fingerprint.get("backend_options"))
    content = {
        module: {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": pattern_of(module, megatron)},
            "transformer_engine": _features(options, formats),
        }
        for module, options in modules.items()
    }
    text = commented(_HOW, *coarser)
    return Snippet(NAME, "Transformer Engine's debug tools", text + yaml.safe_dump(content, sort_keys=False), tuple(coarser))


def pattern_of(module: str, megatron: bool) -> str:
    """A regular expression of one module's name as nvdlfw_inspect infers it; Megatron's blocks count from 1 there."""
    if megatron:
        module = re.sub(r"(?<=\blayers\.)\d+", lambda found: str(int(found[0]) + 1), module, count=1)
    parts = (r"\d+" if part == "*" else re.escape(part) for part in module.split("."))
    return r"(^|\.)" + r"\.".join(parts) + r"(\.gemm_\d+)?$"


def _coarser(options: Sequence[tuple[Finding, Option]]) -> Iterator[str]:
    kinds = {option.kind for _, option in options}
    for finding, option in options:
        if option.recipe != finding.chosen.recipe:
            yield f"{finding.name}: these tools have no {finding.chosen.recipe}; it has {option.recipe} instead."
        if "format" in kinds:
            yield f"{finding.name}: FP8 values, multiplied in BF16 in all GEMMs of the module: no other way here."
        elif kinds == {"current", "bf16"}:
            yield f"{finding.name}: all GEMMs of the module are in BF16: some cannot be while others are rescaled."


def _first(finding: Finding) -> Option:
    stay, *others = finding.options
    return next(option for option in others if option.meets and _can_be_said(option, stay.recipe))


def _can_be_said(option: Option, in_use: str) -> bool:
    if option.kind == "bf16":
        return True
    scaling = option.parsed.scaling
    if option.kind == "current":  # this feature works under delayed scaling only
        return in_use.startswith("delayed")
    return option.kind == "format" and scaling == CurrentScaling()


def _features(options: Sequence[tuple[Finding, Option]], formats: Mapping[Key, str]) -> dict[str, Any]:
    """What a module is given.

    A feature that casts a tensor does so in both GEMMs that read it: whether it does is asked of one and kept for the other.
    """
    by_kind: dict[str, list[str]] = {}
    for finding, option in options:
        by_kind.setdefault(option.kind, []).append(finding.role)
    in_bf16 = by_kind.get("bf16", [])
    if "format" in by_kind:
        new = {finding.role: _format(option, finding.role) for finding, option in options if option.kind == "format"}
        layer = options[0][0].layer
        chosen = {role: new.get(role) or formats.get((layer, role)) for role in ROLES if role not in in_bf16}
        structs = [
            {"tensor": _TENSORS[role], "quant_format": _FORMATS[fmt]} for role, fmt in chosen.items() if fmt in _FORMATS
        ]
        return {"FakeQuant": {"enabled": True, "gemms": list(OPERANDS), "tensors_struct": structs}}
    if "current" in by_kind and not in_bf16:
        tensors = [_TENSORS[role] for role in by_kind["current"]]
        return {"PerTensorScaling": {"enabled": True, "gemms": list(OPERANDS), "tensors": tensors}}
    read = {gemm for role in in_bf16 for gemm in READERS[role]}
    gemms = [gemm for gemm in OPERANDS if gemm in read or "current" in by_kind]
    return {"DisableQuantizationGEMM": {"enabled": True, "gemms": gemms}}


def _format(option: Option, role: str) -> str:
    return option.parsed.format_of(role).name
