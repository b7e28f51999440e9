"""Runs the README's main job, and keeps its records: `scripts/validation/main_job/train.py`.

It takes two minutes on two cores. Metrics, steps and fingerprints go to `records/`, and histograms of the run for which
the demo advises a change. The tests judge these records, and run the job itself for few steps.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RECORDS = Path(__file__).with_name("records")
RUNS = ("baseline", "learning_rate", "reference", "stuck_scale", "rescued")
_SCRIPTS = Path(__file__).parents[2]
_LEFT_OUT = {"stuck_scale": shutil.ignore_patterns("status.json")}
_USUALLY_LEFT_OUT = shutil.ignore_patterns("histograms", "status.json")


def main() -> None:
    path = os.pathsep.join(map(str, (_SCRIPTS.parent / "recipes", *filter(None, [os.environ.get("PYTHONPATH")]))))
    with tempfile.TemporaryDirectory() as folder:
        job = [sys.executable, "-W", "ignore", str(_SCRIPTS / "demo.py"), "--output", f"{folder}/runs"]
        subprocess.run(job, check=True, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        shutil.rmtree(RECORDS, ignore_errors=True)
        for name in RUNS:
            ignore = _LEFT_OUT.get(name, _USUALLY_LEFT_OUT)
            shutil.copytree(f"{folder}/runs/{name}/fp8_debug", RECORDS / name / "fp8_debug", ignore=ignore)


if __name__ == "__main__":
    main()
