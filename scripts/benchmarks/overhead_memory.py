"""Print the small GPT's peak memory in MiB, before its first step and at the end: `overhead_memory.py none|monitor`.

The output is JSON for overhead.py. With `monitor`, a monitor samples every tenth step. With `none`, no module of the package
is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile

from benchmarks.common.paired import peak_memory as peak
from benchmarks.common.small_gpt import SmallGPT, one_process

STEPS, INTERVAL = 60, 10


def main(kind: str) -> dict[str, float]:
    gpt = SmallGPT()
    if kind == "none":
        before = peak()
        for _ in range(STEPS):
            gpt.step()
        return {"before": before, "peak": peak()}
    from nemo_fp8_debug import Monitor

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Monitor(gpt.model, folder, interval=INTERVAL)) as monitor,
    ):
        before = peak()
        for number in range(STEPS):
            with monitor.step(number) as report:
                report(loss=gpt.step())
    return {"before": before, "peak": peak()}


if __name__ == "__main__":
    with one_process():
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            found = main(sys.argv[1])
        print(json.dumps(found))
