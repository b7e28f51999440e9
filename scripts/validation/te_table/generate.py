"""Writes rows/RECIPE.csv: combinations in which each pair of values that Transformer Engine takes is found.

    PYTHONPATH=scripts/validation .venv/bin/python -m te_table.generate

Needs allpairspy, which the tests do not: the rows are committed.
"""

from __future__ import annotations

import csv
import random
from itertools import combinations

from allpairspy import AllPairs  # type: ignore[import-not-found, unused-ignore]

from .factors import RECIPES, ROWS, Pair, factors_of, is_allowed, pairs_of

#: orders in which the rest of a row is tried, before a pair is taken to be impossible
TRIES = 60


def rows_of(recipe: str) -> list[dict[str, str]]:
    """Rows that cover all pairs; AllPairs misses some for which a row has to be gone back on.

    Weights that are stored hide how they are cast: all other pairs are found in a row without.
    """
    factors = {**factors_of(recipe), "weights_stored": ["no"]}
    names = list(factors)

    def allowed(chosen: list[str]) -> bool:
        return is_allowed(recipe, dict(zip(names, chosen, strict=False)))

    found = [
        dict(zip(names, row, strict=True)) for row in AllPairs([list(f) for f in factors.values()], filter_func=allowed)
    ]
    left = {pair for pair in pairs_of(factors_of(recipe)) if is_allowed(recipe, dict(pair))}
    for row in found:
        left -= set(combinations(row.items(), 2))
    dice = random.Random(0)
    for pair in sorted(left):
        if pair in left and (row := _completed(recipe, pair, left, dice)):
            found.append(row)
            left -= set(combinations(row.items(), 2))
    if left:
        print(f"{recipe}: impossible: {sorted(left)}")
    return found


def _completed(recipe: str, pair: Pair, left: set[Pair], dice: random.Random) -> dict[str, str] | None:
    factors = factors_of(recipe)
    for _ in range(TRIES):
        row = dict(pair)
        others = [name for name in factors if name not in row]
        dice.shuffle(others)
        for name in others:
            values = [value for value in factors[name] if is_allowed(recipe, {**row, name: value})]
            if not values:
                break
            new = {value: _new(name, value, row, left, list(factors)) for value in values}
            row[name] = max(values, key=new.__getitem__)
        else:
            return {name: row[name] for name in factors}
    return None


def _new(name: str, value: str, row: dict[str, str], left: set[Pair], names: list[str]) -> int:
    """How many pairs that are left a value covers."""
    first = names.index(name)
    return sum(
        (((name, value), other) if first < names.index(other[0]) else (other, (name, value))) in left
        for other in row.items()
    )


def main() -> None:
    ROWS.mkdir(exist_ok=True)
    for recipe in RECIPES:
        rows = rows_of(recipe)
        with (ROWS / f"{recipe}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(factors_of(recipe)), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"{recipe}: {len(rows)} rows")


if __name__ == "__main__":
    main()
