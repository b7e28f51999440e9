"""The process of a job: one request from stdin, and lines of JSON to stdout, the last of them the answer.

It writes what it knows so far before, and ends when stdin is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import joblib

from ...analysis.formatting import jsonable
from ...core.threads import run_in_background
from ...errors import ConfigError, RecordError

if TYPE_CHECKING:
    from .analyses import Tell

#: by how much the process gives way to others, TensorBoard's own above all
_NICE = 5


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.readline())
    run_in_background("fp8-parent", _end_with_the_parent)
    os.nice(_NICE)
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not part of the answer
    with os.fdopen(out, "w") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()

        write(answer_request(request, lambda partial: write({"state": "working", "partial": jsonable(partial)})))


def answer_request(request: dict[str, Any], tell: Tell = lambda partial: None) -> dict[str, Any]:
    """Return what a request comes to, as the browser gets it.

    Args:
        tell: called with what is known so far.
    """
    try:
        # For so little, others take longer to start, and one process was promised.
        with joblib.parallel_config("sequential"):
            return {"state": "done", "result": jsonable(_compute(request.pop("kind"), request, tell))}
    except (ConfigError, RecordError) as error:
        return {"state": "failed", "error": str(error)}
    except MemoryError:
        return {"state": "failed", "error": "It takes more memory than there is; run `nemo-fp8-debug` on a larger machine."}
    except Exception as error:  # of a record that no check has found out
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return {"state": "failed", "error": f"It could not be computed ({told})."}


def _compute(kind: str, request: dict[str, Any], tell: Tell) -> Any:
    """Compute what a kind of job is about."""
    # Imported when asked for: it takes as long as some jobs.
    from .analyses import judge_headline, judge_run, try_recipe

    if kind == "verdict":
        return judge_run(**request, tell=tell)
    if kind == "headline":
        del request["version"]  # it tells jobs of a record that grows apart
        return judge_headline(**request)
    return try_recipe(**request)


def _end_with_the_parent() -> None:
    while os.read(0, 1):  # sys.stdin could not be closed at exit while it is read
        pass
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)  # and what this process started
    os._exit(1)
