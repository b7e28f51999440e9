"""The audit of scales that Transformer Engine stored in a checkpoint."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import assert_audited, assert_cast
from saved_checkpoints import normal, pickled, te_extra, te_states

from nemo_fp8_debug.analysis.checkpoint.audit import audit
from nemo_fp8_debug.errors import FP8DebugWarning


@pytest.mark.parametrize("version", [1, 2])
def test_stored_scales(tmp_path: Path, version: int) -> None:
    """Version 2: as real modules saved it. Version 1: the same state as io.BytesIO, as get_extra_state of 1.13 writes it."""
    state: dict[str, Any] = te_states()
    if version == 1:
        for key in [key for key in state if key.endswith("_extra_state") and ".3." not in key]:
            extra = te_extra(key.removeprefix("decoder.layers.").removesuffix("._extra_state"))
            torch.save(extra | {"scale_inv_fwd": 1 / extra["scale_fwd"]}, saved := io.BytesIO())
            state[key] = saved
    torch.save(state, tmp_path / "a.pt")
    found = audit(tmp_path / "a.pt")
    weights = {n.removesuffix(".weight"): w for n, w in state.items() if n.endswith("linear_qkv.weight")}
    weights |= {n.removesuffix(".weight"): w for n, w in state.items() if n.endswith("linear_proj.weight")}
    rows = assert_audited(found, weights)
    for name, weight in weights.items():
        stored = rows[name]["fp8_stored"]
        layer = int(name.split(".")[2])
        if layer == 3:
            assert stored is None
            continue
        assert stored["state"] == ["fits", "stale: clips", "stale: far below"][layer]
        assert_cast(stored, weight, float(te_extra(name.removeprefix("decoder.layers."))["scale_fwd"][1]))
    assert found.rows[0]["fp8_stored"]["overflow_pct"] > 20
    assert any("stale: clips (2)" in sentence for sentence in found.verdict())


@pytest.mark.parametrize(
    ("scale", "history", "state"),
    [(1.0, 0.0, "never set"), (1.0, 448.0, "stale: clips"), (math.inf, 1.0, "invalid"), (0.0, 1.0, "invalid")],
)
def test_states_of_a_stored_scale(tmp_path: Path, scale: float, history: float, state: str) -> None:
    extra = te_extra("0.linear_proj")
    extra["scale_fwd"][1], extra["amax_history_fwd"][:, 1] = scale, history
    torch.save({"a.weight": 1000 * normal(64, 64), "a._extra_state": pickled(extra)}, tmp_path / "a.pt")
    assert audit(tmp_path / "a.pt").rows[0]["fp8_stored"]["state"] == state


def test_scales_in_the_format_that_the_checkpoint_says(tmp_path: Path) -> None:
    """A scale made for E5M2 would clip everything in E4M3."""
    extra = te_extra("0.linear_proj")
    weight = normal(32, 32)
    extra["scale_fwd"][1] = 57344 / float(weight.abs().max())
    extra["extra_fp8_variables"]["fp8_max_fwd"] = 57344
    torch.save({"a.weight": weight, "a._extra_state": pickled(extra)}, tmp_path / "a.pt")
    stored = audit(tmp_path / "a.pt").rows[0]["fp8_stored"]
    assert stored["state"] == "fits" and stored["format"] == "e5m2"
    assert_cast(stored, weight, stored["scale"], "e5m2")


def test_scales_whose_place_is_not_known_are_not_guessed(tmp_path: Path) -> None:
    extra = te_extra("0.linear_proj")
    extra["scale_fwd"], extra["amax_history_fwd"] = torch.rand(6), torch.rand(4, 6)
    torch.save({"a.weight0": normal(8, 8), "a.weight1": normal(8, 8), "a._extra_state": pickled(extra)}, tmp_path / "a.pt")
    with pytest.warns(FP8DebugWarning, match=r"a\._extra_state has \(6,\) forward scales"):
        found = audit(tmp_path / "a.pt")
    assert [row["fp8_stored"] for row in found.rows] == [{"state": "unreadable"}] * 2
