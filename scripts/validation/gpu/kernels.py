"""Kernels of a CUDA device: what each finds beside what a CPU finds, and its rate beside that of the device's own copy.

On a device, medians, of memory that its cache does not hold. Emulated: the same kernels in Numba's simulator, a few values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, Protocol

import torch

from nemo_fp8_debug.kernels import (
    _kernel_on,
    add_to_histogram,
    count_histogram,
    measure_float32_moments,
    quantization_sums,
    torch_fallback,
)
from nemo_fp8_debug.numerics.block_scaling import BlockScalingRule, quantization_sums_in_blocks
from nemo_fp8_debug.numerics.formats import E4M3, FloatFormat
from nemo_fp8_debug.numerics.histogram import BINS, Histogram, find_infinity_bin
from nemo_fp8_debug.numerics.metrics import (
    MomentsFound,
    QuantizationSums,
    SumsFound,
    ValueMoments,
    compute_float32_moments,
    quantization_sums_of_float32,
)
from nemo_fp8_debug.numerics.recipe import parse_recipe

from .measures import Measure, Piece, all_of, measure
from .parts import Part
from .tensors import KINDS, normal

RAN = "what ran"
#: calls that are timed, and of plain torch operations, which take long
ROUNDS, PLAIN_ROUNDS = 30, 3
MIB = (64, 256, 1024)
RECIPES = ("blockwise", "mxfp8", "nvfp4")
SCALE = 3.7
#: relative difference of float64 sums that are taken in another order
CLOSE = 1e-12
COLUMNS = 4096
#: rows and values whose sums a CPU takes too
ROWS, VALUES = 1024, 1 << 20


class Engine(Protocol):
    """Where kernels run."""

    #: bytes of a tensor
    sizes: tuple[int, ...]
    device: str
    columns: int

    def ran(self, kernel: str) -> Measure:
        """What is timed and compared: promised is the kernel, where there is a device for it."""

    def count(self, into: Histogram, x: torch.Tensor) -> None:
        """Add the magnitudes of a 16-bit tensor to a histogram."""

    def block_sums(
        self, x: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat, counted: Histogram
    ) -> SumsFound:
        """Sums under the scales of blocks."""

    def moments(self, x: torch.Tensor) -> MomentsFound:
        """Moments of a float32 tensor."""

    def sums(self, x: torch.Tensor, scale: torch.Tensor) -> SumsFound:
        """Sums of a float32 tensor under one scale."""

    def milliseconds(self, call: Callable[[], object], rounds: int = ROUNDS) -> float:
        """Median time of a call on the device."""

    def host_microseconds(self, call: Callable[[], object]) -> float:
        """Median time of a call in the thread that makes it."""


class Device:
    """A CUDA device."""

    device = "cuda"
    sizes: tuple[int, ...] = tuple(mib << 20 for mib in MIB)
    columns = COLUMNS

    def ran(self, kernel: str) -> Measure:
        used = _kernel_on(torch.device("cuda", torch.cuda.current_device()), kernel) is not None
        return measure(RAN, "the kernel" if used else "plain torch operations", limit="the kernel", kept=used)

    def count(self, into: Histogram, x: torch.Tensor) -> None:
        add_to_histogram(into, x)

    def block_sums(
        self, x: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat, counted: Histogram
    ) -> SumsFound:
        return quantization_sums(x, rule, role, fmt, counted)

    def moments(self, x: torch.Tensor) -> MomentsFound:
        return measure_float32_moments(x)

    def sums(self, x: torch.Tensor, scale: torch.Tensor) -> SumsFound:
        return quantization_sums(x, scale, "input", E4M3)

    def milliseconds(self, call: Callable[[], object], rounds: int = ROUNDS) -> float:
        call()
        swept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        found = []
        for _ in range(rounds):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            swept.zero_()  # and the device is busy until all that is timed has been launched
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
        return statistics.median(found)

    def host_microseconds(self, call: Callable[[], object]) -> float:
        found = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            found.append(1e6 * (time.perf_counter() - start))
        return statistics.median(found)


class Simulator:
    """Numba's simulator, on a CPU: its times are of Python."""

    device = "cpu"
    sizes: tuple[int, ...] = (1 << 12, 1 << 13)
    columns = 64
    grid = (2, 32)

    def ran(self, kernel: str) -> Measure:
        return measure(RAN, "the kernel's source in Numba's simulator")

    def count(self, into: Histogram, x: torch.Tensor) -> None:
        from cuda_simulator import bits, count

        count(bits(x), find_infinity_bin(into.dtype), into.counts.numpy(), self.grid)

    def block_sums(
        self, x: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat, counted: Histogram
    ) -> SumsFound:
        from cuda_simulator import block_sums

        return block_sums(x, rule, role, fmt, self.grid)

    def moments(self, x: torch.Tensor) -> MomentsFound:
        from cuda_simulator import float32_moments

        return float32_moments(x, self.grid)

    def sums(self, x: torch.Tensor, scale: torch.Tensor) -> SumsFound:
        from cuda_simulator import float32_sums

        return float32_sums(x, float(scale), E4M3, self.grid)

    def milliseconds(self, call: Callable[[], object], rounds: int = ROUNDS) -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def host_microseconds(self, call: Callable[[], object]) -> float:
        return 1e3 * self.milliseconds(call)


def run(part: Part, emulate: bool) -> Iterator[Piece]:
    """Lines of every tensor; promised is that each finds what a CPU does."""
    engine: Engine = Simulator() if emulate else Device()
    torch.manual_seed(0)
    kernel, of, exact = {
        "counts": ("histogram", counts, "equal, count by count"),
        "block-sums": ("blocks", blocks, f"counts equal, sums within {CLOSE}"),
        "float32": ("float32", float32, f"counts and extremes equal, sums within {CLOSE}"),
    }[part.name]
    yield {"measures": [engine.ran(kernel)]}
    equal = []
    for line in of(engine):
        yield {"lines": [line]}
        equal.append(line["equal"])
    yield {"measures": [all_of(f"tensors in which it finds what a CPU does ({exact})", sum(equal), len(equal))]}


def counts(engine: Engine) -> Iterable[dict[str, Any]]:
    for kind in KINDS:
        for size in engine.sizes if kind is normal else engine.sizes[:1]:
            yield of_counts(engine, kind(size // 2, engine.device), kind.__name__.replace("_", " "))
    yield of_counts(engine, normal(engine.sizes[0] // 2, engine.device)[1:-1], "not aligned")
    yield of_counts(engine, normal(engine.sizes[0] // 2, engine.device).half(), "float16")


def of_counts(engine: Engine, x: torch.Tensor, name: str) -> dict[str, Any]:
    counted = empty(x)
    engine.count(counted, x)
    equal = torch.equal(counted.counts.cpu(), count_histogram(x.cpu()).counts)
    plain = lambda: torch_fallback.count_bit_patterns(x.view(torch.int16), counted.counts)  # noqa: E731
    return {"tensor": name, "values": x.numel(), **rates(engine, x, lambda: engine.count(counted, x), plain), "equal": equal}


def empty(x: torch.Tensor) -> Histogram:
    return Histogram(x.dtype, torch.zeros(BINS, dtype=torch.int64, device=x.device))


def blocks(engine: Engine) -> Iterable[dict[str, Any]]:
    for recipe in RECIPES:
        for role in ("input", "weight"):
            for size in engine.sizes:
                yield of_blocks(engine, normal(size // 2, engine.device).view(-1, engine.columns), recipe, role)


def of_blocks(engine: Engine, x: torch.Tensor, recipe: str, role: str) -> dict[str, Any]:
    rule, fmt = parse_recipe(recipe).scaling, parse_recipe(recipe).get_format(role)
    assert isinstance(rule, BlockScalingRule)
    counted, some = count_histogram(x), x[:ROWS]
    ours = engine.block_sums(some, rule, role, fmt, count_histogram(some)).summed_row.cpu()
    theirs = quantization_sums(some.cpu(), rule, role, fmt)
    timed = rates(
        engine,
        x,
        lambda: engine.block_sums(x, rule, role, fmt, counted),
        lambda: quantization_sums_in_blocks(x, rule, role, fmt),
    )
    return {"tensor": f"{recipe} {role}", "values": x.numel(), **timed, **same(ours, theirs)}


def float32(engine: Engine) -> Iterable[dict[str, Any]]:
    """Moments and sums by themselves, as a hook requests for them."""
    for size in engine.sizes:
        x = normal(size // 4, engine.device).float()
        scale, some = torch.full((), SCALE, device=x.device), x[:VALUES]
        found = same(engine.moments(some).summed_row.cpu(), compute_float32_moments(some.cpu()))
        timed = rates(engine, x, lambda x=x: engine.moments(x), lambda x=x: compute_float32_moments(x))
        yield {"tensor": "float32 moments", "values": x.numel(), **timed, **found}
        found = same(engine.sums(some, scale).summed_row.cpu(), quantization_sums(some.cpu(), scale.cpu(), "input", E4M3))
        timed = rates(
            engine,
            x,
            lambda x=x, scale=scale: engine.sums(x, scale),
            lambda x=x, scale=scale: quantization_sums_of_float32(x, scale, E4M3),
        )
        yield {"tensor": "float32 sums", "values": x.numel(), **timed, **found}


def rates(engine: Engine, x: torch.Tensor, kernel: Callable[[], object], plain: Callable[[], object]) -> dict[str, Any]:
    """Times of the kernel, of the device's copy, which reads and writes each byte, and of the same by plain torch."""
    size = x.numel() * x.element_size()
    ours, copy = engine.milliseconds(kernel), engine.milliseconds(x.clone)
    rate, copied = size / ours / 1e9, 2 * size / copy / 1e9
    return {
        "ms": ours,
        "rate": rate,
        "copy_rate": copied,
        "ratio": rate / copied,
        "plain_ms": _if_it_fits(engine, plain),
        "host_us": engine.host_microseconds(kernel),
    }


def _if_it_fits(engine: Engine, plain: Callable[[], object]) -> float | None:
    """Plain torch operations keep float64 copies, for which a device may be too small."""
    try:
        return engine.milliseconds(plain, PLAIN_ROUNDS)
    except torch.cuda.OutOfMemoryError:
        return None


def same(ours: QuantizationSums | ValueMoments, theirs: QuantizationSums | ValueMoments) -> dict[str, Any]:
    """Whether counts and extremes are equal and sums close, and how far those are apart; a median is not among them."""
    exact, apart = True, 0.0
    for field in fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name.startswith("sum_"):
            apart = max(apart, float(((a - b).abs() / b.abs().clamp(min=torch.finfo(b.dtype).tiny)).max()))
        elif field.name != "median":
            exact = exact and torch.equal(a, b)
    return {"equal": exact and apart <= CLOSE, "apart": apart}
