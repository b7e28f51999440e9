"""How far clean runs of other seeds lie apart, which reasons of thresholds cite: `clean_spread.py [--share 0.2]`.

It prints the largest value of each measure among pairs of clean runs of the benchmark.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

sys.path.insert(0, str(Path(__file__).parents[1]))

from fault_injection.facts_cache import draw_runs, read_all
from nemo_fp8_debug.analysis import thresholds
from nemo_fp8_debug.analysis.diagnosis.facts import Facts
from nemo_fp8_debug.analysis.diagnosis.rules.gradients import gradient_norms, name_kind, sizes_against_baseline
from nemo_fp8_debug.analysis.loss.curve import compute_running_median


def measure_pair(facts: Facts) -> Iterator[tuple[str, float]]:
    """Yield how far a run and its baseline lie apart, by measure."""
    run, baseline, few = facts.loss.run, facts.loss.baseline, thresholds.LEVEL
    if baseline is not None and len(run.losses) and len(baseline.losses) and min(run.losses[0], baseline.losses[0]) > 0:
        yield "first loss, times", float(np.exp(abs(np.log(run.losses[0] / baseline.losses[0]))))
    norms = gradient_norms(facts)
    known = pl.col("grad_norm").is_finite() & (pl.col("grad_norm") > 0)
    mine = norms.run.filter(known)
    if len(mine) > few:
        bits = np.log2(mine["grad_norm"].to_numpy())
        yield "spike of the gradient norm, bits", float((bits - compute_running_median(bits, few)).max())
    if norms.baseline is not None and len(mine):
        both = mine.join(norms.baseline.filter(known), on="step", suffix="_baseline").sort("step")
        bits = np.log2(both["grad_norm"].to_numpy() / both["grad_norm_baseline"].to_numpy())
        if len(bits) > few:
            yield "first gradient norms, bits", abs(float(np.median(bits[:few])))
    sizes = sizes_against_baseline(facts)
    if len(sizes):
        kinds = sizes.with_columns(kind=pl.col("layer").map_elements(name_kind, pl.String))
        of_kinds = kinds.group_by("role", "kind").agg(pl.col("bits").median())
        for (role,), rows in of_kinds.group_by("role"):
            bits = rows["bits"].drop_nulls().to_numpy()
            usual = float(np.median(bits)) if role == "grad_output" else 0.0
            yield f"size of {role} by kind of GEMM, bits", float(np.abs(bits - usual).max(initial=0.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.2, help="of the benchmark's runs")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    clean = [truth for truth in draw_runs(options.share) if truth["kind"] == "none"]
    found = defaultdict[str, list[float]](list)
    for _, _, _, facts in read_all(clean, ["other"], [5], options.jobs):
        for measure, value in measure_pair(facts):
            found[measure].append(value)
    for measure, values in sorted(found.items()):
        print(f"{measure}: at most {max(values):.2f} in {len(values)} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
