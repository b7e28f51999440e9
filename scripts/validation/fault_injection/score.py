"""Scores what is said of recorded runs: `fault_injection/score.py SEED... --output FOLDER`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fault_injection.verdicts import HARM, Judged, judged


def _share(title: str, right: Sequence[bool], goal: str) -> list[str]:
    part = f"{100 * sum(right) / len(right):.1f}%" if right else "-"
    return [title, f"{sum(right)} of {len(right)}", part, goal]


def _rescued(run: Judged) -> bool:
    outcome = run.folder / "rescue.json"
    return outcome.exists() and json.loads(outcome.read_text())["gap"] <= HARM


def scores(runs: Sequence[Judged]) -> list[list[str]]:
    """A row a question: what, how many, which share, and the share that is asked for."""
    clean = [run for run in runs if run.is_clean]
    injected = [run for run in runs if not run.is_clean]
    numeric = [run for run in injected if run.is_numeric]
    harmful = [run for run in injected if run.is_harmful]
    harmless = [run for run in injected if not run.is_harmful]
    hurt = [run for run in numeric if run.is_harmful]
    return [
        _share("culprit named first", [run.located for run in numeric], ">= 95%"),
        _share("cause right", [run.said.cause == run.truth["cause"] for run in injected], ">= 90%"),
        _share("named before the loss diverges, harmful in an operand", [(run.lead or 0) > 0 for run in hurt], ">= 90%"),
        _share("clean called clean", [run.said.harm == "none" and run.said.cause == "none" for run in clean], ""),
        _share("no verdict of harm on a clean run", [run.said.harm != "harmful" for run in clean], "100%"),
        _share("harmless called harmless", [run.said.harm != "harmful" for run in harmless], ">= 80%"),
        _share("harmful called harmful", [run.said.harm == "harmful" for run in harmful], ""),
        _share("rescued by what is recommended, harmful in an operand", [_rescued(run) for run in hurt], ">= 90%"),
    ]


def confusion(runs: Sequence[Judged]) -> Table:
    """Causes: true ones down, said ones across."""
    counts = Counter((run.truth["cause"], run.said.cause) for run in runs)
    true, said = (sorted({pair[i] for pair in counts}) for i in (0, 1))
    table = Table("true cause", *said, title="Causes: how often each was said of each", title_justify="left")
    for cause in true:
        table.add_row(cause, *(str(counts[cause, other] or "") for other in said))
    return table


def failures(run: Judged) -> list[str]:
    """What was wrong about a run."""
    found = []
    if run.is_numeric and not run.located:
        found.append(f"named {run.said.culprit.operand if run.said.culprit else 'nothing'}")
    if run.said.cause != run.truth["cause"]:
        found.append(f"said {run.said.cause}")
    if (run.said.harm == "harmful") != run.is_harmful:
        found.append(f"called {run.said.harm}, gap {run.gap:+.1%}")
    if run.is_numeric and run.is_harmful:
        if (run.lead or 0) <= 0:
            found.append(f"lead {run.lead}")
        if not _rescued(run):
            found.append("not rescued")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("runs/truth"))
    options = parser.parse_args()
    runs = [run for seed in options.seeds for run in judged(options.output / f"seed-{seed}")]
    out = Console(width=150, highlight=False)
    clean = sum(run.is_clean for run in runs)
    out.print(f"{len(runs) - clean} runs with a fault, {clean} without, seeds {', '.join(map(str, options.seeds))}")
    table = Table("question", "runs", "share", "asked for", title="Scores", title_justify="left")
    for row in scores(runs):
        table.add_row(*row)
    out.print(table)
    out.print(confusion(runs))
    leads = sorted(run.lead for run in runs if run.is_numeric and run.is_harmful and run.lead is not None)
    if leads:
        out.print(f"Lead over the loss: median {leads[len(leads) // 2]} steps, {leads[0]} to {leads[-1]}")
    for run in runs:
        if wrong := failures(run):
            out.print(f"  {run.name}: {', '.join(wrong)}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
