"""Makes .venv, piece by piece: only those that are missing, and only if nothing stands in their way."""

from __future__ import annotations

import argparse
import fcntl
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from checks import CannotStart, check, find_torch
from pieces import SETS, Piece, Workshop
from pip_config import read_pip_config
from processes import Failed, Processes
from schedule import make_pieces


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/setup.sh", description=__doc__)
    parser.add_argument("set", nargs="?", choices=sorted(SETS), default="demo", help="what to install (demo)")
    wanted = SETS[parser.parse_args().set]
    if not missing_of(wanted):
        return 0
    # One at a time. What a killed setup has left running holds the lock until it ends.
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = missing_of(wanted)
        return make(missing, Processes(lock.fileno())) if missing else 0


def missing_of(wanted: Sequence[Piece]) -> list[Piece]:
    """What is not there, in order; all of it if the venv that holds it has to be made anew."""
    missing = [piece for piece in wanted if piece.is_missing()]
    return list(wanted) if wanted[0] in missing else missing


def make(missing: list[Piece], processes: Processes) -> int:
    """Make what is missing; the exit status."""
    try:
        config = read_pip_config()
        torch = find_torch(missing, config)
        megabytes = check(missing, config, torch)
    except CannotStart as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    print(f"Installing {', '.join(p.name for p in missing)} into .venv (up to {megabytes / 1000:.1f} GB) ...", flush=True)
    if torch and torch.remark:
        print(torch.remark, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    try:
        make_pieces(missing, Workshop(processes, config, torch))
    except Failed as error:
        print(f"setup: {error}\nsetup: the next call goes on from here", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        processes.kill()
    print(f"Installed in {time.monotonic() - began:.0f} s.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
