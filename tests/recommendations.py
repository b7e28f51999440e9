"""Recommendations whose findings are given, to see what becomes of them in the files of hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from nemo_fp8_debug.analysis.loss.curve import LossCurve
from nemo_fp8_debug.analysis.recommendation.options import Budget, CastOption, WorstErrors
from nemo_fp8_debug.analysis.recommendation.recommend import BF16EndBlocks, Recommendation, TensorFix
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.plan.plan import Plan
from nemo_fp8_debug.record.schema import SCHEMAS

#: kinds of changes with their recipes, in order of cost, all of which keep the budget
Ways = Sequence[tuple[str, str]]
BF16: Ways = [("bf16", "bf16")]
CURRENT: Ways = [("current", "current-hybrid"), *BF16]
MARGIN: Ways = [("margin", "delayed-hybrid(margin=1)"), *CURRENT]


def run(**host: Any) -> Run:
    """A run of Megatron's in delayed scaling."""
    row = {"step": 0, "layer": "decoder.layers.0.mlp.linear_fc1", "role": "input", "recipe": "delayed-hybrid"}
    metrics = pl.DataFrame([row | {"scale_source": "engine"}], SCHEMAS["metrics"])
    losses = LossCurve.from_steps_table(pl.DataFrame(schema=SCHEMAS["steps"]))
    return Run(
        "", {"backend_options": host}, MetricsTable.from_rows(metrics), losses, pl.DataFrame(schema=SCHEMAS["metrics"])
    )


def recommendation(run: Run, ways: Mapping[tuple[str, str], Ways], ends: BF16EndBlocks | None = None) -> Recommendation:
    """Of operands that delayed scaling does not do for."""
    stay, none = CastOption("stay", "delayed-hybrid", None, False), WorstErrors(0.0, 0.0, 0.0)
    findings = [
        TensorFix(*key, "", (stay, *(CastOption(kind, recipe, none, True) for kind, recipe in these)), None)
        for key, these in ways.items()
    ]
    return Recommendation(run, Budget(), tuple(findings), Plan(), None, None, ends, ())
