"""Writes scripts/packages/locked from the lists beside it: `.venv/bin/python scripts/setup/lock.py`, about 3 minutes.

Packages come from where pip is configured to look, as in scripts/setup. No list names an index. Versions that are
locked stay, unless their line is taken out before. Packages are wheels, but for those that have none
(SOURCES), which uv checks while it resolves. aarch64 is tried in the end: the lists are the same.
"""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pip_config import PipConfig, read_pip_config

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "scripts" / "packages"
LOCKED = PACKAGES / "locked"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PLATFORM = "{}-manylinux_2_31"
#: sources, pure Python, for want of a wheel
SOURCES = ("antlr4-python3-runtime", "wget")
#: what setup.cfg asks for: uv would have to build the package to find it
REQUIREMENTS = "-"
UV = [Path(sys.executable).with_name("uv"), "pip"]
BUILDS = ["--only-binary", ":all:", *(part for name in SOURCES for part in ("--no-binary", name))]
#: a package of the list and its hashes
_ENTRY = re.compile(r"^([\w.-]+)==(\S+)( \\\n    --hash=\S+)+\n", re.MULTILINE)


def compile_list(config: PipConfig, output: Path, *arguments: str | Path) -> None:
    """Resolve into `output`, whose versions are kept where they can be."""
    command = [*UV, "compile", "-q", "--generate-hashes", "--no-header", "--no-annotate", *config.uv_arguments]
    environment = os.environ | config.environment
    command += ["-o", output, *arguments]
    subprocess.run([*map(str, command)], check=True, cwd=ROOT, env=environment, input=requirements(), text=True)


def requirements() -> str:
    """What the package itself asks for, one a line."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup["options"]["install_requires"].strip() + "\n"


def lock(config: PipConfig, python: str) -> None:
    """The lists of one Python: for the demo, for tests beyond it, and for PyPI's torch."""
    target = ["--python-version", python, "--python-platform", PLATFORM.format("x86_64")]
    steered = [*target, "--overrides", PACKAGES / "overrides.txt", "--no-emit-package", "torch"]
    steered += ["--excludes", PACKAGES / "excludes.txt", "--emit-build-options", *BUILDS, REQUIREMENTS]
    demo, tests, cuda = (LOCKED / f"{name}-{python}.txt" for name in ("demo", "tests", "torch-cuda"))
    compile_list(config, demo, *steered, "--excludes", PACKAGES / "demo-excludes.txt", PACKAGES / "demo.in")
    compile_list(config, tests, *steered, "-c", demo, PACKAGES / "demo.in", PACKAGES / "tests.in")
    compile_list(config, cuda, *target, *BUILDS, "--emit-build-options", "-c", demo, PACKAGES / "torch.in")
    names = {found[1] for found in _ENTRY.finditer(demo.read_text())}
    for beyond in (tests, cuda):
        beyond.write_text(_ENTRY.sub(lambda found: "" if found[1] in names else found[0], beyond.read_text()))


def has_wheels(config: PipConfig, output: Path, python: str, machine: str) -> str:
    """What uv says of a list on another machine; nothing, if it could be installed there."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*UV, "install", "--dry-run", "-q", "--no-deps", "--require-hashes", "--target", folder, *BUILDS]
        command += ["--python-version", python, "--python-platform", PLATFORM.format(machine), "-r", output]
        command += config.uv_arguments
        environment = os.environ | config.environment
        return subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment).stderr.strip()


def main() -> None:
    LOCKED.mkdir(exist_ok=True)
    config = read_pip_config()
    alone = ["--no-deps", "--python-version", "3.12"]
    for name in ("uv", "te", "bridge"):
        compile_list(config, LOCKED / f"{name}.txt", *alone, "--only-binary", ":all:", PACKAGES / f"{name}.in")
    compile_list(config, LOCKED / "deepspeed.txt", *alone, PACKAGES / "deepspeed.in")
    compile_list(config, LOCKED / "audit.txt", "--python-version", "3.13", "--only-binary", ":all:", PACKAGES / "audit.in")
    for python in PYTHONS:
        lock(config, python)
        for kind in ("demo", "tests"):
            said = has_wheels(config, LOCKED / f"{kind}-{python}.txt", python, "aarch64")
            print(f"{kind}-{python}: {said or 'aarch64 too'}", flush=True)


if __name__ == "__main__":
    main()
