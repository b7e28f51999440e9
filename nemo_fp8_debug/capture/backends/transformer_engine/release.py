"""Which releases of Transformer Engine have been read: what a later one does to casts is not known here."""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.version import InvalidVersion, Version

#: the last release whose sources were read, and whose casts were compared with those that are reported
LAST_READ = Version("2.20")


def unread_release() -> str:
    """Why nothing is known of the casts of the release that is installed; empty: it was read."""
    found = _installed()
    try:
        if Version(found).release[:2] <= LAST_READ.release:
            return ""
    except InvalidVersion:
        return f"its release of Transformer Engine, {found or 'which does not tell its version'}, is not known here"
    return f"Transformer Engine {found} is later than {LAST_READ}, the last release whose casts are known here"


def _installed() -> str:
    for name in ("transformer_engine", "transformer-engine"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(sys.modules.get("transformer_engine"), "__version__", ""))
