"""How close the errors of parts of outputs are to those of whole outputs, and the floor that ordinary GEMMs lie on.

`.venv/bin/python scripts/benchmarks/output_error.py [--seeds 6]`. A BF16 network of two linear layers, 512 tokens, measured
under current scaling: once with gradients of normal values, which the floor is of, and once with those of a loss.
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

#: rows and columns; the last is more than any output has
ROWS = (32, 64, 128, 10_000)
WIDTH, TOKENS = 256, 512


class Last:
    """Keeps the outputs of the last sample: relative error by (layer, product)."""

    in_callers_thread = True

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Nothing to prepare."""

    def record(self, sample: Sample) -> None:
        """Keep it."""
        columns = (sample.table("outputs")[name] for name in ("layer", "product", "relative_error"))
        self.errors = {(layer, product): error for layer, product, error in zip(*columns, strict=True)}

    def record_steps(self, steps: Mapping[int, Mapping[str, Any]]) -> None:
        """Not needed."""

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Not kept."""

    def close(self) -> None:
        """Nothing is held back."""


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
        print(f"{rows:>6} rows: {shown(found, '.1%')} off the errors of whole outputs, of {len(found)}")
    for product, found in floor.items():
        print(f"{product:>6}: relative error {shown(found, '.4f')}")


def shown(values: Sequence[float], form: str) -> str:
    return f"median {statistics.median(values):{form}}, largest {max(values):{form}}"


if __name__ == "__main__":
    main()
