"""The process of a job: reads a request from stdin, writes what it knows so far and its answer to stdout, a line of JSON
each, and ends when stdin is closed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import joblib

from ...errors import ConfigError, RecordError
from ..web.json_values import plain
from .telling import Tell, to_nobody

#: by how much the process gives way to others, TensorBoard's own above all
_NICE = 5


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.nice(_NICE)
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not part of the answer
    with os.fdopen(out, "w") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()

        write(answered(request, lambda partial: write({"state": "working", "partial": plain(partial)})))


def answered(request: dict[str, Any], tell: Tell = to_nobody) -> dict[str, Any]:
    """What a request comes to, as the browser gets it.

    Args:
        tell: called with what is known so far.
    """
    try:
        with joblib.parallel_config(
            "sequential"
        ):  # for so little, others take longer to start, and one process was promised
            return {"state": "done", "result": plain(_JOBS[request.pop("kind")](request, tell))}
    except (ConfigError, RecordError) as error:
        return {"state": "failed", "error": str(error)}
    except MemoryError:
        return {"state": "failed", "error": "It takes more memory than there is; run `nemo-fp8-debug` on a larger machine."}
    except Exception as error:  # of a record that no check has found out
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return {"state": "failed", "error": f"It could not be computed ({told})."}


def _verdict(request: dict[str, Any], tell: Tell) -> Any:
    from .verdict import verdict

    return verdict(**request, tell=tell)


def _what_if(request: dict[str, Any], tell: Tell) -> Any:
    from .what_if import what_if

    return what_if(**request)


def _headline(request: dict[str, Any], tell: Tell) -> Any:
    from .verdict import headline

    del request["version"]  # it tells jobs of a record that grows apart
    return headline(**request)


#: imported when asked for: what a job does not need takes longer to import than the job takes
_JOBS: dict[str, Callable[[dict[str, Any], Tell], Any]] = {"verdict": _verdict, "headline": _headline, "what_if": _what_if}


def _end_with_the_parent() -> None:
    while os.read(0, 1):  # sys.stdin could not be closed at exit while it is read
        pass
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)  # and what this process started
    os._exit(1)
