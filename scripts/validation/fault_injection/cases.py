"""The runs of the benchmark: what goes wrong, where, and in how strong a way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fault_injection.fault import Fault
from fault_injection.faults import Gradients, Labels, LearningRate, OutlierChannel, StuckScale, Weights, WrongScale

#: steps that all runs of a seed have in common; of the runs that are told apart; and of the fault's onset
START, END = 300, 560
QKV, PROJ, FC1, FC2 = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"
#: runs without a fault, of each seed
CLEAN = 8


@dataclass(frozen=True)
class Case:
    """A run."""

    name: str
    seed: int
    #: of the data; the clean reference, and the baseline that it is compared with, have seed's own
    order: int
    fault: Callable[[], Fault]


def onset_of(seed: int) -> int:
    """First step of a seed's faults."""
    return 360 + 10 * (seed % 3) + seed


def cases(seed: int) -> Iterator[Case]:
    """All runs of a seed."""
    for number in range(CLEAN):
        # Half of them see the baseline's data, half others.
        yield Case(f"clean-{number}", seed, seed if number < CLEAN // 2 else 100 * seed + number + 50, Fault)
    for make in (*_wrong_scales(seed), *_of_values(seed), *_of_software(seed)):
        yield Case(make().name, seed, seed, make)


def _layer(seed: int, shift: int, kind: str) -> str:
    return f"decoder.layers.{(seed + shift) % 4}.{kind}"


def _wrong_scales(seed: int) -> Iterator[Callable[[], Fault]]:
    onset = onset_of(seed)

    def wrong(cause: str, role: str, layer: str, bits: Callable[[int], float], mark: str = "") -> Callable[[], Fault]:
        name = f"{cause}{mark}-{role}-{layer}"
        return lambda: WrongScale(name, cause, (layer, role), onset, bits=bits)

    yield wrong("clipping", "input", _layer(seed, 0, FC2), _ramp(12, 60))
    yield wrong("clipping", "input", _layer(seed, 1, QKV), _ramp(12, 60))
    yield wrong("clipping", "input", _layer(seed, 2, FC1), _ramp(8, 80))
    yield wrong("clipping", "weight", _layer(seed, 3, FC1), _ramp(10, 60))
    yield wrong("clipping", "weight", _layer(seed, 0, PROJ), _ramp(10, 60))
    yield wrong("clipping", "grad_output", _layer(seed, 1, FC2), _ramp(20, 60))
    yield wrong("clipping", "grad_output", _layer(seed, 2, QKV), _ramp(20, 60))
    yield wrong("underflow", "input", _layer(seed, 3, FC1), _ramp(-20, 60))
    yield wrong("underflow", "input", _layer(seed, 0, PROJ), _ramp(-20, 80))
    yield wrong("underflow", "weight", _layer(seed, 1, FC2), _ramp(-20, 60))
    yield wrong("underflow", "grad_output", _layer(seed, 2, FC1), _ramp(-36, 60))
    yield wrong("underflow", "grad_output", _layer(seed, 3, QKV), _ramp(-36, 60))
    yield wrong("corrupted_scale", "input", _layer(seed, 0, PROJ), lambda age: 6.0)
    yield wrong("corrupted_scale", "input", _layer(seed, 1, FC1), lambda age: -16.0)
    yield wrong("corrupted_scale", "weight", _layer(seed, 2, QKV), lambda age: 6.0)
    # A little too small, in an operand with range to spare.
    yield wrong("underflow", "weight", _layer(seed, 3, FC2), _ramp(-12, 40), "-slight")
    yield wrong("clipping", "grad_output", _layer(seed, 0, FC1), _ramp(2, 40), "-slight")


def _of_values(seed: int) -> Iterator[Callable[[], Fault]]:
    onset = onset_of(seed)
    for shift, kind, growth, over in ((1, FC2, 8, 1), (2, QKV, 6, 10), (3, PROJ, 10, 20)):
        layer = _layer(seed, shift, kind)
        yield lambda layer=layer, growth=growth, over=over: StuckScale(
            f"stale_scale-input-{layer}", "stale_scale", (layer, "input"), onset, growth=growth, over=over
        )
    for shift, kind, height in ((0, FC1, 22), (2, FC2, 22), (3, QKV, 20), (1, PROJ, 11)):
        layer = _layer(seed, shift, kind)
        yield lambda layer=layer, height=height: OutlierChannel(
            f"outlier-{height}-input-{layer}", "outlier", (layer, "input"), onset, height=height
        )


def _of_software(seed: int) -> Iterator[Callable[[], Fault]]:
    onset = onset_of(seed)
    yield lambda: LearningRate("learning_rate", "software", None, onset, factor=10.0)
    yield lambda: Labels("labels", "software", None, onset)
    yield lambda: Gradients("gradients", "software", None, onset, layer=seed % 4)
    yield lambda: Weights("weights", "software", None, onset, layer=(seed + 2) % 4)


def _ramp(bits: float, over: int) -> Callable[[int], float]:
    """Rises, or falls, to `bits` in so many steps."""
    return lambda age: bits * min(1.0, (age + 1) / over)
