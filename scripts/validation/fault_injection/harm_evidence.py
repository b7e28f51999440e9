"""How well harm can be told with a baseline of another seed by two quantities more than those of `learned_limit.py`: `pip
install scikit-learn==1.9.1`, then `fault_injection/harm_evidence.py`.

What a GEMM weighs, times the share of values that an operand of it loses; and how far the gradient norm moves with the
first thing that is found. Boosted trees get both beside what they get there. Printed are, for several limits of the chance
that they give, how often they are right, how much of the harm they miss, and how many clean runs are above the limit: of the
runs that set thresholds, cross-validated, and of the others, by trees that know the former alone.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from fault_injection.learned_limit import SEEDS, SETS, Runs, of_all, quantities
from fault_injection.records import StoredRun
from nemo_fp8_debug.analysis.diagnosis.diagnosis import Diagnosis
from nemo_fp8_debug.analysis.diagnosis.rules.finding import Finding

LIMITS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)
#: steps before the onset that tell what a GEMM weighs, those that do where it is the start, and losses on either side of it
_BEFORE, _EARLY, _AROUND = 60, (100, 160), 50
#: operands that are looked at, samples at the end that tell what is lost, and what stands for nothing
_MOST, _LAST, _NONE = 6, 6, -12.0
_COLUMNS = ("mse", "relative_error", "n", "underflow_pct", "overflow_pct")
_ROLES = ("input", "weight", "grad_output")


def shown(run: StoredRun, baseline: StoredRun, said: Diagnosis) -> list[float]:
    """What `learned_limit.py` gives to trees; how far the gradient norm moves; and what is lost, times what its GEMM weighs,
    of the operand that is found first, of the worst X or W, and of the worst dY."""
    operands = [f for f in said.findings if f.rule == "operand" and f.confidence != "low"][:_MOST]
    found = [(f.role, _loses(run, baseline, f)) for f in operands]
    first = found[0][1] if found else _NONE
    forward = max((loses for role, loses in found if role != "grad_output"), default=_NONE)
    backward = max((loses for role, loses in found if role == "grad_output"), default=_NONE)
    since = None if said.blame.finding is None else said.blame.finding.since
    moved = 0.0 if since is None else _norm_moves(run, since) - _norm_moves(baseline, since)
    return [*quantities(run, baseline, said), moved, first, forward, backward]


def _loses(run: StoredRun, baseline: StoredRun, found: Finding) -> float:
    """Natural log of the share of values that an operand loses in the end, times what its GEMM weighs."""
    since = found.since or 0
    early = since < _BEFORE // 2
    weights = _weights(baseline, *_EARLY) if early else _weights(run, max(since - _BEFORE, 0), since)
    rows = run.metrics.frame(_COLUMNS).filter(pl.col("step") >= since, layer=found.layer, role=found.role).tail(_LAST)
    lost = rows.select(pl.max_horizontal("underflow_pct", "overflow_pct").fill_nan(None).median()).item()
    if found.layer not in weights or len(rows) < _LAST or lost is None:
        return _NONE
    return weights[found.layer] + float(np.log(max(lost, 0.01) / 100))


def _weights(run: StoredRun, first: int, end: int) -> dict[str, float]:
    """Of each GEMM between two steps, the natural log of |dY| |X| |W|, above the median of all: by as much as that at the
    most the loss changes, to first order, if Y becomes 0."""
    size = pl.col("mse").cast(pl.Float64).sqrt() / pl.col("relative_error").cast(pl.Float64)
    rows = run.metrics.frame(_COLUMNS).filter(pl.col("step") >= first, pl.col("step") < end).with_columns(size=size)
    rows = rows.filter(pl.col("size").is_finite() & (pl.col("size") > 0))
    of = rows.group_by("layer", "role").agg(pl.col("size").median().log(), pl.col("n").cast(pl.Float64).median().log())
    table = {(layer, role): (size, n) for layer, role, size, n in of.iter_rows()}
    found = {}
    for layer in of["layer"].unique():
        if all((layer, role) in table for role in _ROLES):
            (x, of_x), (w, of_w), (dy, of_y) = (table[layer, role] for role in _ROLES)
            # Y has of_y values, each a sum of sqrt(of_x of_w / of_y) products.
            found[layer] = x + w + (of_x + of_w - of_y) / 4 + dy + of_y
    usual = float(np.median(list(found.values()))) if found else 0.0
    return {layer: value - usual for layer, value in found.items()}


def _norm_moves(run: StoredRun, since: int) -> float:
    """By how much the natural log of the gradient norm is larger after a step than before; 0: that is not known."""
    norms = run.steps["grad_norm"].cast(pl.Float64).to_numpy()
    at = int(np.searchsorted(run.steps["step"].to_numpy(), since))
    sides = [side[np.isfinite(side) & (side > 0)] for side in (norms[max(at - _AROUND, 0) : at], norms[at : at + _AROUND])]
    if min(map(len, sides)) < _AROUND // 5:
        return 0.0
    before, after = (float(np.log(side).mean()) for side in sides)
    return after - before


def main() -> None:
    judged, values = of_all(shown)
    runs = Runs(judged)
    by_seed = [runs.chances(values, seed) for seed in range(SEEDS)]
    crossed, fitted = (np.mean(each, axis=0) for each in zip(*by_seed, strict=True))
    table = Table("limit", "", "harm right", "harmed, not told", "clean, called harmed")
    for limit in LIMITS:
        for which, name in SETS.items():
            chances = crossed if which == "tune" else fitted
            table.add_row(f"{limit:g}", name, *runs.told(chances > limit, runs.of[which]).values())
    Console(width=130, highlight=False).print(table)


if __name__ == "__main__":
    main()
