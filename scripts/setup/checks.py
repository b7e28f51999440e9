"""What must be there before anything is written: a platform, space on the disk, packages."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pieces import LOCKED, ROOT, Piece
from pip_config import PipConfig, bundled_pip

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: seconds in which an index must answer, if pip waits no shorter
PATIENCE = 10.0
#: of the wheels that are installed: manylinux_2_31
GLIBC = (2, 31)
#: what PyPI's torch takes more than a CPU build, with its CUDA packages
CUDA_MEGABYTES = 3900


class CannotStart(Exception):
    """What is missing, in one line."""


@dataclass(frozen=True)
class Torch:
    """Which build of torch to install, and from which index, if not from pip's."""

    requirements: Path
    index: str | None = None
    megabytes: int = 0
    remark: str = ""


def find_torch(missing: Sequence[Piece], config: PipConfig) -> Torch | None:
    """A CPU build of torch from where pip would look, or the official one, or PyPI's with CUDA; None if none is needed.

    Raises:
        CannotStart: packages are missing and the index cannot be reached.
    """
    if not any(piece.uses_network for piece in missing):
        return None
    pages = [_page(f"{index}/torch/", config) for index in config.indexes]
    if not any(piece.name == "torch" for piece in missing):
        return None
    requirements = LOCKED / "torch-cpu.txt"
    if any(_has_cpu_wheel(text) for text in (*pages, *(_listing(place, config) for place in config.find_links))):
        return Torch(requirements)
    try:
        if _has_cpu_wheel(_page(f"{CPU_INDEX}/torch/", config)):
            return Torch(requirements, CPU_INDEX)
    except CannotStart:
        pass
    version = "{}.{}".format(*sys.version_info)
    remark = f"No CPU build of torch can be had ({CPU_INDEX}): PyPI's, with CUDA, takes {CUDA_MEGABYTES / 1000:.1f} GB more."
    return Torch(LOCKED / f"torch-cuda-{version}.txt", megabytes=CUDA_MEGABYTES, remark=remark)


def check(missing: Sequence[Piece], config: PipConfig, torch: Torch | None) -> int:
    """The megabytes that will be written.

    Raises:
        CannotStart: something is missing.
    """
    machine = platform.machine()
    library, version = platform.libc_ver()
    if machine not in ("x86_64", "aarch64"):
        raise CannotStart(f"x86_64 or aarch64 is needed, and this is {machine}: most packages have no wheel for it.")
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < GLIBC:
        raise CannotStart(
            f"glibc {'.'.join(map(str, GLIBC))} or later is needed, and this is {library or 'musl'} {version}."
        )
    if importlib.util.find_spec("venv") is None or not bundled_pip():
        package = "python{}.{}-venv".format(*sys.version_info)
        raise CannotStart(f"Python's venv module is needed: on Debian and Ubuntu, apt-get install {package}.")
    if not os.access(ROOT, os.W_OK):
        raise CannotStart(f"{ROOT} cannot be written to.")
    megabytes = sum(piece.megabytes for piece in missing) + (torch.megabytes if torch else 0)
    for place in {_device(folder): folder for folder in (ROOT, _uv_cache())}.values():
        free = shutil.disk_usage(place).free // 10**6
        if free < megabytes:
            raise CannotStart(f"{megabytes / 1000:.1f} GB of free disk is needed, and {place} has {free / 1000:.1f} GB.")
    return megabytes


def _page(url: str, config: PipConfig) -> str:
    """A page of an index, empty if the index answers that it has none."""
    timeout = min(PATIENCE, config.timeout)
    answers: list[str | OSError] = []

    def read() -> None:
        try:
            answers.append(config.open(url, timeout))
        except urllib.error.HTTPError:
            answers.append("")  # it answers: whether it wants a password is between it and pip
        except (OSError, ValueError) as error:
            # A folder in place of an index has no page for what it has not.
            answers.append("" if url.startswith("file:") else OSError(*error.args))

    # In a thread, since looking up a name has no time limit of its own.
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(timeout + 1)
    answer = answers[0] if answers else OSError("no answer")
    if isinstance(answer, OSError):
        host = re.sub(r"//[^/@]*@", "//", url).removesuffix("/torch/")
        raise CannotStart(
            f"the network is needed, and {host} cannot be reached ({_reason(answer)}). pip config names another index."
        )
    return answer


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", error) or error)


def _listing(place: str, config: PipConfig) -> str:
    """What a folder or page of pip's find-links has."""
    path = Path(place.removeprefix("file://")).expanduser()
    if path.is_dir():
        return "\n".join(os.listdir(path))
    try:
        return path.read_text() if path.is_file() else _page(place, config)
    except CannotStart:
        return ""


def _has_cpu_wheel(text: str) -> bool:
    tag = "cp{}{}".format(*sys.version_info)
    return bool(re.search(rf"torch-2\.13\.0(\+|%2B)cpu-{tag}-{tag}-manylinux\w*_{platform.machine()}\.whl", text))


def _uv_cache() -> Path:
    """The folder in which uv keeps what it downloads, or that which it would be made in."""
    cache = os.environ.get("UV_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uv"
    return next(folder for folder in (Path(cache).absolute(), *Path(cache).absolute().parents) if folder.exists())


def _device(folder: Path) -> int:
    return folder.stat().st_dev
