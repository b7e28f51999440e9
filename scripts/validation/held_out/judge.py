"""Asks `nemo-fp8-debug diagnose` about each run of a set, alone and against baselines, and writes down what it answers."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import multiprocessing
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from fault_injection.known import Fault, Known
from fault_injection.raw_losses import Losses, Recorded
from fault_injection.sentences import check_texts, list_texts

from held_out.make import LOSSES, PLAN, RECORD, TRUTH
from held_out.scores import print_scores
from nemo_fp8_debug.cli import app

VERDICTS, LOG = "verdicts.jsonl", "judged.log"
ALONE = "alone"


@dataclass(frozen=True)
class Answer:
    """What `diagnose` says of a run, as far as it is scored."""

    #: None: it cannot tell
    harmed: bool | None
    #: as `right_causes` calls it; `none`, or `unknown` if it cannot tell
    cause: str
    confidence: str | None
    #: (layer, role) of the operand that it names first
    tensor: tuple[str, str] | None
    #: step from which that is wrong
    since: int | None
    #: step from which the loss is harmed
    diverges_at: int | None
    #: percent, with its interval
    gap: tuple[float | None, float | None, float | None] | None
    sentence: str


def read_answer(found: Mapping[str, Any]) -> Answer:
    """Return what the output of `diagnose --json` says. Nothing else of this package reads that output."""
    culprit, gap = found["culprit"] or {}, found["gap"]
    named = culprit.get("layer") and culprit.get("role")
    return Answer(
        harmed=None if found["harm"] == "unknown" else found["harm"] in ("harmful", "likely"),
        cause=found["cause"],
        confidence=found["confidence"],
        tensor=(culprit["layer"], culprit["role"]) if named else None,
        since=culprit.get("since") if named else None,
        diverges_at=found["divergence_step"],
        gap=None if gap is None else (gap["percent"], gap["low"], gap["high"]),
        sentence=found["verdict"],
    )


def ask_diagnose(run: Path, baselines: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the JSON that `nemo-fp8-debug diagnose RUN --json` prints."""
    arguments = ["diagnose", str(run), "--json"]
    for baseline in baselines:
        arguments += ["--baseline", str(baseline)]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            app(arguments, standalone_mode=False)
        except Exception as error:
            raise RuntimeError(f"diagnose failed: {error!r} {told.getvalue().strip()}") from error
    if not printed.getvalue():
        raise RuntimeError(f"diagnose printed nothing: {told.getvalue().strip()}")
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def read_known(folder: Path, name: str, truth: Mapping[str, Any], baseline: str | None, same_batches: bool) -> Known:
    """Return what is known of a run apart from its verdict.

    Args:
        folder: of the set.
        name: of the run.
        truth: of the run.
        baseline: name of the run that it is judged against; None: there is none.
        same_batches: whether that one had the same batches.
    """
    recorded = Recorded.read(folder / name / RECORD)
    mine, theirs = (
        None if each is None else Losses.of(json.loads((folder / each / LOSSES).read_text())) for each in (name, baseline)
    )
    assert mine is not None
    harmed = {"yes": True, "no": False}.get(truth["harmed"])
    return Known(
        mine,
        theirs,
        same_batches,
        Fault.from_truth(truth),
        harmed,
        recorded.sampled,
        recorded.layers,
        leaves=truth["diverges_at"],
        baseline_end=None if baseline is None else Recorded.read(folder / baseline / RECORD).sampled[-1],
    )


def judge_run(folder: Path, planned: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a verdict for each baseline of a run that is there, and one without any, with what is true of the run."""
    truth = json.loads((folder / planned["name"] / TRUTH).read_text())
    verdicts = []
    for kind, baseline in {ALONE: None, **planned["baselines"]}.items():
        if baseline is not None and not (folder / baseline / RECORD).exists():
            continue
        against = [] if baseline is None else [folder / baseline / RECORD]
        verdict = {"name": planned["name"], "baseline": kind, "against": baseline, "truth": truth, "error": None}
        try:
            told = ask_diagnose(folder / planned["name"] / RECORD, against)
            known = read_known(folder, planned["name"], truth, baseline, kind == "near")
            checked = check_texts(list_texts(told), known)
            verdict |= {"answer": asdict(read_answer(told)), "sentences": checked.to_json()}
        except RuntimeError as error:
            verdict |= {"answer": None, "error": str(error)}
        verdicts.append(verdict)
    return verdicts


def judge_folder(folder: Path, jobs: int = 1, again: bool = False) -> None:
    """Judge all runs of a set that are there, note that they were judged, and print how often verdicts were right.

    Args:
        folder: of the set.
        jobs: processes.
        again: print what was said before, and ask nothing.
    """
    path, log = folder / VERDICTS, folder / LOG
    if not again:
        commit = _describe_commit()
        with path.open("w") as file:
            for verdict in _judge_all(folder, jobs):
                file.write(json.dumps(verdict | {"commit": commit}) + "\n")
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        with log.open("a") as file:
            file.write(f"{now} {commit}\n")
    judged = log.read_text().splitlines()
    print(f"judged {len(judged)} times, last at {judged[-1]}")
    print_scores(read_verdicts(folder))


def read_verdicts(folder: Path) -> list[dict[str, Any]]:
    """Return the verdicts on a set that was judged."""
    return [json.loads(line) for line in (folder / VERDICTS).read_text().splitlines()]


def _judge_all(folder: Path, jobs: int) -> Iterator[dict[str, Any]]:
    planned = [json.loads(line) for line in (folder / PLAN).read_text().splitlines()]
    there = [one for one in planned if (folder / one["name"] / TRUTH).exists()]
    ask = partial(judge_run, folder)
    if jobs == 1:
        for run in there:
            yield from ask(run)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for verdicts in pool.map(ask, there):
            yield from verdicts


def _describe_commit() -> str:
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(asked, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()
