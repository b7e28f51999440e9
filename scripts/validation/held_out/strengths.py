"""How a fault of the benchmark is made so weak that its harm is small, or so short."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

from fault_injection import faults_of_software as software
from fault_injection.draws import SLIGHT, SLIGHT_HEIGHT
from fault_injection.fault import Fault, Together
from fault_injection.faults_of_operands import OtherRecipe, OutlierChannel, StuckScale, WrongScale

#: part of its bits that is left of a scale fault or an outlier, and of the growth under a stale scale
_BITS, _GROWTH = (0.5, 0.9), (0.3, 0.7)
#: steps that a fault without a strength of its own lasts
_SHORT = (8, 40)
_MARGINS, _EPSILONS = (1, 2, 4), (2.0**-4, 1.0, 2.0**4)
_RATES, _DECAYS, _SUMS, _SHARES = (2.0, 3.0, 5.0, 8.0), (50.0, 100.0, 200.0), (1.5, 2.0, 0.5), (0.1, 0.2)


def weaken_fault(fault: Fault, chosen: random.Random, layers: Sequence[str]) -> Fault | None:
    """Return the same fault with less strength, or an end; None if it cannot be weakened.

    Bits are multiplied by a number drawn evenly from 0.5 to 0.9. Factors are drawn from short lists near 1. What has
    neither lasts 8 to 40 steps. Another recipe is that of one layer alone.

    Args:
        fault: as the benchmark draws it.
        chosen: where random numbers come from.
        layers: names of the quantized GEMMs.
    """
    match fault:
        case Together():
            parts = [weaken_fault(part, chosen, layers) for part in fault.parts]
            return replace(fault, parts=tuple(weak or own for weak, own in zip(parts, fault.parts, strict=True)))
        case WrongScale():
            return replace(fault, bits=round(fault.bits * chosen.uniform(*_BITS), 1))
        case OutlierChannel():
            return replace(fault, height=round(fault.height * chosen.uniform(*_BITS), 1))
        case StuckScale():
            return replace(fault, growth=max(1, round(fault.growth * chosen.uniform(*_GROWTH))))
        case OtherRecipe():
            recipe = re.sub(r"margin=\d+", f"margin={chosen.choice(_MARGINS)}", fault.recipe)
            recipe = re.sub(r"epsilon=[^)]+", f"epsilon={chosen.choice(_EPSILONS)}", recipe)
            layer = fault.culprits[0][0] if fault.culprits else chosen.choice(list(layers))
            return replace(fault, recipe=recipe, roles=(), culprits=((layer, "input"), (layer, "weight")))
        case software.LearningRate():
            return replace(fault, factor=chosen.choice(_RATES))
        case software.WeightDecay():
            return replace(fault, factor=chosen.choice(_DECAYS))
        case software.SummedGradients():
            return replace(fault, factor=chosen.choice(_SUMS))
        case software.WrongLabels():
            return _shorten(replace(fault, share=chosen.choice(_SHARES)), chosen)
        case software.GradientsOfALayer() | software.RepeatedData() | software.NoMask() | software.LossScale():
            return _shorten(fault, chosen)
    return None


def is_slight(fault: Fault) -> bool:
    """Return True if a fault is no stronger than those that the benchmark calls harmless, so that it may go unnamed."""
    match fault:
        case WrongScale():
            low, high = SLIGHT[fault.culprits[0][1]]
            return low <= fault.bits <= high
        case OutlierChannel():
            return fault.height <= SLIGHT_HEIGHT[1]
        case Together():
            return all(map(is_slight, fault.parts))
    return False


def _shorten(fault: Fault, chosen: random.Random) -> Fault:
    return replace(fault, until=fault.onset + chosen.randint(*_SHORT))
