"""Which releases of Transformer Engine have been read: what a later one does to casts is not known here."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

from packaging.version import InvalidVersion, Version

#: the last release whose sources were read, and whose casts were compared with those that are reported
LAST_READ = Version("2.20")


def unread_release() -> str:
    """Why nothing is known of the casts of the release that is installed; empty: it was read."""
    module = sys.modules.get("transformer_engine")
    found = _installed(importlib.metadata.version, module, str(getattr(module, "__version__", "")))
    try:
        if Version(found).release[:2] <= LAST_READ.release:
            return ""
    except InvalidVersion:
        return f"its release of Transformer Engine, {found or 'which does not tell its version'}, is not known here"
    return f"Transformer Engine {found} is later than {LAST_READ}, the last release whose casts are known here"


@functools.lru_cache(maxsize=1)
def _installed(look_up: Callable[[str], str], module: Any, says: str) -> str:
    """Looked up once for a module that is imported: that takes longer than all else that is asked in a step.

    Args:
        look_up: tells the version of a package.
        says: what it says itself, if packages do not tell.
    """
    for name in ("transformer_engine", "transformer-engine"):
        try:
            return look_up(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return says
