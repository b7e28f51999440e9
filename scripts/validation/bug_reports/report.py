"""What a bug report is, and the list of all."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from bug_reports.training import Training

#: causes that say "not how FP8 represents operands", of which a report may accept any
SOFTWARE = ("software", "wrong_product", "wrong_reduction")
SEED, DRAWN = 20261128, 10


@dataclass(frozen=True)
class Answer:
    """What is right to say of the faulty run."""

    #: in words, for people
    text: str
    #: words of `diagnose` for the cause, any of which is right; "none": nothing is wrong
    causes: tuple[str, ...]
    #: patterns of "layer role" or "layer product", any of which is right
    tensors: tuple[str, ...] = ()
    #: False: naming no tensor is right too, because the record shows none or none is at fault
    needs_tensor: bool = True
    #: earliest and latest step that is right as the onset; None: there is no step to name
    steps: tuple[int, int] | None = (0, 5)
    #: why "cannot tell" is right as well; empty: the record tells, so "cannot tell" is a miss
    cannot_tell: str = ""


@dataclass(frozen=True)
class Report:
    """A public bug, and the training that stands in for it."""

    name: str
    #: threads, the first of which the stand-in follows
    links: tuple[str, ...]
    #: month of the first thread
    date: str
    what: str
    #: why the numbers were wrong, in a few words that no other report has
    mechanism: str
    answer: Answer
    #: "harmful": the loss ends more than 2% above the good run's, or not finite; "none": it does not
    harm: str
    training: type[Training] = field(repr=False)
    #: False: handed over with a truth that is binding
    new: bool = True
    #: True: a second run of the report above it
    variant: bool = False
    drawn: bool = False

    @property
    def link(self) -> str:
        """Return the thread that the stand-in follows."""
        return self.links[0]


_REPORTS: dict[str, Report] = {}


def register(
    links: str, date: str, what: str, mechanism: str, answer: Answer, harm: str, *, new: bool = True, variant: bool = False
) -> Callable[[type[Training]], type[Training]]:
    """Return a decorator that puts a training into the list, under its name in snake case."""

    def keep(training: type[Training]) -> type[Training]:
        name = re.sub(r"(?<!^)(?=[A-Z][a-z])|(?<=[a-z0-9])(?=[A-Z])", "_", training.__name__).lower()
        assert name not in _REPORTS, name
        urls = tuple(f"https://github.com/{link}" for link in links.split())
        _REPORTS[name] = Report(name, urls, date, what, mechanism, answer, harm, training, new, variant)
        return training

    return keep


def list_reports() -> dict[str, Report]:
    """Return all reports by name, the drawn ones marked."""
    from bug_reports import attention, casts, gradients, hosts, losses, optimizers, resumes, scales  # noqa: F401

    names = sorted(name for name, report in _REPORTS.items() if report.new)
    drawn = set(random.Random(SEED).sample(names, DRAWN))
    return {name: Report(**{**vars(report), "drawn": name in drawn}) for name, report in _REPORTS.items()}
