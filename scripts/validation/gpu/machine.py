"""Where a call runs: what the interpreter has, the machine, and which sources."""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .parts import EMULATED_RECIPES, OWN, PARTS, TORCHAO_RECIPE, Part
from .results import Refused

ROOT = Path(__file__).parents[3]
#: modules whose name is not that of their distribution
MODULES = {"pyyaml": "yaml"}
#: where losses are compared those of two runs without the monitor have to be the same; elsewhere it would only slow steps
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
#: what is measured, and what measures it; tables are printed from the JSON
SOURCES = (
    "nemo_fp8_debug/**/*.py",
    *(f"scripts/validation/{name}.py" for name in ("gpu/*", "emulated_te/*", "cuda_simulator")),
    *(f"scripts/benchmarks/{name}.py" for name in ("common/paired", "common/step_costs", "device_to_host")),
)
NOT_MEASURED = ("scripts/validation/gpu/tables.py",)


@dataclass(frozen=True)
class Machine:
    """What `probe` found."""

    python: str
    emulate: bool
    found: dict[str, Any]

    @property
    def device(self) -> dict[str, Any] | None:
        """None without a CUDA device, and where kernels are emulated."""
        device: dict[str, Any] | None = self.found["device"]
        return device

    def lacking(self) -> dict[str, str]:
        """Modules that are not there, or cannot be imported, and why."""
        missing: dict[str, str] = dict.fromkeys(self.found["missing"], "is not there")
        return {**missing, **self.found["broken"]}

    def wanted(self, part: Part) -> set[str]:
        """Modules that a part needs."""
        return modules(part.needed(self.emulate))

    def lacks(self, part: Part) -> list[str]:
        """Of these, what is not there."""
        wanted = self.wanted(part)
        return [f"{name} ({why})" for name, why in self.lacking().items() if name in wanted]

    def cannot(self, recipe: str | None) -> tuple[str, str] | None:
        """The status of parts of a recipe that this device does not have, and why."""
        if recipe is None:
            return None
        if self.emulate:
            return None if recipe in EMULATED_RECIPES else ("not emulated", "there are no emulated kernels of block scaling")
        if recipe == TORCHAO_RECIPE and float((self.device or {}).get("capability", 0)) < 10:
            return "not on this device", "torchao's NVFP4 kernels need compute capability 10.0"
        supported, why = self.found["recipes"].get(recipe, (True, ""))
        return None if supported else ("not on this device", why)

    def about(self) -> dict[str, Any]:
        """The head of the JSON."""
        return {
            "emulated": self.emulate,
            "device": self.device,
            "sources": sources(),
            "versions": self.found["versions"],
            "machine": {
                "system": f"{platform.system()} {platform.machine()}",
                "processor": _processor(),
                "cores": os.cpu_count(),
            },
        }


def examine(python: str, emulate: bool) -> Machine:
    """Ask an interpreter what it has.

    Raises:
        Refused: it cannot be run.
    """
    wanted = modules(name for part in PARTS for name in part.needed(emulate))
    command = [python, "-W", "ignore", "-m", "gpu.probe", *sorted(wanted), *(["--emulate"] if emulate else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{python} cannot be run ({error}); name another interpreter with PYTHON or --python") from None
    try:
        return Machine(python, emulate, json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        told = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise Refused(f"{python} does not tell what it has ({told}); it has to be Python 3.10 or later") from None


def modules(needed: Iterable[str]) -> set[str]:
    """With those of the package's own requirements in place of it."""
    return {module for name in needed for module in (_requirements() if name == OWN else (name,))}


def _requirements() -> tuple[str, ...]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    names = (re.split(r"[^\w-]", line)[0] for line in config["options"]["install_requires"].split("\n") if line)
    return tuple(MODULES.get(name, name.replace("-", "_")) for name in names)


def commit() -> str | None:
    """Of the working copy, with a plus if something in it differs; None where it is no working copy."""
    found = _git("rev-parse", "HEAD") if _git("rev-parse", "--show-toplevel") == str(ROOT) else ""
    return f"{found[:12]}{'+' if _git('status', '--porcelain', '--untracked-files=no') else ''}" if found else None


def sources() -> str:
    """A digest of all that is measured and measures, so that results of other sources are told apart without git too."""
    found = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        if name not in NOT_MEASURED:
            found.update(f"{name}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def environment(machine: Machine, part: Part) -> dict[str, str]:
    """For the process of a part."""
    path = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *machine.found["path"]]
    values = {**os.environ, "PYTHONUNBUFFERED": "1", **(DETERMINISTIC if part.compares_losses else {})}
    if machine.emulate:
        path.append(str(ROOT / "recipes"))  # lets Megatron train on a CPU
        values |= {
            "NUMBA_ENABLE_CUDASIM": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        }
        values |= {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    return values


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.machine()
