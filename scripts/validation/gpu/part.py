"""The process of one part: `python -m gpu.part NAME FILE [--emulate]` writes what it found to FILE, piece by piece.

So a part that is ended leaves all that it had measured.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from .parts import PARTS
from .results import write


def main() -> int:
    name, file, *others = sys.argv[1:]
    part = next(part for part in PARTS if part.name == name)
    results: dict[str, Any] = {"measures": []}
    found: dict[str, Any] = {"results": results}
    try:
        for piece in importlib.import_module(f".{part.module}", __package__).run(part, bool(others)):
            add(results, piece)
            write(Path(file), json.dumps(found))
        found["status"] = "done"
    except Exception as error:  # whatever a framework or a driver raises
        traceback.print_exc()
        found |= {"status": "failed", "reason": (f"{type(error).__name__}: {error}".splitlines() or [""])[0]}
    write(Path(file), json.dumps(found))
    return int(found["status"] == "failed")


def add(results: dict[str, Any], piece: dict[str, Any]) -> None:
    """Lists go behind what is there under their name; anything else is put there."""
    for name, value in piece.items():
        results[name] = [*results.get(name, []), *value] if isinstance(value, list) else value


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # what a framework has open may keep the interpreter from ending: NCCL does
