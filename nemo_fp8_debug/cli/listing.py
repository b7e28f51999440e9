"""Rows of findings: a table if it fits, else an entry a row, so that no name and no number is cut."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .console import escape_controls

#: columns that a text may be wrapped to, at the least
_NARROWEST = 24
#: what stands for the beginning that all names share
_ELLIPSIS = "…"
_INDENT = "    "


@dataclass(frozen=True)
class Column:
    """A column: `name`s are never cut or wrapped, `text` is wrapped, `number`s stand on the right."""

    heading: str
    kind: Literal["name", "text", "number"] = "number"


#: the two columns that say which tensor a row is about
TENSOR = (Column("layer", "name"), Column("tensor", "name"))


def tensor_and_layer(names: Sequence[str]) -> str:
    """The heading of an entry about a tensor.

    Example:
        >>> tensor_and_layer(["layers.0.fc1", "X"])
        'X of layers.0.fc1'
    """
    layer, tensor = names
    return f"{tensor} of {layer}"


def print_rows(
    out: Console,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    entry: Callable[[Sequence[str]], str] = tensor_and_layer,
    styles: Sequence[str] = (),
) -> None:
    """Print a row a finding.

    Args:
        rows: a text for each column.
        entry: makes the heading of an entry from the names of a row.
        styles: of the rows; none if left out.
    """
    styles = styles or [""] * len(rows)
    if _least_width(columns, rows) <= out.width:
        out.print(_table(title, columns, rows, styles, out.width))
        return
    begin, shorter = without_common_beginning(rows)
    if begin and _least_width(columns, shorter) <= out.width:
        out.print(_table(f"{title}\n{_ELLIPSIS} stands for {begin}", columns, shorter, styles, out.width))
        return
    out.print(Text(title, "italic"))
    for row, style in zip(rows, styles, strict=True):
        _print_entry(out, columns, row, entry, style)
    out.print()


def without_common_beginning(rows: Sequence[Sequence[str]]) -> tuple[str, list[Sequence[str]]]:
    """The parts of dotted names that all rows begin with, and the rows with an ellipsis instead.

    Example:
        >>> without_common_beginning([["model.layers.0.fc1"], ["model.layers.1.fc1"]])
        ('model.layers.', [['…0.fc1'], ['…1.fc1']])
    """
    names = [row[0].split(".") for row in rows]
    shared = 0
    for parts in zip(*names, strict=False):
        if len(set(parts)) > 1:
            break
        shared += 1
    shared = min([shared, *(len(name) - 1 for name in names)])
    if len(rows) < 2 or shared < 1:
        return "", list(rows)
    begin = [*accumulate(names[0][:shared], "{}.{}".format)][-1] + "."
    return begin, [[f"{_ELLIPSIS}{row[0].removeprefix(begin)}", *row[1:]] for row in rows]


def _least_width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """How wide the table is at the least: each column has a border and two spaces."""
    return 1 + sum(3 + least for least, _ in _widths(columns, rows))


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Of each column: the least width, and that of its longest cell."""
    found = []
    for place, column in enumerate(columns):
        longest = max([len(escape_controls(row[place])) for row in rows], default=0)
        word = max(map(len, column.heading.split()))
        least = max(word, min(longest, _NARROWEST) if column.kind == "text" else longest)
        found.append((least, max(longest, len(column.heading))))
    return found


def _table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str], width: int) -> Table:
    table = Table(title=Text(title), title_justify="left")
    spare = width - _least_width(columns, rows)
    for column, (least, whole) in zip(columns, _widths(columns, rows), strict=True):
        more = min(spare, whole - least)
        spare -= more
        justify: Literal["left", "right"] = "right" if column.kind == "number" else "left"
        table.add_column(Text(column.heading), justify=justify, width=least + more, overflow="fold")
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*(Text(escape_controls(cell)) for cell in row), style=style or None)
    return table


def _print_entry(
    out: Console, columns: Sequence[Column], row: Sequence[str], entry: Callable[[Sequence[str]], str], style: str
) -> None:
    names = [cell for column, cell in zip(columns, row, strict=True) if column.kind == "name"]
    others = [(c.heading, cell) for c, cell in zip(columns, row, strict=True) if c.kind != "name" and cell not in ("", "-")]
    out.print(Text(escape_controls(entry(names))), style=style or "bold", overflow="fold")
    for line in filled([f"{heading}: {escape_controls(cell)}" for heading, cell in others], out.width - len(_INDENT)):
        out.print(Text(_INDENT + line), overflow="fold")


def filled(pieces: Sequence[str], width: int) -> Iterator[str]:
    """Lines that break between pieces if they can, and between words if a piece is longer than a line.

    Example:
        >>> list(filled(["amax: 5.72 -> 3380", "cosine: 0.9"], 22))
        ['amax: 5.72 -> 3380;', 'cosine: 0.9']
    """
    line = ""
    for place, piece in enumerate(pieces):
        ended = piece + (";" if place < len(pieces) - 1 else "")
        if line and len(line) + 1 + len(ended) > width:
            yield line
            line = ""
        line = f"{line} {ended}".strip()
        if len(line) > width:
            *whole, line = textwrap.wrap(line, width)
            yield from whole
    if line:
        yield line
