"""What sampled steps cost that look at products too, in sampled steps that do not: `verified_step.py [--rounds 12]`.

The model of overhead.py. Every step is sampled; options take turns within one process, and a round's times are compared
with those of the same round. Times go on until all is measured and recorded.
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

#: by what is looked at
OPTIONS: dict[str, dict[str, Any]] = {
    "operands alone": {},
    "output_rows=64": {"output_rows": 64},
    "verify_rows=64": {"verify_rows": 64},
    "both": {"output_rows": 64, "verify_rows": 64},
}
STEPS = 4


def seconds(gpt: SmallGPT, options: dict[str, Any]) -> float:
    """Of some sampled steps."""
    with monitored(gpt, interval=1, **options) as monitor:
        step(gpt, monitor, 0)
        monitor.flush()
        began = time.perf_counter()
        for number in range(1, 1 + STEPS):
            step(gpt, monitor, number)
        monitor.flush()
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    with one_process():
        gpt, times = SmallGPT(), defaultdict[str, list[float]](list)
        for options in OPTIONS.values():
            seconds(gpt, options)
        for turn in range(rounds):
            names = list(OPTIONS)
            for name in names[turn % 4 :] + names[: turn % 4]:
                times[name].append(seconds(gpt, OPTIONS[name]))
    for name, found in times.items():
        shown = [f"{1e3 * statistics.median(found) / STEPS:.1f} ms a step"]
        for base in ("operands alone", "output_rows=64"):
            ratio = Estimate.of([mine / its for mine, its in zip(found, times[base], strict=True)])
            shown.append(f"{ratio.show(2)} of {base}")
        print(f"{name}: {'; '.join(shown)}")


if __name__ == "__main__":
    main()
