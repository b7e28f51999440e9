"""Names of dumped tensors' files, and a listing that does not read their values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import quote

from .reader import find_record
from .storage import FolderStorage

FOLDER = "tensors"
#: largest number of characters of a layer's name in a file name
_LONGEST = 120
_NAME = re.compile(r"rank-(\d{1,9})\.call-(\d{1,9})\..*\.([0-9a-f]{8})\.safetensors")
_STEP = re.compile(r"attempt-(\d{1,9})-step-(\d{1,18})")


def make_tensor_file_name(layer: str, role: str) -> str:
    """Return the part of a file name that describes the tensor. Cut the layer's name if it is too long.

    Example:
        >>> make_tensor_file_name("decoder.layers.3.fc2", "input")
        'input.decoder.layers.3.fc2'
    """
    return f"{role}.{quote(layer, safe='[]')[:_LONGEST]}"


def dumped_files(run: str | os.PathLike[str]) -> Iterator[tuple[int, int, int, str]]:
    """List the tensors that a run dumped.

    Args:
        run: the record, or a folder above it. A path or any fsspec address.

    Returns:
        (attempt, step, rank, name) of each file, in order of attempts and steps. Pass the name to `read_dump`.

    Raises:
        RecordError: `run` contains no record or several.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> monitor = Monitor(model, "runs/dumped", interval=1, dump=["0"], dump_min_free_bytes=0, table_rows=0)
        >>> with monitor.step(0):
        ...     model(torch.ones(8, 32)).sum().backward()
        >>> monitor.close()
        >>> for attempt, step, rank, name in dumped_files("runs/dumped"):
        ...     about, tensors = read_dump("runs/dumped", name)
        ...     print(step, about.role, list(tensors["value"].shape))
        0 grad_output [8, 32]
        0 input [8, 32]
        0 weight [32, 32]
    """
    storage = run if isinstance(run, FolderStorage) else find_record(run)
    for folder in storage.list_names(FOLDER):
        if found := _STEP.fullmatch(folder):
            for file in storage.list_names(f"{FOLDER}/{folder}"):
                if name := _NAME.fullmatch(file):
                    yield int(found[1]), int(found[2]), int(name[1]), f"{FOLDER}/{folder}/{file}"
