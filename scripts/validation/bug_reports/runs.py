"""Train the runs of bug reports and keep what they did."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bug_reports.monitor_rule import watch_run
from bug_reports.report import Report

MEASURED = Path(__file__).with_name("measured.json")
#: last steps that a loss is averaged over, and the gap that counts as harm, as a part of the good run's loss
LAST, HARM = 32, 0.02
#: seed and order of the good run of other batches
OTHER_SEED, OTHER_ORDER = 5, 5


def make_runs(reports: Iterable[Report], root: Path, keep: bool = False) -> None:
    """Train three runs of each report: the faulty one, the good one of the same batches, and one of another seed."""
    for report in reports:
        began, losses = sum(os.times()[:4]), {}
        for name, (faulty, seed, order) in list_runs().items():
            losses[name] = report.training(faulty, seed, order).run(root / report.name / name)
        row, seconds = describe_runs(report, root, losses), sum(os.times()[:4]) - began
        if keep:
            keep_measured({report.name: row})
        print(
            f"{report.name}: {seconds:.0f} s of a core, losses {row['bad']} and {row['good']}, other seed {row['other']}, "
            f"gap {row['gap_pct']}%, {row['harm']} ({report.harm} expected), monitor: {row['monitor']}",
            flush=True,
        )


def list_runs() -> dict[str, tuple[bool, int, int]]:
    """Return whether each run is faulty, its seed and its order of data."""
    return {"bad": (True, 0, 0), "good": (False, 0, 0), "other": (False, OTHER_SEED, OTHER_ORDER)}


def describe_runs(report: Report, root: Path, losses: dict[str, list[float]]) -> dict[str, Any]:
    """Return final losses, the gap, whether that is harm, and what the monitor says of the faulty run."""
    ends = {name: sum(values[-LAST:]) / len(values[-LAST:]) for name, values in losses.items()}
    gap = ends["bad"] / ends["good"] - 1
    # A log may show a loss of zero for NaN.
    hidden = losses["bad"][-1] == 0
    harmful = not math.isfinite(gap) or gap > HARM or hidden
    return {
        **{name: round(end, 4) if math.isfinite(end) else None for name, end in ends.items()},
        "gap_pct": round(100 * gap, 2) if math.isfinite(gap) and not hidden else None,
        "harm": "harmful" if harmful else "none",
        "monitor": watch_run(root / report.name / "bad"),
        "monitor_of_good": watch_run(root / report.name / "good"),
    }


def keep_measured(measured: dict[str, dict[str, Any]]) -> None:
    """Write what was measured beside the code, with what was measured before of other reports."""
    before = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    MEASURED.write_text(json.dumps(dict(sorted({**before, **measured}.items())), indent=1) + "\n")
