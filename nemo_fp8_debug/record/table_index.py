"""Where the rows of a table are: which part has those of each step that count, and of which operands they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
import pyarrow as pa

from ..core.threads import ahead
from .outline import Outline, Stretch, stretches
from .parts import KEYS, Ints, Owners, PartDamagedError, order_newest_first, read_each, read_names
from .schema import Part
from .storage import Storage


@dataclass(frozen=True)
class TableIndex:
    """The sampled steps of a table, and which part has each."""

    #: int64, ascending
    steps: Ints
    owner: dict[int, Part]
    #: by path why parts are left out
    damaged: dict[str, str]

    @classmethod
    def read(
        cls,
        run: Storage,
        table: str,
        outline_of: Callable[[Part], Outline],
        parts: Sequence[Part] | None = None,
        use: Callable[[Part, Outline], None] = lambda part, outline: None,
    ) -> TableIndex:
        """Read the outlines of parts, several at once.

        Args:
            outline_of: reads that of a part; raises what `read_outline` does.
            parts: those that are read first; by default all of the table, as they are listed.
            use: is called with each part before its steps count; may raise the same.
        """
        owners = Owners(table)

        def add(part: Part, outline: Outline) -> None:
            use(part, outline)
            owners.add(part, outline.steps)

        damaged = read_each(run, table, outline_of, add, owners, parts, ahead)
        return cls(np.array(sorted(owners.of_step), np.int64), owners.of_step, damaged)

    @property
    def in_order(self) -> list[tuple[Part, list[int]]]:
        """Parts with the steps that they have, in order of steps; a part twice if another has steps in between."""
        runs = itertools.groupby(self.steps.tolist(), self.owner.__getitem__)
        return [(part, list(steps)) for part, steps in runs]

    @cached_property
    def held(self) -> dict[Part, list[int]]:
        """The steps that each part has, ascending."""
        parts: dict[Part, list[int]] = {}
        for part, steps in self.in_order:
            parts.setdefault(part, []).extend(steps)
        return parts

    @cached_property
    def newest_first(self) -> list[Part]:
        """The parts that have steps: those of the latest attempt before others, however far these came."""
        return order_newest_first(self.held)

    @property
    def newest(self) -> Part | None:
        """The last part of the latest attempt."""
        return self.newest_first[0] if self.newest_first else None

    def nearest(self, step: int) -> int:
        """Return the sampled step next to one; of two the earlier."""
        after = min(int(np.searchsorted(self.steps, step)), len(self.steps) - 1)
        before = max(after - 1, 0)
        return int(min(self.steps[before], self.steps[after], key=lambda s: abs(int(s) - step)))


@dataclass(frozen=True)
class StepRows:
    """Rows of one step in a part, one behind the other."""

    #: place among the steps
    step: int
    #: place of the first row in the part
    first: int
    #: of the operands of each row, among the layouts
    layout: int


class Operands:
    """The operands of rows. Most steps list the same ones, and names are read once for each such list."""

    def __init__(self, run: Storage, table: str) -> None:
        self._run, self._table = run, table
        #: layer, role of each
        self.names = pl.DataFrame(schema=dict.fromkeys(KEYS[1:], pl.String))
        #: int64 [rows]: the operand of each row of a stretch
        self.layouts: list[Ints] = []
        self._layout: dict[str, int] = {}

    def add(self, part: Part, outline: Outline) -> None:
        """Learn the operands of a part.

        Raises:
            PartDamagedError: its names cannot be read, or differ from what the footer says.
        """
        names = read_new_names(self._run, self._table, part, outline, self._layout)
        for digest, of_stretch in names.items():
            self._layout[digest] = len(self.layouts)
            self.layouts.append(self._places(pl.DataFrame(pl.from_arrow(of_stretch))))

    def runs(self, outline: Outline, places: Mapping[int, int]) -> list[StepRows]:
        """Return where rows of some steps are in a part, in order of steps.

        Args:
            places: of steps that are wanted.
        """
        runs = [
            StepRows(places[stretch.step], first, self._layout[stretch.digest])
            for first, stretch in place_stretches(outline)
            if stretch.step in places
        ]
        return sorted(runs, key=lambda run: run.step)

    def _places(self, names: pl.DataFrame) -> Ints:
        """Of each row, the place of its operand; those that are new are added."""
        new = names.unique(maintain_order=True).join(self.names, on=KEYS[1:], how="anti", maintain_order="left")
        self.names = pl.concat([self.names, new])
        places = names.join(self.names.with_row_index("place"), on=KEYS[1:], how="left", maintain_order="left")["place"]
        found: Ints = places.cast(pl.Int64).to_numpy()
        return found


def place_stretches(outline: Outline) -> list[tuple[int, Stretch]]:
    """Return the stretches of a part, each with the place of its first row."""
    firsts = itertools.accumulate((stretch.rows for stretch in outline.stretches), initial=0)
    return list(zip(firsts, outline.stretches, strict=False))


def read_new_names(
    run: Storage, table: str, part: Part, outline: Outline, known: Container[str] = ()
) -> dict[str, pa.Table]:
    """Read layers and roles of the stretches of a part, each list of them once, by its digest.

    Args:
        known: digests of lists that are not read.

    Raises:
        PartGoneError, PartDamagedError: as `read_names`, or they differ from what the footer says.
    """
    new = dict[str, tuple[int, Stretch]]()
    for first, stretch in place_stretches(outline):
        if stretch.digest not in known:
            new.setdefault(stretch.digest, (first, stretch))
    tables = read_names(run, table, part, [(first, first + stretch.rows) for first, stretch in new.values()]) if new else []
    if [stretches(names) for names in tables] != [[stretch] for _, stretch in new.values()]:
        raise PartDamagedError("its footer does not fit its rows")
    return {digest: names.select(KEYS[1:]) for digest, names in zip(new, tables, strict=True)}
