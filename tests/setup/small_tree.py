"""A copy of this repository whose locked lists are small: setup runs in it for real, in seconds, from a folder of wheels."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

from processes import finished

ROOT = Path(__file__).parents[2]
VERSION = "{}.{}".format(*sys.version_info)
_TAG = "cp{}{}".format(*sys.version_info)
#: builds when it is told to, and says that it has begun
_SLOW_BACKEND = """
import os, pathlib, time, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    pathlib.Path(os.environ["SLOW_FOLDER"], "begun").touch()
    while not pathlib.Path(os.environ["SLOW_FOLDER"], "go").exists():
        time.sleep(0.02)
    name = "slow-1.0-py3-none-any.whl"
    info = "slow-1.0.dist-info/"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as wheel:
        wheel.writestr("slow.py", "")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: slow\\nVersion: 1.0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "".join(f"{file},,\\n" for file in wheel.namelist()))
    return name
"""


def copy_tree(folder: Path) -> Path:
    """The files that setup reads, without packages and lists."""
    tree = folder / "tree"
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        tree.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree)
    shutil.copytree(
        ROOT / "nemo_fp8_debug", tree / "nemo_fp8_debug", ignore=shutil.ignore_patterns("node_modules", "__pycache__")
    )
    (tree / "scripts" / "packages" / "locked").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", tree / "scripts")
    shutil.copytree(ROOT / "scripts" / "setup", tree / "scripts" / "setup", ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def small_lists(tree: Path, wheels: Path) -> None:
    """Lists of packages that `wheels` then has: pip, setuptools, uv as installed here; small ones for torch and the rest."""
    wheels.mkdir()
    locked = tree / "scripts" / "packages" / "locked"
    setup_tools = [_installed(name, wheels) for name in ("pip", "setuptools", "uv")]
    (locked / "uv.txt").write_text("".join(map(_pin, setup_tools)))
    torch = _wheel(wheels, "torch", "2.13.0+cpu", f"{_TAG}-{_TAG}-manylinux_2_28_{os.uname().machine}")
    (locked / "torch-cpu.txt").write_text(_pin(torch))
    (locked / f"torch-cuda-{VERSION}.txt").write_text("")
    (locked / f"demo-{VERSION}.txt").write_text(_pin(_slow_source(wheels)))


def run_setup(tree: Path, *before: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/setup.sh, behind a command such as `unshare`."""
    return finished(*before, "scripts/setup.sh", cwd=tree, env=clean_environment(**environment))


def clean_environment(**values: str) -> dict[str, str]:
    """This one without settings of pip's, uv's and Python's, so that only `values` decide."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "PYTHON", "VIRTUAL_ENV"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PYTHON": getattr(sys, "_base_executable", sys.executable)} | values


def _installed(name: str, wheels: Path) -> Path:
    """A wheel of an installed package."""
    package = metadata.distribution(name)
    tag = next(line.split()[1] for line in (package.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:"))
    path = wheels / f"{name}-{package.version}-{tag}.whl"
    scripts = f"{name}-{package.version}.data/scripts/"
    record = io.StringIO()
    with zipfile.ZipFile(path, "w") as wheel:
        for file in package.files or ():
            inside = scripts + file.name if ".." in file.parts else str(file)
            if file.suffix == ".pyc" or file.name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
                continue
            wheel.write(str(file.locate()), inside)  # as it is, executables too
            record.write(f"{inside},,\n")
        wheel.writestr(f"{name}-{package.version}.dist-info/RECORD", record.getvalue())
    return path


def _wheel(wheels: Path, name: str, version: str, tag: str) -> Path:
    path = wheels / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info/"
    files = {
        f"{name}.py": "",
        info + "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        info + "WHEEL": f"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
        record = [f"{file},sha256={_short_hash(text)},{len(text)}\n" for file, text in files.items()]
        wheel.writestr(info + "RECORD", "".join(record) + f"{info}RECORD,,\n")
    return path


def _short_hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def _slow_source(wheels: Path) -> Path:
    """A source whose build waits until it is told to go on."""
    path = wheels / "slow-1.0.tar.gz"
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "slow"\nversion = "1.0"\n',
        "backend.py": _SLOW_BACKEND,
    }
    with tarfile.open(path, "w:gz") as source:
        for file, text in files.items():
            entry = tarfile.TarInfo(f"slow-1.0/{file}")
            entry.size = len(text)
            source.addfile(entry, io.BytesIO(text.encode()))
    return path


def _pin(path: Path) -> str:
    name, version = path.name.removesuffix(".tar.gz").split("-")[:2]
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
