"""Learns the bands that come with the package from the clean runs that set thresholds: `fault_injection/learn_bands.py`."""

from __future__ import annotations

from fault_injection.judge import bands_without
from nemo_fp8_debug.analysis.bands.bands import SHIPPED

if __name__ == "__main__":
    bands = bands_without(None)
    bands.write(SHIPPED)
    print(f"{bands.runs} runs of {', '.join(bands.families)}: {SHIPPED} ({SHIPPED.stat().st_size >> 10} KiB)")
