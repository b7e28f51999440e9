"""Outlines. An outline is a short summary in a part's footer. It shows which rows belong to which operands.

Most sampled steps list the same operands in the same order, so the outline stores a digest of each list. An outline also
contains the values of text columns that have few different values, and values that all rows share.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

#: key of the outline in a part's footer
OUTLINE = b"outline"
_KEYS = ("step", "layer", "role")
#: text columns that we leave out because they have many different values; largest number of different values, and largest
#: number of characters in a value, that an outline contains
_MANY, _FEW, _SHORT = ("layer", "gemm", "name"), 16, 200
#: largest number of characters in an outline that we accept, and number of characters in a digest
_LONGEST, _DIGEST = 1 << 24, 32


#: a value that all rows of a column may share
Value = int | str | None


class RowsOfStep(NamedTuple):
    """Consecutive rows of a part that belong to one step."""

    step: int
    rows: int
    #: digest of the rows' layers and roles, in order
    digest: str


@dataclass(frozen=True)
class PartOutline:
    """The description of a part's rows in its footer."""

    stretches: tuple[RowsOfStep, ...]
    #: for each text column with few different values: these values, in the order of their first rows
    texts: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    #: the value of each column that has the same value in all rows: an integer, a short string or null
    same: Mapping[str, Value] = field(default_factory=dict)
    #: for each column of `texts` with different values: a digest of each stretch's values, in order
    patterns: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def locate_row(self, row: int) -> tuple[int, int]:
        """Return the index of the stretch that contains a row of the part, and the row's index in the stretch.

        >>> PartOutline((RowsOfStep(0, 3, ""), RowsOfStep(5, 3, ""))).locate_row(4)
        (1, 1)
        """
        stretch = int(np.searchsorted(self._ends, row, side="right"))
        return stretch, row - int(self._ends[stretch - 1] if stretch else 0)

    @cached_property
    def steps(self) -> frozenset[int]:
        """Return the steps of the part's rows."""
        return frozenset(stretch.step for stretch in self.stretches)

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum([stretch.rows for stretch in self.stretches])


def make_outline(table: pa.Table) -> PartOutline:
    """Return the outline of a table.

    Example:
        >>> table = pa.table({"step": [0, 0], "layer": ["a", "b"], "role": ["input"] * 2, "format": ["e4m3", None]})
        >>> make_outline(table).texts["format"], make_outline(table).same
        (['e4m3', None], {'role': 'input', 'step': 0})
    """
    names = [field.name for field in table.schema if field.type == pa.string() and field.name not in _MANY]
    values = {name: pc.unique(table[name]).to_pylist() for name in names}
    few = {name: of_name for name, of_name in values.items() if len(of_name) <= _FEW and all(map(_is_short, of_name))}
    same = {name: of_name[0] for name, of_name in few.items() if len(of_name) == 1}
    of_steps = tuple(list_rows_by_step(table))
    patterns = {name: _patterns(table[name], of_steps) for name in few if name not in _KEYS}
    return PartOutline(of_steps, few, same | _same_numbers(table), patterns)


def _patterns(column: pa.ChunkedArray, of_steps: Sequence[RowsOfStep]) -> list[str]:
    """Return a digest of each stretch's values, in order."""
    ends = itertools.accumulate((stretch.rows for stretch in of_steps), initial=0)
    return [_pattern(column.slice(first, stretch.rows)) for first, stretch in zip(ends, of_steps, strict=False)]


def _pattern(texts: pa.ChunkedArray) -> str:
    coded = texts.combine_chunks().dictionary_encode()
    values = coded.dictionary.to_pylist() + [None] * bool(coded.null_count)
    digest = hashlib.blake2b(json.dumps(values).encode(), digest_size=_DIGEST // 2)
    if len(values) > 1:
        digest.update(coded.indices.fill_null(-1).to_numpy())
    return digest.hexdigest()


def _is_short(text: str | None) -> bool:
    return text is None or len(text) <= _SHORT


def _same_numbers(table: pa.Table) -> dict[str, Value]:
    """Return the value of each integer column whose rows are all equal, and of each numeric column that is all null."""
    found: dict[str, Value] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not len(column) or not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            continue
        if column.null_count == len(column):
            found[name] = None
        elif not column.null_count and pa.types.is_integer(column.type):
            ends = pc.min_max(column).as_py()
            if ends["min"] == ends["max"]:
                found[name] = ends["min"]
    return found


def list_rows_by_step(table: pa.Table) -> list[RowsOfStep]:
    """Return the stretches of a table, or none if the table has no operands.

    Example:
        >>> table = pa.table({"step": [0, 0, 5, 5], "layer": ["a", "b"] * 2, "role": ["input"] * 4})
        >>> first, second = list_rows_by_step(table)
        >>> (first.step, first.rows, second.step), first.digest == second.digest
        ((0, 2, 5), True)
    """
    if not set(_KEYS) <= set(table.column_names) or not len(table) or table["step"].null_count:
        return []
    column = table["step"].combine_chunks()  # to_numpy would import pandas
    steps = np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)
    ends = [0, *((steps[1:] != steps[:-1]).nonzero()[0] + 1).tolist(), len(steps)]
    names = [table[name].combine_chunks() for name in _KEYS[1:]]
    spans = itertools.pairwise(ends)
    return [RowsOfStep(int(steps[a]), b - a, _digest([each.slice(a, b - a) for each in names])) for a, b in spans]


def _digest(names: list[pa.StringArray]) -> str:
    """Return the digest of a sequence of strings."""
    digest = hashlib.blake2b(digest_size=_DIGEST // 2)
    for texts in names:
        _, offsets, characters = texts.buffers()
        ends = np.frombuffer(offsets, np.int32, len(texts) + 1, 4 * texts.offset)
        digest.update(np.diff(ends).tobytes())
        digest.update(memoryview(characters)[ends[0] : ends[-1]] if characters is not None else b"")
    return digest.hexdigest()


def format_outline(outlines: Sequence[PartOutline]) -> str:
    """Return the outlines of consecutive tables as one string for a footer."""
    all_of_them = [stretch for outline in outlines for stretch in outline.stretches]
    columns = set.intersection(*(set(outline.texts) for outline in outlines)) if outlines else ()
    texts = {
        name: list(dict.fromkeys(text for outline in outlines for text in outline.texts[name])) for name in sorted(columns)
    }
    first, *others = (outline.same for outline in outlines) if outlines else ({},)
    same = {name: value for name, value in first.items() if all(each.get(name, ...) == value for each in others)}
    patterns = {
        name: [pattern for outline in outlines for pattern in outline.patterns[name]]
        for name in texts
        if name not in same and name not in _KEYS
    }
    told = {"stretches": all_of_them, "texts": texts, "same": same, "patterns": patterns}
    return json.dumps(told, separators=(",", ":"))


def parse_outline(text: bytes | None) -> PartOutline | None:
    """Parse a footer's string. Return None if the string is not an outline."""
    if text is None or len(text) > _LONGEST:
        return None
    try:
        content = json.loads(text)
        found = tuple(RowsOfStep(step, rows, digest) for step, rows, digest in content["stretches"])
        texts = {str(name): list(values) for name, values in content["texts"].items()}
        same = {str(name): value for name, value in content.get("same", {}).items()}
        patterns = {str(name): list(of_name) for name, of_name in content.get("patterns", {}).items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    known = all(text is None or isinstance(text, str) for values in texts.values() for text in values)
    known &= all(value is None or type(value) in (int, str) for value in same.values())
    known &= all(len(of_name) == len(found) and all(map(_is_digest, of_name)) for of_name in patterns.values())
    return PartOutline(found, texts, same, patterns) if known and found and all(map(_is_sound, found)) else None


def _is_sound(stretch: RowsOfStep) -> bool:
    step, rows, digest = stretch
    numbers = type(step) is int and type(rows) is int and 0 <= step < 1 << 63 and 0 < rows < 1 << 63
    return numbers and _is_digest(digest)


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == _DIGEST
