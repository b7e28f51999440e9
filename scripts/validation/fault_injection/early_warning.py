"""How early a score of the operands warns of harm, and how often for nothing: `fault_injection/early_warning.py`.

Scores are compared on steps: those of clean runs, and those of harmed runs from the onset of an operand's fault to the
divergence of the loss. The held-out runs take `--set held-out`, once the verdicts were judged on them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from fault_injection.records import read_run, truths
from nemo_fp8_debug.analysis.diagnosis.limits import early_warning
from nemo_fp8_debug.analysis.runs.grid import Grid
from nemo_fp8_debug.analysis.runs.run import Run

Floats = npt.NDArray[np.float64]
INTERVAL, FIRST = 5, 2
#: samples before one that it is compared with, where a score looks at the operand's own past
_PAST = 8


def _of_own_past(values: Floats) -> Floats:
    """[T, S] -> [S]: by how much the farthest operand lies above the median of its samples before."""
    found = np.zeros(values.shape[1])
    for s in range(FIRST, values.shape[1]):
        with np.errstate(invalid="ignore"):
            rises = values[:, s] - np.nanmedian(values[:, max(0, s - _PAST) : s], axis=1)
        found[s] = np.max(rises, where=np.isfinite(rises), initial=-np.inf)
    return found


def _largest(values: Floats) -> Floats:
    return np.max(values, axis=0, where=~np.isnan(values), initial=-np.inf)


def scores(run: Run) -> dict[str, Floats]:
    """By name, the score of each sample behind the first; the product's own comes first."""
    grid: Grid = run.grid
    lost = np.fmax(grid.of("underflow_pct"), grid.of("overflow_pct"))
    with np.errstate(divide="ignore", invalid="ignore"):
        error, kurtosis, off = (np.log2(x) for x in (grid.of("relative_error"), grid.of("kurtosis"), 1 - grid.of("cosine")))
    others = {
        "values lost": _largest(lost),
        "relative error": _largest(error),
        "kurtosis": _largest(kurtosis),
        "values lost, against its past": _of_own_past(np.log2(np.maximum(lost, 0.01))),
        "relative error, against its past": _of_own_past(error),
        "cosine, against its past": _of_own_past(off),
        "kurtosis, against its past": _of_own_past(kurtosis),
        "outlier, against its past": _of_own_past(grid.of("outlier_log2")),
        "shrinkage": _largest(_shrinkage(grid)),
        "shrinkage, against its past": _of_own_past(_shrinkage(grid)),
    }
    return {"early_warning": early_warning(run)["score"].to_numpy()} | {name: of[FIRST:] for name, of in others.items()}


def _shrinkage(grid: Grid) -> Floats:
    """[T, S]: 1 - sum(x q) / sum(x^2), of values x that are cast to q.

    With c their cosine, e the relative error and r = |q| / |x|, e^2 = 1 - 2 c r + r^2 has two solutions; it is the smaller
    r, since what underflows or is clipped shrinks.
    """
    c, e = grid.of("cosine"), grid.of("relative_error")
    r = c - np.sqrt(np.maximum(e**2 - (1 - c**2), 0))
    shrinkage: Floats = 1 - c * r
    return shrinkage


@dataclass
class Scored:
    """Of one score."""

    #: of each clean run
    clean: list[Floats] = field(default_factory=list)
    #: of each harmed run: truth, steps, scores
    harmed: list[tuple[Mapping[str, Any], npt.NDArray[np.int64], Floats]] = field(default_factory=list)

    def area(self) -> float:
        """Under the ROC, over steps."""
        before = [of[(steps >= t["onset"]) & (steps < t["diverges_at"])] for t, steps, of in self.harmed]
        hits, others = np.concatenate(before), np.concatenate(self.clean)
        ranks = rankdata(np.concatenate([hits, others]))[: len(hits)]
        return float((ranks.sum() - len(hits) * (len(hits) + 1) / 2) / (len(hits) * len(others)))

    def leads(self, limit: float) -> list[tuple[str, float]]:
        """Kind of fault, and steps from the first warning to the divergence; -inf: none came before."""
        found = []
        for told, steps, of in self.harmed:
            at = steps[(of > limit) & (steps >= told["onset"]) & (steps < told["diverges_at"])]
            found.append((told["kind"], float(told["diverges_at"] - at[0]) if len(at) else -np.inf))
        return found

    def limits(self) -> dict[str, float]:
        """With one false alarm in 1,000 steps of clean runs, and in none of the clean runs."""
        steps = np.sort(np.concatenate(self.clean))
        return {
            "1 in 1,000 clean steps": float(steps[-max(1, len(steps) // 1000)]),
            "no clean run": max(float(of.max()) for of in self.clean),
        }


def collect(which: str, first: int = 0) -> dict[str, Scored]:
    """By score."""
    found: dict[str, Scored] = defaultdict(Scored)
    for told in truths(which, first=first):
        late = told["harmful"] and told["culprits"] and told["diverges_at"] is not None
        if told["kind"] != "none" and not (late and -(-told["onset"] // INTERVAL) * INTERVAL < told["diverges_at"]):
            continue
        run = read_run(told, INTERVAL)
        steps = run.grid.steps[FIRST:]
        for name, of in scores(run).items():
            of = of if len(of) == len(steps) else np.zeros(len(steps))  # FP4 has no limits, and no score
            if told["kind"] == "none":
                found[name].clean.append(of)
            else:
                found[name].harmed.append((told, steps, of))
    return found


def _told(leads: Sequence[float]) -> str:
    values = np.array(leads)
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975], method="nearest")
    return f"{np.isfinite(values).sum()} of {len(values)} warned of, lead {np.median(values):g} [{low:g}, {high:g}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("tune", "released", "held-out"), default="tune")
    parser.add_argument("--first", type=int, default=0, help="part from which runs count")
    options = parser.parse_args()
    found = collect(options.set, options.first)
    first = next(iter(found.values()))
    print(f"{len(first.harmed)} harmed runs with a sample between onset and divergence, {len(first.clean)} clean ones")
    for name, scored in found.items():
        at = "; ".join(f"{what}: {_told([v for _, v in scored.leads(limit)])}" for what, limit in scored.limits().items())
        print(f"{name}: area {scored.area():.3f}; {at}")
    leads = first.leads(1.0)
    false_steps = sum(int((of > 1).sum()) for of in first.clean)
    false_runs = sum(bool((of > 1).any()) for of in first.clean)
    print(f"early_warning above 1: {_told([v for _, v in leads])}; {false_steps} clean steps, {false_runs} clean runs")
    for kind in sorted({kind for kind, _ in leads}):
        print(f"    {kind}: {_told([v for k, v in leads if k == kind])}")


if __name__ == "__main__":
    main()
