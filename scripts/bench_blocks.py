"""Times the figures' sums of a BF16 tensor under block recipes beside torch.aminmax of the same tensor.

`python scripts/bench_blocks.py [--threads 2]`. Ratios and medians; kernel and aminmax take turns, so that they share the
machine's moods. The plain path, which other devices take, is timed once, in one thread.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from bench_sketch import seconds

from nemo_fp8_debug.kernels import quantization_sums
from nemo_fp8_debug.numerics.blocks import BlockRule, quantization_sums_in_blocks
from nemo_fp8_debug.numerics.scaling import parse_recipe

VALUES = 1 << 24
ROUNDS = 15
RECIPES = ("blockwise", "blockwise(power_of_two=False)", "mxfp8", "mxfp8-hybrid", "nvfp4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    x = torch.randn(4096, VALUES // 4096).bfloat16()
    print(f"{VALUES / 2**20:.0f} Mi BF16 values, {threads} threads, medians of {ROUNDS}; ratios to torch.aminmax")
    for name in RECIPES:
        recipe = parse_recipe(name)
        rule = recipe.scaling
        assert isinstance(rule, BlockRule)
        for role in ("grad_output", "weight"):
            how = rule, role, recipe.format_of(role)
            quantization_sums(x, *how)
            ours, theirs = [], []
            for _ in range(ROUNDS):
                ours.append(seconds(lambda how=how: quantization_sums(x, *how)))
                torch.aminmax(x)  # torch's idle threads spin into the first call
                theirs.append(seconds(lambda: torch.aminmax(x)))
            torch.set_num_threads(1)
            plain = seconds(lambda how=how: quantization_sums_in_blocks(x, *how))
            torch.set_num_threads(threads)
            kernel, aminmax = statistics.median(ours), statistics.median(theirs)
            print(
                f"{name:30} {role:12} kernel {1e3 * kernel:6.1f} ms, ratio {kernel / aminmax:5.1f}   "
                f"plain {plain:5.2f} s, ratio {plain / aminmax:5.0f}"
            )


if __name__ == "__main__":
    main()
