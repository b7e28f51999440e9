"""The histograms of a sampled step come to the host as they are on the device, in one copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.device_to_host import VALUES, copy_to_host, launches, milliseconds

from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.numerics.histogram import Histogram

from .measures import Piece, all_of
from .parts import Part

OPERANDS, EMULATED_OPERANDS = (60, 240), (6, 12)


def run(part: Part, emulate: bool) -> Iterator[Piece]:
    """A line for each number of histograms."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = [_line(n, "cpu" if emulate else "cuda") for n in (EMULATED_OPERANDS if emulate else OPERANDS)]
    equal = sum(line["equal"] for line in lines)
    measures = [all_of("lines in which all is the device's, bit by bit", equal, len(lines))]
    yield {"measures": measures, "lines": lines}


def _line(operands: int, device: str) -> dict[str, Any]:
    host = [count_histogram((1 + i) * torch.randn(VALUES).bfloat16()) for i in range(operands)]
    away = [Histogram(of.dtype, of.counts.to(device)) for of in host]
    found = copy_to_host(away)
    return {
        "histograms": operands,
        "operations": launches(away),
        "device_ms": milliseconds(lambda: copy_to_host(away)),
        "equal": all(torch.equal(of.counts, counts) for of, counts in zip(host, found, strict=True)),
    }
