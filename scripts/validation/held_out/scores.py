"""Counts how often verdicts about a set were right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fault_injection.judge import Judged, in_an_operand, share
from fault_injection.sentences import Checked, describe_checks
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

#: how this package's answers are called by the benchmark's `Judged`
_HARM = {True: "harmful", False: "none", None: "unknown"}
#: causes that say that nothing was found
_NOTHING = ("none", "unknown")


@dataclass(frozen=True)
class Verdict(Judged):
    """What is said of a run of the set, beside what is true of it."""

    error: str | None
    #: whether its sentences were checked, and one is false
    has_false_sentence: bool | None = None

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> Verdict:
        """Read a line of the verdicts; a run that `diagnose` failed on has an error, and no cause."""
        answer, truth = line["answer"] or {}, line["truth"]
        tensor = answer.get("tensor")
        return cls(
            truth=truth,
            baseline=line["baseline"],
            interval=truth["interval"],
            harm=_HARM[answer.get("harmed")],
            cause=answer.get("cause", "unknown"),
            culprit=tuple(tensor) if tensor else None,
            since=answer.get("since"),
            confidence=answer.get("confidence"),
            error=line["error"],
            has_false_sentence=bool(line["sentences"]["false"]) if line.get("sentences") else None,
        )

    @property
    def has_tensor(self) -> bool:
        """Whether an operand is to be named: the fault sits in one, is not slight, and some sample shows it."""
        return in_an_operand(self) and not self.truth["slight"]

    @property
    def cause_right(self) -> bool:
        return self.cause in self.truth["causes"]

    @property
    def cause_unknown(self) -> bool:
        """Whether it says that it cannot tell the cause, which is not right."""
        return self.cause == "unknown" and not self.cause_right

    @property
    def harm_is_clear(self) -> bool:
        return bool(self.truth["harmed"] != "too close")

    @property
    def is_harmed(self) -> bool:
        """Whether the whole interval of the true gap lies above 2%."""
        return bool(self.truth["harmed"] == "yes")

    @property
    def harm_right(self) -> bool:
        return (self.harm == "harmful") == self.is_harmed

    @property
    def falsely_reassures(self) -> bool:
        """Whether it says with high confidence that nothing is wrong."""
        return self.cause == "none" and self.confidence == "high" and not self.cause_right

    @property
    def all_right(self) -> bool:
        """Whether its cause is right, and its operand if the fault sits in one."""
        return self.cause_right and (self.located or not self.has_tensor) and not (self.is_clean and self.accused)


Chosen = Callable[[Verdict], bool]
#: title, of which verdicts, and what is asked of them
GOALS: Sequence[tuple[str, Chosen, Chosen]] = (
    ("tensor right, faults of an operand", lambda one: one.has_tensor, lambda one: one.located),
    (
        "tensor right, and harmed",
        lambda one: one.has_tensor and one.is_harmed,
        lambda one: one.located,
    ),
    ("cause right", lambda one: not one.is_clean, lambda one: one.cause_right),
    ("cause wrong", lambda one: not one.is_clean, lambda one: not one.cause_right and not one.cause_unknown),
    ("cause cannot be told", lambda one: not one.is_clean, lambda one: one.cause_unknown),
    ("cause right, and harmed", lambda one: not one.is_clean and one.is_harmed, lambda one: one.cause_right),
    (
        "harm right where stated",
        lambda one: not one.is_clean and one.harm_is_clear and one.harm_told,
        lambda one: one.harm_right,
    ),
    ("harm cannot be told, harmed", lambda one: one.is_harmed, lambda one: not one.harm_told),
    (
        "harm cannot be told, not harmed",
        lambda one: not one.is_clean and one.truth["harmed"] == "no",
        lambda one: not one.harm_told,
    ),
    ("says nothing is wrong, high confidence, falsely", lambda one: not one.is_clean, lambda one: one.falsely_reassures),
    ("clean, accused", lambda one: one.is_clean, lambda one: one.accused),
    ("clean, called harmed", lambda one: one.is_clean, lambda one: one.harm == "harmful"),
    ("a sentence is false", lambda one: one.has_false_sentence is not None, lambda one: bool(one.has_false_sentence)),
    ("diagnose failed", lambda one: True, lambda one: one.error is not None),
)


def print_scores(lines: Iterable[Mapping[str, Any]]) -> None:
    """Print the table of goals, one by kind of fault and family, how often confidence was right, and false sentences."""
    lines, out = list(lines), Console(width=170, highlight=False)
    verdicts = [Verdict.from_line(line) for line in lines]
    for table in (tabulate_goals(verdicts), *tabulate_kinds(verdicts), tabulate_confidence(verdicts)):
        out.print(table)
    for one in verdicts:
        if one.error is not None:
            out.print(f"{one.truth['name']} {one.baseline}: {one.error}", soft_wrap=True)
    checks = {f"{each['name']} {each['baseline']}": each["sentences"] for each in lines if each.get("sentences")}
    if checks:
        out.print(
            describe_checks({name: Checked.from_json(told) for name, told in checks.items()}), soft_wrap=True, markup=False
        )


def count_scores(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return by goal and baseline how many verdicts meet it of how many, and likewise by confidence; and the commit."""
    lines = list(lines)
    verdicts = [Verdict.from_line(line) for line in lines]
    goals = {
        title: {
            kind: [sum(answers), len(answers)]
            for kind in list_baselines(verdicts)
            if (answers := [asked(one) for one in verdicts if one.baseline == kind and chosen(one)])
        }
        for title, chosen, asked in GOALS
    }
    levels = {level: [one.all_right for one in verdicts if one.confidence == level] for level in ("high", "medium", "low")}
    confidence = {level: [sum(right), len(right)] for level, right in levels.items()}
    return {"commits": sorted({line["commit"] for line in lines}), "goals": goals, "confidence": confidence}


def tabulate_goals(verdicts: Sequence[Verdict]) -> Table:
    """Return how many verdicts meet each goal, with a column a baseline."""
    baselines = list_baselines(verdicts)
    table = Table("", *baselines, title="Goals", title_justify="left")
    for title, chosen, asked in GOALS:
        answers = [[asked(one) for one in verdicts if one.baseline == kind and chosen(one)] for kind in baselines]
        table.add_row(title, *map(share, answers))
    return table


def tabulate_kinds(verdicts: Sequence[Verdict]) -> Iterator[Table]:
    """Yield how many are right by kind of fault, and by family, recipe and strength."""
    baselines, faulted = list_baselines(verdicts), [one for one in verdicts if not one.is_clean]
    for title in ("kind", "family", "engine", "weak") if faulted else ():
        table = Table(title, *baselines, title=f"Tensor, cause, harm right of how many, by {title}", title_justify="left")
        for value in sorted({one.truth[title] for one in faulted}):
            here = [one for one in faulted if one.truth[title] == value]
            table.add_row(str(value), *(_count([one for one in here if one.baseline == kind]) for kind in baselines))
        yield table


def _count(verdicts: Sequence[Verdict]) -> str:
    in_operands = [one for one in verdicts if one.has_tensor]
    clear = [one for one in verdicts if one.harm_is_clear]
    parts = (
        f"{sum(one.located for one in in_operands)}/{len(in_operands)}",
        f"{sum(one.cause_right for one in verdicts)}/{len(verdicts)}",
        f"{sum(one.harm_right and one.harm_told for one in clear)}/{len(clear)}",
    )
    return ", ".join(parts)


def tabulate_confidence(verdicts: Sequence[Verdict]) -> Table:
    """Return how often verdicts of each confidence are right, in percent with the Wilson interval: of all, and of those
    that name something."""
    table = Table("confidence", "of all verdicts", "of those that name a cause", title="Reliability", title_justify="left")
    for confidence in ("high", "medium", "low", None):
        here = [one for one in verdicts if one.confidence == confidence and one.error is None]
        naming = [one for one in here if one.cause not in _NOTHING]
        table.add_row(confidence or "none stated", *(_wilson([one.all_right for one in those]) for those in (here, naming)))
    return table


def _wilson(right: Sequence[bool]) -> str:
    if not right:
        return "-"
    k, n = sum(right), len(right)
    low, high = binomtest(k, n).proportion_ci(0.95, method="wilson")
    return f"{k} of {n}: {100 * k / n:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"


def list_baselines(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the kinds of baselines, in the order in which they first come."""
    return list(dict.fromkeys(one.baseline for one in verdicts))
