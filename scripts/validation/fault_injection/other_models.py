"""What `diagnose` says of models that the benchmark was not made with: `fault_injection/other_models.py --model neox`.

Their runs are drawn and trained as those of a part of the benchmark. What is true of each run, and what was said of it, is
kept in other_models/, a file a model; without arguments that is shown. Records are not kept, unless a folder for them is
given: runs that are there are not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from rich.console import Console

from fault_injection.families import LATER, OTHERS
from fault_injection.judge import INTERVALS, QUESTIONS, Judged, failure, judge, share, tables
from fault_injection.records import truths
from fault_injection.run_part import run_part

RESULTS = Path(__file__).with_suffix("")
#: each of another engine: delayed, current, blockwise, MXFP8, NVFP4
PARTS = (300, 301, 304, 305, 308)
BASELINES = ("near", "other", "depth", "none")


def judged_anew(model: str, parts: Sequence[int], records: Path, jobs: int) -> list[Judged]:
    """Train parts of a model, and judge their runs."""
    for part in parts:
        run_part(model, part, records)
    runs = [told for told in truths("all", records) if told["family"] == model and int(told["part"][-3:]) in parts]
    return list(judge(runs, BASELINES, INTERVALS, jobs))


def keep(model: str, found: Sequence[Judged]) -> None:
    """What is true and what was said, by which commit."""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=RESULTS.parent).stdout.strip()
    rows = [asdict(one) for one in found]
    truth = {f"{row['truth']['part']}/{row['truth']['name']}": row["truth"] for row in rows}
    for row in truth.values():
        del row["path"], row["row"]
    said = [{**row, "truth": f"{row['truth']['part']}/{row['truth']['name']}"} for row in rows]
    RESULTS.mkdir(exist_ok=True)
    lines = ",\n".join(map(json.dumps, said))
    text = f'{{"commit": "{commit}",\n"truth": {json.dumps(truth)},\n"said": [\n{lines}\n]}}\n'
    (RESULTS / f"{model}.json").write_text(text)


def kept(models: Sequence[str] = OTHERS) -> Iterator[Judged]:
    """All that was said of the runs of some models."""
    for path in (RESULTS / f"{model}.json" for model in models):
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())
            for row in found["said"]:
                culprit = tuple(row["culprit"]) if row["culprit"] else None
                yield Judged(**{**row, "truth": found["truth"][row["truth"]], "culprit": culprit})


def summary(found: Sequence[Judged]) -> Iterator[str]:
    """Rows of a table, sampled every 5th step: what is right with a baseline of another seed, and which clean runs are
    accused with any; of each model, of all that were there when limits were set, and of the others."""
    yield "| model | culprit | cause | harm right | harmed, and cannot tell | clean, accused: near, other, depth, none |"
    yield "|---|---|---|---|---|---|"
    here = [one for one in found if one.interval == INTERVALS[0]]
    for models in (tuple(model for model in OTHERS if model not in LATER), LATER):
        of = {model: [one for one in here if one.truth["family"] == model] for model in models}
        yield from (_row(model, those) for model, those in of.items())
        yield _row("all of these", [one for those in of.values() for one in those])


def _models(of: Sequence[Judged]) -> set[str]:
    return {one.truth["family"] for one in of}


def _row(name: str, of: Sequence[Judged]) -> str:
    asked = {title: (chosen, answer) for title, chosen, answer in QUESTIONS}
    shares = []
    for title in ("culprit first", "cause", "harm right", "harmed, and cannot tell"):
        chosen, answer = asked[title]
        right = [answer(one) for one in of if one.baseline == "other" and chosen(one)]
        shares.append(share(right) if len(_models(of)) > 1 else f"{sum(right)} of {len(right)}")
    accused = [[one.accused for one in of if one.is_clean and one.baseline == baseline] for baseline in BASELINES]
    shares.append(", ".join(f"{sum(those)} of {len(those)}" for those in accused))
    return f"| {' | '.join([name, *shares])} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=OTHERS, nargs="+", default=())
    parser.add_argument("--part", type=int, nargs="+", default=PARTS)
    parser.add_argument("--records", type=Path, help="folder in which records are kept")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        for model in options.model:
            keep(model, judged_anew(model, options.part, options.records or Path(temporary), options.jobs))
    out, found = Console(width=170, highlight=False), list(kept(options.model or OTHERS))
    for table in tables(found):
        out.print(table)
    print("\n".join(summary(found)))
    for one in found:
        if wrong := failure(one):
            out.print(f"{one.truth['part']}/{one.truth['name']} {one.baseline} {one.interval}: {wrong}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
