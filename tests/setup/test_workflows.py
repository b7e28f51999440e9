"""The workflow files, as GitHub's schema and zizmor see them; and that they run what a contributor runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml
from processes import finished

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return finished(Path(sys.executable).with_name(program), *arguments)


def test_they_are_as_github_wants_them() -> None:
    done = _run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    assert done.returncode == 0, done.stdout


def test_they_are_safe() -> None:
    done = _run("zizmor", "--offline", "--pedantic", *WORKFLOWS)
    assert done.returncode == 0, done.stdout


def test_a_workflow_that_is_not_is_found(tmp_path: Path) -> None:
    path = tmp_path / "bad.yml"
    path.write_text(re.sub(r"checkout@\w+", "checkout@v6", WORKFLOWS[0].read_text()))
    assert "unpinned-uses" in _run("zizmor", "--offline", path).stdout
    path.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert _run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", path).returncode


def test_they_call_scripts_of_this_repository_on_each_python() -> None:
    jobs = {name: job for path in WORKFLOWS for name, job in yaml.safe_load(path.read_text())["jobs"].items()}
    called = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    commands = {
        "scripts/lint.sh",
        "scripts/test.sh",
        "scripts/test.sh --long -m long",
        "scripts/demo.sh",
        "scripts/audit.sh",
    }
    assert called == commands
    assert all((ROOT / command.split()[0]).stat().st_mode & 0o100 for command in called)
    assert jobs["tests"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
