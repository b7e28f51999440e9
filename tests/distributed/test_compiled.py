"""Hooks would change what is compiled: a rank that has compiled a layer gives no part of it, and the record says so."""

from __future__ import annotations

import json
from pathlib import Path

from processes import run_script

from nemo_fp8_debug.record.reader import find_record, read_table_rows


def test_a_layer_that_one_rank_has_compiled_lacks_its_part(tmp_path: Path) -> None:
    run_script(Path(__file__).with_name("compiled.py"), tmp_path, TORCHDYNAMO_DISABLE=None)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first["watched"] == first["plain"] and second["watched"] == second["plain"]
    rows = (
        read_table_rows(find_record(tmp_path / "run"), "metrics").select("layer", "role", "ranks", "ranks_missing").unique()
    )
    found = {(layer, role): (stats, missing) for layer, role, stats, missing in rows.rows()}
    activations = ("input", "grad_output")
    assert found == {
        **{("0.0", role): (1, 1) for role in activations},
        **{("1", role): (2, 0) for role in activations},
        **{(layer, "weight"): (1, 0) for layer in ("0.0", "1")},
    }
    (warning,) = first["said"]
    assert "first X of 0.0 (1 of 2 parts missing)" in warning
