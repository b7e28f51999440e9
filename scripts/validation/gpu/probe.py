"""What an interpreter has: printed as JSON by `python -m gpu.probe MODULE ...`, which needs nothing but Python itself."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("torch", "numpy", "numba", "numba-cuda", "transformer-engine", "megatron-core", "nvdlfw-inspect", "triton")
#: Transformer Engine's own answer for each recipe
SUPPORT = {
    "delayed": "check_fp8_support",
    "tensorwise": "check_fp8_support",
    "blockwise": "check_fp8_block_scaling_support",
    "mxfp8": "check_mxfp8_support",
}


def main() -> None:
    """The modules to look for are arguments; `--emulate` looks for Transformer Engine beside the environment too."""
    arguments = sys.argv[1:]
    emulate = "--emulate" in arguments
    beside = Path(sys.prefix) / "te"
    path = [str(beside)] if emulate and beside.is_dir() else []
    versions = {name: _version(name, path) for name in DISTRIBUTIONS}
    found: dict[str, Any] = {
        "path": path,
        "missing": [name for name in arguments if name != "--emulate" and not _exists(name, path)],
        "versions": {"python": platform.python_version()} | {name: v for name, v in versions.items() if v},
        "device": None,
        "recipes": {},
        "broken": {},
    }
    if _exists("torch", path):
        _ask_torch(found, emulate)
    print(json.dumps(found))


def _exists(module: str, path: Sequence[str]) -> bool:
    """Whether it would be found, here or in further folders."""
    try:
        if importlib.util.find_spec(module) is not None:
            return True
    except (ImportError, ValueError):  # of a package that is not there
        pass
    return importlib.machinery.PathFinder.find_spec(module, path) is not None


def _version(distribution: str, path: Sequence[str]) -> str | None:
    found = importlib.metadata.distributions(name=distribution, path=[*sys.path, *path])
    return next((one.version for one in found), None)


def _ask_torch(found: dict[str, Any], emulate: bool) -> None:
    try:
        import torch
    except Exception as error:  # whatever is wrong with it
        found["broken"]["torch"] = _told(error)
        return
    found["versions"] |= {"torch": torch.__version__} | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
    if emulate or not torch.cuda.is_available():
        return
    properties = torch.cuda.get_device_properties(0)
    found["device"] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
    }
    if _exists("transformer_engine", []):
        _ask_te(found)


def _driver() -> str | None:
    """As `nvidia-smi` names it, from the kernel; None where it does not tell."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


def _ask_te(found: dict[str, Any]) -> None:
    try:
        import transformer_engine.pytorch  # noqa: F401

        try:
            from transformer_engine.pytorch import quantization as checks
        except ImportError:  # before 2.9
            from transformer_engine.pytorch import fp8 as checks
    except Exception as error:  # whatever its libraries raise
        found["broken"]["transformer_engine"] = _told(error)
        return
    for recipe, name in SUPPORT.items():
        check = getattr(checks, name, None)
        found["recipes"][recipe] = list(check()) if check else [False, "this release of Transformer Engine does not know it"]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    main()
