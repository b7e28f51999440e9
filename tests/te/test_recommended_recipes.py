"""Recommended recipes of modules in megatron-core 0.17: its parser, its modules, and the casts of the kernels."""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from processes import finished, found_in
from recommendations import BF16, CURRENT, recommendation, run

from nemo_fp8_debug.analysis.recommendation.recommend import BF16EndBlocks
from nemo_fp8_debug.analysis.recommendation.snippets.megatron import (
    flags_of,
    make_global_options_snippet,
    make_module_recipes_snippet,
)
from nemo_fp8_debug.analysis.recommendation.snippets.te_quantizers import make_quantizer_snippets
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.record.schema import SCHEMAS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BRIDGE, TE = Path(sys.prefix) / "bridge", Path(sys.prefix) / "te"
BLOCKS = "decoder.layers.0", "decoder.layers.1"
LAYERS = [
    f"{b}.{n}"
    for b in BLOCKS
    for n in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
]
LEAVES, RESCALED, IN_E4M3 = LAYERS[-1], LAYERS[2], LAYERS[0]
SHOWN = ("X", "W", "dY")


# Long tests rest on nemo_fp8_debug/analysis/recommendation/**/*.py.
@pytest.mark.long
def test_modules_cast_as_their_recipe_says_and_all_others_as_the_run_does(tmp_path: Path) -> None:
    assert (BRIDGE / "megatron").is_dir(), f"no Megatron-Bridge in {BRIDGE}; scripts/setup.sh tests installs it"
    ways = {
        (LEAVES, "input"): BF16,
        (RESCALED, "weight"): CURRENT,
        (IN_E4M3, "grad_output"): [("format", "current-e4m3"), *BF16],
    }
    modules = make_module_recipes_snippet(recommendation(run(), ways))
    options = make_global_options_snippet(
        recommendation(run(), {(RESCALED, "weight"): CURRENT}, BF16EndBlocks(0, 1, 2, None))
    )
    assert modules and options
    values = yaml.safe_load(options.text)
    assert len(values) == 5
    (tmp_path / modules.name).write_text(modules.text)
    path = found_in(ROOT, BRIDGE, TE, ROOT / "recipes", ROOT / "scripts/validation")
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    operands = quantizers_of(tmp_path)
    arguments = str(tmp_path / modules.name), str(operands), json.dumps(flags_of(values)), json.dumps(values)
    command = [sys.executable, "-W", "ignore", str(HERE / "recommended_run.py"), *arguments]
    done = finished(*command, env=environment)
    if done.returncode != 0:
        pytest.fail(done.stderr[-8_000:], pytrace=False)
    found = json.loads(done.stdout.splitlines()[-1])
    usual = {(layer, role, "e5m2" if role == "dY" else "e4m3", "Float8Quantizer") for layer in LAYERS for role in SHOWN}
    changed = {(layer, role, fmt, kind) for layer, role, fmt, kind in usual if layer in (LEAVES, RESCALED, IN_E4M3)}
    current = "Float8CurrentScalingQuantizer"
    expected = usual - changed
    expected |= {(RESCALED, role, "e5m2" if role == "dY" else "e4m3", current) for role in SHOWN}
    expected |= {(IN_E4M3, role, "e4m3", current) for role in SHOWN}
    assert set(map(tuple, found["casts"])) == expected
    assert found["arguments"] == found["bridge"] == values
    check_operands(found)


def quantizers_of(folder: Path) -> Path:
    """Files for dY of one layer in BF16 and in E4M3 of another, of a run in current scaling."""
    rows = [
        {"layer": layer, "role": role, "recipe": "current-hybrid", "format": fmt, "scale_source": "engine"}
        for layer in LAYERS
        for role, fmt in (("input", "e4m3"), ("weight", "e4m3"), ("grad_output", "e5m2"))
    ]
    of_run = replace(
        run(), metrics=MetricsTable.from_rows(pl.DataFrame(rows, SCHEMAS["metrics"]).with_columns(step=pl.lit(0, pl.Int64)))
    )
    older = replace(of_run, fingerprint={"versions": {"transformer-engine": "2.4.0", "megatron-core": "0.16.0"}})
    older_files, _ = make_quantizer_snippets(recommendation(older, {(LEAVES, "input"): BF16}), for_megatron=True)
    assert [file.coarser[0].partition(". Until")[0] for file in older_files] == [
        "The run has transformer-engine 2.4.0, but te_quantizers.py needs 2.19 or later",
        "The run has megatron-core 0.16.0, but megatron_operands.yaml needs 0.17 or later",
    ]
    ways = {(LEAVES, "grad_output"): BF16, (IN_E4M3, "grad_output"): [("format", "current-e4m3"), *BF16]}
    (factory, modules), _ = make_quantizer_snippets(recommendation(of_run, ways), for_megatron=True)
    for snippet in (factory, modules):
        (folder / snippet.name).write_text(snippet.text)
    with pytest.raises(ImportError, match=r"needs Transformer Engine 2\.19 or later"):  # this process has none
        runpy.run_path(str(folder / factory.name))
    return folder / modules.name


def check_operands(found: dict[str, Any]) -> None:
    """Single operands: by the factory of a whole run, and by recipes of modules within a run of any recipe."""
    current = "Float8CurrentScalingQuantizer"
    mine = {(IN_E4M3, role, "e4m3", current) for role in SHOWN} | {(LEAVES, role, "e4m3", current) for role in ("X", "W")}
    for way, kind in (("delayed", "Float8Quantizer"), ("tensorwise", current), ("factory", current)):
        usual = {(layer, role, "e5m2" if role == "dY" else "e4m3", kind) for layer in LAYERS for role in SHOWN}
        others = {cast for cast in usual if cast[0] not in (IN_E4M3, LEAVES)}
        key = way if way == "factory" else f"operands, {way}"
        assert set(map(tuple, found[key])) == others | mine, way
