"""How early the warning of the operands comes before harm, and how often for nothing: `fault_injection/early_warning.py`.

Scores are compared on steps: those of clean runs, and those of harmed runs from the onset of an operand's fault to the
divergence of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from fault_injection.records import read_run, truths
from nemo_fp8_debug.analysis.diagnosis.limits import compute_early_warning_scores

Floats = npt.NDArray[np.float64]
#: parts whose runs are warned of: no limit of the score was set on them
PARTS = range(200, 300)
INTERVAL, FIRST = 5, 2


@dataclass
class Scored:
    """Scores of runs."""

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


def collect() -> Scored:
    """Score the clean runs, and the harmed ones with a sample between onset and divergence."""
    found = Scored()
    for told in truths("all"):
        if int(told["part"].rpartition("-")[2]) not in PARTS:
            continue
        late = told["harmful"] and told["culprits"] and told["diverges_at"] is not None
        if told["kind"] != "none" and not (late and -(-told["onset"] // INTERVAL) * INTERVAL < told["diverges_at"]):
            continue
        run = read_run(told, INTERVAL)
        steps, scores = run.metrics.grid.steps[FIRST:], compute_early_warning_scores(run)["score"].to_numpy()
        scores = scores if len(scores) == len(steps) else np.zeros(len(steps))  # FP4 has no limits, and no score
        if told["kind"] == "none":
            found.clean.append(scores)
        else:
            found.harmed.append((told, steps, scores))
    return found


def _told(leads: Sequence[float]) -> str:
    values = np.array(leads)
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975], method="nearest")
    return f"{np.isfinite(values).sum()} of {len(values)} warned of, lead {np.median(values):g} [{low:g}, {high:g}]"


def main() -> None:
    found = collect()
    leads, false_runs = found.leads(1.0), sum(bool((of > 1).any()) for of in found.clean)
    print(f"{_told([v for _, v in leads])}; {false_runs} of {len(found.clean)} clean runs; area {found.area():.3f}")
    for kind in sorted({kind for kind, _ in leads}):
        print(f"    {kind}: {_told([v for k, v in leads if k == kind])}")


if __name__ == "__main__":
    main()
