"""Counts how often verdicts of each cause are right, and writes `confidence.json`: `fit_confidence.py --share 1`.

A verdict is right if it names the cause rightly, and the operand if there is one to name. A clean run that is accused is
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fault_injection.facts_cache import draw_runs, read_all
from fault_injection.judge import Judged, is_right, judge_one

OUTPUT = Path(__file__).parents[3] / "nemo_fp8_debug/analysis/diagnosis/confidence.json"
#: verdicts of a family that make a share
FEWEST = 10


def count_right(judged: Iterable[Judged]) -> dict[str, dict[str, float]]:
    """Return by cause, and with or without a baseline, how many verdicts are right, and the share of the worst family."""
    by_family: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for one in judged:
        if one.cause in ("none", "unknown") or one.confidence == "low":
            continue
        name = f"{one.cause}, {'alone' if one.baseline == 'none' else 'paired'}"
        by_family[name][one.truth["family"]].append(is_right(one))
    found = {}
    for name, families in sorted(by_family.items()):
        large = [each for each in families.values() if len(each) >= FEWEST]
        every = [right for each in families.values() for right in each]
        worst = min(large, key=lambda each: sum(each) / len(each), default=every)
        found[name] = {"right": sum(every), "verdicts": len(every), "worst family": round(sum(worst) / len(worst), 3)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of the benchmark's runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    cases = read_all(draw_runs(options.share), ["near", "other", "none"], [5, 20], options.jobs)
    found = count_right(judge_one(*case) for case in cases)
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
