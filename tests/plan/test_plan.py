"""The file that a recommendation is kept in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_fp8_debug.errors import ConfigError
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.plan.plan import Change, Plan

FC2 = "decoder.layers.0.mlp.linear_fc2"


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    plan = Plan((Change(FC2, "current", ("input",), why="stale scale"), Change("linear_qkv", "bf16", multiply_in_bf16=True)))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_the_last_change_of_an_operand_holds() -> None:
    plan = Plan((Change("linear_fc2", "bf16"), Change(FC2, "current", ("input",))))
    delayed = parse_recipe("delayed")
    assert plan.recipe_of(FC2, "input", delayed).name == "current-hybrid"
    assert plan.recipe_of(FC2, "weight", delayed).name == "bf16"
    assert plan.recipe_of("decoder.layers.0.mlp.linear_fc1", "weight", delayed) == delayed


def test_a_plan_is_not_overwritten(tmp_path: Path) -> None:
    Plan().save(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="not overwritten"):
        Plan((Change(FC2, "bf16"),)).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == Plan()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"version": 2, "changes": []}',
        *(
            json.dumps({"version": 1, "changes": [change]}).encode()
            for change in (
                3,
                {},
                {"layer": FC2},
                {"layer": FC2, "recipe": "fp7"},
                {"layer": "re:(", "recipe": "bf16"},
                {"layer": 1, "recipe": "bf16"},
                {"layer": FC2, "recipe": "bf16", "roles": "input"},
                {"layer": FC2, "recipe": "bf16", "roles": []},
                {"layer": FC2, "recipe": "bf16", "roles": ["output"]},
                {"layer": FC2, "recipe": "bf16", "multiply_in_bf16": 1},
                {"layer": FC2, "recipe": "bf16", "sure": True},
            )
        ),
    ],
)
def test_what_is_no_plan_is_refused_by_name(tmp_path: Path, content: Any) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


def test_no_file_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")
