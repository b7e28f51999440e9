"""What optimizers keep, and what lies between GEMMs, in the tab: against the record as `read_table` has it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from browser import tensorboard, window
from playwright.sync_api import Browser, expect
from tab import Tab
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.core.keys import STATES
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.tensorboard_plugin.web import link

STEPS = 70  # more than are merged at a time


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    torch.manual_seed(0)
    block = [nn.Linear(16, 16), nn.LayerNorm(16)]
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Sequential(*block), nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16))])}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"interval": 1, "table_rows": 0, "what_if": ["current-e5m2", "bf16"], "on_error": "raise"}
    monitor = Monitor(model, str(folder / "run"), states=tuple(STATES), activations=("norm",), **options)
    for step in range(STEPS):
        with monitor.step(step):
            x = torch.randn(32, 16)
            for layer in model["layers"]:
                x = layer(x)
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    return folder


@pytest.fixture(scope="module")
def tab(trained: Path) -> Tab:
    return Tab(trained)


def in_use(folder: Path, table: str) -> pl.DataFrame:
    return read_table_rows(folder / "run", table).filter(pl.col("scale_source").cast(pl.String).ne_missing("what-if"))


@pytest.mark.parametrize(
    ("table", "metric"),
    [("states", "amax"), ("states", "share_pct"), ("activations", "kurtosis"), ("activations", "channel_ratio")],
)
def test_frames_and_extent_are_those_of_what_is_in_use(trained: Path, tab: Tab, table: str, metric: str) -> None:
    rows = in_use(trained, table)
    header, values = tab.frames(run="run", metric=metric, table=table, from_=0, to=STEPS - 10)
    assert header["steps"] == list(range(STEPS - 9))
    tensors = list(zip(header["layer"], header["role"], strict=True))
    expected = {(s, layer, role): value for s, layer, role, value in rows.select("step", "layer", "role", metric).rows()}
    assert len(tensors) * STEPS == len(expected)
    for i, step in enumerate(header["steps"]):
        assert [expected[(step, *key)] for key in tensors] == pytest.approx(values[i].tolist(), rel=1e-6)
    extent = tab.json("extent", run="run", metric=metric, table=table)
    assert (extent["low"], extent["high"]) == (rows[metric].min(), rows[metric].max())


def test_a_tensor_is_found_in_its_own_table(trained: Path, tab: Tab) -> None:
    about = tab.json("run", run="run", table="states")
    assert about["tables"] == ["metrics", "states", "activations"]
    assert set(about["tensors"]["role"]) == {*STATES} - {"master_weight"}
    rows = in_use(trained, "states").filter(layer="layers.0.0", role="second_moment")
    found = tab.json("timeline", run="run", layer="layers.0.0", role="second_moment", metrics="amax,entropy")
    assert found["metrics"]["amax"] == rows["amax"].to_list() and found["metrics"]["entropy"] == [None] * STEPS
    found = tab.json("histogram", run="run", layer="layers.1.1", role="norm_output", step=7)
    row = in_use(trained, "activations").filter(layer="layers.1.1", role="norm_output", step=7).row(0, named=True)
    assert sum(np.sum(part["counts"]) for part in found["rows"]) == row["n"]
    assert found["recorded"]["channel_ratio"] == row["channel_ratio"]


def test_metrics_that_operands_do_not_have_are_empty(tab: Tab) -> None:
    _, values = tab.frames(run="run", metric="entropy", from_=0, to=10)
    assert np.isnan(values).all()


@pytest.fixture(scope="module")
def board(trained: Path) -> Iterator[str]:
    with tensorboard("--logdir", trained) as address:
        yield address


def test_they_are_chosen_on_the_map(browser: Browser, board: str) -> None:
    page = window(browser).new_page()
    page.goto(link(board, run="run", view="map"))
    frame = page.frame_locator("iframe")
    frame.locator("[data-panel='run']").wait_for()
    expect(frame.locator("[data-picker='table'] option")).to_have_text(
        ["operands of GEMMs", "optimizer states", "between GEMMs"]
    )
    assert "channel_ratio" not in frame.locator("[data-picker='metric'] option").evaluate_all(
        "all => all.map((o) => o.value)"
    )
    frame.locator("[data-picker='table']").select_option("activations")
    frame.locator("[data-picker='metric']").select_option("channel_ratio")
    role = re.compile("norm_(input|output)")
    expect(frame.locator("[data-panel='run']")).to_have_attribute("data-role", role)
    frame.locator("[data-picker='table']").select_option("states")
    expect(frame.locator("[data-panel='run']")).to_have_attribute("data-role", re.compile("|".join(STATES)))
    page.close()
