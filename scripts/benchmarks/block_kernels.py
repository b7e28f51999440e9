"""Time the metrics' sums of a BF16 tensor under block recipes, compared with torch.aminmax of the same tensor.

`.venv/bin/python scripts/benchmarks/block_kernels.py [--threads 2]` takes about 3 minutes.

We time what a sampled step needs in addition to the tensor's histogram. We print the median time, and the median ratio to
aminmax. Kernel and aminmax take turns, so that the machine's load affects both. `hot` and `cold` are as in histogram.py.

We also print ratios to aminmax of three lower bounds. `arithmetic` does the same work on as many values that all come from
the closest cache. `reading` is as in histogram.py. `call` is the time for a single block, which is each call's overhead.

`spread` are normal values times 2^(2z), with z normal as well. In many of their blocks, small values are in the subnormal
range of the format. The plain path, which other devices use, is timed once, in one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from benchmarks.histogram import LAYOUTS, SIZES, Call, in_turns, reading, seconds, tensors_of
from nemo_fp8_debug.kernels import count_histogram, quantization_sums
from nemo_fp8_debug.numerics.block_scaling import BlockScalingRule, quantization_sums_in_blocks
from nemo_fp8_debug.numerics.formats import FloatFormat
from nemo_fp8_debug.numerics.recipe import parse_recipe

CASES = (
    ("blockwise", "grad_output"),
    ("blockwise", "weight"),
    ("blockwise(power_of_two=False)", "grad_output"),
    ("mxfp8", "input"),
    ("rowwise", "input"),
    ("nvfp4", "input"),
    ("nvfp4", "weight"),
)
#: seconds for each comparison
BUDGET = 1.5
#: number of values for timing the arithmetic, so large that the overhead of a call is negligible
MANY = 1 << 24

How = tuple[BlockScalingRule, str, FloatFormat]


def how(name: str, role: str) -> How:
    """Return the rule, the role and the format of an operand under a recipe."""
    recipe = parse_recipe(name)
    assert isinstance(recipe.scaling, BlockScalingRule)
    return recipe.scaling, role, recipe.get_format(role)


def plain_ratio(by: How, threads: int) -> float:
    """Return the ratio of the plain path's time to the time of aminmax, both in one thread."""
    x = torch.randn(1024, 4096).bfloat16()
    torch.set_num_threads(1)
    ratio = seconds(lambda: quantization_sums_in_blocks(x, *by)) / min(seconds(lambda: torch.aminmax(x)) for _ in range(20))
    torch.set_num_threads(threads)
    return ratio


def measuring(by: How, tensors: list[torch.Tensor]) -> Call:
    """Return a function that measures one of these tensors."""
    histograms = {x.data_ptr(): count_histogram(x) for x in tensors}
    return lambda x: quantization_sums(x, *by, histograms[x.data_ptr()])


def arithmetic(by: How) -> Call:
    """Return a function that ignores its argument and measures `MANY` values: one row in a close cache, over and over."""
    x = torch.randn(4096).bfloat16().expand(MANY // 4096, 4096)
    counted = count_histogram(x)
    return lambda _: quantization_sums(x, *by, counted)


def call(by: How) -> Call:
    """Return a function that ignores its argument and measures a single block."""
    high, wide = by[0].get_block_shape(by[1])
    x = torch.randn(high, min(wide, 4096)).bfloat16()
    counted = count_histogram(x)
    return lambda _: quantization_sums(x, *by, counted)


def spread(mebi: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield one tensor of `spread` values, in the form of `tensors_of`."""
    z, normal = torch.randn(2, 1 << 20)
    yield "hot", [(normal * torch.exp2(2 * z)).bfloat16().repeat(mebi).view(-1, 4096)]


def cases() -> Iterator[tuple[str, str, str, int]]:
    """Yield recipe, role, layout, and size in 2^20 values."""
    for name, role in CASES:
        yield from ((name, role, "contiguous", mebi) for mebi in SIZES)
    yield from (("mxfp8", "input", layout, 16) for layout in LAYOUTS if layout != "contiguous")
    yield from ((name, role, "spread", mebi) for name, role in CASES[:2] for mebi in SIZES[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    for name, role in CASES:
        print(f"plain path in one thread: {name:30} {role:12} {plain_ratio(how(name, role), threads):6.0f} times aminmax")
    print(f"BF16, {threads} threads; medians, and medians of ratios to torch.aminmax")
    for name, role, layout, mebi in cases():
        by, flat = how(name, role), layout == "contiguous"
        for state, tensors in spread(mebi) if layout == "spread" else tensors_of(mebi, layout):
            ours_of = measuring(by, tensors)
            ours_of(tensors[0])
            calls = [ours_of, arithmetic(by), call(by), *([reading] if flat else []), torch.aminmax]
            found = in_turns(tensors, calls, BUDGET)
            (ours, ratio), (theirs, _) = found[0], found[-1]
            floors = f"arithmetic {found[1][1] * (mebi << 20) / MANY:5.2f}  call {found[2][1]:5.2f}"
            floors += f"  reading {found[3][1]:5.2f}" if flat else ""
            case = f"{name:30} {role:12} {mebi:4} Mi {layout:22} {state:4}"
            print(f"{case} {ours:7.2f} ms  aminmax {theirs:7.2f} ms  ratio {ratio:5.2f}  {floors}", flush=True)


if __name__ == "__main__":
    main()
