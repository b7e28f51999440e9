"""What is wrong with a record or out of the ordinary, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ...core.scale_sources import notice, quantization
from ...errors import hearing
from ...record.reader import read_fingerprint
from ...record.storage import Storage
from .part_matrices import Index, Parts


def notes(parts: Parts, run: Storage, index: Index) -> list[str]:
    """What is wrong with a record or out of the ordinary, in sentences."""
    with hearing() as heard:
        fingerprint = read_fingerprint(run)
    told = [f"{message}." for message in (*heard, *index.heard)]
    if damaged := parts.harmed(run) | index.damaged:
        (name, why), *others = damaged.items()
        more = f" So are {len(others)} other parts." if others else ""
        told.append(f"The metrics of {name} are left out: {why}{more}")
    if not len(index.steps) and not index.damaged:
        told.append("Nothing was sampled yet: the record has no metrics.")
    attempts = {part.attempt for part in index.owner.values()}
    if len(attempts) > 1:
        told.append(f"The run was started {len(attempts)} times; of steps that were trained twice the latest are shown.")
    known = quantization_of(parts, run, index, fingerprint)
    if known is not None and (said := notice(known)):
        told.append(said)
    return told


def quantization_of(parts: Parts, run: Storage, index: Index, fingerprint: Mapping[str, Any]) -> str | None:
    """Whether anything is quantized, as `quantization` tells it of the newest part that can be read; None: there is none."""
    for part in index.newest_first:
        if sources := parts.unless_damaged(run, part, "scale_source", partial(parts.texts, run, part, "scale_source")):
            return quantization({sources.known[code] for code in np.unique(sources.codes)} - {None}, fingerprint)
    return None
