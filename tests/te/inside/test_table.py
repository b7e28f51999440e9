"""All recipes with all their options, in pairs: nothing is reported of a cast that a kernel was not given.

All rows are run by scripts/validation/te_table/run.sh; here it is some of them, and that its results are of this release.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from itertools import combinations
from pathlib import Path

import pytest
from pairs import pairs_of
from te_table.compare import result_of
from te_table.factors import RECIPES, checksum_of_rows, factors_of, is_allowed, rows_of

RESULTS = json.loads((Path(__file__).parents[3] / "scripts/validation/te_table/results.json").read_text())
#: one row in so many is run here
EVERY = 14
#: whose column-wise copies hold other values
IN_BLOCKS = ("Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe")
#: options under which a cast is unknown, and why
UNKNOWN = {
    "it has no row-wise copy, because no gradient of X is needed": "column-wise copies are not measured",
}

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_reported_is_what_kernels_were_given(tmp_path: Path, recipe: str) -> None:
    seen = copies = 0
    for number, row in list(enumerate(rows_of(recipe)))[::EVERY]:
        result = result_of(recipe, row, tmp_path / str(number))
        assert result.differing == [], (recipe, number)
        assert result.reasons.keys() <= UNKNOWN.keys(), (recipe, number)
        seen += result.sources["engine"]
        copies += result.copies.total()
    assert seen and bool(copies) == (recipe in IN_BLOCKS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_row_has_each_pair_that_transformer_engine_takes(recipe: str) -> None:
    rows = rows_of(recipe)
    factors = factors_of(recipe)
    assert all(is_allowed(recipe, row) for row in rows) and list(rows[0]) == list(factors)
    covered = {pair for row in rows for pair in combinations(row.items(), 2)}
    assert {pair for pair in pairs_of(factors) if is_allowed(recipe, dict(pair))} == covered


def test_results_are_of_these_rows_and_releases() -> None:
    assert RESULTS["rows"] == checksum_of_rows()
    assert RESULTS["releases"] == {name: version(name) for name in ("transformer-engine", "megatron-core")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_of_all_rows_none_differs(recipe: str) -> None:
    found = RESULTS[recipe]
    assert found["rows"] == len(rows_of(recipe)) and found["rows that differ"] == 0
    assert found["casts"].keys() <= {"engine", "expected", "not quantized", "stored", "unknown"}
    assert found["rows with unknown by reason"].keys() <= UNKNOWN.keys()


def test_a_copy_that_is_not_made_is_unknown(tmp_path: Path) -> None:
    """Of a gradient whose copies have formats of their own: nothing multiplies the row-wise one."""
    row = {name: values[0] for name, values in factors_of("CustomRecipe").items()}
    row |= {"qfactory": "hybrid", "layer": "GroupedLinear", "input_needs_grad": "no"}
    result = result_of("CustomRecipe", row, tmp_path)
    assert result.differing == [] and result.sources == {"engine": 8, "unknown": 4}
    assert [*result.reasons] == ["it has no row-wise copy, because no gradient of X is needed"]


def test_a_weight_that_may_have_changed_since_it_was_cached_is_unknown(tmp_path: Path) -> None:
    """Its step casts no weight, and the kernels multiply what was cast before the weight moved."""
    row = {name: values[0] for name, values in factors_of("Float8CurrentScaling").items()}
    row["cached_weights"] = "from first step"
    for layer in ("Linear", "TERowParallelLinear", "LayerNormMLP"):
        result = result_of("Float8CurrentScaling", row | {"layer": layer, "recompute": "te reentrant"}, tmp_path / layer)
        assert result.differing == []
        assert list(result.reasons) == ["it was cast before this step and cached, and may have changed since"]
