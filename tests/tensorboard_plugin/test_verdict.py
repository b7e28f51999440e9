"""The Verdict view in a real Chromium, against what the command line says of the same records."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from browser import open_tab
from playwright.sync_api import Browser, Page, expect
from shown import cells, number, said, table, taken_away, title
from typer.testing import CliRunner
from verdict_records import CULPRIT, HOSTILE, ONSET

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.ranking import rank_tensors_by_harm
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.numerics.metric_names import LABELS

Open = Callable[..., Page]
THREE = {"view": "verdict", "run": "bad", "baseline": "baseline", "reference": "reference"}


def verdict(page: Page) -> str:
    page.locator(".headline[data-stage=all]").wait_for()
    return page.locator("p.verdict").first.inner_text()


class TestThreeRuns:
    @pytest.fixture(scope="class")
    @classmethod
    def diagnosis(cls, logdir: Path) -> Any:
        return said("diagnose", logdir / "bad", "--baseline", logdir / "baseline", "--reference", logdir / "reference")

    @pytest.fixture(scope="class")
    @classmethod
    def comparison(cls, logdir: Path) -> Any:
        return said("compare", logdir / "bad", "--baseline", logdir / "baseline", "--reference", logdir / "reference")

    def test_the_sentences_and_the_findings_are_those_of_diagnose(self, frame: Open, diagnosis: Any) -> None:
        page = frame(**THREE)
        assert verdict(page) == diagnosis["verdict"]
        of_view = page.locator("#view dl.facts")
        facts = dict(zip(of_view.locator("dt").all_inner_texts(), of_view.locator("dd").all_inner_texts(), strict=True))
        assert facts["Begins in"] == f"X of {CULPRIT}" == title(diagnosis["culprit"])
        assert (facts["Cause"], facts["Confidence"], facts["Harm"]) == (
            diagnosis["cause"],
            diagnosis["confidence"],
            diagnosis["harm"],
        )
        assert facts["Since"] == f"step {ONSET}, on the map"
        shown = [[row[0], row[1], row[3], row[4], row[5]] for row in cells(table(page, "Findings of the rules"))]
        assert shown == [
            [f["rule"], "-" if f["since"] is None else str(f["since"]), f["cause"], f["strength"], f["evidence"]]
            for f in diagnosis["findings"]
        ]
        advice = [sentence.replace("`", "") for sentence in diagnosis["next"]]
        assert page.locator("ul.advice li").all_inner_texts() == advice != []

    def test_the_comparison_is_that_of_compare(self, frame: Open, comparison: Any, logdir: Path) -> None:
        page = frame(**THREE)
        expect(page.locator("p.verdict").nth(1)).to_have_text(comparison["verdict"])
        page.locator("details.fold > summary").click()
        ranking = table(page, "medians over the later half. Drift")
        found = diagnose(logdir / "bad", logdir / "baseline", logdir / "reference")
        ranks = rank_tensors_by_harm(found)
        tensors = sorted(comparison["tensors"], key=lambda row: ranks[row["layer"], row["role"]])
        assert [row[0] for row in cells(ranking)] == [title(row) for row in tensors][:15]
        names, *rows = taken_away(page, ranking)
        for row, of in zip(rows, tensors, strict=True):
            listed = dict(zip(names, row, strict=True))
            assert listed["tensor"] == title(of)
            for column, metric in (
                ("MSE ratio", "mse_ratio"),
                ("out of band from step", "onset"),
            ):
                assert number(listed[column]) == of[metric]
            drift = of["drift_log2"]
            assert number(listed["drift"]) == (drift if drift is None else pytest.approx(2**drift, rel=1e-12))
            for run, column in (("baseline", "before"), ("run", "after")):
                assert number(listed[f"underflow (%), {column}"]) == of[f"underflow_pct_{run}"]
        order = cells(table(page, "Each tensor and metric, at the first step"))
        assert [row[:4] for row in order] == [
            [str(of["onset"]), "-" if of["lead"] is None else str(of["lead"]), title(of), LABELS[of["metric"]][0]]
            for of in comparison["out_of_band"]
        ]
        told = page.locator("details.fold th, details.fold caption").all_inner_texts()
        assert not [text for text in told if re.search(r"[a-z]_[a-z]|log2|amax", text)]
        losses = {row[0]: row[5:] for row in cells(table(page, "Medians over a sixth"))}
        assert losses == {
            part: ["-" if run[key] is None else str(run[key]) for key in ("diverged_at", "above_baseline_since")]
            for part, run in comparison["runs"].items()
        }
        differences = cells(table(page, "settings that affect precision"))
        assert [row[:3] for row in differences] == [
            [d["setting"], d["baseline"], d["run"]] for d in comparison["differences"]
        ]

    def test_files_to_copy_and_to_save_are_those_that_recommend_writes(
        self, frame: Open, logdir: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "fix"
        command = ["recommend", str(logdir / "bad"), "--baseline", str(logdir / "baseline"), "--output", str(folder)]
        assert CliRunner().invoke(app, command).exit_code == 0
        written = {path.name: path.read_text() for path in folder.iterdir()}
        page = frame(**THREE)
        verdict(page)
        shown = {s.get_attribute("aria-label"): s.locator("pre").text_content() for s in page.locator(".snippet").all()}
        assert shown == written
        for name, text in written.items():
            snippet = page.locator(f".snippet[aria-label='{name}']")
            snippet.get_by_role("button", name="Copy").click()
            expect(snippet.get_by_role("status")).to_have_text("Copied.")
            assert page.evaluate("navigator.clipboard.readText()") == text
            with page.expect_download() as download:
                snippet.get_by_role("button", name="Save").click()
            assert (download.value.suggested_filename, Path(download.value.path()).read_text()) == (name, text)

    def test_without_a_clipboard_the_text_is_marked(self, frame: Open) -> None:
        page = frame("delete Navigator.prototype.clipboard", **THREE)
        verdict(page)
        snippet = page.locator(".snippet").first
        snippet.get_by_role("button", name="Copy").click()
        expect(snippet.get_by_role("status")).to_contain_text("Ctrl+C")
        assert page.evaluate("String(getSelection())").strip() == (snippet.locator("pre").text_content() or "").strip()

    def test_the_change_its_errors_and_the_coverage(self, frame: Open, logdir: Path) -> None:
        found = said("recommend", logdir / "bad", "--baseline", logdir / "baseline")
        page = frame(**THREE)
        verdict(page)
        names, *rows = taken_away(page, table(page, "The cheapest changes"))
        for row, of in zip(rows, found["findings"], strict=True):
            shown = dict(zip(names, row, strict=True))
            assert (shown["tensor"], shown["change"]) == (title(of), of["chosen"]["recipe"])
            for label, metric in (("relative error", "relative_error"), ("underflow (%)", "underflow_pct")):
                pair = of["options"][0]["errors"][metric], of["chosen"]["errors"][metric]
                assert tuple(number(shown[f"{label}, {when}"]) for when in ("before", "after")) == pair
        before, after = (f"{100 * found['fp8_coverage'][when]:.3g}%" for when in ("before", "after"))
        expect(page.get_by_text("FP8 coverage")).to_contain_text(f"{before} → {after}")

    def test_in_tensorboard_the_culprit_leads_to_its_timeline(self, browser: Browser, board: str) -> None:
        page = open_tab(browser, board, **THREE)
        culprit = page.frame_locator("iframe").locator(".headline").get_by_role("link", name=f"X of {CULPRIT}")
        culprit.click()
        expect(page.frame_locator("iframe").locator("#tab-timeline")).to_have_attribute("aria-selected", "true")
        state = unquote(page.url)
        assert page.url.startswith(f"{board}/#fp8&")
        for part in ("view=timeline", f"layer={CULPRIT}", "role=input", f"step={ONSET}", "run=bad", "baseline=baseline"):
            assert f"p.fp8.{part}" in state
        page.go_back()
        expect(page.frame_locator("iframe").locator("p.verdict").first).to_be_visible()
        page.close()


def test_advice_against_fp8_is_none_where_software_is_to_blame(frame: Open, logdir: Path) -> None:
    """The reference run, here the same run again, leaves too."""
    found = said("diagnose", logdir / "bad", "--baseline", logdir / "baseline", "--reference", logdir / "again")
    assert found["cause"] == "software" and any(f["rule"] == "operand" for f in found["findings"])
    page = frame(**THREE | {"reference": "again"})
    assert verdict(page) == found["verdict"]
    assert page.locator("ul.advice li").all_inner_texts() == found["next"]
    assert "BF16" not in found["next"][0] and "scaling" not in found["next"][0]
    fits = [f["rule"] for f in found["findings"] if f["cause"] == "software"]
    assert [row[0] for row in cells(table(page, "Findings of the rules"))] == fits and "reference" in fits
    evidence = page.locator("[aria-label=Diagnosis] details")
    assert evidence.locator("td").first.is_hidden()
    evidence.locator("summary").click()
    others = [f["rule"] for f in found["findings"] if f["cause"] != "software"]
    assert [row[0] for row in cells(evidence.locator(".table"))] == others
    assert page.locator(".snippet").count() == 0


def test_without_a_good_run_it_is_judged_alone(frame: Open, logdir: Path) -> None:
    page = frame(view="verdict", run="bad", baseline="", reference="")
    assert verdict(page) == said("diagnose", logdir / "bad")["verdict"]
    expect(page.get_by_text("Judged alone")).to_be_visible()
    expect(page.get_by_text("was judged only by bands of healthy runs")).to_be_visible()
    expect(page.locator(".headline h1")).to_contain_text(f"bad (run): X of {CULPRIT} went wrong at or before step {ONSET}")
    recommended = said("recommend", logdir / "bad")["findings"]
    assert [row[0] for row in cells(table(page, "The cheapest changes"))] == [title(of) for of in recommended]
    assert page.locator("details.fold").count() == 0


def test_hostile_names_are_text(frame: Open) -> None:
    page = frame(**THREE)
    verdict(page)
    expect(page.get_by_role("link", name=f"dY of {HOSTILE}").first).to_be_visible()
    assert page.locator("#view img").count() == 0 and not page.evaluate("window.hacked")


def test_a_verdict_that_there_is_none_of_is_a_sentence(frame: Open, logdir: Path) -> None:
    result = CliRunner().invoke(app, ["diagnose", str(logdir / HOSTILE), "--baseline", str(logdir / "baseline")])
    assert result.exit_code != 0
    page = frame(**THREE | {"run": HOSTILE, "reference": ""})
    problem = page.get_by_role("alert")
    problem.wait_for()
    assert " ".join(problem.inner_text().split()) in " ".join(result.output.split())
    assert page.locator("#view img, #view b").count() == 0 and not page.evaluate("window.hacked")
