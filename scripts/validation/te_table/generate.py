"""Writes rows/RECIPE.csv: combinations in which each pair of values that Transformer Engine takes is found.

    PYTHONPATH=scripts/validation .venv/bin/python -m te_table.generate

Needs allpairspy, which the tests do not: the rows are committed.
"""

from __future__ import annotations

import csv
from functools import partial

from pairs import covering_rows

from .factors import RECIPES, ROWS, factors_of, is_allowed


def main() -> None:
    ROWS.mkdir(exist_ok=True)
    for recipe in RECIPES:
        factors = factors_of(recipe)
        # Weights that are stored hide how they are cast: all other pairs are found in a row without.
        rows = covering_rows(factors, partial(is_allowed, recipe), {**factors, "weights_stored": ["no"]})
        with (ROWS / f"{recipe}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(factors), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"{recipe}: {len(rows)} rows")


if __name__ == "__main__":
    main()
