"""Records runs on S3 behind a proxy that makes it slow, cut off, throttled, late, silent or gone.

    .venv/bin/python scripts/validation/s3_faults.py     # about 10 minutes; writes s3_faults.json

moto's server, real HTTP. For each of `FAULTS` a Monitor records 3 steps, twice in one place, and every row must be that of
the same run on a disk. For each of `OUTAGES` the place does not answer from step 3 on; the run must end, and say what is
lost.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from s3_proxy import Faults, Proxy, new_address, s3

from nemo_fp8_debug import FP8DebugWarning, Monitor, compare, read_record

RESULT = Path(__file__).with_suffix(".json")
FAULTS = {
    "none": Faults(),
    "slow, 50 ms a request": Faults(delay=0.05),
    "each 5th reset before it is done": Faults(cut_before=5),
    "each 5th reset after it is done": Faults(cut_after=5),
    "half of each 5th answer": Faults(cut_within=5),
    "each 9th throttled": Faults(throttled=9),
    "listed 2 s late": Faults(late=2.0),
    "all at once": Faults(delay=0.05, cut_before=7, cut_after=11, cut_within=5, throttled=13, late=1.0),
}


@dataclass(frozen=True)
class Outage:
    """From step 3 of `steps` on, each of which takes `pause` seconds by itself; it ends with step `ends`, if at all."""

    faults: Faults
    steps: int = 12
    ends: int | None = None
    pause: float = 0.5


OUTAGES = {
    "silent to the end": Outage(Faults(silent=True)),
    "gone to the end": Outage(Faults(gone=True)),
    "silent, back before the end": Outage(Faults(silent=True), ends=9),
    "gone, back before the end": Outage(Faults(gone=True), ends=9),
    "silent for five minutes": Outage(Faults(silent=True), steps=150, pause=2.0),
}
LEAVES = 3


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, s3() as proxy:
        train(folder)
        found = {"faults": {name: of_fault(proxy, faults, folder) for name, faults in FAULTS.items()}}
        found["outages"] = {name: of_outage(proxy, outage, new_address()) for name, outage in OUTAGES.items()}
    RESULT.write_text(json.dumps(found, indent=2) + "\n")


def of_fault(proxy: Proxy, faults: Faults, local: str) -> dict[str, Any]:
    """What recording once cost, and with a second start, reading and comparing; `local` is such a record on a disk."""
    address, proxy.faults, proxy.hit, proxy.requests = new_address(), faults, 0, 0
    began = time.monotonic()
    train(address)
    found: dict[str, Any] = {"requests": proxy.requests, "seconds": round(time.monotonic() - began, 1)}
    train(address)
    time.sleep(faults.late)
    for table in ("metrics", "histograms"):
        there, expected = (read_record(run, table).drop("attempt") for run in (address, local))
        assert there.equals(expected, null_equal=True), (faults, table)
    found["tensors_compared"] = len(compare(address, local).tensors)
    found |= {"requests_in_all": proxy.requests, "hit": proxy.hit, "seconds_in_all": round(time.monotonic() - began, 1)}
    print(faults, found, flush=True)
    return found


def of_outage(proxy: Proxy, outage: Outage, address: str) -> dict[str, Any]:
    """What an outage cost a run, in seconds and parts, and what the run said."""
    proxy.faults = Faults()
    before = {LEAVES: lambda: vars(proxy).update(faults=outage.faults, requests=0)}
    if outage.ends is not None:
        before[outage.ends] = lambda: setattr(proxy, "faults", Faults())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        took, closing = train(address, outage.steps, before, outage.pause)
    said = [str(w.message).partition(": ")[2] for w in caught if issubclass(w.category, FP8DebugWarning)]
    proxy.faults, requests = Faults(), proxy.requests
    recorded = read_record(address)["step"].unique().to_list()
    found: dict[str, Any] = {
        "seconds_of_run": round(sum(took[LEAVES:]), 1),
        "seconds_that_training_waited": round(sum(t - outage.pause for t in took[LEAVES:]), 1),
        "longest_step": round(max(took[LEAVES:]) - outage.pause, 1),
        "seconds_to_close": round(closing, 1),
        "requests": requests,
        "steps": outage.steps,
        "steps_recorded": len(recorded),
        "said": [re.sub(r'(s3|http)://[^\s"]+', r"\1://...", message) for message in said],
    }
    print(outage, json.dumps(found, indent=2), flush=True)
    return found


def train(
    run: str, steps: int = 3, before: Mapping[int, Callable[[], None]] | None = None, pause: float = 0.0
) -> tuple[list[float], float]:
    """Record a run.

    Args:
        before: what to do before a step.
        pause: seconds that a step takes by itself.

    Returns:
        seconds of each step, and those of closing.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).bfloat16()
    monitor = Monitor(model, run, interval=1, table_rows=0, recipe="current")
    took = []
    for step in range(steps):
        if before and step in before:
            if step == LEAVES:
                monitor.flush()  # so that it is known which steps the outage hits
            before[step]()
        began = time.monotonic()
        with monitor.step(step) as report:
            loss = model(torch.ones(4, 8).bfloat16()).float().sum()
            loss.backward()
            report(loss=loss)
        time.sleep(pause)
        took.append(time.monotonic() - began)
    began = time.monotonic()
    monitor.close()
    return took, time.monotonic() - began


if __name__ == "__main__":
    main()
