"""What options of the monitor cost a sampled step: options take turns within one process, on the model of overhead.py.

Every step is sampled, and times go on until all is measured and recorded. A round's times are compared with those of the
same round.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common.paired import Estimate
from benchmarks.common.small_gpt import SmallGPT, one_process
from benchmarks.common.step_costs import monitored, step

STEPS = 4


def compare(options: Mapping[str, Mapping[str, Any]], rounds: int, clock: Callable[[], float], bases: Sequence[str]) -> None:
    """Print milliseconds a step of each, and its ratio to each of `bases`.

    Args:
        options: of the monitor, by what they look at.
        clock: that tells seconds.
    """
    with one_process():
        gpt, times = SmallGPT(), defaultdict[str, list[float]](list)
        for given in options.values():
            _seconds(gpt, given, clock)
        for turn in range(rounds):
            names, at = list(options), turn % len(options)
            for name in names[at:] + names[:at]:
                times[name].append(_seconds(gpt, options[name], clock))
    for name, found in times.items():
        shown = [f"{1e3 * statistics.median(found) / STEPS:.1f} ms a step"]
        for base in bases:
            ratio = Estimate.of([mine / its for mine, its in zip(found, times[base], strict=True)])
            shown.append(f"{ratio.show(2)} of {base}")
        print(f"{name}: {'; '.join(shown)}")


def _seconds(gpt: SmallGPT, options: Mapping[str, Any], clock: Callable[[], float]) -> float:
    """Of some sampled steps."""
    with monitored(gpt, interval=1, **options) as monitor:
        step(gpt, monitor, 0)
        monitor.flush()
        began = clock()
        for number in range(1, 1 + STEPS):
            step(gpt, monitor, number)
        monitor.flush()
        return clock() - began
