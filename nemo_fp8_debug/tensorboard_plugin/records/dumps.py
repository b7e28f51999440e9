"""Which tensors a record has dumped, by the names of their files."""

from __future__ import annotations

from typing import Any

from ...errors import hearing
from ...record.dump_names import dumped_files, tensor_in_name
from ...record.storage import Storage
from .cache import Cache

#: files of one tensor that are told of
_MOST = 50
#: records whose files are known
_KEPT = 16

Files = list[tuple[int, int, int, str]]


class Dumps:
    """The files of dumped tensors, listed once for each state of a record."""

    def __init__(self) -> None:
        self._files: Cache[Files] = Cache(_KEPT, lambda _: 1)

    def of_tensor(self, run: Storage, version: str, layer: str, role: str) -> dict[str, Any]:
        """The latest files of a tensor, and how many there are.

        Args:
            version: of the record.

        Returns:
            `count`, and `files`: `step`, `rank` and `name` (below the folder of the record) of each, ascending.
        """
        mine = [file for file in self._files.get((str(run), version), lambda: _listed(run)) if _is_of(file[3], layer, role)]
        files = [{"step": step, "rank": rank, "name": name} for _, step, rank, name in mine[-_MOST:]]
        return {"count": len(mine), "files": files}


def _listed(run: Storage) -> Files:
    with hearing():
        return sorted(dumped_files(run))


def _is_of(name: str, layer: str, role: str) -> bool:
    """Of layers whose names are alike as far as a file's name goes, any of them."""
    return f".{tensor_in_name(layer, role)}." in name.rpartition("/")[2]
