"""What each rule and each threshold of `diagnose` changes: `ablation.py --share 0.1 --sets FOLDER ... --reports FOLDER`.

A rule is left out. A threshold is multiplied by 0.1 and by 10. The table counts verdicts that change, and those that
become wrong and right by it: on the benchmark, on sets of other families, and on bug reports. What changes nothing
should go. Facts are measured before, so that a threshold of a fact changes nothing here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from bug_reports import judging
from bug_reports.report import Report, list_reports
from held_out.make import PLAN, RECORD, TRUTH
from held_out.scores import Verdict

from fault_injection.facts_cache import draw_runs, read_all
from fault_injection.judge import Judged, Truth, judge_one
from nemo_fp8_debug.analysis import thresholds
from nemo_fp8_debug.analysis.diagnosis.answer import measure_confidence
from nemo_fp8_debug.analysis.diagnosis.diagnose import judge_facts, measure_facts
from nemo_fp8_debug.analysis.diagnosis.facts import Facts
from nemo_fp8_debug.analysis.diagnosis.rule import list_needed_facts, load_rules

OUTPUT = Path(__file__).parent / "ablation.json"
FACTORS = (0.1, 10.0)
#: what a verdict is about, to see whether it changes; and whether it is right
Outcome = tuple[object, bool]


@dataclass(frozen=True)
class Case:
    """A run with its baseline, and what is true of it."""

    #: `benchmark`, `other families` or `bug reports`
    source: str
    facts: Facts
    truth: Truth | Report
    baseline: str = "none"
    interval: int = 5

    def judge(self, leave_out: Sequence[str] = ()) -> Outcome:
        """Return what is said of the run, and whether it is right."""
        for facts in filter(None, (self.facts, self.facts.past_baseline)):
            loss = facts.loss  # copies measure anew, by the thresholds that are set now
            baseline = loss.baseline and replace(loss.baseline)
            facts.loss = replace(loss, run=replace(loss.run), baseline=baseline)
        if isinstance(self.truth, Report):
            return self._judge_report(self.truth, leave_out)
        one = judge_one(self.truth, self.baseline, self.interval, self.facts, leave_out)
        if self.source != "benchmark":
            one = Verdict(**{**vars(one), "error": None})
        return (one.cause, one.culprit, one.harm), is_right(one)

    def _judge_report(self, report: Report, leave_out: Sequence[str]) -> Outcome:
        decision = judge_facts(self.facts, leave_out).decision
        finding = None if decision.finding is None else vars(decision.finding)
        confidence = measure_confidence(decision, self.facts.paired)
        told = {"cause": decision.cause, "cause_finding": finding, "confidence": confidence, "harm": "", "verdict": ""}
        said = judging.read_json({**told, "divergence_step": None})
        scores = judging.score(report.answer, said)
        return (said.cause, said.tensor), all(scores[part] == judging.RIGHT for part in ("tensor", "cause"))


def is_right(one: Judged) -> bool:
    """Return True if a verdict accuses no clean run, or names cause, tensor and harm rightly, as far as it states them."""
    if one.is_clean:
        return not one.accused
    harm = one.harm_right or not one.harm_told or not one.harm_is_clear
    has_tensor = one.has_tensor if isinstance(one, Verdict) else one.names_operand
    return one.cause_right and harm and (one.located or not has_tensor)


def list_set(folder: Path) -> Iterator[Case]:
    """Yield the runs of a set of `held_out`, alone and with each baseline."""
    for line in (folder / PLAN).read_text().splitlines():
        planned = json.loads(line)
        if not (folder / planned["name"] / TRUTH).exists():
            continue
        truth = json.loads((folder / planned["name"] / TRUTH).read_text())
        for kind, baseline in {"none": None, **planned["baselines"]}.items():
            against = [] if baseline is None else [folder / baseline / RECORD]
            if all(each.exists() for each in against):
                facts, _ = measure_facts(folder / planned["name"] / RECORD, against)
                yield Case("other families", facts.measure_all(list_needed_facts()), truth, kind, truth.get("interval", 5))


def list_bug_reports(folder: Path) -> Iterator[Case]:
    """Yield the bug reports but the drawn ones, alone and with each baseline."""
    for report in list_reports().values():
        if report.drawn or not (folder / report.name).exists():
            continue
        for way, baseline in judging.WAYS.items():
            facts, _ = measure_facts(folder / report.name / "bad", [folder / report.name / baseline] if baseline else [])
            yield Case("bug reports", facts.measure_all(list_needed_facts()), report, way)


class Change(NamedTuple):
    """A rule that is left out, or a threshold that is multiplied by a factor."""

    name: str
    factor: float | None = None

    def judge(self, cases: Sequence[Case]) -> list[Outcome]:
        """Judge all cases with this change."""
        if self.factor is None:
            return [case.judge((self.name,)) for case in cases]
        (threshold,) = (each for each in thresholds.TABLE if each.name == self.name)
        usual, changed = threshold.value, threshold.value * self.factor
        changed = min(changed, 1.0) if threshold.unit.startswith("of ") else changed
        setattr(thresholds, self.name, max(round(changed), 1) if isinstance(usual, int) else changed)
        try:
            return [case.judge() for case in cases]
        finally:
            setattr(thresholds, self.name, usual)


def list_changes() -> list[Change]:
    """Return the changes that are tried."""
    rules = [Change(each.name) for each in load_rules()]
    return rules + [Change(each.name, factor) for each in thresholds.TABLE for factor in FACTORS]


def count_changes(cases: Sequence[Case], before: Sequence[Outcome], after: Sequence[Outcome]) -> dict[str, list[int]]:
    """Return by source how many verdicts change, become wrong, and become right."""
    counts: dict[str, Counter[str]] = {case.source: Counter() for case in cases}
    for case, (said, right), (now, right_now) in zip(cases, before, after, strict=True):
        counts[case.source].update(changed=now != said, wrong=right and not right_now, right=right_now and not right)
    return {source: [each[x] for x in ("changed", "wrong", "right")] for source, each in counts.items()}


def measure_changes(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield what each rule and each threshold changes."""
    before = [case.judge() for case in cases]
    for change in list_changes():
        what = f"without rule: {change.name}" if change.factor is None else f"{change.name} x {change.factor:g}"
        yield {"what": what, **count_changes(cases, before, change.judge(cases))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.1, help="of the benchmark's runs")
    parser.add_argument("--baselines", nargs="+", default=["other", "none"])
    parser.add_argument("--intervals", nargs="+", type=int, default=[5])
    parser.add_argument("--sets", nargs="+", type=Path, default=[], help="folders of held_out's sets")
    parser.add_argument("--reports", type=Path, help="the folder of bug reports")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    runs = read_all(draw_runs(options.share), options.baselines, options.intervals, options.jobs)
    cases = [Case("benchmark", facts, truth, kind, every) for truth, kind, every, facts in runs]
    cases += [case for folder in options.sets for case in list_set(folder)]
    cases += list_bug_reports(options.reports) if options.reports else []
    rows = []
    for change in measure_changes(cases):
        print(*change.values(), sep="  ", flush=True)
        rows.append(change)
    count = Counter(case.source for case in cases)
    options.output.write_text(json.dumps({"verdicts": count, "changes": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
