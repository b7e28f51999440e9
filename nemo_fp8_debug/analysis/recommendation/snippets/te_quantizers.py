"""Write a quantizer factory for Transformer Engine's `CustomRecipe` that changes single operands only.

A GEMM kernel supports only certain pairs of operands. If an operand leaves FP8, the other operand of each GEMM that reads it
must also leave FP8, in that GEMM only.

Source: `pytorch/quantization.py`, `pytorch/custom_recipes/quantizer_factories.py` and `pytorch/tensor/hybrid_tensor.py` of
Transformer Engine 2.20.2. Release 2.19 is the first with `IdentityQuantizer` and `HybridQuantizer`.
`megatron/core/fp8_utils.py` and `extensions/transformer_engine.py` of megatron-core 0.17.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ....core.keys import ROLES, SHOWN_AS
from ....core.layer_names import is_expert_aggregate
from ....core.scale_sources import ENGINE
from ....numerics.block_scaling import Float8BlockScaling, MXFP8Scaling
from ....numerics.recipe import BF16_RECIPE, find_recipe
from ....numerics.tensor_scaling import CurrentScaling, DelayedScaling
from ...runs.run import Run
from ..options import STAY, Cast, CastOption, resolve_recipe_cast
from ..recommend import OPERANDS, READERS, Recommendation, TensorFix
from .megatron import count_pipeline_stages, name_module_on_its_rank
from .snippet import Snippet, combine_options, comment_lines, name_module_of_gemm

#: casts by role; None means high precision
Casts = Mapping[str, Cast | None]
#: casts by (role, GEMM); None means high precision
ByGemm = dict[tuple[str, str], Cast | None]


class Unreadable(Exception):
    """Raised if the record does not show how a module casts an operand. The message names the operand and the reason."""


@dataclass(frozen=True)
class ChangedModule:
    """A module with changed casts."""

    name: str
    casts: ByGemm
    #: sentences about differences from the plan
    coarser: tuple[str, ...]


def read_casts(run: Run) -> dict[str, Casts | Unreadable]:
    """Return the last recorded casts of all modules that quantize, or why they are unreadable, for example because experts
    of a module differ.
    """
    rows = run.metrics.read_last_samples(["recipe", "format", "scale_source"])
    found: dict[str, dict[str, Cast | None] | Unreadable] = {}
    for layer, role, name, fmt, source in rows.iter_rows():
        if is_expert_aggregate(layer) or role not in ROLES:
            continue
        module = name_module_of_gemm(layer)
        casts = found.setdefault(module, {})
        if isinstance(casts, Unreadable):
            continue
        try:
            cast = _read_cast(name, fmt, source)
            if casts.setdefault(role, cast) != cast:
                raise Unreadable("experts of a group are cast in different ways")
        except Unreadable as error:
            found[module] = Unreadable(f"{SHOWN_AS[role]} of {layer}: {error}")
    return {m: _check_whole(m, c) if isinstance(c, dict) else c for m, c in found.items() if not _is_high_precision(c)}


def _read_cast(name: str, fmt: str, source: str | None) -> Cast | None:
    if source == "not quantized":
        return None
    if source != ENGINE:
        raise Unreadable(f"its cast was not read (`scale_source` is {source})")
    recipe = find_recipe(name)
    if recipe is None:
        raise Unreadable(f"unsupported recipe {name}")
    scaling = recipe.scaling
    by_torchao = getattr(scaling, "by_logarithm", False)
    if by_torchao or not isinstance(scaling, (CurrentScaling, DelayedScaling, Float8BlockScaling, MXFP8Scaling)):
        raise Unreadable(f"not all options of {name} are in the record")
    return scaling, fmt


def _is_high_precision(casts: Casts | Unreadable) -> bool:
    return not isinstance(casts, Unreadable) and not any(casts.values())


def _check_whole(module: str, casts: Casts) -> Casts | Unreadable:
    """Return the casts if all three operands are recorded and quantized. Otherwise return the reason why they are
    incomplete.
    """
    if missing := [role for role in ROLES if role not in casts]:
        return Unreadable(f"{SHOWN_AS[missing[0]]} of {module}: it was not recorded")
    if plain := [role for role in ROLES if casts[role] is None]:
        return Unreadable(f"{SHOWN_AS[plain[0]]} of {module}: it is not quantized, but other operands of its module are")
    return casts


def find_usual_casts(all_casts: Iterable[Casts]) -> dict[str, Cast]:
    """Return the most frequent cast of each role."""
    found: dict[str, list[Cast]] = {role: [] for role in ROLES}
    for casts in all_casts:
        for role, cast in casts.items():
            if cast is not None:
                found[role].append(cast)
    return {role: max(dict.fromkeys(casts), key=casts.count) for role, casts in found.items() if casts}


def spread_over_gemms(casts: Casts) -> ByGemm:
    """Return casts by GEMM. An operand gets the same cast in both GEMMs that read it."""
    return {(role, gemm): casts[role] for role in ROLES for gemm in READERS[role]}


def change_module(name: str, casts: Casts, findings: Sequence[TensorFix]) -> ChangedModule:
    """Choose the cheapest options for a module's operands such that kernels can multiply the operands with each other.

    Args:
        name: the module.
        casts: recorded casts.
        findings: findings of this module, or of its experts, that need a change.
    """
    menus = {role: _list_options([f for f in findings if f.role == role]) for role in ROLES}
    menus = {role: menu for role, menu in menus.items() if menu}
    for chosen in combine_options(menus.values()):
        options = dict(zip(menus, chosen, strict=True))
        made = _apply_options(casts, options)
        if _can_be_multiplied(made):
            return ChangedModule(name, *_without_nested_delays(name, made, _tell_differences(name, findings, options)))
    raise AssertionError("a GEMM with both operands in BF16 always works")


def _list_options(findings: Sequence[TensorFix]) -> list[CastOption]:
    """Return the options that all findings have in common, in order of cost."""
    others = [{o.recipe for o in f.options if o.meets and o.kind != STAY} for f in findings]
    own = findings[0].options if findings else ()
    return [o for o in own if o.kind != STAY and o.meets and all(o.recipe in recipes for recipes in others)]


def _apply_options(casts: Casts, options: Mapping[str, CastOption]) -> ByGemm:
    made = spread_over_gemms(
        dict(casts)
        | {role: resolve_recipe_cast(o.parsed_recipe, role) for role, o in options.items() if o.recipe != BF16_RECIPE.name}
    )
    left = {gemm for role, option in options.items() if option.recipe == BF16_RECIPE.name for gemm in READERS[role]}
    return {(role, gemm): None if gemm in left else cast for (role, gemm), cast in made.items()}


def _can_be_multiplied(made: ByGemm) -> bool:
    delayed = [{c for (role, _), c in made.items() if role in roles and _is_delayed(c)} for roles in (ROLES[:2], ROLES[2:])]
    # Transformer Engine keeps one history for each direction of a module. The format of the forward history is E4M3.
    histories = all(len(found) < 2 for found in delayed) and all(fmt == "e4m3" for _, fmt in filter(None, delayed[0]))
    return histories and all(_kernel_takes(*(made[role, gemm] for role in pair)) for gemm, pair in OPERANDS.items())


def _kernel_takes(a: Cast | None, b: Cast | None) -> bool:
    if a is None or b is None:
        return a is b
    per_tensor = (CurrentScaling, DelayedScaling)
    alike = type(a[0]) is type(b[0]) or (isinstance(a[0], per_tensor) and isinstance(b[0], per_tensor))
    return alike and not a[1] == b[1] == "e5m2"  # cuBLAS does not multiply E5M2 by E5M2


def _is_delayed(cast: Cast | None) -> bool:
    return cast is not None and isinstance(cast[0], DelayedScaling)


def _tell_differences(name: str, findings: Sequence[TensorFix], options: Mapping[str, CastOption]) -> tuple[str, ...]:
    """Return sentences about operands that get a different option than in the plan."""
    said = {}
    for finding in findings:
        option = options[finding.role]
        if option.recipe != finding.chosen_option.recipe:
            said[finding.tensor_name] = (
                f"no kernel takes {finding.chosen_option.recipe} with the other operand, so it has {option.recipe}"
            )
        elif finding.layer != name:
            said[f"{SHOWN_AS[finding.role]} of {name}"] = "all experts of the group are cast alike"
    return tuple(f"{key}: {sentence}." for key, sentence in said.items())


def _without_nested_delays(name: str, made: ByGemm, coarser: tuple[str, ...]) -> tuple[ByGemm, tuple[str, ...]]:
    """If one copy of an operand is in high precision, use current scaling, because a history needs both copies in FP8."""
    more = []
    for role in ROLES:
        copies = [made[role, gemm] for gemm in READERS[role]]
        kept = next((cast for cast in copies if _is_delayed(cast)), None)
        if kept and None in copies:
            gemm = next(gemm for gemm in READERS[role] if made[role, gemm])
            made[role, gemm] = CurrentScaling(), kept[1]
            more.append(
                f"{SHOWN_AS[role]} of {name}: in {gemm}, which stays in FP8, its scale follows the tensor (current). "
                "Transformer Engine keeps no history for an operand of which one copy is not in FP8."
            )
    return made, (*coarser, *more)


PROLOGUE = '''
from __future__ import annotations

import fnmatch
import re
import warnings

try:
    from transformer_engine.common.recipe import Format
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.quantization import DelayedScalingRequest
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
except ImportError as error:
    raise ImportError(f"{__name__} needs Transformer Engine 2.19 or later: {error}") from error


def high_precision():
    """Return a quantizer that leaves an operand in high precision."""
    return IdentityQuantizer()


def current(fmt, power_of_two, epsilon):
    """Return a quantizer with one scale, from the tensor itself."""
    return Float8CurrentScalingQuantizer(
        _dtype(fmt), device="cuda", force_pow_2_scales=power_of_two, amax_epsilon=epsilon
    )


def delayed(fmt, margin, history, algorithm):
    """Request one scale from the amaxes of earlier steps. HYBRID is E4M3 forward and E5M2 backward."""
    return DelayedScalingRequest(getattr(Format, fmt), margin, history, algorithm)


def blockwise(fmt, dimensions, power_of_two, epsilon):
    """Return a quantizer with a scale for each 1x128 or 128x128 block."""
    return Float8BlockQuantizer(
        _dtype(fmt),
        rowwise=True,
        columnwise=True,
        amax_epsilon=epsilon,
        force_pow_2_scales=power_of_two,
        block_scaling_dim=dimensions,
    )


def mxfp8(fmt, square):
    """Return a quantizer with a scale for each 1x32 or 32x32 block."""
    return MXFP8Quantizer(_dtype(fmt), with_2d_quantization=square)


def by_gemm(**quantizers):
    """Return a quantizer with separate row-wise and column-wise copies for the two GEMMs that read an operand."""
    row_wise, column_wise = quantizers.values()
    return HybridQuantizer(rowwise_quantizer=row_wise, columnwise_quantizer=column_wise)


def factory(role):
    """Return the quantizer of an operand of any module, by the module's name."""
    if not _is_operand(role):
        return _outside(role)
    if re.match(r"(Layer_\\d+)?(\\.|$)", role.name):  # a default name of Transformer Engine
        raise ValueError(
            f"a module of Transformer Engine has no name, so {__name__} cannot identify it; "
            "call nemo_fp8_debug.name_modules(model) before the first step"
        )
    if not _in_record(role.name) and not _told:
        _told.append(role.name)
        warnings.warn(f"{role.name} is not in the record behind {__name__}: it is cast like most modules", stacklevel=2)
    return _quantizer(role.name, role.tensor_type)


def factory_of(name):
    """Return the factory of one module, regardless of the module's own name."""
    return lambda role: _quantizer(name, role.tensor_type) if _is_operand(role) else _outside(role)


def _is_operand(role):
    return role is not None and role.module_type in ("linear", "grouped_linear") and role.tensor_type in USUAL


def _quantizer(name, operand):
    for table in (CHANGED, OTHERS):
        for pattern, quantizers in table.items():
            if name == pattern or ("*" in pattern and fnmatch.fnmatchcase(name, pattern)):
                return _noted(quantizers[operand]())
    return _noted(USUAL[operand]())


def _noted(made):
    if isinstance(made, DelayedScalingRequest):
        _requests.append(made)
        del _requests[:-1]
    return made


def _outside(role):
    """Return the quantizer of a module's output, which Transformer Engine requests after the operands' quantizers.

    Outputs are cast only if a caller wants FP8. All histories of a direction must be equal, in both directions or in none.
    """
    if role is not None and role.module_type not in ("", "linear", "grouped_linear"):
        return high_precision()  # attention, which CustomRecipe casts only with fp8_dpa
    if not _requests:
        for quantizers in (USUAL, *OTHERS.values(), *CHANGED.values()):
            for quantizer in quantizers.values():
                _noted(quantizer())
    return _requests[0] if _requests else current("E4M3", False, 0.0)


def _in_record(name):
    return re.sub(r"\\d+", "*", name) in {re.sub(r"\\d+", "*", known) for known in RECORDED}


def _dtype(fmt):
    return DType.kFloat8E5M2 if fmt == "E5M2" else DType.kFloat8E4M3


_told = []
#: the last request for a history
_requests = []
'''


NAME, MODULES = "te_quantizers.py", "megatron_operands.yaml"
#: the first releases of Transformer Engine and of megatron-core that support these files
NEEDS, MEGATRON_NEEDS = (2, 19), (0, 17)
_HOW = (
    "Quantizers of single operands, for Transformer Engine's CustomRecipe: every operand is cast as in the run that was "
    "recorded, except for those in CHANGED. This file needs Transformer Engine 2.19 or later.",
    "A loop of your own: nemo_fp8_debug.name_modules(model) before the first step, then te.autocast(enabled=True, "
    "recipe=CustomRecipe(qfactory=te_quantizers.factory)) with this folder on PYTHONPATH.",
    "Megatron-LM: --fp8-recipe custom --fp8-quantizer-factory te_quantizers.factory, and name_modules(model) in the "
    f"function that builds the model. Or, with megatron-core 0.17 or later, {MODULES}: it changes only the named modules. "
    "All others keep the run's own recipe.",
)
_NOT_IN_RECORD = (
    "The record does not contain custom functions for amaxes and scales, or reduce_amax. This file assumes Transformer "
    "Engine's defaults.",
    "This file assumes that column-wise copies are cast like the recorded row-wise ones.",
)
_HOW_MODULES = (
    f"Quantizers of the named modules, from {NAME}. All other modules keep the run's recipe. Megatron-LM: "
    "--te-precision-config-file THIS_FILE, with the folder on PYTHONPATH. This needs megatron-core 0.17 or later, "
    "Transformer Engine 2.19 or later, and weights that are not stored in FP8 (--fp8-param-gather)."
)


def make_quantizer_snippets(found: Recommendation, for_megatron: bool) -> tuple[list[Snippet], list[str]]:
    """Return the files, or the reasons why they are not written. If nothing changes, return neither."""
    by_module: dict[str, list[TensorFix]] = {}
    for finding in found.fixes_to_apply:
        by_module.setdefault(name_module_of_gemm(finding.layer), []).append(finding)
    if not by_module:
        return [], []
    recorded = read_casts(found.run)
    if reason := next(_reasons(found, recorded, by_module), None):
        return [], [f"{NAME} is not written: {reason}. Recipes of modules are written; see the other files."]
    known = {name: casts for name, casts in recorded.items() if not isinstance(casts, Unreadable)}
    changed = [change_module(name, known[name], findings) for name, findings in by_module.items()]
    older = _older(found, "transformer-engine", NEEDS, NAME)
    coarser = [*older, *(sentence for module in changed for sentence in module.coarser), *_attention(found)]
    paragraphs = (*_HOW, *_NOT_IN_RECORD[_no_history(known) :], *coarser)
    text = comment_lines(*paragraphs) + PROLOGUE + _tables(found, known, changed)
    snippets = [Snippet(NAME, "quantizers of single operands, Transformer Engine", text, tuple(coarser))]
    if for_megatron and count_pipeline_stages(found) == 1:
        snippets.append(_modules(found, changed, tuple(_older(found, "megatron-core", MEGATRON_NEEDS, MODULES))))
    return snippets, []


def _reasons(found: Recommendation, recorded: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    host = found.run.fingerprint.get("backend_options", {})
    if host.get("fp8_quantizer_factory"):
        yield "the run has its own quantizer factory, whose casts the record shows only in part; edit that factory"
    if host.get("fp8_wgrad") is False:
        yield "fp8_wgrad is off, and CustomRecipe has no option for that"
    for name in names:
        if name not in recorded:
            yield f"{name} is not in FP8"
    yield from (str(casts) for casts in recorded.values() if isinstance(casts, Unreadable))


def _older(found: Recommendation, package: str, needs: tuple[int, int], file: str) -> Iterator[str]:
    """Yield a sentence if the run's release of a package is too old for a file."""
    version = str(found.run.fingerprint.get("versions", {}).get(package, ""))
    number = re.match(r"(\d+)\.(\d+)", version)
    if number and tuple(map(int, number.groups())) < needs:
        yield (
            f"The run has {package} {version}, but {file} needs {'.'.join(map(str, needs))} or later. Until then, use "
            "megatron_modules.yaml or plan.json, which change whole modules."
        )


def _attention(found: Recommendation) -> Iterator[str]:
    risky = found.run.fingerprint.get("risky_features_on", {})
    if risky.get("fp8_dot_product_attention") or risky.get("fp8_multi_head_attention"):
        yield f"Attention is in FP8 in the run, but not under CustomRecipe. {MODULES} does not change attention."


def _no_history(known: Mapping[str, Casts]) -> bool:
    casts = [cast for of_module in known.values() for cast in of_module.values()]
    return not any(cast is not None and isinstance(cast[0], DelayedScaling) for cast in casts)


def _tables(found: Recommendation, known: Mapping[str, Casts], changed: Iterable[ChangedModule]) -> str:
    usual = find_usual_casts(known.values())
    by_name = {module.name: module.casts for module in changed}
    others = {
        name: spread_over_gemms(casts) for name, casts in known.items() if dict(casts) != usual and name not in by_name
    }
    names = sorted({re.sub(r"\d+", "*", name) for name in known})
    parts = [
        _table("USUAL", "by role: the cast in most modules of the run", _operands(spread_over_gemms(usual), "    ")),
        _table("OTHERS", "by module: casts in the run that differ from USUAL", _by_module(others)),
        _table("CHANGED", "by module: casts that differ from the run", _by_module(by_name)),
        "#: modules of the record, * for a number\nRECORDED = (\n" + "".join(f"    {name!r},\n" for name in names) + ")\n",
        "#: for Megatron's recipes of modules\n"
        + "".join(f"module_{i} = factory_of({name!r})\n" for i, name in enumerate(by_name)),
    ]
    return "\n" + "\n".join(parts)


def _table(name: str, about: str, lines: str) -> str:
    return f"#: {about}\n{name} = {{\n{lines}}}\n"


def _by_module(modules: Mapping[str, ByGemm]) -> str:
    return "".join(f"    {name!r}: {{\n{_operands(casts, ' ' * 8)}    }},\n" for name, casts in modules.items())


def _operands(casts: ByGemm, indent: str) -> str:
    return "".join(f'{indent}"{role}": lambda: {_quantizer(casts, role)},\n' for role in ROLES)


def _quantizer(casts: ByGemm, role: str) -> str:
    first, second = (casts[role, gemm] for gemm in READERS[role])
    if first == second:
        return _call(first, role)
    row_wise, column_wise = READERS[role]
    return f"by_gemm({row_wise}={_call(first, role)}, {column_wise}={_call(second, role)})"


def _call(cast: Cast | None, role: str) -> str:
    """Return a call of one of the functions at the top of the file."""
    if cast is None:
        return "high_precision()"
    rule, fmt = cast[0], cast[1].upper()
    if isinstance(rule, DelayedScaling):
        both = "HYBRID" if role != "grad_output" or fmt == "E5M2" else "E4M3"
        return f"delayed({both!r}, {rule.margin}, {rule.amax_history_len}, {rule.amax_compute_algo!r})"
    if isinstance(rule, CurrentScaling):
        return f"current({fmt!r}, {rule.power_of_two}, {rule.epsilon})"
    if isinstance(rule, Float8BlockScaling):
        return f"blockwise({fmt!r}, {2 if role == 'weight' else 1}, {rule.power_of_two}, {rule.epsilon})"
    assert isinstance(rule, MXFP8Scaling)
    return f"mxfp8({fmt!r}, {rule.square_weights and role == 'weight'})"


def _modules(found: Recommendation, changed: Iterable[ChangedModule], coarser: tuple[str, ...]) -> Snippet:
    configs, matchers = {}, {}
    for i, module in enumerate(changed):
        recipe = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": f"te_quantizers.module_{i}"}
        configs[f"module_{i}"] = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": recipe}
        pattern = name_module_on_its_rank(module.name, found)
        matchers[pattern] = {"type": "glob", "enabled": True, "pattern": pattern, "config": f"module_{i}"}
    content = yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False)
    return Snippet(
        MODULES, "quantizers of single operands, Megatron", comment_lines(_HOW_MODULES, *coarser) + content, coarser
    )
