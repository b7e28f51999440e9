"""Judges verdicts by what is true of each run: `fault_injection/judge.py --share 0.2 --failures`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

from fault_injection.known import Fault as KnownFault
from fault_injection.known import Known
from fault_injection.raw_losses import Losses
from fault_injection.records import FOLDER, StoredRun, read_losses, read_run, truths
from fault_injection.right_causes import is_sampled, right_causes
from fault_injection.sentences import Checked, check_texts, describe_checks
from fault_injection.sets import LEARNED_FROM
from fault_injection.truth import HARM
from nemo_fp8_debug.analysis.bands.bands import HealthyBands
from nemo_fp8_debug.analysis.diagnosis.answer import measure_confidence, state_harm
from nemo_fp8_debug.analysis.diagnosis.diagnose import judge_facts
from nemo_fp8_debug.analysis.diagnosis.diagnosis import Diagnosis
from nemo_fp8_debug.analysis.diagnosis.facts import DiagnosedRecords, Facts
from nemo_fp8_debug.analysis.diagnosis.narrator import tell_advice, tell_headline, tell_verdict
from nemo_fp8_debug.core.layer_names import find_aggregate_key

#: `near`: the same batches; `none`: none, with the bands of the package, of clean runs below part 200; `families`: none,
#: with bands of the other families
BASELINES = ("near", "other", "depth", "none", "families")
INTERVALS = (5, 20, 50)
#: what a verdict calls a harmed run
_HARM = ("harmful", "likely")
Truth = Mapping[str, Any]


@dataclass(frozen=True)
class Judged:
    """What is said of a run, beside what is true of it."""

    truth: Truth
    baseline: str
    interval: int
    harm: str
    cause: str
    #: (layer, role); None: none is named
    culprit: tuple[str, str] | None
    since: int | None
    confidence: str | None = field(default=None, kw_only=True)
    #: what came of checking its sentences; None: nobody did
    checked: Checked | None = field(default=None, kw_only=True)

    @property
    def is_clean(self) -> bool:
        return bool(self.truth["kind"] == "none")

    @property
    def accused(self) -> bool:
        """Whether anything is said to be wrong."""
        return self.cause not in ("none", "unknown") or self.culprit is not None or self.harm in _HARM

    @property
    def located(self) -> bool:
        """Whether an operand is named that it sits in; of one of several experts all of them together, too."""
        known = {tuple(culprit) for culprit in self.truth["culprits"]}
        return self.culprit is not None and self.culprit in known | {find_aggregate_key(*culprit) for culprit in known}

    @property
    def names_operand(self) -> bool:
        """Whether an operand is to be named: a fault sits in one, does more than nothing, and some sample shows it."""
        return in_an_operand(self)

    @property
    def cause_right(self) -> bool:
        return self.cause in right_causes(self.truth, self.interval)

    @property
    def harm_right(self) -> bool:
        return (self.harm in _HARM) == self.truth["harmful"]

    @property
    def harm_told(self) -> bool:
        """Whether it says that the run is harmed, or that it is not; not that it cannot tell."""
        return self.harm != "unknown"

    @property
    def harm_is_clear(self) -> bool:
        """Whether its gap is not between half of what counts as harm and one and a half times that."""
        gap = self.truth["gap_pct"]
        return gap is None or not 50 * HARM < gap <= 150 * HARM

    @property
    def cannot_tell(self) -> bool:
        return "unknown" in (self.harm, self.cause)


def baseline_of(told: Truth, kind: str) -> str | None:
    """The name of the clean run of the same part that a run is compared with; None: there is none of that kind."""
    of, name = told["counterpart"], told["name"]
    if kind == "near":
        if told["kind"] == "none":
            return str(name.removesuffix("-near") if name.endswith("-near") else f"{name}-near")
        return f"{of}-near"
    stem = of.removesuffix("-near")
    others = {"other": {"a": "b", "b": "a"}, "depth": {"a": "deep", "b": "deep", "deep": "a"}}
    return others[kind].get(stem)


@cache
def runs_by_part(folder: Path = FOLDER) -> dict[str, dict[str, Truth]]:
    """By file and name."""
    found: dict[str, dict[str, Truth]] = defaultdict(dict)
    for told in truths("all", folder):
        found[told["path"]][told["name"]] = told
    return found


@cache
def bands_without(family: str | None) -> HealthyBands:
    """Learned from healthy runs, but for those of a family."""
    return HealthyBands.learn(read_run(told) for told in learned_from() if told["family"] != family)


def learned_from() -> list[Truth]:
    """The clean runs that the bands of the package are learned from."""
    return [
        told for told in truths("tune") if told["kind"] == "none" and int(told["part"].rpartition("-")[2]) < LEARNED_FROM
    ]


def baselines_of(told: Truth, baseline: str, interval: int) -> list[StoredRun] | None:
    """Return the baselines of a kind; None: the run has none."""
    if baseline in ("none", "families"):
        return []
    name = baseline_of(told, baseline)
    return None if name is None else [read_run(runs_by_part(Path(told["path"]).parent)[told["path"]][name], interval)]


def judge_one(
    told: Truth, baseline: str, interval: int, facts: Facts, leave_out: Sequence[str] = (), sentences: bool = False
) -> Judged:
    """Return what is said of a run, from its facts.

    Args:
        leave_out: names of rules.
        sentences: check those of its verdict, too.
    """
    _, loss, stopped_at, decision = judge_facts(facts, leave_out)
    found, harm = decision.culprit, state_harm(loss, stopped_at, decision, facts.steps)
    confidence = measure_confidence(decision, facts.paired)
    culprit = (found.layer, found.role) if found and found.layer and found.role else None
    since = found.since if found else None
    checked = check_texts(tell_verdict_of(facts), know_run(told, baseline, facts)) if sentences else None
    return Judged(told, baseline, interval, harm, decision.cause, culprit, since, confidence=confidence, checked=checked)


def tell_verdict_of(facts: Facts) -> tuple[str, str]:
    """Return verdict and headline of a run whose record was dropped. What the baseline does not show is left out."""
    metrics = SimpleNamespace(steps=facts.steps)
    run: Any = SimpleNamespace(unit=facts.unit, metrics=metrics, table=lambda name: pl.DataFrame())
    records = facts.records or DiagnosedRecords(run, run if facts.paired else None)
    found = Diagnosis(facts, records, *judge_facts(facts))
    return tell_verdict(found, tell_advice(found, None)), tell_headline(found)


def know_run(told: Truth, baseline: str, facts: Facts) -> Known:
    """Return what is known of a run apart from its verdict: raw losses, samples and layers of its record, and the truth."""
    theirs = facts.loss.baseline  # of several, their mean
    gap = told["gap_pct"]
    is_close = gap is not None and 50 * HARM < gap <= 150 * HARM
    layers = frozenset(facts.tensors["layer"].to_list())
    return Known(
        Losses.of({step: loss for step, loss in read_losses(told).items() if loss is not None}),
        None if theirs is None else Losses(theirs.steps, theirs.losses),
        baseline == "near",
        KnownFault.from_truth(told),
        None if is_close else told["harmful"],
        facts.steps.tolist(),
        layers,
        leaves=told["diverges_at"],
    )


def judged(told: Truth, baseline: str, interval: int, sentences: bool = False) -> Judged | None:
    """Return what is said of a run; None if it has no such baseline."""
    from fault_injection.facts_cache import read_facts

    facts = read_facts(told, baseline, interval)
    return None if facts is None else judge_one(told, baseline, interval, facts, sentences=sentences)


def _all_of(task: tuple[Truth, Sequence[str], Sequence[int], bool]) -> list[Judged]:
    told, baselines, intervals, sentences = task
    return [one for kind in baselines for every in intervals if (one := judged(told, kind, every, sentences))]


def judge(
    runs: Iterable[Truth],
    baselines: Sequence[str] = BASELINES,
    intervals: Sequence[int] = INTERVALS,
    jobs: int = 1,
    sentences: bool = False,
) -> Iterator[Judged]:
    """What is said of all of them."""
    tasks = [(told, baselines, intervals, sentences) for told in runs]
    if jobs == 1:
        for task in tasks:
            yield from _all_of(task)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for found in pool.map(_all_of, tasks, chunksize=4):
            yield from found


Chosen = Callable[[Judged], bool]
#: kinds by which no operand alone is to be named
_IN_NO_ONE = ("harmless", "nan_operand", "margin", "e5m2_forward")
_SOFTWARE = (
    *("learning_rate", "weight_decay", "gradient_sum", "gradient_layer", "repeated_data", "no_mask", "loss_scale"),
    "wrong_labels",
)


def in_an_operand(one: Judged) -> bool:
    """Whether an operand is to be named: a fault sits in one, does more than nothing, and some sample shows it."""
    return bool(one.truth["culprits"]) and one.truth["kind"] not in _IN_NO_ONE and is_sampled(one.truth, one.interval)


#: title, of which runs, what is asked of them, and whether that is to be high or low
QUESTIONS: Sequence[tuple[str, Chosen, Chosen]] = (
    ("culprit first", in_an_operand, lambda one: one.located),
    ("cause", lambda one: not one.is_clean, lambda one: one.cause_right),
    (
        "harm right, cannot tell left out",
        lambda one: not one.is_clean and one.harm_is_clear and one.harm_told,
        lambda one: one.harm_right,
    ),
    (
        "software blamed on an operand",
        lambda one: one.truth["kind"] in _SOFTWARE,
        lambda one: one.culprit is not None,
    ),
    ("harmed, and cannot tell", lambda one: one.truth["harmful"], lambda one: one.cannot_tell),
    ("clean, accused", lambda one: one.is_clean, lambda one: one.accused),
    ("a sentence is false", lambda one: one.checked is not None, lambda one: bool(one.checked and one.checked.false)),
)


def share(right: Sequence[bool]) -> str:
    """As percents with the Clopper-Pearson interval."""
    if not right:
        return "-"
    k, n = sum(right), len(right)
    low, high = binomtest(k, n).proportion_ci(0.95, method="exact")
    return f"{k} of {n}: {100 * k / n:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"


def tables(found: Sequence[Judged]) -> Iterator[Table]:
    """A table an interval, with a column a baseline."""
    for interval in sorted({one.interval for one in found}):
        here = [one for one in found if one.interval == interval]
        baselines = [kind for kind in BASELINES if any(one.baseline == kind for one in here)]
        table = Table("", *baselines, title=f"Sampled every {interval} steps", title_justify="left")
        for title, chosen, asked in QUESTIONS:
            of = {kind: [asked(one) for one in here if one.baseline == kind and chosen(one)] for kind in baselines}
            table.add_row(title, *(share(of[kind]) for kind in baselines))
        yield table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baselines", nargs="+", choices=BASELINES, default=BASELINES)
    parser.add_argument("--intervals", nargs="+", type=int, default=INTERVALS, help="multiples of 5")
    parser.add_argument("--share", type=float, default=1.0, help="of the benchmark's runs, drawn by a fixed seed")
    parser.add_argument("--output", type=Path, help="file for the counts, which docs/accuracy.md shows")
    parser.add_argument("--failures", action="store_true", help="list each verdict that is wrong")
    parser.add_argument("--sentences", action="store_true", help="check the sentences of verdicts against raw losses")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    from fault_injection.facts_cache import draw_runs

    runs = draw_runs(options.share)
    sentences = options.sentences or options.output is not None
    found = list(judge(runs, options.baselines, options.intervals, options.jobs, sentences))
    if options.output:
        options.output.write_text(json.dumps(count_answers(found, len(runs)), indent=1) + "\n")
    out = Console(width=170, highlight=False)
    clean = sum(told["kind"] == "none" for told in runs)
    out.print(f"{len(runs) - clean} runs with a fault, {clean} without")
    for table in tables(found):
        out.print(table)
    for one in found if options.failures else ():
        if wrong := failure(one):
            out.print(f"{one.truth['part']}/{one.truth['name']} {one.baseline} {one.interval}: {wrong}", soft_wrap=True)
    if options.sentences:
        names = [f"{one.truth['part']}/{one.truth['name']} {one.baseline} {one.interval}" for one in found]
        checks = {name: one.checked for name, one in zip(names, found, strict=True) if one.checked is not None}
        print(describe_checks(checks))
    return 0


def count_answers(found: Sequence[Judged], runs: int) -> dict[str, Any]:
    """Return by interval, question and baseline how often it is so, of how many; and how often each confidence is right."""
    counts: dict[str, Any] = {"runs": runs, "verdicts": len(found)}
    for interval in sorted({one.interval for one in found}):
        here = [one for one in found if one.interval == interval]
        counts[str(interval)] = {
            title: {kind: _count([asked(one) for one in here if one.baseline == kind and chosen(one)]) for kind in BASELINES}
            for title, chosen, asked in QUESTIONS
        }
    named = [one for one in found if one.confidence is not None]
    counts["confidence"] = {
        level: _count([is_right(one) for one in named if one.confidence == level]) for level in ("high", "medium", "low")
    }
    return counts


def _count(answers: Sequence[bool]) -> list[int]:
    return [sum(answers), len(answers)]


def is_right(one: Judged) -> bool:
    """Return True if a verdict names the cause rightly, and the operand if one is to be named."""
    return not one.is_clean and one.cause_right and (one.located or not one.names_operand)


def failure(one: Judged) -> str:
    """What is wrong about a verdict; empty where nothing is."""
    truth, told = one.truth, []
    if one.is_clean and one.accused:
        told.append(f"accused of {one.cause}")
    if truth["culprits"] and truth["kind"] != "harmless" and not one.located:
        told.append(f"{one.culprit} instead of {truth['culprits'][0]}")
    if not one.is_clean and not one.cause_right:
        told.append(f"{one.cause} instead of {'/'.join(sorted(right_causes(truth, one.interval)))}")
    if not one.harm_right and one.harm_is_clear:
        told.append(f"{one.harm}, gap {truth['gap_pct']}%")
    return "; ".join(told)


if __name__ == "__main__":
    sys.exit(main())
