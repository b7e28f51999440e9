"""Rows of a table in which each pair of values of its factors is found; needs allpairspy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Factors = Mapping[str, Sequence[str]]
Row = Mapping[str, str]
#: two factors in their order, each with a value
Pair = tuple[tuple[str, str], tuple[str, str]]
#: orders in which the rest of a row is tried, before a pair is taken to be impossible
TRIES = 60


def pairs_of(factors: Factors) -> Iterator[Pair]:
    """All pairs of values of different factors."""
    for (one, values), (other, others) in combinations(factors.items(), 2):
        for value, with_value in product(values, others):
            yield (one, value), (other, with_value)


def covering_rows(factors: Factors, is_allowed: Callable[[Row], bool], first: Factors | None = None) -> list[dict[str, str]]:
    """Rows that cover all pairs that are allowed; AllPairs misses some for which a row has to be gone back on.

    Args:
        is_allowed: of a row, or of a part of one.
        first: values to be combined before all others.

    Raises:
        ValueError: a pair is in no row that is allowed.
    """
    from allpairspy import AllPairs  # type: ignore[import-not-found, unused-ignore]

    names = list(factors)
    combined = AllPairs(
        [list(values) for values in (first or factors).values()],
        filter_func=lambda chosen: is_allowed(dict(zip(names, chosen, strict=False))),
    )
    found = [dict(zip(names, row, strict=True)) for row in combined]
    left = {pair for pair in pairs_of(factors) if is_allowed(dict(pair))}
    for row in found:
        left -= set(combinations(row.items(), 2))
    dice = random.Random(0)
    for pair in sorted(left):
        if pair in left:
            found.append(_completed(factors, is_allowed, pair, left, dice))
            left -= set(combinations(found[-1].items(), 2))
    return found


def _completed(
    factors: Factors, is_allowed: Callable[[Row], bool], pair: Pair, left: set[Pair], dice: random.Random
) -> dict[str, str]:
    for _ in range(TRIES):
        row = dict(pair)
        others = [name for name in factors if name not in row]
        dice.shuffle(others)
        for name in others:
            values = [value for value in factors[name] if is_allowed({**row, name: value})]
            if not values:
                break
            new = {value: _new(name, value, row, left, list(factors)) for value in values}
            row[name] = max(values, key=new.__getitem__)
        else:
            return {name: row[name] for name in factors}
    raise ValueError(f"{pair} is in no row that is allowed")


def _new(name: str, value: str, row: Row, left: set[Pair], names: list[str]) -> int:
    """How many pairs that are left a value covers."""
    mine, place = (name, value), names.index(name)
    pairs = ((mine, other) if place < names.index(other[0]) else (other, mine) for other in row.items())
    return sum(pair in left for pair in pairs)
