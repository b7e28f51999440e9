"""A run and a baseline that name the same layers differently: what is shown beside each other is of the same layer."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from browser import tensorboard, window
from playwright.sync_api import Browser, Page, expect
from samples import measured_sample, sample
from tab import Tab, start
from typer.testing import CliRunner
from unlike_runs import CULPRIT, foreign, megatron, write

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.tensorboard_plugin.web import link

SINCE, STEP = 100, 150
LAYER, ROLE = CULPRIT
#: as `bad` calls the culprit
OWN = f"model.{LAYER}"


def prefixed(depth: int, kind: str) -> str:
    return f"model.{megatron(depth, kind)}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bad` has a prefix that the baseline lacks, `foreign` other names altogether."""
    folder = tmp_path_factory.mktemp("renamed")
    write(folder / "baseline")
    write(folder / "bad", since=SINCE, named=prefixed)
    write(folder / "foreign", since=SINCE, named=foreign)
    write(folder / "same", since=SINCE)
    write(folder / "wider", named=foreign, wider=2)
    for name, layer in (("counted", "model.fc"), ("counted-before", "fc")):
        record = start(folder / name)
        record.record(measured_sample(10, {(layer, "input"): torch.randn(64, 32).bfloat16()}))
        record.close()
    return folder


@pytest.fixture(scope="module")
def tab(runs: Path) -> Tab:
    return Tab(runs)


def test_names_are_those_that_compare_matches(tab: Tab, runs: Path) -> None:
    for run in ("bad", "foreign"):
        told = tab.json("names", run=run, baseline="baseline")
        assert told["names"] == dict(compare(runs / run, runs / "baseline").run.renamed_to)
        assert told["how"] in compare(runs / run, runs / "baseline").notes
    assert told["names"][foreign(1, "mlp.linear_fc2")] == LAYER and "c_out for linear_fc2" in told["how"]
    assert tab.json("names", run="bad", baseline="baseline")["names"][OWN] == LAYER
    assert tab.json("names", run="baseline", baseline="bad")["names"][LAYER] == OWN


@pytest.mark.parametrize("run", ["same", "wider"])
def test_there_are_none_where_layers_have_the_same_names_or_are_others(tab: Tab, run: str) -> None:
    assert tab.json("names", run=run, baseline="baseline") == {"names": {}, "how": ""}


def test_names_are_of_all_parts(tmp_path: Path) -> None:
    """Of a layer that the newest part lacks, too."""
    write(tmp_path / "baseline")
    record = start(tmp_path / "run")
    for step, layer in ((0, prefixed(0, "mlp.linear_fc1")), (10, OWN)):
        record.record(sample(step, [{"layer": layer}]))
    record.close()
    names = Tab(tmp_path).json("names", run="run", baseline="baseline")["names"]
    assert names == {prefixed(0, "mlp.linear_fc1"): megatron(0, "mlp.linear_fc1"), OWN: LAYER}


def test_a_band_is_that_of_the_same_layer(tab: Tab) -> None:
    same = tab.json("band", run="same", baseline="baseline", layer=LAYER, role=ROLE)
    assert same["since"] == SINCE
    for run, layer in (("bad", OWN), ("foreign", foreign(1, "mlp.linear_fc2"))):
        assert tab.json("band", run=run, baseline="baseline", layer=layer, role=ROLE) == same


@pytest.fixture(scope="module")
def board(runs: Path) -> Iterator[str]:
    with tensorboard("--logdir", runs) as address:
        yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = window(browser).new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page
    assert not faults
    page.close()


def opened(page: Page, board: str, **state: object) -> None:
    state = {"run": "bad", "baseline": "baseline", "step": STEP, "metric": "underflow_pct"} | state
    page.goto(link(board, **state).replace("/#fp8&", "/data/plugin_entry.html?name=fp8#"))


def recorded(run: Path, layer: str) -> list[tuple[int, float]]:
    where = {"layer": layer, "role": ROLE}
    return read_table_rows(run, "metrics", ["step", "underflow_pct"], where).rows()  # type: ignore[return-value]


def drawn(page: Page) -> dict[str, list[tuple[int, float]]]:
    """By run what a timeline shows of the tensor."""
    with page.expect_download() as download:
        page.locator("figure button", has_text="CSV").click()
    rows = csv.DictReader(io.StringIO(Path(download.value.path()).read_text(), newline=""))
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["underflow_pct"]:
            found.setdefault(row["run"], []).append((int(row["step"]), float(row["underflow_pct"])))
    return found


def in_address(page: Page, layer: str) -> None:
    page.wait_for_function("layer => new URLSearchParams(location.hash.slice(1)).get('p.fp8.layer') === layer", arg=layer)


def test_a_timeline_has_the_baseline_beside_the_run(page: Page, board: str, runs: Path) -> None:
    """Whichever of its names a link has, and after the baseline is taken away."""
    opened(page, board, view="timeline", layer=OWN, role=ROLE)
    in_address(page, LAYER)
    page.locator("[data-drawn*=leaves]").wait_for()
    page.get_by_text("Reading the record").wait_for(state="detached")
    assert drawn(page) == {"bad": recorded(runs / "bad", OWN), "baseline": recorded(runs / "baseline", LAYER)}
    expect(page.locator("[data-card] [data-words=band]")).to_contain_text(f"Out of the band of baseline since step {SINCE}")
    expect(page.locator("main .notes")).to_contain_text(
        "bad: its layers have the names of baseline. Names were matched after replacing the run's prefix 'model.'"
    )
    page.locator("[data-part=baseline]").select_option("")
    in_address(page, OWN)
    page.locator("[data-drawn]:not([data-drawn*=leaves])").wait_for()
    page.get_by_text("Reading the record").wait_for(state="detached")
    assert drawn(page) == {"bad": recorded(runs / "bad", OWN)}


@pytest.mark.parametrize("run", ["bad", "foreign"])
def test_map_and_course_hold_the_run_against_the_baseline(page: Page, board: str, run: str) -> None:
    opened(page, board, run=run, view="map", color="all")
    difference = page.locator("[data-panel=difference]")
    expect(difference).to_have_attribute("data-layer", LAYER)
    assert float(difference.get_attribute("data-value") or "nan") == pytest.approx(20.0)
    expect(page.locator("[data-panel=run]")).to_have_attribute("data-layer", LAYER)
    worst = page.locator("caption", has_text="tensors at this step").locator("xpath=..").locator("tbody tr").first
    expect(worst.locator("td.n")).to_have_text(["20.1%", "0.1%", "20"])
    page.get_by_role("tab", name="Course").click()
    cells = page.locator("div.table tbody tr").first.locator("td")
    expect(cells).to_have_text([f"X of {LAYER}", "20.1", "20", str(SINCE), str(SINCE)])


def test_the_tensor_that_the_verdict_names_is_found(page: Page, board: str, runs: Path) -> None:
    opened(page, board, view="timeline")
    expect(page.get_by_text(f"No tensor is chosen, so this is X of {LAYER}")).to_be_visible()
    page.locator("[data-drawn*=leaves]").wait_for()
    page.locator("[data-card] summary", has_text="Values, why, links").click()
    expect(page.locator("[data-card] [data-words=values]")).to_contain_text("0.1% baseline → 20.1% bad")


def test_distributions_are_of_the_same_layer(page: Page, board: str, runs: Path) -> None:
    state = {"run": "counted", "baseline": "counted-before", "step": 10}
    opened(page, board, view="distribution", layer="fc", role="input", **state)
    expect(page.get_by_text("the same tensor in counted-before")).to_be_visible()
    expect(page.locator("main .notes")).to_contain_text("counted: its layers have the names of counted-before.")


# Long tests rest on nemo_fp8_debug/tensorboard_plugin/page/*.py.
# Long tests rest on nemo_fp8_debug/tensorboard_plugin/records/*.py.
@pytest.mark.long
def test_a_report_shows_them_beside_each_other(page: Page, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    arguments = [str(runs / "bad"), "--baseline", str(runs / "baseline"), "--html", str(file)]
    result = CliRunner().invoke(app, ["compare", *arguments])
    assert result.exit_code == 0, result.output
    page.goto(file.as_uri())
    timeline = page.locator("section[data-view=timeline]").first
    timeline.locator("[data-drawn*=leaves]").wait_for()
    values = timeline.locator("[data-table=values] tr[data-metric=underflow_pct] td")
    expect(values).to_have_text(["20.1%", "0.1%", "up to 1.1%"])
    course = page.locator("section[data-view=course] div.table tbody tr").first
    expect(course.locator("td").first).to_have_text(f"X of {LAYER}")
    expect(page.locator("section[data-view=map] [data-panel=run]")).to_have_attribute("data-layer", LAYER)
    expect(page.locator(".problem")).to_have_count(0)


@pytest.mark.long
def test_an_exported_folder_does_so_too(page: Page, runs: Path, tmp_path: Path) -> None:
    """Of whichever two runs."""
    folder = tmp_path / "page"
    arguments = [*(str(runs / name) for name in ("baseline", "bad", "foreign")), "--export", str(folder)]
    result = CliRunner().invoke(app, ["view", *arguments])
    assert result.exit_code == 0, result.output
    for run, baseline, own in (("bad", "baseline", OWN), ("foreign", "bad", foreign(1, "mlp.linear_fc2"))):
        state = {"view": "timeline", "run": run, "baseline": baseline, "layer": own, "role": ROLE, "step": STEP}
        page.goto(f"{(folder / 'index.html').as_uri()}#{'&'.join(f'p.fp8.{name}={value}' for name, value in state.items())}")
        in_address(page, LAYER if baseline == "baseline" else OWN)
        row = page.locator("[data-table=values] tr[data-metric=underflow_pct] td")
        expect(row.first).to_have_text("20.1%")
        expect(row.nth(1)).to_have_text("0.1%" if baseline == "baseline" else "20.1%")
        page.goto("about:blank")
