"""What sampled steps cost that look at optimizer states and activations too: `around_gemms.py [--rounds 8]`.

In sampled steps that look at operands alone, on the model of overhead.py. What counts is time on CPUs, of all threads, until
all is measured and recorded; options take turns within one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

from benchmarks.common.paired import Estimate
from benchmarks.common.small_gpt import SmallGPT, one_process
from benchmarks.common.step_costs import monitored, step
from nemo_fp8_debug.core.keys import ACTIVATIONS, STATES

#: by what is looked at
OPTIONS: dict[str, dict[str, Any]] = {
    "operands alone": {},
    "gradients and steps": {"states": ("weight_gradient", "update")},
    "all states": {"states": tuple(STATES)},
    "errors of steps": {"states": ("update",), "output_rows": 64},
    **{f"activations: {kind}": {"activations": (kind,)} for kind in ACTIVATIONS if kind != "router"},
    "all of it": {"states": tuple(STATES), "activations": ("norm", "attention"), "output_rows": 64},
}


STEPS = 4


def seconds(gpt: SmallGPT, options: dict[str, Any]) -> float:
    """On CPUs, of some sampled steps."""
    with monitored(gpt, interval=1, **options) as monitor:
        step(gpt, monitor, 0)
        monitor.flush()
        began = time.process_time()
        for number in range(1, 1 + STEPS):
            step(gpt, monitor, number)
        monitor.flush()
        return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    with one_process():
        gpt, times = SmallGPT(), defaultdict[str, list[float]](list)
        for options in OPTIONS.values():
            seconds(gpt, options)
        for turn in range(rounds):
            names, at = list(OPTIONS), turn % len(OPTIONS)
            for name in names[at:] + names[:at]:
                times[name].append(seconds(gpt, OPTIONS[name]))
    for name, found in times.items():
        ratio = Estimate.of([mine / its for mine, its in zip(found, times["operands alone"], strict=True)])
        print(f"{name}: {1e3 * statistics.median(found) / STEPS:.0f} ms a step, {ratio.show(2)} of operands alone")


if __name__ == "__main__":
    main()
