"""Runs over hosts that fail: how long training is held up, which rank says so, and whether losses stay the same.

    python scripts/validation/network_faults.py --output results.json

Hosts are network namespaces (`network_hosts.py`), which takes root. Each rank trains a model of its own, so that training
itself waits for no other host. `--limit` is what the monitor promises, 60 s; a fault lasts longer.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from network_cases import CASES, broken
from network_run import run_case

from nemo_fp8_debug.distributed import patience
from nemo_fp8_debug.kernels import count_histogram


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON")
    parser.add_argument("--limit", type=float, default=patience.LONGEST, help="seconds that training waits at the most")
    parser.add_argument("--lasts", type=float, default=100.0, help="seconds that a fault lasts")
    parser.add_argument("--work", type=float, default=0.0, help="seconds that the monitor may work besides")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    given = parser.parse_args()
    patience.LONGEST = given.limit
    count_histogram(torch.zeros(1, dtype=torch.bfloat16))  # compiled once, and imported, for all ranks
    gc.freeze()
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "limit_s": given.limit,
        "lasts_s": given.lasts,
        "work_s": given.work,
    }
    found["cases"] = {}
    for name in given.cases:
        folder = Path(tempfile.mkdtemp())
        result = json.loads(json.dumps(run_case(CASES[name], given.lasts, folder)))
        shutil.rmtree(folder)
        found["cases"][name] = result
        given.output.write_text(json.dumps(found, indent=1) + "\n")
        print(
            name, *({k: r[k] for k in ("held_up_s", "waits", "warnings")} for r in result["ranks"]), sep="\n  ", flush=True
        )
    if wrong := broken(found):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
