"""What the device finds in the histograms of a sampled step before they are copied: moments and sums, as on the host."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.device_to_host import VALUES, Launches, asked_of, milliseconds, milliseconds_on_host, same, to_host

from nemo_fp8_debug.capture.packed_transfer import copied_to_host
from nemo_fp8_debug.kernels import histogram_of
from nemo_fp8_debug.numerics.histogram import Histogram

from .measures import all_of
from .parts import Part

OPERANDS, EMULATED_OPERANDS = 240, 12


def run(part: Part, emulate: bool) -> dict[str, Any]:
    """A line for each number of scales that sums are asked under."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    host = [
        histogram_of((1 + i) * torch.randn(VALUES).bfloat16()) for i in range(EMULATED_OPERANDS if emulate else OPERANDS)
    ]
    lines = [_line(host, "cpu" if emulate else "cuda", scales) for scales in (0, 1, 2, 4)]
    equal = sum(line["equal"] for line in lines)
    return {
        "measures": [all_of("lines in which all is the host's, bit by bit", equal, len(lines))],
        "lines": lines,
    }


def _line(host: list[Histogram], device: str, scales: int) -> dict[str, Any]:
    away = [Histogram(of.dtype, of.counts.to(device)) for of in host]
    with Launches() as launches:
        copied_to_host([of.counts for of in away], to_host, asked_of(away, scales) if scales else ())
    return {
        "histograms": len(host),
        "scales": scales,
        "operations": launches.counts.total(),
        "host_ms": milliseconds_on_host(host, scales),
        "device_ms": milliseconds(away, scales),
        "equal": same(away, host, scales),
    }
