"""Score what `diagnose` says of the faulty runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fault_injection.known import Fault, Known
from fault_injection.raw_losses import Recorded
from fault_injection.sentences import Checked, check_texts, describe_checks, list_texts

from bug_reports.monitor_rule import watch_run
from bug_reports.report import Answer, Report

RIGHT, UNSURE, WRONG, NONE = "right", "cannot tell", "wrong", "-"
#: the baseline of each way to ask
WAYS = {"alone": None, "same batches": "good", "other seed": "other"}
PARTS = ("tensor", "cause", "step")
#: how `diagnose` names roles and products, and how answers do
_NAMES = {
    **{"input": "X", "weight": "W", "grad_output": "dY", "fprop": "Y", "dgrad": "dX", "wgrad": "dW", "reduction": "dW"},
    **{"weight_gradient": "dW", "first_moment": "m", "second_moment": "v", "update": "step of W", "logits": "logits"},
}


@dataclass(frozen=True)
class Said:
    """What `diagnose` said, as far as it is scored."""

    #: "layer role"; None: it names no tensor
    tensor: str | None
    cause: str
    step: int | None
    #: False: it found nothing, and could have missed something
    sure: bool
    harm: str
    #: the sentences of verdict, headline and report
    texts: Sequence[str]
    confidence: str | None = None


@dataclass(frozen=True)
class Judged:
    """A report, and the score of each part for each way to ask."""

    report: Report
    said: Mapping[str, Said]
    scores: Mapping[str, Mapping[str, str]]
    monitor: str
    #: what came of checking the sentences, for each way to ask
    checked: Mapping[str, Checked] = field(default_factory=dict)


def read_json(told: Mapping[str, Any]) -> Said:
    """Read the JSON of `diagnose`. This is the only function that knows its structure."""
    found = told["cause_finding"] or {}
    layer, role = found.get("layer"), found.get("role")
    name = _NAMES.get(role, role)
    if told["cause"] in ("wrong_product", "wrong_reduction"):  # the evidence begins with the product
        name = found["evidence"].partition(" of ")[0].removeprefix("the reduced ")
    tensor = f"{layer} {name}" if layer and name else None
    sure = told["confidence"] is not None and told["cause"] != "unknown"
    step = told["divergence_step"] if told["cause"] == "software" and not found else found.get("since")
    return Said(
        tensor, told["cause"], step, sure, told["harm"], list_texts(told) if "story" in told else (), told["confidence"]
    )


def ask(run: Path, baseline: Path | None) -> Said:
    """Run `diagnose` in a process of its own."""
    words = [str(Path(sys.executable).with_name("nemo-fp8-debug")), "diagnose", str(run), "--json"]
    words += ["--baseline", str(baseline)] if baseline else []
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "NO_COLOR": "1"})
    return read_json(json.loads(done.stdout))


def score(answer: Answer, said: Said) -> dict[str, str]:
    """Return right, cannot tell or wrong for the tensor, the cause and the step."""
    return {
        "tensor": score_tensor(answer, said),
        "cause": score_cause(answer, said),
        "step": score_step(answer, said),
    }


def is_unsure(said: Said) -> bool:
    """Return True if it says that it cannot tell."""
    return said.tensor is None and (said.cause == "unknown" or (said.cause == "none" and not said.sure))


def score_tensor(answer: Answer, said: Said) -> str:
    """Score layer and tensor."""
    if said.tensor is not None:
        return RIGHT if any(fnmatchcase(said.tensor, pattern) for pattern in answer.tensors) else WRONG
    if not answer.tensors:
        return RIGHT if not is_unsure(said) or answer.cannot_tell or "none" in answer.causes else UNSURE
    if is_unsure(said):
        return RIGHT if answer.cannot_tell else UNSURE
    return RIGHT if not answer.needs_tensor else UNSURE


def score_cause(answer: Answer, said: Said) -> str:
    """Score the cause. A sure "nothing is wrong" of a fault is wrong."""
    if is_unsure(said):
        return RIGHT if answer.cannot_tell or "none" in answer.causes else UNSURE
    return RIGHT if said.cause in answer.causes else WRONG


def score_step(answer: Answer, said: Said) -> str:
    """Score the onset."""
    if answer.steps is None or (said.cause == "none" and "none" in answer.causes):
        return NONE
    if is_unsure(said):
        return RIGHT if answer.cannot_tell else UNSURE
    if said.step is None:
        return UNSURE
    return RIGHT if answer.steps[0] <= said.step <= answer.steps[1] else WRONG


def judge_runs(reports: Iterable[Report], root: Path) -> list[Judged]:
    """Ask alone and with both baselines, for every report."""
    judged = []
    for report in reports:
        folder = root / report.name
        said = {way: ask(folder / "bad", folder / name if name else None) for way, name in WAYS.items()}
        scores = {way: score(report.answer, each) for way, each in said.items()}
        checked = {way: check_texts(each.texts, know_run(report, folder, WAYS[way])) for way, each in said.items()}
        judged.append(Judged(report, said, scores, watch_run(folder / "bad"), checked))
        print(f"{report.name}: " + "; ".join(f"{way} {' / '.join(scores[way].values())}" for way in WAYS), flush=True)
    return judged


def know_run(report: Report, folder: Path, baseline: str | None) -> Known:
    """Return what is known of the faulty run apart from its verdict.

    Args:
        report: that it stands for.
        folder: of its runs.
        baseline: name of the run that it is judged against; None: there is none.
    """
    mine = Recorded.read(folder / "bad")
    theirs = None if baseline is None else Recorded.read(folder / baseline)
    return Known(
        mine.losses,
        None if theirs is None else theirs.losses,
        baseline == "good",
        know_fault(report),
        report.harm == "harmful",
        mine.sampled,
        mine.layers,
        baseline_end=theirs.sampled[-1] if theirs is not None and theirs.sampled else None,
    )


def know_fault(report: Report) -> Fault | None:
    """Return what is wrong in a report; None: nothing is.

    The answer says at which steps an onset is right; that includes what a sample may be late by.
    """
    if report.answer.causes == ("none",):
        return None
    first, last = report.answer.steps or (0, report.training.steps)
    since, interval = report.training.since, report.training.interval
    begins = since if first - interval <= since <= last else first
    tensors = [pattern.partition(" ") for pattern in report.answer.tensors]
    culprits = tuple(f"{role} of {layer}" for layer, _, role in tensors)
    return Fault(begins, max(last - interval, begins), culprits=culprits)


def describe_sentences(judged: Sequence[Judged]) -> str:
    """Return which sentences are false, and how many verdicts have one."""
    return describe_checks({f"{each.report.name} {way}": told for each in judged for way, told in each.checked.items()})


def describe_scores(judged: Sequence[Judged]) -> str:
    """Return how often each part was right, by way to ask."""
    lines = ["", f"{len(judged)} reports"]
    for way in WAYS:
        counts = {part: Counter(each.scores[way][part] for each in judged) for part in PARTS}
        told = [f"{part} {', '.join(f'{n} {s}' for s, n in sorted(c.items()))}" for part, c in counts.items()]
        named = sum(each.scores[way]["cause"] == RIGHT and not is_unsure(each.said[way]) for each in judged)
        lines.append(f"{way}: {'; '.join(told)}; {named} right causes are told, and others are rightly not")
    return "\n".join(lines)


def list_judged(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return each report with what is right, what `diagnose` says of it and a monitor would, for the documentation."""
    rows = []
    for each in judged:
        report, said = each.report, {}
        for way, one in each.said.items():
            verdict, headline = one.texts[:2]
            told = {"cause": one.cause, "tensor": one.tensor, "step": one.step, "confidence": one.confidence}
            said[way] = {"headline": headline, "verdict": verdict, **told, "scores": each.scores[way]}
        of_report = {name: getattr(report, name) for name in ("name", "link", "date", "what", "new", "variant", "drawn")}
        rows.append({**of_report, "answer": report.answer.text, "monitor": each.monitor, "said": said})
    return rows
