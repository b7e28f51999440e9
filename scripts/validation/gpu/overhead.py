"""The overhead contract: what the monitor costs the steps of a GPT in real FP8, and what it may cost.

Steps are timed from an empty training stream to an empty one, and nothing waits inside of them; what is compared takes
turns. Everything is recorded. Medians, intervals 95% by bootstrap.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.common.paired import peak_memory
from benchmarks.common.step_costs import (
    INTERVAL,
    WARMUP,
    HookTimes,
    Sampled,
    Unsampled,
    hook_time,
    monitored,
    sampled,
    step,
    unsampled,
)

from .gpt import GPT, Setup, megatron
from .measures import Measure, Piece, at_most, measure
from .parts import Part

#: a sampled step, and what samples add to all steps, in percent
LIMIT, AVERAGE = 1.3, 0.5
#: triples of steps that are not sampled, and groups of ten steps one of which is
PAIRS, GROUPS = 40, 10
EMULATED_PAIRS, EMULATED_GROUPS = 2, 1


def run(part: Part, emulate: bool) -> Iterator[Piece]:
    """Rows of the contract."""
    pairs, groups = (EMULATED_PAIRS, EMULATED_GROUPS) if emulate else (PAIRS, GROUPS)
    with megatron(emulate) as device:
        gpt = GPT(Setup.of(part, device))
        for _ in range(WARMUP):
            gpt.step()
        yield {"measures": of_sampled(sampled(gpt, groups))}
        yield {"measures": of_hooks(hook_time(gpt, groups))}
        yield {"measures": of_unsampled(unsampled(gpt, pairs))}
        yield {"measures": of_memory(gpt, groups)}


def of_unsampled(found: Unsampled) -> list[Measure]:
    return [
        measure(
            "unsampled step, attached",
            found.ratio,
            "of one without",
            limit="within two steps without",
            kept=found.within_noise,
            of_time=True,
        ),
        measure("two steps without", found.control, "of one another", of_time=True),
        measure("hooks in unsampled steps", found.hooks, limit="0", kept=found.hooks == 0),
    ]


def of_sampled(found: Sampled) -> list[Measure]:
    steps = "unsampled steps"
    return [
        at_most("sampled step, until the next can start", found.until, LIMIT, steps),
        at_most("sampled step, with all that it costs the next four", found.whole, LIMIT, steps),
        measure("the same in processor time of all threads", found.processor, steps, of_time=True),
        at_most(f"average at interval {INTERVAL}", found.average, AVERAGE, "%"),
        measure("an unsampled step", 1e3 * found.base, "ms", of_time=True),
    ]


def of_hooks(found: HookTimes) -> list[Measure]:
    rows = [measure("hooks in a sampled step", found.hooks, "and one on each output")]
    for kind in sorted(found.microseconds):
        rows += [
            measure(f"host time of a {kind}", found.microseconds[kind], "us", of_time=True),
            measure(f"calls of a {kind} in a step", found.calls[kind]),
            measure(f"host time of all of them ({kind})", found.milliseconds[kind], "ms a step", of_time=True),
        ]
    return rows


def of_memory(gpt: GPT, groups: int) -> list[Measure]:
    """Peaks of steps, in turn sampled and not, until all that a step left is done."""
    device = torch.cuda.is_available()
    with monitored(gpt, interval=2) as monitor:
        peaks: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(2 + 2 * groups):
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            if device:
                torch.cuda.reset_peak_memory_stats()
            step(gpt, monitor, number)
            monitor.flush()
            of_device = 0.0
            if device:
                torch.cuda.synchronize()
                of_device = torch.cuda.max_memory_allocated() / 2**20
            if number >= 2:
                peaks[number % 2 == 0].append((of_device, peak_memory()))
    medians = {of: [statistics.median(kind) for kind in zip(*found, strict=True)] for of, found in peaks.items()}

    def rows(what: str, of: int) -> list[Measure]:
        on, off = medians[True][of], medians[False][of]
        return [
            measure(f"peak of {what} memory in sampled steps", on, "MiB", of_time=True),
            measure("more than in unsampled ones", on - off, "MiB", of_time=True),
        ]

    return [*(rows("device", 0) if device else [measure("peak of device memory", "no device")]), *rows("host", 1)]
