"""States that Transformer Engine's FusedAdam keeps in fewer bits, or scaled: in the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_te import te
from transformer_engine.pytorch.optimizers import FusedAdam

from nemo_fp8_debug import Monitor, read_record

SIZE = 64
STATES = ("weight_gradient", "first_moment", "second_moment", "master_weight", "update")
NAMES = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq", "master_weight": "master_param"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8], ids=str)
def test_moments_of_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = te.Linear(SIZE, SIZE, params_dtype=torch.bfloat16, bias=False)
    optimizer = FusedAdam(model.parameters(), lr=1e-3, master_weights=True, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise", states=STATES)
    expected = {}
    for step in range(2):
        with monitor.step(step):
            model(torch.randn(32, SIZE, dtype=torch.bfloat16)).float().square().mean().backward()
            gradient = model.weight.grad.clone()
            optimizer.step()
        # What the optimizer makes of its states when it computes.
        for role, name in NAMES.items():
            expected[step, role] = optimizer.get_unscaled_state(model.weight, name).double()
        expected[step, "weight_gradient"] = gradient.double()
        optimizer.zero_grad()
    monitor.close()
    rows = read_record(str(tmp_path), "states").to_dicts()
    found = {(row["step"], row["role"]): row for row in rows if row["role"] != "update"}
    assert set(found) == set(expected)
    for key, x in expected.items():
        assert (found[key]["n"], found[key]["amax"]) == (x.numel(), x.abs().max().item()), key
        assert found[key]["kurtosis"] == pytest.approx((x.pow(4).mean() / x.pow(2).mean() ** 2).item(), rel=1e-6), key


def test_a_gradient_that_is_kept_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = te.Linear(SIZE, SIZE, params_dtype=torch.bfloat16, bias=False)
    optimizer = FusedAdam(model.parameters(), lr=1e-3, master_weights=True, use_decoupled_grad=True)
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise", states=("weight_gradient",))
    with monitor.step(0):
        model(torch.randn(32, SIZE, dtype=torch.bfloat16)).float().square().mean().backward()
        model.weight.decoupled_grad = model.weight.grad.float() * 3
        optimizer.step()
    monitor.close()
    assert read_record(str(tmp_path), "states")["amax"].to_list() == [model.weight.decoupled_grad.abs().max().item()]
