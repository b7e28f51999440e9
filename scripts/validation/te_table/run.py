"""Runs all rows and writes results.json: how many casts were reported as the engine's, as unknown, and wrongly.

scripts/validation/te_table/run.sh [RECIPE [ROW ...]]
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from emulated_te import te  # before anything that imports Transformer Engine  # noqa: F401
from megatron_on_cpu import megatron_on_cpu

from .compare import Result, result_of
from .factors import RECIPES, checksum_of_rows, rows_of

RESULTS = Path(__file__).with_name("results.json")


def main(only: list[str]) -> int:
    from megatron.core import parallel_state

    found: dict[str, Any] = {
        "releases": {name: version(name) for name in ("transformer-engine", "megatron-core")},
        "rows": checksum_of_rows(),
    }
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, megatron_on_cpu():
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        for recipe in [only[0]] if only else RECIPES:
            found[recipe], bad = _of_recipe(recipe, [int(n) for n in only[1:]], Path(folder))
            wrong += bad
    if not only:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return wrong


def _of_recipe(recipe: str, numbers: list[int], folder: Path) -> tuple[dict[str, Any], int]:
    total, unknown_rows, wrong = Result(), 0, 0
    rows = rows_of(recipe)
    for number in numbers or range(len(rows)):
        try:
            result = result_of(recipe, rows[number], folder / recipe / str(number))
        except Exception as error:
            result = Result(differing=[f"{type(error).__name__}: {error}"])
            if numbers:
                traceback.print_exc()
        total.sources += result.sources
        total.reasons += Counter(result.reasons.keys())
        unknown_rows += result.sources["unknown"] > 0
        wrong += bool(result.differing)
        for text in result.differing[:3]:
            print(f"{recipe} {number}: {text}\n    {' '.join(f'{k}={v}' for k, v in rows[number].items())}")
    print(f"{recipe}: {len(rows)} rows, {dict(total.sources)}, wrong in {wrong}, unknown in {unknown_rows}: {total.reasons}")
    return {
        "rows": len(rows),
        "rows that differ": wrong,
        "rows with unknown": unknown_rows,
        "casts": dict(sorted(total.sources.items())),
        "rows with unknown by reason": dict(total.reasons.most_common()),
    }, wrong


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
