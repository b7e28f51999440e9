"""What each GEMM of Transformer Engine is given, as recorded and as recommended: an operand, not a module, at a time.

A GEMM multiplies two operands that its kernel can take together. So an operand that leaves FP8 does so in the two GEMMs that
read it, and takes its partner along in these two only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ....core.keys import ROLES, SHOWN_AS
from ....core.layer_names import is_aggregate
from ....core.scale_sources import ENGINE
from ....numerics.block_scaling import BlockScaling, MXFP8Scaling
from ....numerics.recipe import BF16_RECIPE, find_recipe
from ....numerics.tensor_scaling import CurrentScaling, DelayedScaling
from ...runs.run import Run
from ..options import STAY, Cast, Option, cast_of
from ..recommend import OPERANDS, READERS, TensorFix
from .snippet import module_of

#: role -> cast; None is high precision
Casts = Mapping[str, Cast | None]
#: (role, GEMM) -> cast
ByGemm = dict[tuple[str, str], Cast | None]


class Unreadable(Exception):
    """How a module casts does not follow from the record; says of which operand, and why."""


@dataclass(frozen=True)
class Module:
    """A module that is to be cast otherwise."""

    name: str
    casts: ByGemm
    #: what is not as the plan says, a sentence each
    coarser: tuple[str, ...]


def recorded(run: Run) -> dict[str, Casts | Unreadable]:
    """How the modules that quantize something cast their operands, as last recorded; experts of a module are cast alike."""
    rows = run.metrics.last(["recipe", "format", "scale_source"])
    found: dict[str, dict[str, Cast | None] | Unreadable] = {}
    for layer, role, name, fmt, source in rows.iter_rows():
        if is_aggregate(layer) or role not in ROLES:
            continue
        module = module_of(layer)
        casts = found.setdefault(module, {})
        if isinstance(casts, Unreadable):
            continue
        try:
            cast = _cast(name, fmt, source)
            if casts.setdefault(role, cast) != cast:
                raise Unreadable("experts of a group are cast in different ways")
        except Unreadable as error:
            found[module] = Unreadable(f"{SHOWN_AS[role]} of {layer}: {error}")
    return {m: _whole(m, c) if isinstance(c, dict) else c for m, c in found.items() if not _is_high_precision(c)}


def _cast(name: str, fmt: str, source: str | None) -> Cast | None:
    if source == "not quantized":
        return None
    if source != ENGINE:
        raise Unreadable(f"what it was cast with was not read (`scale_source` is {source})")
    recipe = find_recipe(name)
    if recipe is None:
        raise Unreadable(f"{name} has no counterpart here")
    scaling = recipe.scaling
    by_torchao = getattr(scaling, "by_logarithm", False)
    if by_torchao or not isinstance(scaling, (CurrentScaling, DelayedScaling, BlockScaling, MXFP8Scaling)):
        raise Unreadable(f"not all options of {name} are in the record")
    return scaling, fmt


def _is_high_precision(casts: Casts | Unreadable) -> bool:
    return not isinstance(casts, Unreadable) and not any(casts.values())


def _whole(module: str, casts: Casts) -> Casts | Unreadable:
    """The same, if all three operands are known and quantized."""
    if missing := [role for role in ROLES if role not in casts]:
        return Unreadable(f"{SHOWN_AS[missing[0]]} of {module}: it was not recorded")
    if plain := [role for role in ROLES if casts[role] is None]:
        return Unreadable(f"{SHOWN_AS[plain[0]]} of {module}: it is not quantized and others of its module are")
    return casts


def usual(all_casts: Iterable[Casts]) -> dict[str, Cast]:
    """How most modules cast each role."""
    found: dict[str, list[Cast]] = {role: [] for role in ROLES}
    for casts in all_casts:
        for role, cast in casts.items():
            if cast is not None:
                found[role].append(cast)
    return {role: max(dict.fromkeys(casts), key=casts.count) for role, casts in found.items() if casts}


def by_gemm(casts: Casts) -> ByGemm:
    """The same cast in both GEMMs that read an operand."""
    return {(role, gemm): casts[role] for role in ROLES for gemm in READERS[role]}


def changed(name: str, casts: Casts, findings: Sequence[TensorFix]) -> Module:
    """A module with the cheapest options of its operands that kernels can multiply, all of them together.

    Args:
        casts: as recorded.
        findings: of this module that change something; those of several experts are one.
    """
    menus = {role: _menu([f for f in findings if f.role == role]) for role in ROLES}
    menus = {role: menu for role, menu in menus.items() if menu}
    for way in sorted(itertools.product(*(enumerate(menu) for menu in menus.values())), key=_cost):
        options = {role: option for role, (_, option) in zip(menus, way, strict=True)}
        made = _applied(casts, options)
        if _can_be_multiplied(made):
            return Module(name, *_without_nested_delays(name, made, _other(name, findings, options)))
    raise AssertionError("BF16 can always be multiplied")


def _cost(way: Sequence[tuple[int, Option]]) -> int:
    return sum(place for place, _ in way)


def _menu(findings: Sequence[TensorFix]) -> list[Option]:
    """Options that every one of the findings has, in order of cost."""
    others = [{o.recipe for o in f.options if o.meets and o.kind != STAY} for f in findings]
    own = findings[0].options if findings else ()
    return [o for o in own if o.kind != STAY and o.meets and all(o.recipe in recipes for recipes in others)]


def _applied(casts: Casts, options: Mapping[str, Option]) -> ByGemm:
    made = by_gemm(
        dict(casts) | {role: cast_of(o.parsed, role) for role, o in options.items() if o.recipe != BF16_RECIPE.name}
    )
    left = {gemm for role, option in options.items() if option.recipe == BF16_RECIPE.name for gemm in READERS[role]}
    return {(role, gemm): None if gemm in left else cast for (role, gemm), cast in made.items()}


def _can_be_multiplied(made: ByGemm) -> bool:
    delayed = [{c for (role, _), c in made.items() if role in roles and _is_delayed(c)} for roles in (ROLES[:2], ROLES[2:])]
    # Transformer Engine keeps one history for a direction of a module, in the forward direction of E4M3.
    histories = all(len(found) < 2 for found in delayed) and all(fmt == "e4m3" for _, fmt in filter(None, delayed[0]))
    return histories and all(_kernel_takes(*(made[role, gemm] for role in pair)) for gemm, pair in OPERANDS.items())


def _kernel_takes(a: Cast | None, b: Cast | None) -> bool:
    if a is None or b is None:
        return a is b
    per_tensor = (CurrentScaling, DelayedScaling)
    alike = type(a[0]) is type(b[0]) or (isinstance(a[0], per_tensor) and isinstance(b[0], per_tensor))
    return alike and not a[1] == b[1] == "e5m2"  # which cuBLAS does not multiply


def _is_delayed(cast: Cast | None) -> bool:
    return cast is not None and isinstance(cast[0], DelayedScaling)


def _other(name: str, findings: Sequence[TensorFix], options: Mapping[str, Option]) -> tuple[str, ...]:
    """Where the plan has another option."""
    said = {}
    for finding in findings:
        option = options[finding.role]
        if option.recipe != finding.chosen.recipe:
            said[finding.name] = f"no {finding.chosen.recipe} beside the others of its GEMMs; it has {option.recipe} instead"
        elif finding.layer != name:
            said[f"{SHOWN_AS[finding.role]} of {name}"] = "all experts of the group are cast alike"
    return tuple(f"{key}: {sentence}." for key, sentence in said.items())


def _without_nested_delays(name: str, made: ByGemm, coarser: tuple[str, ...]) -> tuple[ByGemm, tuple[str, ...]]:
    """Current scaling for an operand of which one copy is in high precision: a history is for both copies or none."""
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
