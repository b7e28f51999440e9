"""Which operands the rows of a part are of, told in a few bytes: sampled steps list the same ones in the same order."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import NamedTuple

import numpy as np
import pyarrow as pa

#: of a part's footer
OUTLINE = b"stretches_of_steps"
_KEYS = ("step", "layer", "role")
#: characters of an outline that are read, and of a digest
_LONGEST, _DIGEST = 1 << 24, 32


class Stretch(NamedTuple):
    """Rows of a part, one behind the other, that are of one step."""

    step: int
    rows: int
    #: of their layers and roles, in order
    digest: str


def stretches(table: pa.Table) -> list[Stretch]:
    """The stretches of a table; none of a table that has no operands.

    Example:
        >>> table = pa.table({"step": [0, 0, 5, 5], "layer": ["a", "b"] * 2, "role": ["input"] * 4})
        >>> first, second = stretches(table)
        >>> (first.step, first.rows, second.step), first.digest == second.digest
        ((0, 2, 5), True)
    """
    if not set(_KEYS) <= set(table.column_names) or not len(table):
        return []
    steps = table["step"].to_numpy()
    ends = [0, *((steps[1:] != steps[:-1]).nonzero()[0] + 1).tolist(), len(steps)]
    names = [table[name].combine_chunks() for name in _KEYS[1:]]
    spans = itertools.pairwise(ends)
    return [Stretch(int(steps[a]), b - a, _digest([each.slice(a, b - a) for each in names])) for a, b in spans]


def _digest(names: list[pa.StringArray]) -> str:
    """Of texts in order."""
    digest = hashlib.blake2b(digest_size=_DIGEST // 2)
    for texts in names:
        _, offsets, characters = texts.buffers()
        ends = np.frombuffer(offsets, np.int32, len(texts) + 1, 4 * texts.offset)
        digest.update(np.diff(ends).tobytes())
        digest.update(memoryview(characters)[ends[0] : ends[-1]] if characters is not None else b"")
    return digest.hexdigest()


def to_text(outline: list[Stretch]) -> str:
    """To be put into a footer."""
    return json.dumps(outline, separators=(",", ":"))


def from_text(text: bytes | None) -> list[Stretch] | None:
    """Back from it; None if it is not an outline."""
    if text is None or len(text) > _LONGEST:
        return None
    try:
        found = [Stretch(step, rows, digest) for step, rows, digest in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        return None
    return found if all(map(_is_sound, found)) else None


def _is_sound(stretch: Stretch) -> bool:
    step, rows, digest = stretch
    numbers = type(step) is int and type(rows) is int and 0 <= step < 1 << 63 and 0 < rows < 1 << 63
    return numbers and isinstance(digest, str) and len(digest) == _DIGEST
