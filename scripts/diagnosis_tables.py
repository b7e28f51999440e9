"""Writes tables about `diagnose` into its pages of the documentation: `scripts/diagnosis_tables.py [--check]`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from nemo_fp8_debug.analysis import thresholds
from nemo_fp8_debug.analysis.diagnosis.finding import CAUSES
from nemo_fp8_debug.analysis.diagnosis.rule import load_rules

ROOT = Path(__file__).parents[1]
PAGES = tuple(ROOT / "docs" / name for name in ("diagnose.md", "bug_reports.md"))
_VALIDATION = ROOT / "scripts" / "validation"
COUNTS = _VALIDATION / "fault_injection" / "verdicts.json"
HELD_OUT = _VALIDATION / "held_out" / "counts.json"
REPORTS = _VALIDATION / "bug_reports" / "said.json"
_MARKS = {"right": "✔", "cannot tell": "?", "wrong": "✖", "-": "-"}
_WAYS = ("same batches", "other seed", "alone")
_QUESTIONS = (
    "culprit first",
    "cause",
    "harm right, cannot tell left out",
    "harmed, and cannot tell",
    "software blamed on an operand",
    "clean, accused",
    "a sentence is false",
)


def list_rules() -> Iterator[tuple[str, ...]]:
    """Yield each rule, what it names, and an example: its docstring."""
    yield "rule", "names", "example"
    for rule in load_rules():
        text = " ".join(rule.description.split())
        what, _, example = text.partition("Example: ")
        yield f"**{rule.name}**", re.split(r"(?<=\.) ", what)[0].strip(), example


def list_causes() -> Iterator[tuple[str, ...]]:
    """Yield each cause, what it means, and what to do."""
    yield "cause", "means", "do"
    for name, cause in CAUSES.items():
        if cause.kind != "nothing":
            yield (
                f"`{name}`",
                cause.means.replace("{tensor}", "a tensor"),
                cause.advice or "look at what computes the tensor",
            )


def list_thresholds() -> Iterator[tuple[str, ...]]:
    """Yield each threshold, its value, and its reason."""
    yield "threshold", "value", "reason"
    for each in thresholds.TABLE:
        yield f"`{each.name}`", f"{each.value:g} {each.unit}".strip(), each.reason


def list_answers() -> Iterator[tuple[str, ...]]:
    """Yield how often verdicts on the benchmark are right, with 95% intervals (Wilson)."""
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    yield "question", "same batches", "another seed", "no baseline"
    for interval in (name for name in counts if name.isdigit()):
        for title, by_baseline in counts[interval].items():
            if title in _QUESTIONS:
                shares = [_show_share(*by_baseline[kind]) for kind in ("near", "other", "none")]
                yield f"{title}, every {interval}th step", *shares


def list_held_out() -> Iterator[tuple[str, ...]]:
    """Yield how often verdicts on the held-out set are right."""
    counts = json.loads(HELD_OUT.read_text(encoding="utf-8"))
    yield "question", "same batches", "another seed", "no baseline"
    for title, by_baseline in counts["goals"].items():
        yield title, *(_show_share(*by_baseline.get(kind, (0, 0))) for kind in ("near", "other", "alone"))


def list_reliability() -> Iterator[tuple[str, ...]]:
    """Yield how often verdicts of each confidence are right, on each benchmark."""
    yield "confidence", "promised", "the benchmark", "held out", "bug reports"
    counts = [json.loads(path.read_text(encoding="utf-8"))["confidence"] for path in (COUNTS, HELD_OUT)]
    counts.append(count_confidence(json.loads(REPORTS.read_text(encoding="utf-8"))))
    for level, promised in (("high", "95%"), ("medium", "80%")):
        yield level, promised, *(_show_share(*each[level]) for each in counts)


def count_confidence(reports: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return by confidence how many verdicts on bug reports are right, and how many there are."""
    verdicts = [said for each in reports for said in each["said"].values()]
    found = {}
    for level in ("high", "medium"):
        here = [said["scores"] for said in verdicts if said["confidence"] == level]
        found[level] = sum("wrong" not in (each["tensor"], each["cause"]) for each in here), len(here)
    return found


def list_report_counts() -> Iterator[tuple[str, ...]]:
    """Yield how often tensor and cause are right on bug reports: all, and those that nobody had looked at."""
    reports = json.loads(REPORTS.read_text(encoding="utf-8"))
    yield "reports", "compared with", "right", "cannot tell", "wrong"
    groups = {
        "handed over": [each for each in reports if not each["new"] and not each["variant"]],
        "found by us, seen": [each for each in reports if each["new"] and not each["drawn"]],
        "found by us, drawn": [each for each in reports if each["drawn"]],
    }
    for group, chosen in groups.items():
        for way in _WAYS:
            scores = [each["said"][way]["scores"] for each in chosen]
            pairs = [(each["tensor"], each["cause"]) for each in scores]
            worst = [next((mark for mark in ("wrong", "cannot tell") if mark in pair), "right") for pair in pairs]
            yield group, way, *(f"{worst.count(s)} of {len(chosen)}" for s in ("right", "cannot tell", "wrong"))


def list_reports() -> Iterator[tuple[str, ...]]:
    """Yield each bug report, what is right to say of it, and what `diagnose` and a monitor say."""
    yield "report", "what it was", "right", "`diagnose` says, compared with the same batches", *_WAYS[1:], "norms and NaN"
    for each in json.loads(REPORTS.read_text(encoding="utf-8")):
        link = f"[{each['link'].removeprefix('https://github.com/').split('/blob/')[0]}]({each['link']}), {each['date']}"
        marks = [" ".join(_MARKS[mark] for mark in each["said"][way]["scores"].values()) for way in _WAYS]
        says = each["said"][_WAYS[0]]["headline"].replace("|", "\\|")
        link += ", drawn" if each["drawn"] else ""
        yield link, each["what"], each["answer"], f"{marks[0]} {says}", *marks[1:], each["monitor"]


def _show_share(right: int, count: int) -> str:
    if not count:
        return "-"
    low, high = binomtest(right, count).proportion_ci(0.95, method="wilson")
    return f"{right} of {count}: {100 * right / count:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"


TABLES: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "rules": list_rules,
    "causes": list_causes,
    "thresholds": list_thresholds,
    "answers": list_answers,
    "confidence": list_reliability,
    "held out": list_held_out,
    "report counts": list_report_counts,
    "reports": list_reports,
}


def write_tables(text: str) -> str:
    """Return the page with each table between its marks."""
    for name, rows in TABLES.items():
        if f"<!-- {name} -->" not in text:
            continue
        heading, *lines = (f"| {' | '.join(row)} |" for row in rows())
        table = "\n".join([heading, "|" + "---|" * (heading.count(" | ") + 1), *lines])
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.escape(marks[0]) + r".*?" + re.escape(marks[1])
        text = re.sub(pattern, lambda _, m=marks, t=table: f"{m[0]}\n{t}\n{m[1]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a page is out of date")
    check: bool = parser.parse_args().check
    stale = 0
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = write_tables(before)
        stale += before != after
        if not check:
            page.write_text(after, encoding="utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
