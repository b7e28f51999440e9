"""Tries the package with each supported minor release of what it attaches to; prints a Markdown table.

    .venv/bin/python scripts/validation/compat/version_matrix.py                          # everything, about 8 minutes
    .venv/bin/python scripts/validation/compat/version_matrix.py --only lightning torch

Each release goes into a folder of its own in front of the environment's packages, without dependencies. A process of its own
then trains a small model twice from the same seeds, with and without the package attached. *ok* means that the losses of the
two are bit-identical, and that every metric equals that of the environment's own releases: counts and names exactly, others
to 1e-12. Of Transformer Engine, which needs a GPU to run, the sources are read.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compat import probes
from compat.probes import PROBES, Metrics
from compat.te_sources import missing_names, unknown_attributes, wrong_layouts

REPOSITORY = Path(__file__).resolve().parents[3]
SEARCHED = [REPOSITORY / folder for folder in (".", "recipes", "scripts/validation")]
TOLERANCE = 1e-12
#: an install or a probe that takes longer has failed
TIMEOUT_S = 240


@dataclass(frozen=True)
class Case:
    """A release of a package to try."""

    package: str
    version: str
    #: what has to be of the same age, or is missing in the environment
    beside: tuple[str, ...] = ()


MEGATRON = ("0.10.0", "0.11.0", "0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1")
#: up to 2.3 it imports pkg_resources, which setuptools had until 81
LIGHTNING = (
    *(Case("lightning", version, ("setuptools<81",)) for version in ("2.1.4", "2.2.5", "2.3.3")),
    *(Case("lightning", version) for version in ("2.4.0", "2.5.6", "2.6.6")),
)
TORCH = ("2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0")
TRANSFORMER_ENGINE = ("1.13.0", "2.4.0", "2.8.0", "2.14.0", "2.20.2")
#: the release whose kernels scripts/validation/emulated_te emulates
EMULATED = "2.20.2"
#: what NeMo's language models import up to 2.4, by way of its older text models, and 2.5 does without
OLD_NEMO: tuple[str, ...] = (
    *("braceexpand", "webdataset", "h5py", "ijson", "jieba", "opencc", "pangu<5", "nltk", "rouge_score"),
    *("sacrebleu", "portalocker", "colorama", "lxml", "scikit-learn", "threadpoolctl", "narwhals"),
    *("matplotlib", "pyparsing", "cycler", "kiwisolver", "fonttools"),
)
#: with the megatron-core of its time
NEMO = (
    Case("nemo-toolkit", "2.2.1", ("megatron-core==0.11.0", *OLD_NEMO, "zarr<3", "numcodecs<0.16", "asciitree")),
    Case("nemo-toolkit", "2.3.3", ("megatron-core==0.12.3", *OLD_NEMO)),
    Case("nemo-toolkit", "2.4.1", ("megatron-core==0.13.1", *OLD_NEMO)),
    Case("nemo-toolkit", "2.5.3", ("megatron-core==0.13.1",)),
    Case("nemo-toolkit", "2.6.2"),
    Case("nemo-toolkit", "2.7.3"),
)


def cases() -> list[Case]:
    """All rows of the table, in order."""

    def plain(package: str, versions: Sequence[str]) -> list[Case]:
        return [Case(package, version) for version in versions]

    megatron, torch, te = ("megatron-core", MEGATRON), ("torch", TORCH), ("transformer-engine", TRANSFORMER_ENGINE)
    return [*plain(*megatron), *LIGHTNING, *NEMO, *plain(*torch), *plain(*te)]


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


def row(case: Case, references: Mapping[str, Any]) -> str:
    """A line of the table; whatever goes wrong stands in it."""
    try:
        if case.package == "transformer-engine":
            result = try_transformer_engine(case)
        else:
            reference = references[case.package]
            if isinstance(reference, Failed):
                raise Failed(f"no reference: {reference}")
            result = try_release(case, reference)
    except NotTried as error:
        result = f"not tried: {error}"
    except Failed as error:
        result = f"failed: {error}"
    pinned = [requirement for requirement in case.beside if "==" in requirement]
    beside = f" (with {', '.join(pinned).replace('==', ' ')})" if pinned else ""
    print(f"{case.package} {case.version}: {result}", file=sys.stderr, flush=True)
    return f"| {case.package} | {case.version} | {result.replace('|', ', ')}{beside} |"


def reference_of(package: str) -> dict[str, Any] | Failed:
    """What the environment's own release measures, or why there is nothing."""
    try:
        return measure(package)
    except Failed as error:
        return error


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packages = list(dict.fromkeys(case.package for case in cases()))
    parser.add_argument("--only", nargs="+", choices=packages, default=packages)
    parser.add_argument("--jobs", type=int, default=2, help="releases that are tried at a time")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        probed = [package for package in arguments.only if package in PROBES]
        references = dict(zip(probed, pool.map(reference_of, probed), strict=True))
        wanted = [case for case in cases() if case.package in arguments.only]
        lines = list(pool.map(lambda case: row(case, references), wanted))
    print("| package | release | result |", "|---|---|---|", *lines, sep="\n")


if __name__ == "__main__":
    main()
