"""Measure the bytes of a record per tensor and sample, for each table, with all tables and with options that save bytes.

    .venv/bin/python scripts/benchmarks/record_bytes.py [--steps 256]

We train a small bfloat16 model with 4 dense layers, 8 experts and Adam, and sample each step. Parts are compacted as by
`nemo-fp8-debug compact`, as after the end of a run. The last column shows the bytes before compacting. A sample has one row
for each tensor in `metrics`, and one row for each tensor and what-if recipe in `what_if`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.record.merging import compact_record

WIDTH, EXPERTS, LAYERS = 256, 8, 4
#: options that record every table that grows with the number of samples
TABLES: dict[str, Any] = {
    "what_if": ["current-e5m2"],
    "output_rows": 16,
    "verify_rows": 16,
    "replicas": True,
    "states": ["weight_gradient", "first_moment", "second_moment", "update"],
    "activations": ["norm"],
    "block_scales": True,
}
RUNS: dict[str, dict[str, Any]] = {
    "every table": TABLES,
    "default": {},
    "histogram_interval=16": {"histogram_interval": 16},
}


class Model(nn.Module):
    """A model with dense layers, followed by experts that each get a part of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(LAYERS))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(layer(norm(x)))
        return torch.cat([expert(part) for expert, part in zip(self.experts, x.chunk(EXPERTS), strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=256)
    steps = parser.parse_args().steps
    tensors = 3 * (LAYERS + EXPERTS)
    print(f"{tensors} tensors of {WIDTH} x {WIDTH}, {steps} samples")
    for name, options in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            train(Path(folder), steps, options)
            done = compact_record(folder)
        print(name)
        for table, size in done.after.items():
            before = done.before[table].bytes
            of_all = f"{size.bytes / steps / tensors:8.0f} bytes a tensor and sample"
            of_row = f"{size.bytes / size.rows:7.0f} a row"
            print(f"  {table:22} {of_all}, {of_row}; before compact {before / steps / tensors:8.0f}")


def train(run: Path, steps: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Model().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    monitor = Monitor(model, run, interval=1, table_rows=0, recipe="mxfp8" if options == TABLES else "delayed", **options)
    for step in range(steps):
        x = torch.randn(512, WIDTH).bfloat16()
        with monitor.step(step) as report:
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(loss=loss)
    monitor.close()


if __name__ == "__main__":
    main()
