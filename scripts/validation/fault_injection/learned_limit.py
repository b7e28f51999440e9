"""How well harm can be told with a baseline of another seed by a classifier that is trained to: `pip install
scikit-learn==1.9.1`, then `fault_injection/learned_limit.py`. Results: learned_limit.json.

Boosted trees get what `diagnose` says and what it goes by: gaps of the losses over several stretches, the farthest jump of
the loss, the gradient norm, the cause, and how far out the culprit is. They are trained on the parts that set thresholds and
asked about the held-out ones, with several seeds; and cross-validated over the former. They are no bound, but they show
whether `diagnose` leaves much of what it sees unused.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.model_selection import GroupKFold, cross_val_predict

from fault_injection.judge import Judged, baseline_of, runs_by_part, share
from fault_injection.records import StoredRun, read_run, truths
from fault_injection.sets import HELD_OUT
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.diagnosis import Diagnosis
from nemo_fp8_debug.analysis.diagnosis.rules.finding import CAUSES, CONFIDENCE
from nemo_fp8_debug.analysis.loss.step_change import farthest_jump

Floats = npt.NDArray[np.float64]
RESULTS = Path(__file__).with_suffix(".json")
INTERVAL, SEEDS, FOLDS = 5, 5, 10
#: losses at the end that are compared, and before the first thing that is found
STRETCHES, BEFORE = (30, 60, 120), 60
#: percent beyond which a gap counts as that, and losses that stand for infinite ones
MOST, LARGE = 200.0, 1e6
HARMS = ("unknown", "none", "harmless so far", "gap", "likely", "harmful")
ROLES = ("input", "weight", "grad_output")


def quantities(run: StoredRun, baseline: StoredRun, said: Diagnosis) -> list[float]:
    """What a run shows beside its baseline."""
    n = min(len(run.loss.losses), len(baseline.loss.losses))
    losses = [np.nan_to_num(each.loss.losses[:n], posinf=LARGE) for each in (run, baseline)]
    sure = [finding for finding in said.findings if finding.confidence != "low"]
    since = min((finding.since for finding in sure if finding.since is not None), default=0)
    at, culprit, jump = min(since, n - 10), said.culprit, farthest_jump(run.loss, baseline.loss)
    before = _gap(*losses, slice(max(at - BEFORE, 0), at))
    gaps = [_gap(*losses, slice(-last, None)) for last in STRETCHES]
    return [
        *(*gaps, before, gaps[1] - before, _gap(*losses, slice(at, None)), at),
        *((0.0, 0.0, 0.0) if jump is None else (jump.step, jump.percent, jump.times)),
        *(_norms(run, baseline), *map(_slope, losses)),
        *(float(said.cause == cause) for cause in CAUSES),
        *(HARMS.index(said.harm), CONFIDENCE.index(said.confidence)),
        max((finding.severity for finding in said.findings), default=0),
        *((-1, -1) if culprit is None else (culprit.severity, np.log2(1 + min(culprit.excess or 0.0, LARGE)))),
        *(float(culprit is not None and culprit.role == role) for role in ROLES),
    ]


def _gap(run: Floats, baseline: Floats, where: slice) -> float:
    """Percent, no more than MOST."""
    if not len(run[where]):
        return 0.0
    return float(min(100 * (run[where].mean() / baseline[where].mean() - 1), MOST))


def _norms(run: StoredRun, baseline: StoredRun) -> float:
    """log2 of the gradient norm at the end beside the baseline's."""
    ends = [each.steps["grad_norm"].cast(pl.Float64).fill_nan(LARGE).tail(STRETCHES[1]).median() for each in (run, baseline)]
    return float(np.log2(ends[0] / ends[1])) if all(isinstance(end, float) and end > 0 for end in ends) else 0.0


def _slope(losses: Floats) -> float:
    """Of the last losses, in thousandths of their mean a step."""
    last = losses[-STRETCHES[1] :]
    return float(np.clip(1000 * np.polyfit(np.arange(len(last)), last / last.mean(), 1)[0], -MOST, MOST))


def of_run(told: Mapping[str, Any]) -> tuple[Judged, list[float]] | None:
    """What is said and shown of a run; None: it has no baseline of another seed."""
    if (name := baseline_of(told, "other")) is None:
        return None
    run, baseline = read_run(told, INTERVAL), read_run(runs_by_part()[told["path"]][name], INTERVAL)
    said = diagnose(run, baseline)
    return Judged(told, "other", INTERVAL, said.harm, said.cause, None, None), quantities(run, baseline, said)


def main() -> None:
    warnings.simplefilter("ignore")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [one for one in pool.map(of_run, truths("all"), chunksize=16) if one is not None]
    runs = [judged for judged, _ in found]
    shown = np.nan_to_num(np.array([values for _, values in found], np.float64))
    harmed = np.array([judged.truth["harmful"] for judged in runs], bool)
    clean = np.array([judged.is_clean for judged in runs])
    clear = ~clean & np.array([judged.harm_is_clear for judged in runs])
    parts = np.array([judged.truth["part"] for judged in runs])
    held_out = np.array([int(part.rpartition("-")[2]) >= HELD_OUT for part in parts])

    def told(said: npt.NDArray[np.bool_], among: npt.NDArray[np.bool_]) -> dict[str, str]:
        return {
            "harm right": share((said == harmed)[clear & among].tolist()),
            "harmed, not told": share((~said)[harmed & among].tolist()),
            "clean, called harmed": share(said[clean & among].tolist()),
        }

    by_rules = np.array([judged.harm in ("harmful", "likely") for judged in runs])
    results: dict[str, Any] = {
        "diagnose": {"set thresholds": told(by_rules, ~held_out), "held out": told(by_rules, held_out)}
    }
    for seed in range(SEEDS):
        trees = GradientBoostingClassifier(
            n_estimators=150, max_depth=4, learning_rate=0.05, subsample=0.5, max_features=0.4, random_state=seed
        )
        known = ~held_out
        crossed = cross_val_predict(
            trees, shown[known], harmed[known], groups=parts[known], cv=GroupKFold(FOLDS), method="predict_proba"
        )[:, 1]
        chances = trees.fit(shown[known], harmed[known]).predict_proba(shown)[:, 1]
        best = max(np.unique(chances), key=lambda least: ((chances > least) == harmed)[clear & held_out].mean())
        validated = np.zeros(len(runs), bool)
        validated[known] = crossed > 0.5
        results[f"trees, seed {seed}"] = {
            "set thresholds, cross-validated": told(validated, known),
            "held out": told(chances > 0.5, held_out),
            "held out, with the best limit for them": told(chances > best, held_out),
        }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
