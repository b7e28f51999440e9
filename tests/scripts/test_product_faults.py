"""What docs/verify.md says of wrong products is what was measured: scripts/validation/product_faults/results.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS: dict[str, Any] = json.loads((ROOT / "scripts/validation/product_faults/results.json").read_text())
PAGE = " ".join((ROOT / "docs/verify.md").read_text().split())


def rows_of(title: str) -> dict[str, list[str]]:
    """A table of the page by its first column, from its heading on."""
    lines = (ROOT / "docs/verify.md").read_text().split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {title} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        rows[first] = others
    return rows


@pytest.mark.parametrize("cpu", ["AVX-512", "without AVX-512"])
def test_no_product_of_a_healthy_model_was_called_wrong(cpu: str) -> None:
    clean = RESULTS[cpu]["clean"]
    assert clean["wrong"] == [] and clean["unknown"] == 0
    assert clean["values"] >= 10_000_000 and clean["blocks"] >= 20_000 and clean["largest"] <= 1
    told = f"{clean['blocks']:,} blocks with {clean['values'] / 1e6:.0f} million values"
    assert told in PAGE and f"{clean['largest']:.3f}" in PAGE


def test_faults_are_named_as_often_as_docs_say() -> None:
    rows, recall = rows_of("fault"), RESULTS["AVX-512"]["recall"]
    assert {re.sub(r"`", "", name) for name in rows} == set(recall)
    for name, cells in rows.items():
        for cell, dtype in zip(cells[1:], ("bfloat16", "float32"), strict=True):
            of = recall[name.strip("`")][dtype]
            assert cell == f"{of['named']} of {of['runs']}" and of["more_named"] == 0


def test_flips_of_single_bits_are_found_as_often_as_docs_say() -> None:
    rows, flips = rows_of("bit"), RESULTS["AVX-512"]["flips"]
    for bit, cells in rows.items():
        shares = [
            flips[dtype][product][int(bit)] if int(bit) < len(flips[dtype][product]) else None
            for dtype in ("bfloat16", "float16", "float32")
            for product in ("fprop", "dgrad", "wgrad")
        ]
        assert cells == ["" if share is None else f"{100 * share:.0f}" for share in shares]


def test_the_chance_to_touch_what_is_checked_is_as_docs_say() -> None:
    rows, touched = rows_of("wrong"), RESULTS["AVX-512"]["touched"]
    assert len(rows) == len(touched)
    for (_, cells), share in zip(rows.items(), touched.values(), strict=True):
        assert cells == [f"{100 * share:.1f}%"]
