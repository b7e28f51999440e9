"""Runs that end without closing their monitors, each in another way: `unclosed.py FOLDER`, in which each gets one."""

from __future__ import annotations

import json
import sys

import torch
from processes import in_turn

from nemo_fp8_debug import Monitor

ENDS = {"fall off": 0, "exit": 3, "raise": 1}
#: until the process ends, as the variables of a script
HELD: list[Monitor] = []


def train(end: str) -> None:
    model = torch.nn.Linear(4, 4)
    monitor = Monitor(model, f"{sys.argv[1]}/{end}", interval=5, table_rows=0)
    HELD.append(monitor)
    for step in range(8):
        with monitor.step(step) as report:
            loss = model(torch.randn(2, 4)).sum()
            loss.backward()
            report(loss=loss)
    if end == "exit":
        sys.exit(3)
    if end == "raise":
        raise RuntimeError("the training failed")


if __name__ == "__main__":
    print(json.dumps(in_turn(train, ENDS)))
