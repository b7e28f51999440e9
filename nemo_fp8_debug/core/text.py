"""Numbers and tables as text, for the terminal, logs, verdicts and reports."""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

MINUS, ELLIPSIS, ARROW = "\u2212", "\u2026", "->"
#: what a table shows instead of a missing value
ABSENT = "-"
#: range of sizes that are written without a power of ten or two
_SMALLEST, _LARGEST = 1e-4, 1e6
#: range of sizes in which an exact power of two is written like other numbers
_SMALL_POWER, _LARGE_POWER = 1e-3, 1e4

_GAP = "  "
#: smallest width of a name and of a text, if there is room, and the largest number of lines of a heading
_NAME, _TEXT, _HEADING_LINES = 20, 24, 2


def format_number(value: float | None, unit: str = "", prefix: str = "", signed: bool = False, digits: int = 3) -> str:
    """Return a number in a readable form. The tab's `number` in `frontend/src/units.js` follows the same rules.

    Args:
        unit: appended to the number.
        prefix: put in front of the number.
        signed: whether to write a plus in front of positive numbers.
        digits: significant digits. Whole numbers from 100 on keep all digits.

    Example:
        >>> [format_number(value) for value in (2896.31, 0.040349, 100.0, 1.25e-5, 2.0**-30, 4.1e9, None)]
        ['2,896', '0.0403', '100', '1.25e−5', '2^−30', '4.1e9', '-']
        >>> format_number(-0.183, "%", signed=True), format_number(2.34567, digits=4)
        ('−0.183%', '2.346')
    """
    if value is None:
        return ABSENT
    sign = MINUS if value < 0 else "+" if signed and value > 0 else ""
    return f"{prefix}{sign}{_format_size(abs(value), digits)}{unit}"


def _format_size(size: float, digits: int) -> str:
    if math.isnan(size):
        return "NaN"
    if math.isinf(size):
        return "inf"
    mantissa, exponent = math.frexp(size)
    if mantissa == 0.5 and not _SMALL_POWER <= size < _LARGE_POWER:
        return f"2^{exponent - 1}".replace("-", MINUS)
    if size and not _SMALLEST <= size < _LARGEST:
        digit, _, power = f"{size:.{digits - 1}e}".partition("e")
        digit = digit.rstrip("0").rstrip(".") if "." in digit else digit
        return f"{digit}e{int(power)}".replace("-", MINUS)
    return f"{size:,.0f}" if size >= 10 ** (digits - 1) else f"{size:,.{digits}g}"


def format_power_of_two(exponent: float) -> str:
    """Return 2 to an exponent as a factor.

    Example:
        >>> format_power_of_two(3), format_power_of_two(-29.6), format_power_of_two(2000)
        ('x8', 'x2^−29.6', 'x2^2,000')
    """
    if math.isfinite(exponent) and not math.log2(_SMALLEST) <= exponent < math.log2(_LARGEST):
        return f"x2^{format_number(exponent)}"
    return f"x{format_number(2.0**exponent)}"


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun.

    Example:
        >>> format_count(1, "run"), format_count(2896, "loss", "losses")
        ('1 run', '2,896 losses')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


# Tables -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    Attributes:
        heading: heading above the column.
        kind: a `name` is shortened in its middle, a `text` is wrapped, and a `number` is aligned to the right.
        rank: if the table is too wide, columns of the highest rank are left out first. A column of rank 0 always stays.
        least: smallest width of a `text`, if there is room.
    """

    heading: str
    kind: Literal["name", "text", "number"] = "number"
    rank: int = 0
    least: int = _TEXT


#: the two columns that name the tensor of a row
TENSOR = (TableColumn("tensor", "text"), TableColumn("layer", "name"))


@dataclass(frozen=True)
class TextTable:
    """A table as lines: the lines of the heading and the rule below it, and the lines of each row."""

    heading: list[str]
    rows: list[list[str]]
    #: common beginning of all names, which an ellipsis replaces; empty if names are complete
    beginning: str = ""


def format_table(columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], width: int | None = None) -> TextTable:
    """Return the lines of a table. Columns without a value in any row are left out.

    Args:
        rows: a string for each column.
        width: width of the terminal, or None for no limit. To fit a table into this width, we leave out columns, shorten
            names in their middle, and wrap texts.

    Example:
        >>> columns = TableColumn("layer", "name"), TableColumn("amax"), TableColumn("overflow %")
        >>> found = format_table(columns, [["layers.0.fc1", "3.83", "-"], ["layers.1.fc1", "1,264", "-"]])
        >>> print("\\n".join([*found.heading, *(line for row in found.rows for line in row)]))
        layer          amax
        ────────────  ─────
        layers.0.fc1   3.83
        layers.1.fc1  1,264
    """
    cells = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
    kept = {column: found for column, found in cells.items() if any(cell not in ("", ABSENT) for cell in found)}
    kept = kept or dict([*cells.items()][:1])
    width = width or _add_up([_find_longest(column, found) for column, found in kept.items()])
    while _add_up([_find_least(*item) for item in kept.items()]) > width and any(column.rank for column in kept):
        del kept[max(kept, key=lambda column: column.rank)]
    beginning, names = "", [column for column in kept if column.kind == "name"]
    if len(names) == 1 and _add_up([_find_longest(*item) for item in kept.items()]) > width:
        beginning, kept[names[0]] = _strip_beginning(kept[names[0]])
    widths = _share_width(kept, width)
    shown = {column: _fit(column, found, widths[column]) for column, found in kept.items()}
    headings = {column: textwrap.wrap(column.heading, widths[column]) for column in kept}
    tall = max(map(len, headings.values()))
    above = {column: [""] * (tall - len(lines)) + lines for column, lines in headings.items()}
    rule = _GAP.join("─" * widths[column] for column in kept)
    body = [_join({column: shown[column][i] for column in kept}, widths) for i in range(len(rows))]
    return TextTable([*_join(above, widths), rule], body, beginning)


_Cells = Mapping[TableColumn, Sequence[str]]


def _add_up(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _find_longest(column: TableColumn, cells: Sequence[str]) -> int:
    return max(map(len, [column.heading, *cells]))


def _find_least(column: TableColumn, cells: Sequence[str], is_narrow: bool = False) -> int:
    """Return the smallest width of a column.

    Args:
        is_narrow: whether to halve the smallest width of names and texts.
    """
    longest, words = max(map(len, cells), default=0), column.heading.split()
    most = {"name": _NAME, "text": column.least, "number": longest}[column.kind] // (2 if is_narrow else 1)
    heading = max(map(len, words))
    while not is_narrow and len(textwrap.wrap(column.heading, heading)) > _HEADING_LINES:
        heading += 1
    return max(longest if column.kind == "number" else min(longest, most), heading)


def _share_width(kept: _Cells, width: int) -> dict[TableColumn, int]:
    """Return the width of each column. Names, texts and headings share what is left after all smallest widths."""
    is_narrow = _add_up([_find_least(*item) for item in kept.items()]) > width
    widths = {column: _find_least(column, cells, is_narrow) for column, cells in kept.items()}
    for column in sorted(kept, key=lambda column: ("name", "text", "number").index(column.kind)):
        spare = max(0, width - _add_up([*widths.values()]))
        widths[column] += min(spare, max(0, _find_longest(column, kept[column]) - widths[column]))
    if (over := _add_up([*widths.values()]) - width) > 0:  # the terminal is very narrow
        widest = max(widths, key=lambda column: widths[column])
        widths[widest] = max(1, widths[widest] - over)
    return widths


def _join(lines_of: _Cells, widths: Mapping[TableColumn, int]) -> list[str]:
    """Return the lines of a row from the lines of its cells."""
    lines = []
    for i in range(max(map(len, lines_of.values()))):
        parts = {column: own[i] if i < len(own) else "" for column, own in lines_of.items()}
        placed = (f"{part:{'>' if c.kind == 'number' else '<'}{widths[c]}}" for c, part in parts.items())
        lines.append(_GAP.join(placed).rstrip())
    return lines


def _strip_beginning(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the common beginning of dotted names, and the names with an ellipsis instead of this beginning.

    Names without a dot, such as *the run*, stay unchanged.
    """
    dotted = [name.split(".") for name in names if "." in name]
    shared = 0
    for parts in zip(*dotted, strict=False):
        if len(set(parts)) > 1:
            break
        shared += 1
    shared = min([shared, *(len(parts) - 1 for parts in dotted)])
    if len(dotted) < 2 or shared < 1:
        return "", list(names)
    beginning = ".".join(dotted[0][:shared]) + "."
    stripped = (f"{ELLIPSIS}{name[len(beginning) :]}" if name.startswith(beginning) else name for name in names)
    return beginning, list(stripped)


def shorten_name(name: str, width: int) -> str:
    """Return a name, with an ellipsis for its middle if the name is too long. Keep more of the end than of the beginning.

    Example:
        >>> shorten_name("decoder.layers.0.self_attention.linear_qkv", 24)
        'decoder.…tion.linear_qkv'
    """
    if len(name) <= width:
        return name
    end = max(1, (width - 1) * 2 // 3)
    return f"{name[: max(0, width - 1 - end)]}{ELLIPSIS}{name[-end:]}"


def _fit(column: TableColumn, cells: Sequence[str], width: int) -> list[list[str]]:
    """Return the lines of each cell. Shorten names, or wrap them if shortened names would look the same."""
    if column.kind == "name":
        short = [shorten_name(cell, width) for cell in cells]
        if len(set(short)) == len(set(cells)):
            return [[cell] for cell in short]
    return [textwrap.wrap(cell, width, break_on_hyphens=False) or [""] for cell in cells]


# Terminals --------------------------------------------------------------------------------------------------------------

#: smallest width of a terminal
_NARROWEST = 40


def read_width_variable() -> int | None:
    """Return the width in the environment variable `COLUMNS`, or None if the variable gives no width."""
    asked = os.environ.get("COLUMNS", "")
    return max(_NARROWEST, int(asked)) if asked.isdecimal() and int(asked) else None


def find_terminal_width(*streams: TextIO) -> int | None:
    """Return the width for text: from `COLUMNS`, or of the first stream that is a terminal. Return None without both."""
    if (asked := read_width_variable()) is not None:
        return asked
    for stream in streams:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            return max(_NARROWEST, os.get_terminal_size(stream.fileno()).columns)
    return None


# Encodings --------------------------------------------------------------------------------------------------------------

#: replacements for characters that a terminal's encoding lacks
_PLAIN = {MINUS: "-", ELLIPSIS: "~", "─": "-"}


def _write_plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in lacking), error.end


#: name of the error handler that writes plain characters, for `str.encode` and streams
PLAINLY = "nemo_fp8_debug.plainly"
codecs.register_error(PLAINLY, _write_plainly)
