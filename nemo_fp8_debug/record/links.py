"""Find links that lead out of the folder that the user names. Neither the commands nor the tab follow such links.

A record may come from anybody, and a link in that record may lead to any file of the reader. A page that is served or sent
to others would show that file. A command that writes into the record would change that file. The folder that the user names
may itself be a link.
"""

from __future__ import annotations

import os

from .migration import folders_of
from .schema import SCHEMAS, STATUS, attempt_of_fingerprint
from .storage import Storage

#: folders of a record, `tensors` for dumps
TABLES = frozenset({*(folder for table in SCHEMAS for folder in folders_of(table)), "tensors"})


def leads_out(storage: Storage, name: str) -> bool:
    """Return True if a file or folder below a local folder, whose path is free of links, lies elsewhere."""
    root = storage.path("").rstrip("/")
    return not f"{os.path.realpath(storage.path(name))}/".startswith(f"{root}/")


def find_link_out(storage: Storage, folder: str) -> str | None:
    """Return the first name in a record that is a link out of `storage`; None: there is none.

    Args:
        storage: a folder whose path is free of links.
        folder: that of the record, below it.
    """
    if not storage.is_local:
        return None
    for name, kind in sorted(storage.entries(folder)):
        is_part = name in TABLES or name == STATUS or attempt_of_fingerprint(name) is not None
        if kind == "link" and is_part and leads_out(storage, _below(folder, name)):
            return name
    for table in sorted(TABLES):
        inside = _below(folder, table)
        try:
            links = [f"{inside}/{name}" for name, kind in storage.entries(inside) if kind == "link"]
        except OSError:
            continue
        if any(leads_out(storage, link) for link in links):
            return f"a part of {table}"
    return None


def _below(folder: str, name: str) -> str:
    return "/".join(filter(None, (folder, name)))
