"""Compare the errors of parts of outputs with the errors of whole outputs, and print the error of ordinary GEMMs.

`.venv/bin/python scripts/benchmarks/output_error.py [--seeds 6]`

We measure a BF16 network of two linear layers with 512 tokens under current scaling: once with normal gradients, which also
give the error of ordinary GEMMs, and once with the gradients of a loss.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.core.sample import Sample

#: numbers of rows and columns to measure; the last number exceeds the size of each output, so it measures whole outputs
ROWS = (32, 64, 128, 10_000)
WIDTH, TOKENS = 256, 512


class Last:
    """A recorder that keeps the relative errors of outputs in the last sample, by (layer, product)."""

    in_callers_thread = True

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Do nothing."""

    def record(self, sample: Sample) -> None:
        """Keep the errors of a sample."""
        columns = (sample.get_table("outputs")[name] for name in ("layer", "product", "relative_error"))
        self.errors = {(layer, product): error for layer, product, error in zip(*columns, strict=True)}

    def record_steps(self, steps: Mapping[int, Mapping[str, Any]]) -> None:
        """Ignore the scalars of steps."""

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Ignore the losses of evaluations."""

    def close(self) -> None:
        """Do nothing, because there is no buffer."""


def errors(seed: int, rows: int, of_loss: bool) -> dict[tuple[str, str], float]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).bfloat16()
    x, dy = torch.randn(2, TOKENS, WIDTH).bfloat16()
    last = Last()
    monitor = Monitor(model, recorders=[last], interval=1, on_error="raise", output_rows=rows)
    with monitor.step(0):
        y = model(x)
        y.backward(2 * y.detach() / y.numel() if of_loss else dy)
    monitor.close()
    return last.errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    seeds = parser.parse_args().seeds
    apart: dict[int, list[float]] = defaultdict(list)
    floor: dict[str, list[float]] = defaultdict(list)
    for seed in range(seeds):
        for of_loss in (False, True):
            *parts, whole = (errors(seed, rows, of_loss) for rows in ROWS)
            for rows, part in zip(ROWS, parts, strict=False):
                apart[rows] += [abs(part[key] / whole[key] - 1) for key in whole]
            if not of_loss:
                for (_, product), error in whole.items():
                    floor[product].append(error)
    for rows, found in apart.items():
        print(f"{rows:>6} rows: {shown(found, '.1%')} difference to the errors of whole outputs, over {len(found)} outputs")
    for product, found in floor.items():
        print(f"{product:>6}: relative error {shown(found, '.4f')}")


def shown(values: Sequence[float], form: str) -> str:
    return f"median {statistics.median(values):{form}}, largest {max(values):{form}}"


if __name__ == "__main__":
    main()
