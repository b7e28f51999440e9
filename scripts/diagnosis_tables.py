"""Write the tables of rules, thresholds and measured accuracy into the pages: `scripts/diagnosis_tables.py [--check]`."""

from __future__ import annotations

import argparse
import json
import math
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
PAGES = tuple(ROOT / "docs" / name for name in ("diagnose.md", "accuracy.md", "bug_reports.md"))
_VALIDATION = ROOT / "scripts" / "validation"
COUNTS = _VALIDATION / "fault_injection" / "verdicts.json"
HELD_OUT = _VALIDATION / "held_out" / "counts.json"
REPORTS = _VALIDATION / "bug_reports" / "said.json"
GATE = _VALIDATION / "gate_coverage.json"
PRODUCTS = _VALIDATION / "product_faults" / "results.json"
_MARKS = {"right": "✔", "nothing": "○", "cannot tell": "?", "wrong": "✖"}
_WAYS = ("same batches", "other seed", "alone")
#: names of questions in the benchmark's counts, with the page's words for each question
_QUESTIONS = {
    "culprit first": "first tensor right",
    "cause": "cause right",
    "harm right, cannot tell left out": "harm right, if stated",
    "harmed, and cannot tell": "harm unknown in harmed runs",
    "software blamed on an operand": "FP8 blamed for another fault",
    "clean, accused": "healthy run accused",
    "a sentence is false": "verdict with a false sentence",
}
#: questions that the page also answers for runs that were sampled more often
_BY_INTERVAL = ("culprit first", "cause")
#: names of questions in the held-out set's counts, with the page's words for each question
_HELD_OUT_QUESTIONS = {
    "tensor right, faults of an operand": "first tensor right",
    "cause right": "cause right",
    "cause right, and harmed": "cause right in harmed runs",
    "cause wrong": "cause wrong",
    "cause cannot be told": "cause unknown",
    "harm right where stated": "harm right, if stated",
    "harm cannot be told, harmed": "harm unknown in harmed runs",
    "harm cannot be told, not harmed": "harm unknown in unharmed runs",
    "clean, accused": "healthy run accused",
    "clean, called harmed": "healthy run called harmed",
    "a sentence is false": "verdict with a false sentence",
}
#: names of faults of one product in the results, with the page's words for each fault
_PRODUCT_FAULTS = {
    "power_of_two": "scale wrong by a power of two",
    "factor": "factor of 1 + 2^-6",
    "dropped_block": "a sixteenth of the sum left out",
    "stale_operand": "operand wrong by a thousandth, as before an update",
    "transposed": "operand read transposed",
    "wrong_rows": "a quarter of the rows replaced by their neighbors",
    "one_value": "highest exponent bit flipped in half of the values",
    "rounded_sums": "sums kept in BF16",
}
_DTYPES = {"bfloat16": "BF16", "float16": "FP16", "float32": "float32"}
#: subjects of thresholds, by the first threshold of each subject
_SUBJECTS = {
    "IN_A_ROW": "duration",
    "SCALE_OFF": "operands",
    "RATE_DIFFERS": "settings and gradients",
    "DECAY": "weights",
    "TIMES_USUAL": "attention and routers",
    "MAX_GAP": "loss",
    "HIGH": "confidence",
}
#: share of found flips from which a bit counts as found, and the smallest probability that the page shows
_FOUND, _LEAST_CHANCE = 0.95, 0.05


def list_causes() -> Iterator[tuple[str, ...]]:
    """Yield each cause, what it means, and the rules that name it."""
    yield "cause", "means", "rules"
    for name, cause in CAUSES.items():
        if cause.kind != "nothing":
            means = re.sub("^(all )?its ", r"\1a tensor's ", cause.means.replace("{tensor}", "a tensor"))
            yield f"`{name}`", means, ", ".join(rule.name for rule in load_rules() if name in rule.causes)


def list_thresholds() -> Iterator[tuple[str, ...]]:
    """Yield the thresholds of each subject with their values. The reasons are in the code."""
    yield "subject", "thresholds"
    by_subject: dict[str, list[str]] = {}
    subject = ""
    for each in thresholds.TABLE:
        subject = _SUBJECTS.get(each.name, subject)
        by_subject.setdefault(subject, []).append(f"`{each.name}` {_show_threshold(each)}")
    for subject, shown in by_subject.items():
        yield subject, ", ".join(shown)


def list_answers() -> Iterator[tuple[str, ...]]:
    """Yield how often verdicts on the benchmark are right, with 95% intervals (Wilson)."""
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    yield "question", "same batches", "another seed", "no baseline"
    for title, shown in _QUESTIONS.items():
        for interval in ("20", "5") if title in _BY_INTERVAL else ("20",):
            shares = (_show_share(*counts[interval][title][kind]) for kind in ("near", "other", "none"))
            yield shown + (f", sampled every {interval} steps" if interval != "20" else ""), *shares


def list_held_out() -> Iterator[tuple[str, ...]]:
    """Yield how often verdicts on the held-out set are right."""
    goals = json.loads(HELD_OUT.read_text(encoding="utf-8"))["goals"]
    yield "question", "same batches", "another seed", "no baseline"
    for title, shown in _HELD_OUT_QUESTIONS.items():
        yield shown, *(_show_share(*goals[title].get(kind, (0, 0))) for kind in ("near", "other", "alone"))


def list_reliability() -> Iterator[tuple[str, ...]]:
    """Yield how often verdicts of each confidence are right, on each benchmark."""
    yield "confidence", "promised", "benchmark", "held-out set", "bug reports"
    counts = [json.loads(path.read_text(encoding="utf-8"))["confidence"] for path in (COUNTS, HELD_OUT)]
    counts.append(count_confidence(json.loads(REPORTS.read_text(encoding="utf-8"))))
    for level, promised in (("high", "95%"), ("medium", "80%")):
        yield level, promised, *(_show_share(*each[level]) for each in counts)


def count_confidence(reports: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return by confidence how many verdicts on bug reports are not wrong, and how many verdicts there are."""
    verdicts = [said for each in reports for said in each["said"].values()]
    found = {}
    for level in ("high", "medium"):
        here = [said for said in verdicts if said["confidence"] == level]
        found[level] = sum(_mark(each) != "wrong" for each in here), len(here)
    return found


def list_report_counts() -> Iterator[tuple[str, ...]]:
    """Yield how often tensor and cause are right, for each group of bug reports."""
    reports = json.loads(REPORTS.read_text(encoding="utf-8"))
    yield "reports", "count", *_WAYS
    groups = {
        "given to us": [each for each in reports if not each["new"] and not each["variant"]],
        "found by us, seen": [each for each in reports if each["new"] and not each["drawn"]],
        "found by us, drawn": [each for each in reports if each["drawn"]],
    }
    for group, chosen in groups.items():
        marks = [[_mark(each["said"][way]) for each in chosen] for way in _WAYS]
        shown = (", ".join(f"{of_way.count(mark)} {_MARKS[mark]}" for mark in _MARKS) for of_way in marks)
        yield group, str(len(chosen)), *shown


def list_reports() -> Iterator[tuple[str, ...]]:
    """Yield each bug report: what `diagnose` says, whether it is right, and the alarm of a monitor, if any."""
    yield "report", "what it was", "`diagnose` names"
    for each in json.loads(REPORTS.read_text(encoding="utf-8")):
        owner, repository, *place = each["link"].removeprefix("https://github.com/").split("/")
        title = f"{owner}/{repository}" + (f"#{place[1]}" if place[0] in ("issues", "pull") else "")
        link = f"[{title}]({each['link']}){', drawn' if each['drawn'] else ''}"
        marks = "".join(_MARKS[_mark(each["said"][way])] for way in _WAYS)
        alarm = "" if each["monitor"] == "silent" else f"; monitor: {each['monitor']}"
        cause = _name_cause(each["said"][_WAYS[0]])
        yield link, each["what"].removesuffix("."), f"{marks} {cause}".strip() + alarm


def list_gates() -> Iterator[tuple[str, ...]]:
    """Yield how often `gate` is right, and how far from the limit a gap must be for a decision."""
    results = json.loads(GATE.read_text(encoding="utf-8"))
    groups = ("the same batches", "other batches")
    lengths = list(results[groups[0]]["by steps"])
    shown = (f"{int(n):,} steps" for n in lengths)
    yield "batches", "interval contains the gap", "bad run passes", "good run fails", *shown
    for group in groups:
        found = results[group]
        names = ("interval holds the gap, %", "pass at or above the limit, %", "fail at or below the limit, %")
        decided = (found["by steps"][n]["points from the limit that are decided in 90 of 100"] for n in lengths)
        yield group, *(f"{found[name]:g}%" for name in names), *(f"{points:.2g}" for points in decided)


def list_clean_products() -> Iterator[tuple[str, ...]]:
    """Yield how many products of healthy models were checked on each CPU, and the largest error relative to its bound."""
    clean = [found["clean"] for found in json.loads(PRODUCTS.read_text(encoding="utf-8")).values()]
    yield "blocks", "values", "called wrong", "largest error over its bound"
    yield (
        f"{min(each['blocks'] for each in clean):,}",
        f"{min(each['values'] for each in clean) / 1e6:.0f} million",
        str(sum(len(each["wrong"]) for each in clean)),
        f"{max(each['largest'] for each in clean):.3f}",
    )


def list_product_faults() -> Iterator[tuple[str, ...]]:
    """Yield how often faulty products were named. Faults with equal shares form one row."""
    faults: dict[tuple[str, ...], list[str]] = {}
    for name, by_dtype in _of_products("recall").items():
        shares = (100 * by_dtype[dtype]["named"] / by_dtype[dtype]["runs"] for dtype in ("bfloat16", "float32"))
        faults.setdefault(tuple(f"{share:g}%" for share in shares), []).append(_PRODUCT_FAULTS[name])
    yield "faults", "BF16", "float32"
    for shown, names in faults.items():
        yield "; ".join(names), *shown


def list_flips() -> Iterator[tuple[str, ...]]:
    """Yield the lowest bit such that nearly all flips of this bit and of all higher bits are found in checked values."""
    yield "dtype", "bits", "Y", "dX", "dW"
    for dtype, by_product in _of_products("flips").items():
        first = {}
        for product, shares in by_product.items():
            missed = [bit for bit, share in enumerate(shares) if share < _FOUND]
            first[product] = str(max(missed) + 1 if missed else 0)
        width = str(len(by_product["fprop"]))
        yield _DTYPES[dtype], width, *(first[product] for product in ("fprop", "dgrad", "wgrad"))


def list_touched() -> Iterator[tuple[str, ...]]:
    """Yield the probability that a sample checks at least one wrong value, by the share of wrong values."""
    yield "wrong", "chance"
    for name, share in _of_products("touched").items():
        what, amount = name.split()
        if share >= _LEAST_CHANCE:
            shown = f"{100 * float(amount):g}% of values" if what == "values" else f"{amount} of 4,096 rows"
            yield shown, f"{100 * share:.1f}%"


def _of_products(part: str) -> Any:
    return json.loads(PRODUCTS.read_text(encoding="utf-8"))["AVX-512"][part]


def _mark(said: Mapping[str, Any]) -> str:
    """Return the worse mark of tensor and cause. If both are right, return `right`, or `nothing` without a cause."""
    pair = said["scores"]["tensor"], said["scores"]["cause"]
    right = "nothing" if said["cause"] in ("none", "unknown") else "right"
    return next((mark for mark in ("wrong", "cannot tell") if mark in pair), right)


def _name_cause(said: Mapping[str, Any]) -> str:
    """Return cause, tensor and first step of a verdict. If it has no cause, return the first sentence of its headline."""
    if said["cause"] in ("none", "unknown"):
        first = said["headline"].partition(". ")[0]
        return "" if first == "We found nothing wrong" else first
    layer, _, role = (said["tensor"] or "").rpartition(" ")
    return f"`{said['cause']}`{f' in {role} of {layer}' if layer else ''} at {said['step']}"


def _show_threshold(each: thresholds.RuleThreshold) -> str:
    """Return value and unit of a threshold: shares in percent, or as a power of two if they are tiny."""
    value, unit = each.value, each.unit
    if unit == "confidence" or unit.startswith("of "):
        shown = f"{100 * value:g}%" if value >= 1e-3 else f"2^{round(math.log2(value))}"
        return f"{shown} {unit}"
    if unit.startswith("%"):
        return f"{value:g}{unit}"
    return f"{value:g} {unit.removesuffix('s') if value == 1 else unit.replace('standard deviations', 'sigma')}".strip()


def _show_share(right: int, count: int) -> str:
    if not count:
        return "-"
    low, high = binomtest(right, count).proportion_ci(0.95, method="wilson")
    percent, low, high = (f"{round(100 * share, 1):g}" for share in (right / count, low, high))
    return f"{percent}% ({right}/{count}) [{low}-{high}]"


TABLES: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "causes": list_causes,
    "thresholds": list_thresholds,
    "answers": list_answers,
    "confidence": list_reliability,
    "held out": list_held_out,
    "report counts": list_report_counts,
    "reports": list_reports,
    "gates": list_gates,
    "clean products": list_clean_products,
    "product faults": list_product_faults,
    "flips": list_flips,
    "touched": list_touched,
}


def write_tables(text: str) -> str:
    """Return the text of a page, with up-to-date tables between their marks."""
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
