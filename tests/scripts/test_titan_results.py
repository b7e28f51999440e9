"""What scripts/validation/titan found, as committed: torchtitan's real trainer and PEFT's adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = json.loads((Path(__file__).parents[2] / "scripts/validation/titan/results.json").read_text())
CASES: dict[str, dict[str, Any]] = RESULTS["cases"]
TENSORWISE, ROWWISE, MXFP8 = "current-hybrid(epsilon=1e-12)", "rowwise-e4m3", "mxfp8-e4m3(by_logarithm=True)"
ROLES = ("grad_output", "input", "weight")
HEAD = {f"{role}: current, current-hybrid, {'e5m2' if role == 'grad_output' else 'e4m3'}" for role in ROLES}

#: what each case may report: of the layers that it quantizes, and of those in high precision
REPORTED = {
    "bf16": HEAD,
    "float8, rowwise asked for, emulate": {
        f"{role}: engine, {TENSORWISE}, {'e5m2' if role == 'grad_output' else 'e4m3'}" for role in ROLES
    },
    "float8, rowwise, emulated": {f"{role}: engine, {ROWWISE}, e4m3" for role in ROLES},
    "float8, rowwise_with_gw_hp, emulated": {f"{role}: engine, {ROWWISE}, e4m3" for role in ROLES},
    "mxfp8, emulated": HEAD | {f"{role}: engine, {MXFP8}, e4m3" for role in ROLES},
    "nvfp4, its kernels stood in": HEAD
    | {f"{role}: engine, nvfp4_torchao, e2m1" for role in ("input", "weight")}
    | {"grad_output: unknown, current-hybrid, e5m2"},
}
#: how torchao's Float8Linear was seen to cast
CAST = {
    "float8, rowwise asked for, emulate": ["e4m3, by tensor", "e5m2, by tensor"],
    "float8, rowwise, emulated": ["e4m3, by row"],
}


def test_torchtitans_trainer_is_not_disturbed() -> None:
    assert CASES.keys() == REPORTED.keys()
    assert all(case["losses and weights bit-identical"] and case["losses"] == 6 for case in CASES.values())
    assert RESULTS["versions"]["torchtitan"].startswith("0.3.")


@pytest.mark.parametrize("case", REPORTED)
def test_what_is_reported_is_what_was_cast(case: str) -> None:
    assert set(CASES[case]["reported"]) == REPORTED[case]
    multiplied = CASES[case]["multiplied"]
    if case in CAST:  # the recipe that is dropped under `emulate` shows in both
        assert multiplied["cast"] == CAST[case]
        assert multiplied["operands"] == 3 * CASES[case]["layers"]
        assert multiplied["largest difference of relative errors"] < 1e-12


def test_the_ledger_of_a_llama_and_of_adapters_is_the_closed_formula() -> None:
    found = [case["ledger over formula"] for case in CASES.values()]
    found += RESULTS["adapters"].values()
    assert found == pytest.approx([1] * len(found), abs=1e-3)
