"""Records runs on S3 behind a proxy that makes it slow, cut off, throttled or late; compares with a local record.

    .venv/bin/python scripts/validation/s3_faults.py     # about 3 minutes; writes s3_faults.json

moto's server, real HTTP. For each fault a Monitor records 3 steps; then every row must be that of the same run on a disk.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch
from s3_proxy import Faults, new_address, s3

from nemo_fp8_debug import Monitor, compare, read_record

RESULT = Path(__file__).with_suffix(".json")
FAULTS = {
    "none": Faults(),
    "slow, 50 ms a request": Faults(delay=0.05),
    "each 5th reset before it is done": Faults(cut_before=5),
    "each 5th reset after it is done": Faults(cut_after=5),
    "half of each 5th answer": Faults(cut_within=5),
    "each 9th throttled": Faults(throttled=9),
    "listed 2 s late": Faults(late=2.0),
}


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder, s3() as proxy:
        train(folder)
        for name, faults in FAULTS.items():
            address, proxy.faults, proxy.hit, proxy.requests = new_address(), faults, 0, 0
            began = time.monotonic()
            train(address)
            took = time.monotonic() - began
            time.sleep(faults.late)
            for table in ("metrics", "histograms"):
                assert read_record(address, table).equals(read_record(folder, table), null_equal=True), (name, table)
            tensors = len(compare(folder, address).tensors)
            found[name] = {
                "requests": proxy.requests,
                "hit": proxy.hit,
                "seconds": round(took, 1),
                "tensors_compared": tensors,
            }
            print(name, found[name], flush=True)
    RESULT.write_text(json.dumps(found, indent=2) + "\n")


def train(run: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).bfloat16()
    monitor = Monitor(model, run, interval=1, table_rows=0, recipe="current")
    for step in range(3):
        with monitor.step(step) as report:
            loss = model(torch.ones(4, 8).bfloat16()).float().sum()
            loss.backward()
            report(loss=loss)
    monitor.close()


if __name__ == "__main__":
    main()
