"""Installs a release beside the environment's packages, tries it in a process of its own, and says what came of it."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compat import probes
from compat.probes import Metrics
from compat.releases import EMULATED, Case
from compat.te_sources import missing_names, unknown_attributes, wrong_layouts

REPOSITORY = Path(__file__).resolve().parents[3]
SEARCHED = [REPOSITORY / folder for folder in (".", "recipes", "scripts/validation")]
TOLERANCE = 1e-12
#: an install or a probe that takes longer has failed
TIMEOUT_S = 240


class NotTried(Exception):
    """A release cannot be had here; says why."""


class Failed(Exception):
    """A release was tried; says what failed."""


def pip(*arguments: str) -> str:
    """Run pip; returns what it printed.

    Raises:
        NotTried: with pip's own last words.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NotTried(f"pip took more than {TIMEOUT_S} s") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotTried((errors or done.stderr.splitlines() or ["pip failed"])[-1][:120])
    return done.stdout


def install(requirements: Sequence[str], folder: Path) -> None:
    """Put releases into a folder, without what they depend on."""
    # Without isolation a source distribution is built with what the environment has, which is quicker.
    pip("install", "-q", "--no-deps", "--no-build-isolation", "--target", str(folder), *requirements)


def measure(package: str, in_front: Sequence[Path] = ()) -> dict[str, Any]:
    """Run a probe in a process of its own.

    Raises:
        Failed: with the last line of its error.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-W", "ignore", probes.__file__, package, str(answer)]
        done = run(command, in_front)
        if done.returncode:
            raise Failed((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:160])
        result: dict[str, Any] = json.loads(answer.read_text())
        return result


def run(command: Sequence[str], in_front: Sequence[Path], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a process that looks for packages in these folders first, and then in the repository's own.

    Raises:
        Failed: it takes too long.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"} | variables
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*in_front, *SEARCHED]))
    try:
        return subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"no answer after {TIMEOUT_S} s") from error


def differences(found: Metrics, expected: Metrics) -> list[str]:
    """Which metrics differ, as "step|layer|role column"."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    pairs = ((key, name) for key, row in expected.items() for name in row)
    return [f"{key} {name}" for key, name in pairs if not _same(found[key].get(name), expected[key][name])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=TOLERANCE)
    return bool(a == b)


def try_release(case: Case, reference: Mapping[str, Any]) -> str:
    """Attach, sample and compare; returns the cell of the table."""
    with tempfile.TemporaryDirectory() as folder:
        in_front = []
        if importlib.metadata.version(case.package).partition("+")[0] != case.version:
            if case.package == "torch":
                require_cpu_build(case)
            install([f"{case.package}=={case.version}", *case.beside], Path(folder))
            in_front = [Path(folder)]
        return compare(case, measure(case.package, in_front), reference)


def compare(case: Case, found: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """The cell of the table for what a probe found.

    Raises:
        Failed: it is not what it should be.
    """
    losses, watched, metrics = found["losses"], found["losses_watched"], found["metrics"]
    if found["version"] != case.version:
        raise Failed(f"{found['version']} was imported")
    if not losses or losses != watched:  # bit-identical: JSON keeps every digit
        raise Failed(f"losses differ with the package attached: {losses}, {watched}")
    if not metrics:
        raise Failed("nothing was sampled")
    if differ := differences(metrics, reference["metrics"]):
        same_loss = "equal" if watched == reference["losses_watched"] else "differ too"
        raise Failed(f"{len(differ)} metrics differ from the reference (losses {same_loss}), first: {differ[0]}")
    return f"ok: {len(losses)} steps, {len(metrics)} operands"


def require_cpu_build(case: Case) -> None:
    """
    Raises:
        NotTried: the index has a CUDA build only, which needs gigabytes beside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        arguments = ["--ignore-installed", "--no-deps", "--dry-run", "--quiet", "--report", str(report)]
        pip("install", *arguments, f"{case.package}=={case.version}")
        metadata = json.loads(report.read_text())["install"][0]["metadata"]
    if cuda := [r for r in metadata.get("requires_dist", ()) if r.startswith(("nvidia-", "cuda-"))]:
        raise NotTried(f"the index has a CUDA build only, which asks for {len(cuda)} CUDA packages")


def try_transformer_engine(case: Case) -> str:
    """Check by name what the host reads and what its quantizers have, and all of it where the kernels are emulated."""
    with tempfile.TemporaryDirectory() as folder:
        install([f"{case.package}=={case.version}"], Path(folder))
        root = Path(folder) / "transformer_engine"
        if problems := [*missing_names(root), *wrong_layouts(root)]:
            raise Failed("; ".join(problems))
        quantizers = unknown_attributes(root)
        strange = [f"{owner}.{name}" for owner, names in quantizers.items() for name in names]
        found = f"attributes present, {len(quantizers) or 'no'} classes of quantizers known"
        found += f" but {', '.join(strange)}, whose casts are 'unknown'" if strange else ""
        if case.version != EMULATED:
            return f"{found}; not run"
        return f"ok: {found}, {run_over_emulated_kernels(Path(folder))}"


def run_over_emulated_kernels(folder: Path) -> str:
    """The tests of the host, which compare every scale and code, on this release's Python.

    Raises:
        Failed: with pytest's closing line.
    """
    tests = str(REPOSITORY / "tests/te/inside/test_host.py")
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    done = run(command, [folder], INSIDE_EMULATED_TE="1")
    last = (done.stdout.strip().splitlines() or ["no answer"])[-1]
    if done.returncode:
        raise Failed(f"over emulated kernels: {last}")
    return f"every scale and code over emulated kernels equal ({last.partition(' in ')[0]})"
