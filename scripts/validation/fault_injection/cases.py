"""The runs of the benchmark. Any number of parts can be drawn, each the same whenever it is.

A part has six clean runs, which are each other's baselines: two pairs that differ in seed and data, and a deeper one; the
runs of a pair differ in 2^-9 of each weight. Its runs with a fault are one of the first two pairs with something wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fault_injection.draws import OPERAND_KINDS, SOFTWARE_KINDS, Draw, drawn, possible
from fault_injection.families import family
from fault_injection.fault import Fault
from fault_injection.sets import ALL_KINDS, RARE_KINDS, has_all_kinds
from fault_injection.training import Setup
from nemo_fp8_debug.capture.gemms import find_gemms, require_matching_gemms

#: by part, in turn
_HOSTS = ("plain", "skipping", "scaled", "plain", "skipping")
#: what the learning rate is multiplied by
_RATES = (1.0, 0.5, 0.75)
#: faults of operands and of software in a part
_MANY, _FEW = (5, 3), (3, 2)


@dataclass(frozen=True)
class Case:
    """A run."""

    name: str
    setup: Setup
    fault: Fault
    #: the clean run that differs from it in nothing but the fault; of a clean run its own name
    counterpart: str


def cases(family_name: str, part: int) -> list[Case]:
    """The runs of a part."""
    chosen = random.Random(f"{family_name} {part}")
    at = part % ALL_KINDS
    seeds = [chosen.randrange(1, 1 << 30) for _ in range(6)]
    depth, engines = family(family_name).depth, family(family_name).engines
    made = Setup(
        family_name, engines[at % len(engines)], seeds[0], seeds[0], depth, _HOSTS[at % len(_HOSTS)], _RATES[at % 3]
    )
    clean = {
        "a": made,
        "b": replace(made, seed=seeds[1], order=seeds[1]),
        "deep": replace(made, seed=seeds[2], order=seeds[2], depth=depth + 1),
    }
    shaken = {f"{name}-near": replace(one, shaken=seeds[3 + i]) for i, (name, one) in enumerate(clean.items())}
    without = [Case(name, one, Fault(), name) for name, one in (clean | shaken).items()]
    kinds = list(_kinds(family_name, part, made))
    return without + [_faulted(chosen, kind, number, clean["ab"[number % 2]]) for number, kind in enumerate(kinds)]


def _faulted(chosen: random.Random, kind: str, number: int, setup: Setup) -> Case:
    of = Draw(chosen, family(setup.family), setup, _names(setup.family, setup.depth, setup.engine))
    return Case(f"{number}-{kind}", setup, drawn(kind, of), "ab"[number % 2])


def _kinds(family_name: str, part: int, setup: Setup) -> Iterator[str]:
    """In turn over the parts of an engine, so that each comes as often as any other that is possible."""
    all_kinds, at, engines = has_all_kinds(family_name, part), part % ALL_KINDS, family(family_name).engines
    earlier = sum(engines[i % len(engines)] == setup.engine for i in range(at))
    for kinds, count in zip((OPERAND_KINDS, SOFTWARE_KINDS), _FEW if all_kinds else _MANY, strict=True):
        known = [kind for kind in kinds if (all_kinds or kind not in RARE_KINDS) and possible(kind, setup)]
        shuffled = random.Random(f"{family_name} {setup.engine} {len(known)}").sample(known, len(known))
        chosen = [shuffled[(earlier * count + i) % len(shuffled)] for i in range(count)]
        if all_kinds and at % 2 and not set(chosen) & set(RARE_KINDS):
            # In one of two parts, one is of a kind that earlier parts do not have.
            chosen[-1] = next((kind for kind in RARE_KINDS[at // 2 % 2 :] if kind in known), chosen[-1])
        yield from chosen


@cache
def _names(family_name: str, depth: int, engine: str) -> Sequence[str]:
    of = family(family_name)
    return [gemm.name for gemm in require_matching_gemms(find_gemms([of.build(0, depth, engine)]), list(of.layers))]
