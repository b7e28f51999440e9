"""Parquet files with checksums, so that a changed bit is detected even if only some rows are read.

On a damaged file, a Parquet reader may abort the process or silently return wrong values. So a part's footer contains the
CRC-32 of every block before the footer, and the part's name ends in the CRC-32 of the footer.
"""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .outline import OUTLINE, PartOutline, format_outline, make_outline, parse_outline

Ints = npt.NDArray[np.int64]

#: size of a block in bytes; each block has a checksum; blocks are small, because we read whole blocks even for a few rows
BLOCK = 1 << 14
#: largest number of rows in a row group, so that reading a few operands of a large sample does not decode all operands
GROUP = 1 << 14
#: footer key of the checksums for each block size; earlier releases wrote larger blocks
_KEYS = {size: f"crc32_of_{size >> 10}_KiB_blocks".encode() for size in (BLOCK, 1 << 16)}
_TAIL = 8  # length of the footer and magic number


def encode_parquet(table: pa.Table) -> tuple[bytes, str]:
    """Encode a table as a file. Return the file's bytes, and the checksum for the end of its name."""
    return encode_parquet_tables(table.schema, [table])


def encode_parquet_tables(schema: pa.Schema, tables: Iterable[pa.Table]) -> tuple[bytes, str]:
    """Encode consecutive tables into one file, like `encode_parquet`. Keep only one table in memory at a time.

    Each table has its own row groups, so that `read` and `read_few_rows` decode few other rows.
    The footer contains an outline of the tables. With the outline, readers find each operand without reading names.
    """
    sink = io.BytesIO()
    # Use no dictionary for numbers that hardly repeat. Bins ascend and neighboring counts are similar, so store differences.
    texts = [field.name for field in schema if field.type == pa.string()]
    lists = [f"{field.name}.list.element" for field in schema if pa.types.is_list(field.type)]
    writer = pq.ParquetWriter(
        sink,
        schema,
        compression="lz4",
        use_dictionary=texts,
        column_encoding=dict.fromkeys(lists, "DELTA_BINARY_PACKED"),
        write_statistics=["attempt", "step"],
    )
    outlines = list[PartOutline]()
    for table in tables:
        writer.write_table(table, row_group_size=max(1, len(table)) if lists else GROUP)
        outlines.append(make_outline(table))
    data = sink.getvalue()
    sums = "".join(f"{zlib.crc32(block):08x}" for block in _blocks(data, BLOCK))
    writer.add_key_value_metadata({_KEYS[BLOCK]: sums, OUTLINE: format_outline(outlines)})
    writer.close()
    content = sink.getvalue()
    return content, f"{zlib.crc32(content[len(data) :]):08x}"


class OpenPartFile:
    """An open part. To read some of its rows, we read and check only the blocks that contain these rows."""

    def __init__(self, file: Any, checksum: str, texts: Sequence[str] = ()) -> None:
        """
        Args:
            file: a seekable file object, open for reading.
            checksum: the checksum at the end of the file's name.
            texts: text columns to read as dictionaries, which makes filtering faster because values repeat.

        Raises:
            ValueError: the file is damaged, or is not a part.
        """
        checked = _Checked(file, checksum)
        try:
            self._part = pq.ParquetFile(checked, read_dictionary=list(texts))  # this reads only the footer
        except KeyError:  # an earlier release wrote it with fewer columns
            there = pq.ParquetFile(checked)
            kept = [name for name in texts if name in there.schema_arrow.names]
            self._part = pq.ParquetFile(checked, metadata=there.metadata, read_dictionary=kept)
        self._metadata = self._part.metadata
        checked.expect(self._metadata)
        counts = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
        self._ends = np.cumsum([0, *counts])
        #: number of rows
        self.count = int(self._ends[-1])

    @property
    def outline(self) -> PartOutline | None:
        """Return the outline in the footer. Return None if there is no outline, or it does not match the rows."""
        found = parse_outline((self._metadata.metadata or {}).get(OUTLINE))
        return found if found is not None and sum(each.rows for each in found.stretches) == self.count else None

    def find_row_groups(self, step: int) -> list[tuple[int, int]]:
        """Return the first row, and the row after the last, of each row group that may contain a step."""
        spans = itertools.pairwise(self._ends.tolist())
        return [span for group, span in enumerate(spans) if _may_have(self._metadata.row_group(group), step)]

    def read_wanted_row_groups(
        self, columns: Sequence[str] | None = None, wanted: Sequence[tuple[int, int]] | None = None
    ) -> tuple[pa.Table, Callable[[Ints], Ints]]:
        """Read the row groups that contain wanted rows.

        Args:
            columns: names, or None for all. Names that the part lacks are ignored.
            wanted: ranges of rows (first row, row after the last), or None for all rows.

        Returns:
            The rows, and a function that converts indices of rows in the part to indices in the result.

        Raises:
            ValueError: the rows are damaged.
        """
        there = np.full(len(self._ends) - 1, wanted is None)
        for first, end in wanted or ():
            there[np.searchsorted(self._ends, first, side="right") - 1 : np.searchsorted(self._ends, end)] = True
        groups = np.flatnonzero(there)
        # For each group that is read: the number of rows before it that are not read.
        nearer = self._ends[groups] - np.cumsum([0, *np.diff(self._ends)[groups][:-1]])

        def at(places: Ints) -> Ints:
            found: Ints = places - nearer[np.searchsorted(self._ends[groups], places, side="right") - 1]
            return found

        names = None if columns is None else list(columns)
        return self._part.read_row_groups(groups.tolist(), columns=names, use_threads=False), at

    def read_row_groups(self) -> Iterator[pa.Table]:
        """Yield all columns, one row group at a time.

        Raises:
            ValueError: a row group is damaged.
        """
        for group in range(self._part.num_row_groups):
            yield self._part.read_row_group(group, use_threads=False)

    def read_few_rows(self, columns: Sequence[str], places: Sequence[int], at_once: int) -> pa.Table:
        """Read a few rows. Decode at most `at_once` rows at a time.

        Args:
            columns: names of the columns to read. Names that the part lacks are ignored.
            places: indices in the part of the rows to read, ascending.
            at_once: rows to decode at a time.

        Raises:
            ValueError: the rows are damaged.
        """
        there = [name for name in columns if name in self._part.schema_arrow.names]
        group = int(np.searchsorted(self._ends, places[0], side="right")) - 1
        groups, begin = list(range(group, self._part.num_row_groups)), int(self._ends[group])
        wanted, found = list(places), []
        batches = self._part.iter_batches(at_once, row_groups=groups, columns=there, use_threads=False)
        while wanted:
            batch = next(batches)
            here = [row for row in wanted if row < begin + len(batch)]
            found.append(batch.take(pa.array([row - begin for row in here], pa.int64())))
            wanted, begin = wanted[len(here) :], begin + len(batch)
        return pa.Table.from_batches(found)


def _may_have(group: pq.RowGroupMetaData, step: int) -> bool:
    """Return whether a row group may contain rows of a step. Use the group's statistics if there are any."""
    for place in range(group.num_columns):
        column = group.column(place)
        if column.path_in_schema == "step":
            known = column.statistics
            return known is None or not known.has_min_max or known.min <= step <= known.max
    return True


def _blocks(data: bytes, size: int) -> list[memoryview]:
    return [memoryview(data)[i : i + size] for i in range(0, len(data), size)]


class _Checked(io.RawIOBase):
    """A part's bytes, checked block by block while they are read."""

    def __init__(self, file: Any, checksum: str) -> None:
        self._file = file
        self._size = file.seek(0, io.SEEK_END)
        self._footer, self._start = self._read_footer()
        if f"{zlib.crc32(self._footer):08x}" != checksum:
            raise ValueError("it is damaged or foreign: the checksum in its name does not match its footer")
        self._sums: npt.NDArray[np.uint32] | None = None
        self._block = BLOCK
        self._at = 0

    def expect(self, metadata: pq.FileMetaData) -> None:
        """Set the checksums of the blocks. Before this call, read only the footer, because blocks are not checked yet."""
        known = metadata.metadata or {}
        self._block, key = next(((size, key) for size, key in _KEYS.items() if key in known), (BLOCK, b""))
        self._sums = np.frombuffer(bytes.fromhex(known.get(key, b"").decode()), ">u4")

    def _read_footer(self) -> tuple[bytes, int]:
        if self._size < _TAIL:
            raise ValueError(f"it is truncated: {self._size} bytes")
        self._file.seek(self._size - _TAIL)
        start = self._size - _TAIL - int.from_bytes(self._file.read(_TAIL)[:4], "little")
        if start < 0:
            raise ValueError("it is damaged or truncated: its footer would be longer than the file")
        self._file.seek(start)
        return self._file.read(self._size - start), start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read_buffer(self, size: int) -> memoryview:
        """Return bytes for pyarrow without a copy."""
        content = self._range(self._at, min(self._size, self._at + size))
        self._at += len(content)
        return content

    def read(self, size: int = -1) -> bytes:
        return bytes(self.read_buffer(self._size - self._at if size < 0 else size))

    def _range(self, begin: int, end: int) -> memoryview:
        if begin >= self._start:
            return memoryview(self._footer)[begin - self._start : end - self._start]
        size = self._block
        first, last = begin // size, (min(end, self._start) - 1) // size
        self._file.seek(first * size)
        data: bytes = self._file.read(min((last + 1) * size, self._start) - first * size)
        if self._sums is not None:
            self._check(data, self._sums[first : last + 1].tolist(), first * size)
        whole = data + self._footer if end > self._start else data
        return memoryview(whole)[begin - first * size : end - first * size]

    def _check(self, data: bytes, known: Sequence[int], begin: int) -> None:
        size = self._block
        whole = len(data) // size
        rest = data[whole * size :]
        # Check all whole blocks at once, which is faster than checking each block. The last block may be shorter.
        sums = [zlib.crc32(memoryview(data)[: whole * size]), *([zlib.crc32(rest)] if rest else [])]
        if len(known) != whole + bool(rest) or sums != [_combined(known[:whole], size), *known[whole:]]:
            both = itertools.zip_longest(map(zlib.crc32, _blocks(data, size)), known)
            wrong = next(i for i, (read, written) in enumerate(both) if read != written)
            raise ValueError(f"it is damaged: its bytes from {begin + wrong * size} differ from the bytes that were written")


def _combined(sums: Sequence[int], size: int) -> int:
    """Return the CRC-32 of consecutive blocks of `size` bytes from the CRC-32 of each block.

    To combine A and B, extend the CRC-32 of A by as many zeros as B is long, then xor with the CRC-32 of B. This is zlib's
    `crc32_combine`.

    >>> _combined([zlib.crc32(b"1234"), zlib.crc32(b"5678")], 4) == zlib.crc32(b"12345678")
    True
    """
    lowest, low, high, highest = _shifts(size)
    crc = 0
    for each in sums:
        crc = lowest[crc & 255] ^ low[crc >> 8 & 255] ^ high[crc >> 16 & 255] ^ highest[crc >> 24] ^ each
    return crc


@lru_cache(len(_KEYS))
def _shifts(size: int) -> list[list[int]]:
    """Return four tables, one for each byte of a CRC-32, lowest byte first. A table maps the byte's value to its
    contribution after `size` zero bytes.
    """
    zeros = bytes(size)
    of_none = zlib.crc32(zeros)
    return [[zlib.crc32(zeros, value << place) ^ of_none for value in range(256)] for place in range(0, 32, 8)]
