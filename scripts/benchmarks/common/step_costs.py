"""What the monitor costs the steps of a model, in rows of (what, measured, limit); for benchmarks of CPUs and GPUs.

What is compared takes turns within one process; metrics are medians, intervals 95% by bootstrap.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.common.paired import Estimate, timed
from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.tracing import CopySafeHook

INTERVAL = 100
NEVER = 10**9
WARMUP = 5
#: steps from one sample to the next where samples are timed, and those of them in which its background work may go on
GROUP, BUSY = 10, 5
Row = tuple[str, str, str]


class Training(Protocol):
    """A model, and what trains it for one step and returns the loss."""

    model: Any

    def step(self) -> torch.Tensor: ...


@contextlib.contextmanager
def monitored(gpt: Training, **options: Any) -> Iterator[Monitor]:
    """The model with a monitor that records everything; what it prints is thrown away."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.closing(Monitor(gpt.model, folder, **options)) as monitor,
    ):
        yield monitor


def step(gpt: Training, monitor: Monitor, number: int) -> None:
    with monitor.step(number) as report:
        report(loss=gpt.step())


def hooks_on(gpt: Training) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = sum(len(getattr(module, kind)) for module in gpt.model.modules() for kind in kinds)
    on_tensors = sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in gpt.model.parameters())
    everywhere = torch.nn.modules.module
    return on_modules + on_tensors + sum(len(getattr(everywhere, f"_global{kind}")) for kind in kinds)


@dataclass(frozen=True)
class Unsampled:
    """What steps took that were not sampled, in steps without a monitor."""

    ratio: Estimate
    #: two steps without a monitor, one by the other
    control: Estimate
    pairs: int
    #: that were installed meanwhile
    hooks: int

    @property
    def within_noise(self) -> bool:
        """Whether steps without a monitor differ as much among themselves."""
        return self.ratio.low <= max(1, self.control.high) and self.ratio.high >= min(1, self.control.low)

    def rows(self) -> list[Row]:
        within = kept(self.within_noise)
        measured = f"{self.ratio.show(3)} ({self.pairs} pairs; none / none {self.control.show(3)})"
        return [
            ("unsampled step, attached / none", measured, f"within none / none: {within}"),
            ("hooks in unsampled steps", str(self.hooks), f"0: {kept(self.hooks == 0)}"),
        ]


def unsampled(gpt: Training, pairs: int) -> Unsampled:
    """Steps without a monitor, with one that does not sample, and without again, in an order that goes round."""
    before = hooks_on(gpt)
    with monitored(gpt, interval=NEVER) as monitor:
        step(gpt, monitor, 0)  # the only one that is sampled
        monitor.flush()
        counted, numbers = [], itertools.count(1)

        def attached() -> None:
            step(gpt, monitor, next(numbers))

        for _ in range(WARMUP):  # counted in these, since to count takes time
            with monitor.step(next(numbers)) as report:
                counted.append(hooks_on(gpt))
                report(loss=gpt.step())
        orders = itertools.cycle(itertools.permutations((gpt.step, attached, gpt.step)))
        ratios, control = [], []
        for order in itertools.islice(orders, pairs):
            times = [timed(call).wall for call in order]
            mine = times.pop(order.index(attached))
            ratios.append(mine / statistics.mean(times))
            control.append(times[0] / times[1])
    return Unsampled(Estimate.of(ratios), Estimate.of(control), pairs, max(counted) - before)


@dataclass(frozen=True)
class Sampled:
    """What sampled steps took, in unsampled ones."""

    #: until the next step could start
    until: Estimate
    #: with what is left to the next four
    whole: Estimate
    #: the same in processor time of all threads
    processor: Estimate
    #: an unsampled step, in seconds
    base: float

    @property
    def average(self) -> Estimate:
        """What samples add to all steps, in percent."""
        return Estimate(*(100 * (of - 1) / INTERVAL for of in (self.whole.median, self.whole.low, self.whole.high)))

    def rows(self, limit: float, until: float | None = None) -> list[Row]:
        """With the most that each may be."""

        def row(what: str, found: Estimate, most: float | None) -> Row:
            return what, f"{found.show()} unsampled steps", "" if most is None else at_most(found, most)

        return [
            row("sampled step, until the next can start", self.until, until),
            row("sampled step, with all that it costs the next four", self.whole, limit),
            row("the same in processor time of all threads", self.processor, None),
            (f"average at interval {INTERVAL}", f"{self.average.show()} %", at_most(self.average, 0.5, " %")),
        ]


def sampled(gpt: Training, groups: int) -> Sampled:
    """Every tenth step is sampled; the later half of each ten is what a step takes without."""
    with monitored(gpt, interval=GROUP) as monitor:
        for number in range(2 * GROUP):
            step(gpt, monitor, number)
        own, whole, processor, bases = [], [], [], []
        for first in range(2 * GROUP, (2 + groups) * GROUP, GROUP):
            used = time.process_time()
            times = [timed(lambda i=i: step(gpt, monitor, i)) for i in range(first, first + GROUP)]
            used = time.process_time() - used
            base, busy = (statistics.median(kind) for kind in zip(*times[BUSY:], strict=True))
            own.append(times[0].wall / base)
            whole.append(1 + sum(taken.wall for taken in times[:BUSY]) / base - BUSY)
            processor.append(1 + used / busy - GROUP)
            bases.append(base)
    return Sampled(Estimate.of(own), Estimate.of(whole), Estimate.of(processor), statistics.median(bases))


@dataclass(frozen=True)
class HookTimes:
    """How long hooks of a sampled step hold the training thread up, by their kind."""

    #: on modules and parameters
    hooks: int
    #: median of a call
    microseconds: dict[str, float]
    #: in a step
    calls: dict[str, int]
    #: of all calls in a step
    milliseconds: dict[str, float]

    def rows(self) -> list[Row]:
        rows = [("hooks in a sampled step", f"{self.hooks}, and one on each output", "")]
        for kind in sorted(self.microseconds):
            what = f"{self.microseconds[kind]:.0f} us ({self.calls[kind]} calls, {self.milliseconds[kind]:.1f} ms a step)"
            rows.append((f"host time of a {kind}", what, ""))
        return rows


def hook_time(gpt: Training, steps: int) -> HookTimes:
    """How long each hook of sampled steps holds the training thread up; on a CPU that is with counting."""
    times = defaultdict[str, list[float]](list)
    run, register = CopySafeHook.__call__, torch.Tensor.register_hook

    def of_kind(kind: str, call: Any) -> Any:
        def timing(*args: Any) -> Any:
            started = time.perf_counter()
            found = call(*args)
            times[kind].append(time.perf_counter() - started)
            return found

        return timing

    def of_module(hook: CopySafeHook, *args: Any) -> Any:
        return of_kind("forward pre-hook (X)" if len(args) == 3 else "forward hook (W)", run)(hook, *args)

    counted: list[int] = []
    with monitored(gpt, interval=1) as monitor:
        step(gpt, monitor, 0)
        CopySafeHook.__call__ = of_module
        torch.Tensor.register_hook = lambda x, hook: register(x, of_kind("gradient hook (dY)", hook))
        try:
            for number in range(1, 1 + steps):
                with monitor.step(number) as report:
                    counted.append(hooks_on(gpt))
                    report(loss=gpt.step())
                monitor.flush()  # no other thread of ours is under way
        finally:
            CopySafeHook.__call__, torch.Tensor.register_hook = run, register
    return HookTimes(
        max(counted),
        {kind: 1e6 * statistics.median(found) for kind, found in times.items()},
        {kind: round(len(found) / steps) for kind, found in times.items()},
        {kind: 1e3 * sum(found) / steps for kind, found in times.items()},
    )


def at_most(found: Estimate, limit: float, unit: str = "") -> str:
    return f"at most {limit:.2f}{unit}: {kept(found.median <= limit)}"


def kept(holds: bool) -> str:
    return "kept" if holds else "BROKEN"


def show(parts: Iterable[Callable[[], list[Row]]]) -> None:
    """A markdown table, each part's rows as soon as they are there."""
    print("| what | measured | limit |\n|---|---|---|")
    for part in parts:
        for row in part():
            print("| " + " | ".join(row) + " |", flush=True)
