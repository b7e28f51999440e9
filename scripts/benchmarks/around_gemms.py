"""Measure the cost of observing optimizer states and activations in sampled steps: `around_gemms.py [--rounds 8]`.

The unit is a sampled step that observes only operands. Times are CPU times of all threads.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.common.sampled_steps import compare
from nemo_fp8_debug.core.keys import ACTIVATIONS, STATES

#: options of the monitor, by what they observe
OPTIONS: dict[str, dict[str, Any]] = {
    "operands alone": {},
    "gradients and steps": {"states": ("weight_gradient", "update")},
    "all states": {"states": tuple(STATES)},
    "errors of steps": {"states": ("update",), "output_rows": 64},
    **{f"activations: {kind}": {"activations": (kind,)} for kind in ACTIVATIONS if kind != "router"},
    "all of it": {"states": tuple(STATES), "activations": ("norm", "attention"), "output_rows": 64},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    compare(OPTIONS, parser.parse_args().rounds, time.process_time, ("operands alone",))


if __name__ == "__main__":
    main()
