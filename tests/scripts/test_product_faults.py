"""What was measured of wrong products, which docs/accuracy.md prints: scripts/validation/product_faults/results.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diagnosis_tables import list_flips, list_product_faults, list_touched

RESULTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "scripts/validation/product_faults/results.json").read_text()
)
FOUND = RESULTS["AVX-512"]


@pytest.mark.parametrize("cpu", ["AVX-512", "without AVX-512"])
def test_no_product_of_a_healthy_model_was_called_wrong(cpu: str) -> None:
    clean = RESULTS[cpu]["clean"]
    assert clean["wrong"] == [] and clean["unknown"] == 0
    assert clean["values"] >= 10_000_000 and clean["blocks"] >= 20_000 and clean["largest"] <= 1


def test_no_other_product_was_named_with_a_faulty_one() -> None:
    assert [of["more_named"] for by_dtype in FOUND["recall"].values() for of in by_dtype.values() if of["more_named"]] == []
    assert {of["runs"] for by_dtype in FOUND["recall"].values() for of in by_dtype.values()} == {100}
    assert sum(len(names.split("; ")) for names, *_ in [*list_product_faults()][1:]) == len(FOUND["recall"])


def test_flips_are_found_from_the_printed_bit_on() -> None:
    _, *rows = list_flips()
    for (_, width, *bits), by_product in zip(rows, FOUND["flips"].values(), strict=True):
        for bit, product in zip(bits, ("fprop", "dgrad", "wgrad"), strict=True):
            first, shares = int(bit), by_product[product]
            assert len(shares) == int(width) and min(shares[first:]) >= 0.95 > shares[first - 1]


def test_a_fault_of_more_values_is_met_more_often() -> None:
    _, *rows = list_touched()
    for kind in ("values", "rows"):
        chances = [float(chance.removesuffix("%")) for what, chance in rows if what.endswith(kind)]
        assert len(chances) >= 3 and chances == sorted(chances) and chances[-1] > 95
