"""The page of a comparison: one file, nothing from the network, hostile names inert, what it shows and what it refuses."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from samples import sample
from typer.testing import CliRunner, Result

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.comparison.summary import summarize
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.record.writer import RunRecord

HOSTILE = "decoder.layers.0.</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}"


def write(folder: Path, harmed: bool, layer: str = "decoder.layers.0.mlp.linear_fc2", losses: bool = True) -> Path:
    record = RunRecord(folder)
    record.open({"recipe": {"name": "delayed" if harmed else "<b>current</b>"}, "versions": {"torch": "2.8"}})
    for step in range(0, 200, 10):
        off = {"underflow_pct": 30.0, "mse": 1.0} if harmed and step >= 100 else {}
        record.record(sample(step, [{"layer": layer, "gemm": "linear_fc2", **off}, {"layer": "output_layer"}]))
        if losses:
            record.record_steps({step: {"loss": 5 - step / 100 + (3 if off else 0)}})
    record.close()
    return folder


def run_cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


class Parsed(HTMLParser):
    """What a browser would make of a page: its elements, its text, and what its scripts hold."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.text, self.scripts = "", list[str]()
        self._in: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        self._in.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._in:
            self._in.remove(tag)

    def handle_data(self, data: str) -> None:
        if "script" in self._in:
            self.scripts[-1] += data
        elif "style" not in self._in:
            self.text += data


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / name, name == "bad") for name in ("baseline", "bad")]


def drawn(parsed: Parsed) -> list[Any]:
    """The data of each plot, as plotly.js gets it."""
    calls = [script for script in parsed.scripts[1:] if "Plotly.newPlot" in script]
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(call, re.search(r'newPlot\(\s*"[^"]+",\s*', call).end())[0] for call in calls]  # type: ignore[union-attr]


def test_the_page_has_the_verdict_the_tables_and_the_plots(tmp_path: Path, runs: list[Path]) -> None:
    result = run_cli(*runs, "--html", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    parsed = Parsed((tmp_path / "page.html").read_text())
    assert summarize(compare(*runs)) in parsed.text
    losses, drift, onset, timelines = drawn(parsed)
    assert [trace["name"] for trace in losses if trace.get("mode") == "markers"] == ["a tensor leaves the band"]
    assert (drift[0]["type"], onset[0]["type"]) == ("heatmap", "heatmap")
    bad = next(trace for trace in timelines if trace["name"] == "run")
    assert list(bad["x"])[10] == 100 and list(bad["y"])[9:11] == [0.1, 30.0]
    assert "recipe.name" in parsed.text and "<b>current</b>" in parsed.text


def test_it_loads_nothing(tmp_path: Path, runs: list[Path]) -> None:
    run_cli(*runs, "--html", tmp_path / "page.html")
    parsed = Parsed((tmp_path / "page.html").read_text())
    assert not {name for name, _ in parsed.attributes} & {"src", "href", "srcset", "data", "action"}
    plots = [script for script in parsed.scripts[1:] if "Plotly.newPlot" in script]
    assert len(plots) == 4
    for plot in plots:
        assert re.search(r'"modeBarButtonsToRemove":\s*\["sendChartToCloud"\]', plot)
    assert not parsed.tags.keys() & {"link", "iframe", "object", "embed", "img", "base", "form"}


def test_hostile_names_are_text(tmp_path: Path, runs: list[Path]) -> None:
    hostile = [write(tmp_path / f"hostile_{name}", name == "bad", HOSTILE) for name in ("baseline", "bad")]
    pages = []
    for i, pair in enumerate((runs, hostile)):
        assert run_cli(*pair, "--html", tmp_path / f"{i}.html").exit_code == 0
        pages.append(Parsed((tmp_path / f"{i}.html").read_text()))
    assert pages[0].tags == pages[1].tags
    assert HOSTILE in pages[1].text and "onerror" not in {name for name, _ in pages[1].attributes}
    labels = json.dumps(drawn(pages[1]))
    assert "alert(1)" in labels and "<script" not in labels and "<img" not in labels


def test_several_runs_are_sections_of_one_page(tmp_path: Path, runs: list[Path]) -> None:
    other = write(tmp_path / "other", True)
    assert run_cli(*runs, other, "--html", tmp_path / "page.html").exit_code == 0
    parsed = Parsed((tmp_path / "page.html").read_text())
    assert parsed.tags["section"] == 2 and str(other) in parsed.text


def test_without_losses_or_onsets_the_rest_is_shown(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, False, losses=False) for name in ("a", "b")]
    assert run_cli(*runs, "--html", tmp_path / "page.html").exit_code == 0
    assert "No tensor leaves the baseline's band." in Parsed((tmp_path / "page.html").read_text()).text


def test_a_file_is_not_overwritten(tmp_path: Path, runs: list[Path]) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    result = run_cli(*runs, "--html", page)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {page} exists and is not overwritten; name another file\n"
    assert page.read_text() == "mine"


def test_a_folder_that_is_not_there_is_an_error_in_one_line(tmp_path: Path, runs: list[Path]) -> None:
    result = run_cli(*runs, "--html", tmp_path / "none" / "page.html")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {tmp_path / 'none' / 'page.html'} cannot be written: No such file or directory\n"
