"""Draws the runs of the held-out set from a seed; nothing is trained.

Runs come in 32 groups, four of each family. All of a group share family, recipe, host, learning rate and length. `a` and `b`
are clean and differ in seed and data order; each has a twin with a fault. In half of the groups each has a near one, too,
whose weights differ by 2^-9 of themselves, and whose batches are the same.

Each run is judged alone and against the clean run of the other seed and data order. In groups with near runs it is also
judged against the near one, which has the same batches.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from fault_injection.cases import Case
from fault_injection.draws import OPERAND_KINDS, SOFTWARE_KINDS, Draw, drawn, possible
from fault_injection.families import family
from fault_injection.families.family import EMULATED
from fault_injection.fault import Fault
from fault_injection.training import STEPS, Schedule, Setup

from held_out.families import FAMILIES
from held_out.strengths import weaken_fault
from nemo_fp8_debug.capture.gemms import find_gemms, require_matching_gemms

GROUPS, OPERAND_FAULTS = 32, 38
#: what the groups have in turn, before they are shuffled; hosts and rates are those of the benchmark
_HOSTS = ("plain", "skipping", "scaled", "plain", "skipping")
_RATES, _LENGTHS, _INTERVALS = (1.0, 0.5, 0.75), (200, 250, 300), (5, 5, 5, 5, 10)
#: layers more than the family's own
_DEEPER = (0, 0, 1)
#: recipes whose emulation takes long: their runs are no deeper than the family, and not of the greatest length
_SLOW = ("blockwise", "mxfp8", "nvfp4")
#: faults that are weakened, and the share of those of software that act from the first step on
WEAKENED, _FROM_THE_START = 8, 0.1
#: kinds that are weak as they are: they move the loss of few of the benchmark's runs by 5%
_WEAK = ("harmless", "transient", "margin", "e5m2_forward", "repeated_data", "gradient_sum", "loss_scale")
#: kinds that cannot be weakened
_NO_STRENGTH = ("nan_operand", "nan_loss", "nan_gradient")
#: of software, which would be another run if they acted from the first step on, or do so already
_LATER = ("repeated_data", "loss_scale", "nan_loss", "nan_gradient")


@dataclass(frozen=True)
class HeldOutRun(Case):
    """A run of the set."""

    group: int
    schedule: Schedule
    #: steps from one sample to the next
    interval: int
    #: names of the clean runs that it is judged against, by kind: `other` seed and data order, `near`
    baselines: Mapping[str, str]
    #: whether its fault is of a kind that seldom does harm, or was made weaker than those of the benchmark
    weak: bool = False

    @property
    def is_faulted(self) -> bool:
        """Whether anything is done to it."""
        return self.fault.kind != "none"

    @property
    def is_near(self) -> bool:
        """Whether it stands beside others as a baseline alone."""
        return bool(self.setup.shaken)

    def describe(self) -> dict[str, Any]:
        """Return the run as plain values."""
        return {
            "name": self.name,
            "group": self.group,
            **asdict(self.setup),
            "steps": self.schedule.steps,
            "interval": self.interval,
            "kind": self.fault.kind,
            "culprits": [list(culprit) for culprit in self.fault.culprits],
            "onset": self.fault.onset,
            "fault": self.fault.described(),
            "weak": self.weak,
            "counterpart": self.counterpart,
            "baselines": dict(self.baselines),
        }


@dataclass(frozen=True)
class _ScaledDraw(Draw):
    """A draw whose onsets lie in a shorter run as they do in one of the benchmark."""

    steps: int = STEPS

    def onset(self, first: int = 40, last: int = 220) -> int:
        return super().onset(first, last) * self.steps // STEPS


def draw_plan(seed: int, families: Sequence[str] = FAMILIES) -> list[HeldOutRun]:
    """Return all runs of a set, those of a group together.

    Args:
        seed: whatever number was chosen for the set.
        families: in turn over the groups.
    """
    chosen = random.Random(f"held out {seed}")
    groups = list(_draw_groups(chosen, families))
    kinds = _draw_kinds(chosen, [clean["a"].setup for clean in groups])
    weakened = set(chosen.sample([place for place, kind in kinds.items() if kind not in (*_WEAK, *_NO_STRENGTH)], WEAKENED))
    runs = []
    for number, clean in enumerate(groups):
        runs += clean.values()
        runs += [_draw_faulted(chosen, clean[end], kinds[number, end], (number, end) in weakened) for end in ("a", "b")]
    return runs


def _in_turn(chosen: random.Random, values: Sequence[Any]) -> list[Any]:
    return chosen.sample([values[i % len(values)] for i in range(GROUPS)], GROUPS)


def _draw_groups(chosen: random.Random, families: Sequence[str]) -> Iterator[dict[str, HeldOutRun]]:
    """Draw the clean runs of each group, by the end of their names."""
    engines, hosts, rates = (_in_turn(chosen, values) for values in (EMULATED, _HOSTS, _RATES))
    lengths, intervals, deeper = (_in_turn(chosen, values) for values in (_LENGTHS, _INTERVALS, _DEEPER))
    rounds = -(-GROUPS // len(families))
    near = [(i // len(families) + i) % 2 == 0 for i in range(rounds * len(families))]
    for number in range(GROUPS):
        name = families[number % len(families)]
        slow = engines[number] in _SLOW
        depth = family(name).depth + (0 if slow else deeper[number])
        setup = Setup(name, engines[number], 0, 0, depth, hosts[number], rates[number])
        schedule = Schedule(min(lengths[number], sorted(_LENGTHS)[-2]) if slow else lengths[number])
        stem = f"{number:02d}-{name}"
        names = {end: f"{stem}-{end}" for end in ("a", "b")}
        clean = {}
        for end, other in (("a", "b"), ("b", "a")):
            start = chosen.randrange(1, 1 << 30)
            own, baselines = replace(setup, seed=start, order=start), {"other": names[other]}
            baselines |= {"near": f"{names[end]}-near"} if near[number] else {}
            clean[end] = HeldOutRun(names[end], own, Fault(), names[end], number, schedule, intervals[number], baselines)
        for end in "ab" if near[number] else "":
            shaken = replace(clean[end].setup, shaken=chosen.randrange(1, 1 << 30))
            clean[f"{end}-near"] = replace(
                clean[end], name=f"{names[end]}-near", setup=shaken, counterpart=names[end], baselines={}
            )
        yield clean


def _draw_kinds(chosen: random.Random, setups: Sequence[Setup]) -> dict[tuple[int, str], str]:
    """Draw a kind of fault for each clean run, by group and end of its name: of those that its recipe and host can have, one
    that was drawn least often so far."""
    places = chosen.sample([(number, end) for number in range(GROUPS) for end in "ab"], 2 * GROUPS)
    drawn_so_far, kinds = Counter[str](), {}
    for i, (number, end) in enumerate(places):
        known = [
            kind for kind in (OPERAND_KINDS if i < OPERAND_FAULTS else SOFTWARE_KINDS) if possible(kind, setups[number])
        ]
        least = min(drawn_so_far[kind] for kind in known)
        kinds[number, end] = chosen.choice([kind for kind in known if drawn_so_far[kind] == least])
        drawn_so_far[kinds[number, end]] += 1
    return kinds


def _draw_faulted(chosen: random.Random, clean: HeldOutRun, kind: str, weakened: bool) -> HeldOutRun:
    setup = clean.setup
    names = list_quantized(setup.family, setup.depth)
    draw = _ScaledDraw(chosen, family(setup.family), setup, names, clean.schedule.steps)
    fault = drawn(kind, draw)
    if kind in SOFTWARE_KINDS and kind not in _LATER and chosen.random() < _FROM_THE_START:
        fault = replace(fault, onset=0)
    weak = weaken_fault(fault, chosen, names) if weakened else None
    return replace(clean, name=f"{clean.name}-{kind}", fault=weak or fault, weak=weakened or kind in _WEAK)


@cache
def list_quantized(family_name: str, depth: int) -> Sequence[str]:
    """Return the names of a model's GEMMs that are quantized."""
    of = family(family_name)
    return [gemm.name for gemm in require_matching_gemms(find_gemms([of.build(0, depth, "current")]), list(of.layers))]
