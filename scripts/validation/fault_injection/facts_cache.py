"""Facts of the benchmark's runs, measured once and kept, so that all verdicts can be judged again within minutes.

    .venv/bin/python scripts/validation/fault_injection/facts_cache.py [--jobs N] [--share 0.2]

Facts depend on what rules need. After a change to a fact, delete the cache (`.cache/facts`) or give another folder.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fault_injection.judge import BASELINES, INTERVALS, Truth, bands_without, baselines_of
from fault_injection.records import read_run, truths
from nemo_fp8_debug.analysis.diagnosis.diagnose import measure_facts
from nemo_fp8_debug.analysis.diagnosis.facts import Facts
from nemo_fp8_debug.analysis.diagnosis.rule import list_needed_facts

FOLDER = Path(__file__).parents[3] / ".cache" / "facts"


def read_facts(told: Truth, baseline: str, interval: int, folder: Path = FOLDER) -> Facts | None:
    """Return the facts of a run next to a kind of baseline, measured now if they are not kept; None: it has no such one."""
    path = folder / f"{told['part']}-{told['name']}-{baseline}-{interval}"
    if path.exists():
        facts: Facts | None = pickle.loads(zlib.decompress(path.read_bytes()))
        return facts
    baselines = baselines_of(told, baseline, interval)
    measured = None
    if baselines is not None:
        bands = bands_without(told["family"]) if baseline == "families" else None
        facts, _ = measure_facts(read_run(told, interval), baselines, bands=bands)
        measured = facts.measure_all(list_needed_facts())
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(zlib.compress(pickle.dumps(measured), 1))
    unfinished.rename(path)
    return measured


def draw_runs(share: float, which: str = "all") -> list[Truth]:
    """Return a share of the benchmark's runs, always the same ones, in a drawn order."""
    runs: list[Truth] = list(truths(which))
    random.Random(1).shuffle(runs)
    return runs[: round(share * len(runs))]


def read_all(
    runs: Sequence[Truth], baselines: Sequence[str], intervals: Sequence[int], jobs: int = 1, folder: Path = FOLDER
) -> Iterator[tuple[Truth, str, int, Facts]]:
    """Yield run, kind of baseline, interval and facts."""
    tasks = [(told, kind, every) for told in runs for kind in baselines for every in intervals]
    with ProcessPoolExecutor(jobs) as pool:
        read = pool.map(partial(_read, folder), tasks, chunksize=16) if jobs > 1 else map(partial(_read, folder), tasks)
        yield from ((*task, facts) for task, facts in zip(tasks, read, strict=True) if facts is not None)


def _read(folder: Path, task: tuple[Truth, str, int]) -> Facts | None:
    return read_facts(*task, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of the benchmark's runs")
    parser.add_argument("--baselines", nargs="+", choices=BASELINES, default=["near", "other", "none"])
    parser.add_argument("--intervals", nargs="+", type=int, default=[5, 20], help=f"of {INTERVALS}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    count = 0
    for _ in read_all(draw_runs(options.share), options.baselines, options.intervals, options.jobs, options.folder):
        count += 1
    print(f"{count} facts in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
