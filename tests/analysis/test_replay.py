"""Figures recomputed from recorded sketches against those that the run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from torch import nn

from nemo_fp8_debug import ConfigError, Monitor, RecordError
from nemo_fp8_debug.analysis.replay import replay
from nemo_fp8_debug.numerics.figures import FIGURES
from nemo_fp8_debug.record.reader import find_run, read_table


def train(folder: Path, recipe: str | dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Path:
    """Five steps of two micro-batches whose scale changes from step to step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)
    monitor = Monitor(model, str(folder), interval=1, recipe=recipe, table_rows=0, on_error="raise")
    for step in range(5):
        with monitor.step(step):
            for i in range(2):
                model((2.0**step * (1 + i) * torch.randn(4, 16)).to(dtype)).float().square().mean().backward()
    monitor.close()
    return find_run(folder)


DELAYED = {"name": "delayed", "amax_history_len": 2, "margin": 1}


@pytest.mark.parametrize("recipe", ["current", DELAYED], ids=["current", "delayed"])
def test_replay_under_the_scales_in_use_gives_the_record(tmp_path: Path, recipe: str | dict[str, Any]) -> None:
    run = train(tmp_path, recipe)
    assert_frame_equal(replay(run), read_table(run, "figures"), check_exact=False, rel_tol=1e-12, check_row_order=False)


@pytest.mark.parametrize(
    "recipe",
    ["current", {"name": "current", "power_of_two": True}, {"name": "current", "fp8_format": "e5m2"}, DELAYED],
    ids=["current", "power of two", "e5m2", "delayed"],
)
def test_replay_under_another_recipe_is_what_a_run_under_it_records(tmp_path: Path, recipe: str | dict[str, Any]) -> None:
    """The runs do not quantise, so the same operands are measured under either recipe."""
    replayed = replay(train(tmp_path / "a", "delayed"), recipe)
    recorded = read_table(train(tmp_path / "b", recipe), "figures")
    if recipe == DELAYED:
        # Without a history each micro-batch is replayed under the one scale that its sketch was recorded for.
        replayed, recorded = (frame.filter(pl.col("step") > 0) for frame in (replayed, recorded))
    else:
        # A history's scale holds for all micro-batches, which are recorded as one sketch: compare the weights.
        replayed, recorded = (frame.filter(pl.col("role") == "weight") for frame in (replayed, recorded))
    columns = ["step", "layer", "role", "recipe", "format", "n", "scale", *FIGURES]
    assert_frame_equal(
        replayed.select(columns), recorded.select(columns), check_exact=False, rel_tol=1e-12, check_row_order=False
    )


def test_float32_operands_are_left_out(tmp_path: Path) -> None:
    assert replay(train(tmp_path, "current", torch.float32)).is_empty()


def test_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no run record"):
        replay(tmp_path)
    with pytest.raises(ConfigError, match="unknown recipe 'fp7'"):
        replay(train(tmp_path, "current"), "fp7")
