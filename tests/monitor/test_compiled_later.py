"""torch.compile called after the monitor was attached is noticed, and its graphs have nothing of the monitor in them. With
the option eager, sampled steps run without them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import finished


@pytest.fixture(scope="module")
def runs() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
        done = finished(sys.executable, "-W", "ignore", str(Path(__file__).with_name("compiled_later.py")))
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("way", "layers", "first"),
    [
        ("wrapped", 3, "block.fc1"),
        ("in place", 3, "block.fc1"),
        ("a part", 2, "block.fc1"),
        ("a part replaced", 2, "block.fc1"),
        ("a function", 3, "block.fc1"),
    ],
)
def test_it_is_said_once_and_changes_nothing(runs: Any, way: str, layers: int, first: str) -> None:
    plain, watched = runs["later"][way]
    assert watched["losses"] == plain["losses"] and watched["graphs"] == plain["graphs"] and plain["graphs"]
    (message,) = watched["said"]
    assert f"after the monitor was attached: {layers} layers (first {first}) run inside it" in message
    kept = {"0": ["head"], "2": ["head"], "4": ["head"]} if layers == 2 else {}
    assert {step: found for step, found in watched["layers"].items() if found} == kept


@pytest.mark.parametrize("way", ["wrapped", "in place", "a part", "a part replaced", "a function"])
def test_with_the_option_eager_compiled_layers_are_sampled_and_graphs_stay_as_they_were(runs: Any, way: str) -> None:
    plain, watched = runs["later"][way][0], runs["eager"][way]
    assert watched["said"] == [] and watched["graphs"] == plain["graphs"]
    assert watched["layers"] == {step: ["block.fc1", "block.fc2", "head"] for step in ("0", "2", "4")}
    assert watched["losses"] == plain["losses"]  # the backend of the test calls the same operators
