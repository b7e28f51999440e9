"""Writes torchao_pairs.csv: options of torchao's `Float8LinearConfig`, each pair of values that it takes at least once.

    .venv/bin/python scripts/validation/torchao_pairs.py

Needs allpairspy, which the test of the rows does not.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from pairs import covering_rows

ROWS = Path(__file__).with_suffix(".csv")
#: by product, the fields of its two operands
PRODUCTS = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight_for_grad_input"),
    "wgrad": ("grad_output_for_grad_weight", "input_for_grad_weight"),
}
_FIELDS = [field for fields in PRODUCTS.values() for field in fields]
FACTORS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_FIELDS, ("TENSORWISE", "AXISWISE")),
    **dict.fromkeys(PRODUCTS, ("cast", "high precision")),
    **{f"{operand}_dtype": ("e4m3", "e5m2") for operand in ("input", "weight", "grad_output")},
    "round_scales_to_power_of_2": ("False", "True"),
    "pad_inner_dim": ("False", "True"),
    "use_fast_accum": ("False", "True"),
    "dtype": ("bfloat16", "float16", "float32"),
    "shape": ("5x16x32", "33x100x48"),
    "micro_batches": ("1", "2"),
    "bias": ("False", "True"),
}


def is_allowed(row: Mapping[str, str]) -> bool:
    """torchao wants no granularity of what it does not cast; keys that are missing are not chosen yet."""
    return not any(
        row.get(product) == "high precision" and row.get(field) == "AXISWISE"
        for product, fields in PRODUCTS.items()
        for field in fields
    )


def rows() -> list[dict[str, str]]:
    """The committed rows."""
    with ROWS.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(FACTORS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(covering_rows(FACTORS, is_allowed))


if __name__ == "__main__":
    main()
