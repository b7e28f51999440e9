"""The kinds of fault, and how one of each is drawn: where it sits, how strong it is, and when it begins."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fault_injection import faults_of_software as software
from fault_injection.engines import ENGINES
from fault_injection.families.family import Family
from fault_injection.fault import Fault, Operand, Together
from fault_injection.faults_of_operands import NaNInOperand, OtherRecipe, OutlierChannel, StuckScale, WrongScale
from fault_injection.training import STEPS, Setup

#: log2 of what a scale is off by, up and down, by role
_UP = {"input": (4, 12), "weight": (4, 12), "grad_output": (8, 20)}
_DOWN = {"input": (-22, -12), "weight": (-22, -12), "grad_output": (-38, -22)}
SLIGHT = {"input": (-4, 0.7), "weight": (-4, 0.7), "grad_output": (-8, 2)}
#: log2 of a channel's magnitude over that of the others
SLIGHT_HEIGHT = (1, 3)
#: engines whose scales can be off
_SCALED_BY_TENSOR = ("delayed", "current", "te-delayed")
_ROLES = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class Draw:
    """What a fault is drawn from."""

    random: random.Random
    family: Family
    setup: Setup
    #: of the quantized GEMMs
    names: Sequence[str]

    def onset(self, first: int = 40, last: int = 220) -> int:
        return self.random.randint(first, last)

    def operand(self) -> Operand:
        return self.random.choice(list(self.names)), self.random.choice(_ROLES)

    def inputs(self) -> tuple[Operand, ...]:
        """An X that can be changed from outside, by all GEMMs that read it."""
        layer = self.random.choice([name for name in self.names if name.rpartition(".")[2] in self.family.changeable])
        return tuple((reader, "input") for reader in self.family.site_of(layer).readers)

    def between(self, bounds: tuple[float, float]) -> float:
        return round(self.random.uniform(*bounds), 1)

    @property
    def scaled_by_tensor(self) -> bool:
        return self.setup.engine in _SCALED_BY_TENSOR

    @property
    def prefix(self) -> str:
        return self.family.prefix_of(self.random.randrange(self.setup.depth))


def _wrong(draw: Draw, kind: str, bits: dict[str, tuple[float, float]], over: tuple[int, int]) -> WrongScale:
    culprit = draw.operand()
    strength = draw.between(bits[culprit[1]])
    return WrongScale(kind, draw.onset(), (culprit,), bits=strength, over=draw.random.randint(*over))


def _corrupted(draw: Draw, kind: str) -> WrongScale:
    return _wrong(draw, kind, draw.random.choice((_UP, _DOWN)), (1, 1))


def _outlier(draw: Draw, kind: str, height: tuple[float, float] = (12, 24)) -> OutlierChannel:
    over = draw.random.choice((1, 10, 40, 80))
    return OutlierChannel(kind, draw.onset(), draw.inputs(), height=draw.between(height), over=over)


def _of_an_operand(draw: Draw, kind: str) -> Fault:
    """Any fault of one operand that its engine can have."""
    if draw.scaled_by_tensor and draw.random.random() < 0.7:
        return _corrupted(draw, kind)
    return replace(_outlier(draw, kind), over=1)


def _stale(draw: Draw, kind: str) -> Fault:
    over = draw.random.choice((1, 10, 30))
    return StuckScale(kind, draw.onset(), draw.inputs(), growth=draw.random.randint(5, 10), over=over)


def _from_the_start(draw: Draw, kind: str) -> Fault:
    return replace(_of_an_operand(draw, kind), onset=0)


def _transient(draw: Draw, kind: str) -> Fault:
    fault = _of_an_operand(draw, kind)
    return replace(fault, until=fault.onset + draw.random.randint(2, 14))


def _two(draw: Draw, kind: str) -> Fault:
    first, second = _of_an_operand(draw, "one_of_two"), _of_an_operand(draw, "one_of_two")
    while set(first.culprits) & set(second.culprits):
        second = _of_an_operand(draw, "one_of_two")
    second = replace(second, onset=first.onset + draw.random.choice((0, 3, 20)))
    return Together(kind, first.onset, (*first.culprits, *second.culprits), parts=(first, second))


def _harmless(draw: Draw, kind: str) -> Fault:
    return _wrong(draw, kind, SLIGHT, (20, 60)) if draw.scaled_by_tensor else _outlier(draw, kind, SLIGHT_HEIGHT)


def _margin(draw: Draw, kind: str) -> Fault:
    recipe = f"delayed(margin={draw.random.choice((3, 6, 10, 17))},amax_history_len=16)"
    if draw.setup.engine == "current":
        recipe = f"current(epsilon={2.0 ** draw.random.randint(4, 20)})"
    return _other_recipe(draw, kind, recipe)


def _e5m2(draw: Draw, kind: str) -> Fault:
    recipe = "current-e5m2" if draw.setup.engine == "current" else "delayed-e5m2(amax_history_len=16)"
    return _other_recipe(draw, kind, recipe)


def _other_recipe(draw: Draw, kind: str, recipe: str) -> Fault:
    """For X and W of one GEMM, or of all."""
    onset, layer = draw.random.choice((0, draw.onset())), draw.random.choice(list(draw.names))
    if draw.random.random() < 0.5:
        return OtherRecipe(kind, onset, recipe=recipe, roles=("input", "weight"))
    return OtherRecipe(kind, onset, ((layer, "input"), (layer, "weight")), recipe=recipe)


def _nan_onset(draw: Draw) -> int:
    return draw.random.choice((0, 1, draw.onset(2, 30), 5 * draw.onset(2, 40), draw.onset()))


def _once(draw: Draw, fault: Fault) -> Fault:
    return replace(fault, until=None if draw.random.random() < 0.2 else fault.onset + 1)


def _summed(draw: Draw, kind: str) -> Fault:
    factor = draw.random.choice((2.0, 4.0, 8.0, 16.0, 1 / 4, 1 / 16))
    return software.SummedGradients(kind, draw.onset(), factor=factor, at_the_loss=draw.random.random() < 0.5)


OPERAND_KINDS: dict[str, Callable[[Draw, str], Fault]] = {
    "drift_up": lambda draw, kind: _wrong(draw, kind, _UP, (20, 80)),
    "drift_down": lambda draw, kind: _wrong(draw, kind, _DOWN, (20, 80)),
    "corrupted": _corrupted,
    "outlier": _outlier,
    "stale": _stale,
    "margin": _margin,
    "e5m2_forward": _e5m2,
    "from_the_start": _from_the_start,
    "transient": _transient,
    "two_at_once": _two,
    "harmless": _harmless,
    "nan_operand": lambda draw, kind: _once(draw, NaNInOperand(kind, _nan_onset(draw), draw.inputs())),
}
SOFTWARE_KINDS: dict[str, Callable[[Draw, str], Fault]] = {
    "learning_rate": lambda draw, kind: software.LearningRate(
        kind, draw.onset(), factor=draw.random.choice((10.0, 30.0, 100.0, 1000.0))
    ),
    "weight_decay": lambda draw, kind: software.WeightDecay(
        kind, draw.onset(), factor=draw.random.choice((300.0, 1000.0, 3000.0))
    ),
    "gradient_sum": _summed,
    "gradient_layer": lambda draw, kind: software.GradientsOfALayer(
        kind, draw.onset(), prefix=draw.prefix, factor=draw.random.choice((-1.0, 0.0))
    ),
    "repeated_data": lambda draw, kind: software.RepeatedData(kind, draw.onset(), period=draw.random.choice((1, 4, 20))),
    "no_mask": lambda draw, kind: software.NoMask(kind, draw.onset()),
    "loss_scale": lambda draw, kind: software.LossScale(
        kind,
        draw.random.choice((0, draw.onset())),
        how=draw.random.choice(("not applied", "applied twice", "not taken back")),
    ),
    "wrong_labels": lambda draw, kind: software.WrongLabels(kind, draw.onset(), share=draw.random.choice((0.25, 0.5, 1.0))),
    "nan_loss": lambda draw, kind: _once(draw, software.NaNInLoss(kind, _nan_onset(draw))),
    "nan_gradient": lambda draw, kind: _once(draw, software.NaNInGradient(kind, _nan_onset(draw), prefix=draw.prefix)),
}
#: what only some engines can have
_ONLY = {
    "drift_up": _SCALED_BY_TENSOR,
    "drift_down": _SCALED_BY_TENSOR,
    "corrupted": _SCALED_BY_TENSOR,
    "stale": ("delayed", "te-delayed"),
    "margin": ("delayed", "current"),
    "e5m2_forward": ("delayed", "current"),
}


def possible(kind: str, setup: Setup) -> bool:
    """Whether a run can have such a fault."""
    if kind == "loss_scale":
        return setup.host == "scaled"
    return setup.engine in _ONLY.get(kind, tuple(ENGINES))


def drawn(kind: str, draw: Draw) -> Fault:
    """A fault of that kind."""
    fault = (OPERAND_KINDS | SOFTWARE_KINDS)[kind](draw, kind)
    assert 0 <= fault.onset < STEPS
    return fault
