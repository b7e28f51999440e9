"""Write torchao's configuration: each layer is converted with a `Float8LinearConfig`, which has options for single operands.

Source: `torchao/float8/config.py` and `float8_linear_utils.py` of release 0.18. The operands of a product are either both in
high precision or both in FP8. An operand has the same format in both products that read it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....core.keys import SHOWN_AS
from ....core.layer_names import compile_layer_patterns
from ....numerics.recipe import BF16_RECIPE
from ..options import STAY, UNDO, CastOption
from ..recommend import OPERANDS, READERS, Recommendation, TensorFix
from .snippet import Snippet, combine_options, comment_lines

NAME = "torchao_float8.py"
_HOW = (
    "This file converts layers as in the recorded run, except for those in CHANGED. Call convert(model) in "
    "place of the run's own convert_to_float8_training, or of torchtitan's and Accelerate's conversion, before the model is "
    "sharded or compiled.",
)
#: fields of Float8LinearConfig by (role, product)
_FIELDS = {
    ("input", "fprop"): "cast_config_input",
    ("input", "wgrad"): "cast_config_input_for_grad_weight",
    ("weight", "fprop"): "cast_config_weight",
    ("weight", "dgrad"): "cast_config_weight_for_grad_input",
    ("grad_output", "dgrad"): "cast_config_grad_output",
    ("grad_output", "wgrad"): "cast_config_grad_output_for_grad_weight",
}
_DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_GATHER = "enable_fsdp_float8_all_gather"
_KINDS = {
    "gemm": "Float8GemmConfig({use_fast_accum})",
    "cast": "cast({scaling_type!r}, {scaling_granularity!r}, {target_dtype!r})",
}
_PROLOGUE = '''
from __future__ import annotations

import warnings

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import CastConfig, Float8GemmConfig, ScalingGranularity, ScalingType

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def cast(scaling_type, granularity, dtype):
    """Return the cast of an operand for a product. DISABLED is high precision."""
    return CastConfig(ScalingType[scaling_type], ScalingGranularity[granularity], getattr(torch, dtype))


def convert(model):
    """Convert the layers of a model. A layer without a configuration stays a torch.nn.Linear."""
    names = {_name(path) for path, _ in model.named_modules()}
    if missing := [name for name in CHANGED if name not in names]:
        warnings.warn(f"the model has no {', '.join(map(repr, missing))}, which {__name__} changes", stacklevel=2)
    for config, layers in CONFIGS:
        chosen = frozenset(layers)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, fqn, chosen=chosen: _name(fqn) in chosen
        )
    return model


def _name(path):
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)

'''


def make_torchao_snippet(found: Recommendation) -> tuple[list[Snippet], list[str]]:
    """Return the file, or the reason why it is not written. If nothing changes, return neither."""
    if not found.fixes_to_apply:
        return [], []
    recorded = found.run.fingerprint.get("torchao", {}).get("configurations")
    entries = [(entry["config"], list(entry["layers"])) for entry in recorded] if isinstance(recorded, list) else []
    by_layer = {layer: i for i, (_, layers) in enumerate(entries) for layer in layers}
    findings: dict[str, list[TensorFix]] = {}
    for finding in found.fixes_to_apply:
        matches = compile_layer_patterns([finding.layer])
        layers = [finding.layer] if finding.layer in by_layer else [layer for layer in by_layer if matches(layer)]
        if not layers:
            return [], [f"{NAME} is not written: the record has no configuration of a Float8Linear {finding.layer}."]
        for layer in layers:
            findings.setdefault(layer, []).append(finding)
    changed = {layer: _changed(layer, entries[by_layer[layer]][0], these) for layer, these in findings.items()}
    coarser = list(dict.fromkeys(sentence for _, sentences in changed.values() for sentence in sentences))
    groups = [(config, [layer for layer in layers if layer not in changed]) for config, layers in entries]
    for layer, (config, _) in changed.items():
        if config is not None:  # None: the layer is not converted
            groups.append((config, [layer]))
    text = comment_lines(*_HOW, *coarser) + _PROLOGUE + _tables(groups, list(changed))
    return [Snippet(NAME, "conversion of layers, torchao", text, tuple(coarser))], []


def _changed(
    layer: str, config: Mapping[str, Any], findings: Sequence[TensorFix]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a layer's configuration with the cheapest options that its products support, or None if it must not be
    converted.
    """
    for options in combine_options(_menu(finding) for finding in findings):
        made = _applied(config, {f.role: o for f, o in zip(findings, options, strict=True)})
        if _can_be_multiplied(made):
            return _without_gather(layer, made, list(_coarser(findings, options)))
    raise AssertionError("a GEMM with both operands in BF16 always works")


def _menu(finding: TensorFix) -> list[CastOption]:
    return [option for option in finding.options if option.meets and _can_be_said(option, finding.options[0])]


def _can_be_said(option: CastOption, stay: CastOption) -> bool:
    if option.kind == UNDO and option.recipe != BF16_RECIPE.name:
        return option.parsed_recipe.scaling == stay.parsed_recipe.scaling
    return option.kind in (UNDO, "format", "bf16")


def _applied(config: Mapping[str, Any], options: Mapping[str, CastOption]) -> dict[str, Any]:
    made = copy.deepcopy(dict(config))
    for role, option in options.items():
        for product in READERS[role]:
            if option.recipe != BF16_RECIPE.name:
                made[_FIELDS[role, product]]["target_dtype"] = _DTYPES[option.parsed_recipe.get_format(role).name]
                continue
            for operand in OPERANDS[product]:
                made[_FIELDS[operand, product]] |= {"scaling_type": "DISABLED", "scaling_granularity": "TENSORWISE"}
    return made


def _can_be_multiplied(config: Mapping[str, Any]) -> bool:
    """Return True if no GEMM multiplies E5M2 by E5M2, which cuBLAS does not support."""
    wide = {
        key
        for key, field in _FIELDS.items()
        if config[field]["scaling_type"] != "DISABLED" and config[field]["target_dtype"] == _DTYPES["e5m2"]
    }
    return not any(all((role, product) in wide for role in pair) for product, pair in OPERANDS.items())


def _coarser(findings: Sequence[TensorFix], options: Sequence[CastOption]) -> Iterator[str]:
    for finding, option in zip(findings, options, strict=True):
        chosen = finding.chosen_option
        if option.recipe != chosen.recipe and chosen.kind != STAY:
            yield f"{finding.tensor_name}: torchao has no {chosen.recipe} here; it has {option.recipe} instead."


def _without_gather(layer: str, config: dict[str, Any], coarser: list[str]) -> tuple[dict[str, Any] | None, list[str]]:
    plain = {key for key, field in _FIELDS.items() if config[field]["scaling_type"] == "DISABLED"}
    if config.get(_GATHER) and any(role == "weight" for role, _ in plain):
        config[_GATHER] = False
        coarser.append(f"{SHOWN_AS['weight']} of {layer} is gathered in high precision, as one of its products needs it.")
    return (None if len(plain) == len(_FIELDS) else config), coarser


def _tables(groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]], changed: Sequence[str]) -> str:
    lines = [f"#: layers that differ from the run\nCHANGED = {changed!r}\n#: configuration, and its layers\nCONFIGS = [\n"]
    for config, layers in groups:
        if layers:
            options = "".join(f"            {name}={_value(value)},\n" for name, value in config.items())
            names = "".join(f"            {layer!r},\n" for layer in layers)
            lines.append(f"    (\n        Float8LinearConfig(\n{options}        ),\n        [\n{names}        ],\n    ),\n")
    return "".join([*lines, "]\n"])


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return _KINDS["gemm" if "use_fast_accum" in value else "cast"].format(**value)
    return repr(value)
