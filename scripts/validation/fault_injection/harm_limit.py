"""How well the loss alone can tell harm with a baseline of another seed, or of another depth:
`fault_injection/harm_limit.py --set tune --baseline other`.

The best that any threshold on the gap over the last steps can do, which is chosen with the truth in hand: without regard to
clean runs, and so that no more than 1 in 100 of them is above it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fault_injection.judge import baseline_of, runs_by_part, share
from fault_injection.records import read_run, truths
from fault_injection.truth import HARM, LAST

Floats = npt.NDArray[np.float64]


def gaps(which: str, baseline: str, first: int = 0) -> Iterator[tuple[float, bool, bool]]:
    """Of each run that has such a baseline: percent that its last losses lie above the baseline's, whether it is clean, and
    whether it is harmed; those harmed or not by a hair are left out, as `judge` does."""
    for told in truths(which, first=first):
        true, name = told["gap_pct"], baseline_of(told, baseline)
        clean = told["kind"] == "none"
        if name is None or (not clean and true is not None and 50 * HARM < true <= 150 * HARM):
            continue
        mine, other = (read_run(each).loss.losses for each in (told, runs_by_part()[told["path"]][name]))
        last = np.where(np.isfinite(mine[-LAST:]), mine[-LAST:], np.inf)
        yield 100 * float(last.mean() / other[-LAST:].mean() - 1), clean, bool(told["harmful"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("tune", "released", "held-out"), default="tune")
    parser.add_argument("--first", type=int, default=0, help="part from which runs count")
    parser.add_argument("--baseline", choices=("other", "depth"), default="other")
    options = parser.parse_args()
    found = np.array(list(gaps(options.set, options.baseline, options.first)))
    of_clean = found[found[:, 1] == 1, 0]
    gap, harmed = found[found[:, 1] == 0, 0], found[found[:, 1] == 0, 2] == 1
    print(f"{len(of_clean)} clean pairs: standard deviation {of_clean.std():.2f}%, largest {of_clean.max():.1f}%")
    for title, most in (("any threshold", 1.0), ("at most 1% of clean runs above it", 0.01)):
        allowed = [x for x in np.unique(gap[np.isfinite(gap)]) if (of_clean > x).mean() <= most]
        best = max(allowed, key=lambda x: float(((gap > x) == harmed).mean()))
        above = int((of_clean > best).sum())
        told = share(list((gap > best) == harmed))
        missed = share(list(gap[harmed] <= best))
        print(f"{title}: above {best:.1f}%, right {told}; harm missed {missed}; clean above it {above} of {len(of_clean)}")


if __name__ == "__main__":
    main()
