"""The process of one part: `python -m gpu.part NAME FILE [--emulate]` writes what it found to FILE."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from .parts import PARTS


def main() -> int:
    name, file, *others = sys.argv[1:]
    part = next(part for part in PARTS if part.name == name)
    found: dict[str, Any]
    try:
        found = {
            "status": "done",
            "results": importlib.import_module(f".{part.module}", __package__).run(part, bool(others)),
        }
    except Exception as error:  # whatever a framework or a driver raises
        traceback.print_exc()
        found = {"status": "failed", "reason": (f"{type(error).__name__}: {error}".splitlines() or [""])[0]}
    Path(file).write_text(json.dumps(found))
    return int(found["status"] == "failed")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # what a framework has open may keep the interpreter from ending: NCCL does
