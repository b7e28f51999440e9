"""Measures how surely wrong products are found, and that right ones are not called wrong.

    PYTHONPATH=scripts/validation:recipes OMP_NUM_THREADS=1 .venv/bin/python -m product_faults.run

Results of a CPU with and of one without AVX-512 lie beside each other in results.json; ATEN_CPU_CAPABILITY=avx2 makes torch
behave as on the latter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_fp8_debug.numerics.gemm_error import sample_indices
from nemo_fp8_debug.numerics.product_check import CHECKED, ExactBlock, check_block
from product_faults.faults import FAULTS, FaultyKernel
from product_faults.models import DTYPES, RECIPES, ROWS, cases, verified

RESULTS = Path(__file__).with_name("results.json")
_RATIOS = ("value_ratio", "row_ratio", "column_ratio", "block_ratio")
#: shapes of X and W for single products: tokens, inputs, outputs
_SHAPE = (256, 1024, 384)


def clean(steps: Sequence[int]) -> dict[str, Any]:
    """Products of models that are right: how many were checked, and what was called wrong."""
    found = dict[str, Any](blocks=0, values=0, wrong=[], unknown=0, largest=0.0)
    for dtype in DTYPES:
        for recipe in RECIPES:
            for case in cases(dtype):
                for row in verified(case, recipe, steps):
                    if row["outcome"] == "unknown":
                        found["unknown"] += 1
                        continue
                    found["blocks"] += 1
                    found["values"] += row["values"]
                    found["largest"] = max(found["largest"], row["error_over_bound"])
                    if row["outcome"] == "beyond":
                        found["wrong"].append([case.name, recipe, str(dtype), *(str(row[n]) for n in ("layer", "product"))])
            print(
                dtype,
                recipe or "no recipe",
                {k: v for k, v in found.items() if k != "wrong"},
                found["wrong"][:3],
                flush=True,
            )
    return found


def recall(trials: int) -> dict[str, Any]:
    """By fault and dtype: of how many products that a kernel got wrong each was named, and none beside it."""
    counts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))
    for dtype in (torch.bfloat16, torch.float32):
        for case in cases(dtype):
            products = _products_of(case)
            for name, fault in FAULTS.items():
                for trial in range(trials):
                    at = (trial * 7919) % products
                    kernel = FaultyKernel(fault, at, seed=trial)
                    with kernel:
                        rows = verified(case, "", [trial], train=False)
                    if not kernel.log or not kernel.log[0][2]:
                        continue  # it happened to do nothing, as to padding
                    beyond = [row for row in rows if row["outcome"] == "beyond"]
                    of = counts[name][str(dtype).removeprefix("torch.")]
                    of[0] += 1
                    of[1] += len(beyond) >= 1
                    of[2] += len(beyond) > 1
        print({name: dict(of) for name, of in counts.items()}, flush=True)
    return {
        name: {kind: dict(zip(("runs", "named", "more_named"), of, strict=True)) for kind, of in kinds.items()}
        for name, kinds in counts.items()
    }


def _products_of(case: Any) -> int:
    """How many products of torch's a step has."""
    kernel = FaultyKernel(lambda product: product.out, -1)
    with kernel:
        case.loss(0).backward()
    case.model.zero_grad()
    return kernel._seen


def flips(trials: int) -> dict[str, dict[str, list[float]]]:
    """By dtype and product: the share of flips of one bit in one checked value that is found, by bit from the lowest on."""
    found: dict[str, dict[str, list[float]]] = {}
    torch.manual_seed(3)
    tokens, inputs, outputs = _SHAPE
    for dtype in DTYPES:
        x = (torch.randn(tokens, inputs) * 2).to(dtype)
        w = (torch.randn(outputs, inputs) / 32).to(dtype)
        dy = (torch.randn(tokens, outputs) * 1e-3).to(dtype)
        operands = {"fprop": (x, w), "dgrad": (dy, w.t().contiguous()), "wgrad": (dy.t().contiguous(), x.t().contiguous())}
        for product, (a, b) in operands.items():
            at_a, at_b = (sample_indices(len(m), ROWS, m.device, 0, m is b) for m in (a, b))
            block, exact = (a @ b.t())[at_a][:, at_b], ExactBlock.from_rows(a[at_a], b[at_b])
            bits = 8 * block.element_size()
            kind = torch.int16 if bits == 16 else torch.int32
            shares = []
            for bit in range(bits):
                named = 0
                for _ in range(trials):
                    flipped = block.clone()
                    place = int(torch.randint(block.numel(), ()))
                    mask = (1 << bit) - (1 << bits if bit == bits - 1 else 0)
                    flipped.view(-1).view(kind)[place] ^= mask
                    checked = dict(zip(CHECKED, check_block(flipped, exact).tolist(), strict=True))
                    named += max(checked[name] for name in _RATIOS) > 1
                shares.append(round(named / trials, 4))
            found.setdefault(str(dtype).removeprefix("torch."), {})[product] = shares
    return found


def touched() -> dict[str, float]:
    """How likely a fault in some of the values or rows of 4096 x 4096 has one that is checked."""
    torch.manual_seed(4)
    n, trials, found = 4096, 400, {}
    at = sample_indices(n, ROWS, torch.device("cpu"), 0, False)
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[at] = True
    for share in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
        wrong = max(1, round(share * n * n))
        hits = 0
        for _ in range(trials):
            places = torch.randint(n * n, (wrong,))
            hits += bool((chosen[places // n] & chosen[places % n]).any())
        found[f"values {share:g}"] = hits / trials
    for rows in (1, 4, 16, 64, 256):
        hits = sum(bool(chosen[torch.randperm(n)[:rows]].any()) for _ in range(trials))
        found[f"rows {rows}"] = hits / trials
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9, help="that each clean model trains")
    parser.add_argument("--trials", type=int, default=25, help="of each fault, model and dtype")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "clean": clean(range(options.steps)),
        "recall": recall(options.trials),
        "flips": flips(300),
        "touched": touched(),
    }
    cpu = "AVX-512" if "AVX512" in torch.backends.cpu.get_cpu_capability() else "without AVX-512"
    known = json.loads(options.output.read_text()) if options.output.exists() else {}
    options.output.write_text(json.dumps(known | {cpu: results}, indent=1) + "\n")
    print(json.dumps({k: v for k, v in results.items() if k != "flips"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
