"""A record copied to another place, any fsspec address to any other."""

from __future__ import annotations

import os

from ..errors import ConfigError, RecordError
from .reader import find_run
from .schema import attempt_of_fingerprint
from .storage import Storage


def copy_record(address: str | os.PathLike[str], output: str | os.PathLike[str]) -> Storage:
    """Copy every file of a record; until the last one is there, readers find no record in the new place.

    Args:
        address: the record, or a folder above it; a path or any fsspec address.
        output: an empty or new folder, or any fsspec address.

    Raises:
        ConfigError: the new place has files, or cannot be written.
        RecordError: there is no record, or a file of it cannot be read.
    """
    run, copied = find_run(address), Storage(output)
    if copied.names():
        raise ConfigError(f"{copied} is not empty; name a new folder")
    for name in sorted(run.files(), key=lambda name: attempt_of_fingerprint(name) is not None):
        try:
            content = run.read(name)
        except Exception as error:  # every driver has errors of its own
            raise RecordError(f"{run.path(name)} cannot be read: {error}") from None
        try:
            copied.write(name, content)
        except Exception as error:
            raise ConfigError(
                f"{copied.path(name)} cannot be written: {getattr(error, 'strerror', None) or error}"
            ) from None
    return copied
