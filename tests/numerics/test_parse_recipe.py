"""Recipes by name and options: what is read, what is refused, and the format of each role."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_fp8_debug.core.keys import ROLES
from nemo_fp8_debug.errors import ConfigError
from nemo_fp8_debug.numerics.block_scaling import Float8BlockScaling, MXFP8Scaling
from nemo_fp8_debug.numerics.formats import BF16, E2M1, E4M3, E5M2, FloatFormat
from nemo_fp8_debug.numerics.nvfp4_scaling import NVFP4Scaling
from nemo_fp8_debug.numerics.recipe import BF16_RECIPE, Recipe, find_recipe, parse_recipe
from nemo_fp8_debug.numerics.tensor_scaling import (
    CurrentScaling,
    DelayedScaling,
    Unscaled,
)


class TestParseRecipe:
    @pytest.mark.parametrize(
        ("value", "recipe"),
        [
            ("delayed", Recipe(DelayedScaling())),
            ("current", Recipe(CurrentScaling())),
            ({"name": "current", "power_of_two": True, "epsilon": 1e-6}, Recipe(CurrentScaling(1e-6, True))),
            (
                {"name": "delayed", "fp8_format": "e4m3", "margin": 1, "amax_history_len": 16},
                Recipe(DelayedScaling(1, 16), "e4m3"),
            ),
            (
                {"name": "delayed", "amax_compute_algo": "most_recent"},
                Recipe(DelayedScaling(amax_compute_algo="most_recent")),
            ),
            (Recipe(CurrentScaling(), "e5m2"), Recipe(CurrentScaling(), "e5m2")),
            ("blockwise", Recipe(Float8BlockScaling(), "e4m3")),
            ("blockwise-hybrid(power_of_two=False)", Recipe(Float8BlockScaling(False), "hybrid")),
            ("mxfp8", Recipe(MXFP8Scaling(), "e4m3")),
            ({"name": "mxfp8", "fp8_format": "hybrid"}, Recipe(MXFP8Scaling(), "hybrid")),
            ("nvfp4", Recipe(NVFP4Scaling(), "e2m1")),
            ("bf16", Recipe(Unscaled(), "bf16")),
        ],
        ids=str,
    )
    def test_reads(self, value: Any, recipe: Recipe) -> None:
        assert parse_recipe(value) == recipe

    @pytest.mark.parametrize(
        ("value", "named"),
        [
            ("delaid", ["'delaid'", "delayed", "current"]),
            ({"margin": 1}, ["None", "delayed", "current"]),
            ({"name": "delayed", "epsilon": 1.0}, ["'epsilon'", "amax_history_len", "amax_compute_algo", "margin"]),
            ({"name": "current", "margin": 1, "foo": 2}, ["'foo', 'margin'", "epsilon", "power_of_two", "fp8_format"]),
            ({"name": "current", "fp8_format": "e3m4"}, ["'e3m4'", "'hybrid'", "'e4m3'", "'e5m2'"]),
            ("mxfp8-e5m2", ["'e5m2'", "'e4m3'", "'hybrid'"]),
            ("nvfp4-e4m3", ["'e4m3'", "'e2m1'"]),
            ("mxfp8(power_of_two=False)", ["'power_of_two'", "fp8_format"]),
            ({"name": "delayed", "amax_compute_algo": "mean"}, ["'mean'", "'max'", "'most_recent'"]),
            ({"name": "delayed", "amax_history_len": 0}, ["amax_history_len", "0", "at least 1"]),
            ({"name": "delayed", "amax_history_len": 99999999999}, ["amax_history_len", "99999999999", "at most 1000000"]),
        ],
        ids=str,
    )
    def test_says_what_is_wrong_and_what_would_be_right(self, value: Any, named: list[str]) -> None:
        with pytest.raises(ConfigError) as error:
            parse_recipe(value)
        assert [part for part in named if part not in str(error.value)] == []

    @pytest.mark.parametrize(
        ("name", "option", "value"),
        [
            ("delayed", "amax_history_len", "16"),
            ("delayed", "amax_history_len", 1.5),
            ("delayed", "margin", "1"),
            ("current", "epsilon", "1e-6"),
        ],
    )
    def test_names_an_option_whose_value_is_of_the_wrong_kind(self, name: str, option: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=option):
            parse_recipe({"name": name, option: value})

    @pytest.mark.parametrize(
        ("value", "name"),
        [
            ("delayed", "delayed-hybrid"),
            ({"name": "current", "fp8_format": "e4m3"}, "current-e4m3"),
            ({"name": "delayed", "margin": 1, "amax_history_len": 16}, "delayed-hybrid(margin=1,amax_history_len=16)"),
            ({"name": "delayed", "amax_history_len": 1024}, "delayed-hybrid"),
            ("blockwise(epsilon=1e-6)", "blockwise-e4m3(epsilon=1e-06)"),
            ({"name": "mxfp8", "fp8_format": "hybrid"}, "mxfp8-hybrid"),
            ("nvfp4-e2m1", "nvfp4"),
            ("bf16", "bf16"),
        ],
        ids=str,
    )
    def test_names_leave_defaults_out_and_are_read_back(self, value: Any, name: str) -> None:
        recipe = parse_recipe(value)
        assert recipe.name == name
        assert parse_recipe(name) == recipe

    @pytest.mark.parametrize(
        ("fp8_format", "formats"),
        [("hybrid", [E4M3, E4M3, E5M2]), ("e4m3", [E4M3] * 3), ("e5m2", [E5M2] * 3)],
    )
    def test_format_of_each_role(self, fp8_format: str, formats: list[FloatFormat]) -> None:
        recipe = Recipe(CurrentScaling(), fp8_format)
        assert [recipe.get_format(role) for role in ROLES] == formats

    @pytest.mark.parametrize(
        ("name", "formats"),
        [
            ("mxfp8", [E4M3] * 3),
            ("blockwise-hybrid", [E4M3, E4M3, E5M2]),
            ("nvfp4", [E2M1] * 3),
            ("bf16", [BF16] * 3),
        ],
    )
    def test_format_of_each_role_under_other_recipes(self, name: str, formats: list[FloatFormat]) -> None:
        assert [parse_recipe(name).get_format(role) for role in ROLES] == formats


@pytest.mark.parametrize(("name", "recipe"), [("bf16", BF16_RECIPE), ("of another tool", None), (None, None)])
def test_a_record_may_name_a_recipe_that_is_not_known(name: str | None, recipe: Recipe | None) -> None:
    assert find_recipe(name) == recipe
