"""How well harm can be told with a baseline of another seed by a classifier that is trained to: `pip install
scikit-learn==1.9.1`, then `fault_injection/learned_limit.py`. Results: learned_limit.json.

Boosted trees get what `diagnose` says and what it goes by: gaps of the losses over several stretches, the farthest jump of
the loss, the gradient norm, the cause, and how far out and how badly held operands are. They are trained on the runs that
set thresholds, with several seeds, and asked about the others: those judged once that never set any, of a family and of
kinds of fault that they have not seen, and the held-out ones. Over the former they are cross-validated. They are no bound,
but they show whether `diagnose` leaves much of what it sees unused. Others are also told what no reader of a record can be
sure of: what was done to the run, where, when, how strongly, and to which model.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.model_selection import GroupKFold, cross_val_predict

from fault_injection.draws import OPERAND_KINDS, SOFTWARE_KINDS
from fault_injection.engines import ENGINES
from fault_injection.families import FAMILIES
from fault_injection.judge import Judged, baseline_of, runs_by_part, share
from fault_injection.records import StoredRun, read_run, truths
from fault_injection.sets import set_of
from fault_injection.training import STEPS
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.diagnosis import Diagnosis
from nemo_fp8_debug.analysis.diagnosis.rules.finding import CAUSES, CONFIDENCE
from nemo_fp8_debug.analysis.loss.step_change import farthest_jump

Floats, Bools = npt.NDArray[np.float64], npt.NDArray[np.bool_]
#: the quantities of a run beside its baseline, of which something is said
Shown = Callable[[StoredRun, StoredRun, Diagnosis], list[float]]
RESULTS = Path(__file__).with_suffix(".json")
INTERVAL, SEEDS, FOLDS = 5, 5, 10
#: losses at the end that are compared, and before the first thing that is found
STRETCHES, BEFORE = (30, 60, 120), 60
#: percent beyond which a gap counts as that, and losses that stand for infinite ones
MOST, LARGE = 200.0, 1e6
#: sets of runs, and what they are called
SETS = {"tune": "set thresholds", "spent": "judged once, set none", "held-out": "held out"}
HARMS = ("unknown", "none", "harmless so far", "gap", "likely", "harmful")
ROLES = ("input", "weight", "grad_output")
#: metrics at the end, of the culprit and of the operands of each role
ERRORS = ("relative_error", "underflow_pct", "overflow_pct", "cosine")
#: numbers of a fault, and parts of the name of a layer that it sits in
STRENGTHS = ("bits", "over", "height", "factor", "period", "share", "growth")
WHERE = ("qkv", "q_proj", "k_proj", "v_proj", "proj", "fc1", "fc2", "gate", "up_proj", "down_proj", "expert")


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
        *_operands(run, said),
    ]


def _operands(run: StoredRun, said: Diagnosis) -> Iterator[float]:
    """How many are out of the baseline's band, by role, and how badly the culprit and all of a role are held at the end."""
    assert said.comparison is not None
    out = said.comparison.out_of_band
    for role in ROLES:
        yield float(out.filter(pl.col("role") == role).select("layer").n_unique())
        yield float(np.log2(1 + min(out.filter(pl.col("role") == role)["excess"].max() or 0.0, LARGE)))
    rows = run.metrics.frame(ERRORS)
    last = rows.filter(pl.col("step") == rows["step"].max())
    for some in (
        last.filter(pl.col("layer") == said.culprit.layer, pl.col("role") == said.culprit.role)
        if said.culprit
        else last.clear(),
        *(last.filter(pl.col("role") == role) for role in ROLES),
    ):
        for name in ERRORS:
            yield float(np.nan_to_num(some[name].cast(pl.Float64).fill_nan(None).median() or 0.0, posinf=LARGE))


def told_of(truth: Mapping[str, Any]) -> list[float]:
    """What was done to a run, and to which."""
    fault, culprits = truth["fault"], truth["culprits"]
    parts = [fault, *fault.get("parts", ())]
    until = fault.get("until") or STEPS
    return [
        *(float(truth["kind"] == kind) for kind in (*OPERAND_KINDS, *SOFTWARE_KINDS)),
        *(float(truth["family"] == family) for family in FAMILIES),
        *(float(truth["engine"] == engine) for engine in ENGINES),
        *map(float, (fault["onset"], until, truth["depth"], truth["rate"], len(culprits))),
        *(max((float(part.get(name) or 0.0) for part in parts), key=abs) for name in STRENGTHS),
        *(float(any(role == each for _, each in culprits)) for role in ROLES),
        *(float(any(part in layer for layer, _ in culprits)) for part in WHERE),
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


def of_run(shown: Shown, told: Mapping[str, Any]) -> tuple[Judged, list[float]] | None:
    """What is said of a run, and some quantities; None: it has no baseline of another seed."""
    if (name := baseline_of(told, "other")) is None:
        return None
    run, baseline = read_run(told, INTERVAL), read_run(runs_by_part()[told["path"]][name], INTERVAL)
    said = diagnose(run, baseline)
    return Judged(told, "other", INTERVAL, said.harm, said.cause, None, None), shown(run, baseline, said)


def of_all(shown: Shown) -> tuple[list[Judged], Floats]:
    """What is said of all runs that have a baseline of another seed, and [runs, quantities]."""
    warnings.simplefilter("ignore")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [one for one in pool.map(partial(of_run, shown), truths("all"), chunksize=16) if one is not None]
    return [judged for judged, _ in found], np.nan_to_num(np.array([values for _, values in found], np.float64))


def main() -> None:
    judged, shown = of_all(quantities)
    runs = Runs(judged)
    faults = np.array([told_of(one.truth) for one in judged], np.float64)
    by_rules = np.array([one.harm in ("harmful", "likely") for one in judged])
    results: dict[str, Any] = {"diagnose": {SETS[which]: runs.told(by_rules, runs.of[which]) for which in SETS}}
    for name, values in (("trees", shown), ("trees that are told the fault", np.hstack([shown, faults]))):
        for seed in range(SEEDS):
            results[f"{name}, seed {seed}"] = runs.by_trees(values, seed)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


class Runs:
    """Runs to learn from, and to ask about."""

    def __init__(self, judged: Sequence[Judged]) -> None:
        self.harmed = np.array([one.truth["harmful"] for one in judged], bool)
        self.clean = np.array([one.is_clean for one in judged])
        self.clear = ~self.clean & np.array([one.harm_is_clear for one in judged])
        self.parts = np.array([one.truth["part"] for one in judged])
        sets = [set_of(one.truth["family"], int(one.truth["part"].rpartition("-")[2]), one.truth["kind"]) for one in judged]
        #: by set
        self.of = {which: np.array([each == which for each in sets]) for which in SETS}

    def told(self, said: Bools, among: Bools) -> dict[str, str]:
        """How often it is right that these runs are harmed, and the others are not."""
        return {
            "harm right": share((said == self.harmed)[self.clear & among].tolist()),
            "harmed, not told": share((~said)[self.harmed & among].tolist()),
            "clean, called harmed": share(said[self.clean & among].tolist()),
        }

    def chances(self, values: Floats, seed: int) -> tuple[Floats, Floats]:
        """Of harm, by trees that are given some values of each run and learn from those that set thresholds: of these,
        cross-validated, and of all; [runs] each."""
        trees = GradientBoostingClassifier(
            n_estimators=150, max_depth=4, learning_rate=0.05, subsample=0.5, max_features=0.4, random_state=seed
        )
        known, crossed = self.of["tune"], np.zeros(len(self.parts))
        folds = {"groups": self.parts[known], "cv": GroupKFold(FOLDS), "method": "predict_proba"}
        crossed[known] = cross_val_predict(trees, values[known], self.harmed[known], **folds)[:, 1]
        return crossed, trees.fit(values[known], self.harmed[known]).predict_proba(values)[:, 1]

    def by_trees(self, values: Floats, seed: int) -> dict[str, dict[str, str]]:
        """How often trees are right that are given some values of each run."""
        crossed, chances = self.chances(values, seed)
        asked = self.clear & self.of["held-out"]
        best = max(np.unique(chances), key=lambda least: ((chances > least) == self.harmed)[asked].mean())
        return {
            f"{SETS['tune']}, cross-validated": self.told(crossed > 0.5, self.of["tune"]),
            **{SETS[which]: self.told(chances > 0.5, self.of[which]) for which in ("spent", "held-out")},
            "held out, with the best limit for them": self.told(chances > best, self.of["held-out"]),
        }


if __name__ == "__main__":
    main()
