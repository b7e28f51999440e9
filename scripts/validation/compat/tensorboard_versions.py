"""Opens the FP8 tab under every version of TensorBoard that it is for, each installed apart, in a headless Chromium.

.venv/bin/python scripts/validation/compat/tensorboard_versions.py [2.14.0 2.21.0 ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import browser
from benchmarks.tensorboard_tab import write

VERSIONS = ("2.14.0", "2.15.1", "2.16.2", "2.17.1", "2.18.0", "2.19.0", "2.20.0", "2.21.0")
#: pkg_resources and names of numpy that some versions still use
OLD = ("setuptools<81", "numpy<2")


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch) / "runs"
        for seed, name in enumerate(("baseline", "bad")):
            write(runs / name, 24, 100, seed, harmed=name == "bad")
        for version in sys.argv[1:] or VERSIONS:
            try:
                said = opened(version, Path(scratch) / version, runs)
            except Exception as error:  # whatever a version fails by is its line of the table
                failed, said = failed + 1, f"FAILED: {str(error).splitlines()[0]}"
            print(f"tensorboard {version:8} {said}", flush=True)
    return failed


def opened(version: str, target: Path, runs: Path) -> str:
    """What the map of the run says is worst."""
    wanted = [f"tensorboard=={version}", *OLD]
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", target, *wanted]
    subprocess.run(command, check=True, capture_output=True)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(target), before)))
    try:
        with browser.tensorboard("--logdir", runs) as address, browser.chromium() as chromium:
            page = browser.open_tab(chromium, address, run="bad", baseline="baseline")
            faults: list[str] = []
            page.on("pageerror", lambda error: faults.append(str(error)))
            worst = page.frame_locator("iframe").locator("[data-panel=difference]")
            worst.wait_for()
            found = worst.get_attribute("data-layer")
            if faults or found != "decoder.layers.0.mlp.linear_fc2":
                raise RuntimeError(f"{faults or found}")
            return f"the tab shows {found} as the worst"
    finally:
        os.environ["PYTHONPATH"] = before


if __name__ == "__main__":
    sys.exit(main())
