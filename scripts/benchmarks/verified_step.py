"""Measure the cost of also observing products in sampled steps, not only operands: `verified_step.py [--rounds 12]`."""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.common.sampled_steps import compare

#: options of the monitor, by what they observe
OPTIONS: dict[str, dict[str, Any]] = {
    "operands alone": {},
    "output_rows=64": {"output_rows": 64},
    "verify_rows=64": {"verify_rows": 64},
    "both": {"output_rows": 64, "verify_rows": 64},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    compare(OPTIONS, parser.parse_args().rounds, time.perf_counter, ("operands alone", "output_rows=64"))


if __name__ == "__main__":
    main()
