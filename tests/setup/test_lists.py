"""The locked lists: complete, hashed, of wheels, and what is installed here."""

from __future__ import annotations

import configparser
import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "scripts" / "packages"
LOCKED = PACKAGES / "locked"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
ENTRY = re.compile(r"([\w.-]+)==([^ ]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")
#: what a Python has beyond 3.11's list, and lacks of it: backports, and what comes with nvidia-resiliency-ext
DIFFERENT = {
    ("demo", "3.10"): ({"async-timeout", "pytz", "six"}, {"lazy-importer"}),
    ("tests", "3.10"): ({"tomli"}, {"six"}),
    ("demo", "3.13"): ({"pyyaml-ft"}, {"nvidia-resiliency-ext", "defusedxml", "psutil", "pynvml"}),
    ("tests", "3.13"): ({"psutil"}, set()),
}
#: sources, for want of a wheel
SOURCES = {"antlr4-python3-runtime", "wget"}


def pins(name: str) -> dict[str, str]:
    """The versions in a list, all of whose lines are a pin with hashes, a comment or an option that asks for wheels."""
    text = (LOCKED / f"{name}.txt").read_text()
    rest = [line for line in ENTRY.sub("", text + "\n").splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in rest} <= {"--only-binary", "--no-binary"}, rest
    assert {line.split()[1] for line in rest} <= SOURCES | {":all:"}
    return {found[1]: found[2] for found in ENTRY.finditer(text + "\n")}


def asked_for(name: str, python: str) -> list[Requirement]:
    lines = [line.split("  #")[0].strip() for line in (PACKAGES / name).read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [one for one in found if not one.marker or one.marker.evaluate({"python_version": python})]


def test_every_list_is_read() -> None:
    expected = {f"{kind}-{python}.txt" for kind in ("demo", "tests", "torch-cuda") for python in PYTHONS}
    expected |= {f"{name}.txt" for name in ("uv", "te", "bridge", "deepspeed", "torch-cpu", "audit")}
    assert {path.name for path in LOCKED.iterdir()} == expected
    assert all(pins(name.removesuffix(".txt")) for name in expected)


@pytest.mark.parametrize("python", PYTHONS)
def test_lists_of_packages_ask_for_wheels(python: str) -> None:
    for kind in ("demo", "tests", "torch-cuda"):
        text = (LOCKED / f"{kind}-{python}.txt").read_text()
        assert "--only-binary :all:\n" in text
        assert set(re.findall("--no-binary (.*)", text)) <= SOURCES


@pytest.mark.parametrize("python", PYTHONS)
def test_a_list_has_all_that_is_asked_for_in_versions_that_are(python: str) -> None:
    demo, tests, cuda = (pins(f"{kind}-{python}") for kind in ("demo", "tests", "torch-cuda"))
    assert not demo.keys() & tests.keys() and not demo.keys() & cuda.keys()
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    own = [Requirement(line) for line in config["options"]["install_requires"].split("\n") if line]
    torch = {"torch": pins("torch-cpu")["torch"]}
    for one in (*own, *asked_for("demo.in", python)):
        assert one.specifier.contains((demo | torch)[canonicalize_name(one.name)]), one
    for one in asked_for("tests.in", python):
        assert one.specifier.contains((demo | tests)[canonicalize_name(one.name)]), one


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", ["demo", "tests"])
def test_lists_of_all_pythons_have_the_same_packages(kind: str, python: str) -> None:
    names, reference = pins(f"{kind}-{python}").keys(), pins(f"{kind}-3.11").keys()
    assert (names - reference, reference - names) == DIFFERENT.get((kind, python), (set(), set()))


def test_torch_is_one_release_in_all_its_builds() -> None:
    hashes = {found[1]: found[3].count("--hash") for found in ENTRY.finditer((LOCKED / "torch-cpu.txt").read_text() + "\n")}
    assert hashes == {"torch": 9}  # x86_64 and aarch64 of four Pythons, and one more
    versions = {pins("torch-cpu")["torch"], *(pins(f"torch-cuda-{python}")["torch"] for python in PYTHONS)}
    assert versions == {"2.13.0+cpu", "2.13.0"}
    assert {Version(version).public for version in versions} == {"2.13.0"}
    assert all("nvidia-cublas" in pins(f"torch-cuda-{python}") for python in PYTHONS)


def test_what_is_installed_is_what_is_locked() -> None:
    python = "{}.{}".format(*sys.version_info)
    expected = pins("uv") | pins(f"demo-{python}") | pins(f"tests-{python}") | pins("deepspeed")
    found = metadata.distributions(path=[sysconfig.get_path("purelib")])  # without what setuptools brings for itself
    installed = {canonicalize_name(one.metadata["Name"]): one.version for one in found}
    assert {name: installed.get(canonicalize_name(name)) for name in expected} == expected
