"""Runs tests with the oldest releases that setup.cfg allows; prints what came of it.

    .venv/bin/python scripts/validation/compat/oldest_requirements.py        # about 4 minutes
    .venv/bin/python scripts/validation/compat/oldest_requirements.py tests/cli

They go into a folder in front of the environment's packages, without dependencies. torch, lightning and NumPy stay the
environment's: version_matrix.py tries others of the first two, and what is compiled here is compiled for this NumPy.
"""

from __future__ import annotations

import argparse
import configparser
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from compat.version_matrix import REPOSITORY, SEARCHED, NotTried, install

KEPT = ("torch", "lightning", "numpy")
#: what a release of that age needs besides, and the environment's releases do not
BESIDE = {
    "numba": ("llvmlite==0.42.0",),
    "rich": ("commonmark",),
    "tensorboard": ("google-auth", "google-auth-oauthlib", "requests-oauthlib", "oauthlib"),
    "typer": ("click<8.2",),
}
#: of what reads, writes, counts, shows and prints; others need later releases for the tests themselves
TESTS = (
    *(f"tests/record/test_{name}.py" for name in ("alike", "dump", "recording", "scan", "store", "table", "tensorboard")),
    *(f"tests/tensorboard_plugin/test_{name}.py" for name in ("routes", "server", "story_card", "tables")),
    *("tests/cli", "tests/kernels", "tests/numerics/test_metrics.py", "tests/analysis/test_compare.py"),
)


def oldest() -> list[str]:
    """Requirements with the least release that each allows."""
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    lines = [line for line in config["options"]["install_requires"].split("\n") if line]
    bounds = [tuple(part.strip() for part in line.partition(",")[0].split(">=")) for line in lines]
    return [f"{name}=={least}" for name, least in bounds if name not in KEPT]


def main() -> int:
    """0: all tests pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=TESTS)
    chosen = parser.parse_args().tests
    requirements = oldest()
    print(", ".join(requirements), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            install([*requirements, *(name for beside in BESIDE.values() for name in beside)], Path(folder))
        except NotTried as error:
            print(f"not tried: {error}")
            return 1
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *chosen]
        path = os.pathsep.join(map(str, [folder, *SEARCHED]))
        return subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, cwd=REPOSITORY
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
