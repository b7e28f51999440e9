"""Weights that are stored in FP8 and FP4: their codes against the optimizer's master weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine_torch as tex
from emulated_te import te
from host_runs import DELAYED, tokens
from torch import nn
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.optimizers import FusedAdam

from nemo_fp8_debug import FP8DebugWarning, Monitor, compare, diagnose, read_record, recommend
from nemo_fp8_debug.capture.backends.base import UnknownCastError
from nemo_fp8_debug.capture.backends.transformer_engine.stored import read_stored_weight

RECIPES = {
    "current": Float8CurrentScaling(),
    "blockwise": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
SIZE = 128


class Model(nn.Module):
    def __init__(self, recipe: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"params_dtype": torch.bfloat16, "bias": False}
        with te.quantized_model_init(enabled=True, recipe=recipe):
            self.proj, self.mlp = te.Linear(SIZE, SIZE, **options), te.LayerNormMLP(SIZE, 2 * SIZE, **options)
            self.experts = te.GroupedLinear(2, SIZE, SIZE, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(self.mlp(self.proj(x)), [SIZE // 2, SIZE // 2])
        return out


WEIGHTS = {
    "proj": "proj.weight",
    "mlp.fc1": "mlp.fc1_weight",
    "mlp.fc2": "mlp.fc2_weight",
    "experts.0": "experts.weight0",
    "experts.1": "experts.weight1",
}


def decoded(parameter: Any) -> torch.Tensor:
    """By the emulated kernel, which is not what is tested here."""
    return tex.dequantize(parameter, DType.kFloat32).double()


def trained(
    folder: Path, model: Model, recipe: Any, masters: Callable[[str], torch.Tensor | None], end: Callable[[], None]
) -> tuple[dict[Any, dict[str, Any]], dict[Any, dict[str, float]]]:
    """The rows of weights by (step, layer), and what they have to be."""
    expected: dict[Any, dict[str, float]] = {}
    with_monitor = Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise", what_if=["mxfp8"])
    for step in range(3):
        with with_monitor.step(step):
            with te.autocast(enabled=True, recipe=recipe):
                y = model(torch.cat([tokens(step, SIZE)] * 4, 1))
            y.float().square().mean().backward()
            for layer, name in WEIGHTS.items():
                expected[step, layer] = facts(decoded(model.get_parameter(name)), masters(name))
            end()
            for parameter in model.parameters():
                parameter.grad = None
    with_monitor.close()
    rows = read_record(str(folder), "metrics").filter(role="weight")
    return {(row["step"], row["layer"]): row for row in rows.iter_rows(named=True) if "*" not in row["layer"]}, expected


def facts(q: torch.Tensor, master: torch.Tensor | None) -> dict[str, float]:
    if master is None:
        return {"n": q.numel(), "amax": q.abs().max().item()}
    x = master.double().reshape(q.shape)
    return {
        "n": x.numel(),
        "amax": x.abs().max().item(),
        "underflow_pct": 100 * ((q == 0) & (x != 0)).double().mean().item(),
        "mse": (x - q).square().mean().item(),
        "cosine": torch.nn.functional.cosine_similarity(x.reshape(-1), q.reshape(-1), 0).item(),
    }


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_codes_against_the_master_weights_of_fused_adam(tmp_path: Path, recipe: Any) -> None:
    model = Model(recipe)
    optimizer = FusedAdam(model.parameters(), lr=3e-3, master_weights=True)

    def master(name: str) -> torch.Tensor | None:
        state = optimizer.state.get(model.get_parameter(name), {})
        return state["master_param"].clone() if "master_param" in state else None

    rows, expected = trained(tmp_path, model, recipe, master, optimizer.step)
    assert set(rows) == set(expected)
    for key, want in expected.items():
        row = rows[key]
        assert row["scale_source"] == ("engine" if key[0] else "stored")  # there is no optimizer state before its first step
        assert {name: row[name] for name in want} == pytest.approx(want, rel=1e-6, abs=1e-12), key
        assert row["dtype"] == "float32"
        if key[0] == 0:
            assert [row[name] for name in ("underflow_pct", "mse", "relative_error", "sqnr_db", "cosine")] == [None] * 5
    # Codes of weights that were trained have lost something; else nothing here could fail.
    assert all(rows[2, layer]["mse"] > 0 for layer in WEIGHTS)


@pytest.mark.parametrize("recipe", [DELAYED, *RECIPES.values()], ids=["delayed", *RECIPES])
def test_without_a_master_what_codes_stand_for(tmp_path: Path, recipe: Any) -> None:
    rows, expected = trained(tmp_path, Model(recipe), recipe, lambda name: None, lambda: None)
    for key, want in expected.items():
        assert rows[key]["scale_source"] == "stored"
        assert {name: rows[key][name] for name in want} == pytest.approx(want, rel=1e-6)


def test_a_stale_code_is_seen(tmp_path: Path) -> None:
    """The codes are compared as they are, and not as the master weight would be cast."""
    model = Model(RECIPES["current"])
    optimizer = FusedAdam(model.parameters(), lr=3e-3, master_weights=True)

    def master(name: str) -> torch.Tensor | None:
        state = optimizer.state.get(model.get_parameter(name), {})
        return state["master_param"].clone() if "master_param" in state else None

    def step_and_lose_a_code() -> None:
        optimizer.step()
        data: Any = model.proj.weight
        data._data[0, :8] = 0

    rows, expected = trained(tmp_path, model, RECIPES["current"], master, step_and_lose_a_code)
    assert rows[1, "proj"]["underflow_pct"] == pytest.approx(expected[1, "proj"]["underflow_pct"])
    assert rows[1, "proj"]["underflow_pct"] >= 100 * 8 / SIZE**2


def test_megatrons_attribute(tmp_path: Path) -> None:
    """As Float16OptimizerWithFloat16Params leaves it."""
    model = Model(RECIPES["current"])
    mains = {name: decoded(model.get_parameter(name)).float() + 1e-3 for name in WEIGHTS.values()}
    for name, main in mains.items():
        model.get_parameter(name).main_param = main
    rows, expected = trained(tmp_path, model, RECIPES["current"], mains.get, lambda: None)
    for key, want in expected.items():
        assert rows[key]["scale_source"] == "engine"
        assert {name: rows[key][name] for name in want} == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("_with_gemm_swizzled_scales", True), ("_fp8_dtype", "kFloat8Next"), ("_rowwise_data", None), ("_quantizer", object())],
)
def test_a_layout_that_is_not_known_is_not_read(attribute: str, value: Any) -> None:
    stored = read_stored_weight(Model(RECIPES["mxfp8"]).proj)
    assert stored is not None
    setattr(stored.parameter, attribute, value)
    with pytest.raises(UnknownCastError):
        stored.decode_values()
        stored.find_cast()


def test_a_class_that_is_not_known_is_left_out_and_said(tmp_path: Path) -> None:
    model = Model(RECIPES["current"])
    kind = type(model.proj.weight)
    model.proj.weight.__class__ = type("Float8TensorNext", (kind,), {"__module__": kind.__module__})
    with pytest.warns(FP8DebugWarning, match=r"W of 1 layers \(first proj\) is stored in an unsupported format"):
        rows, _ = trained(tmp_path, model, RECIPES["current"], lambda name: None, lambda: None)
    assert (0, "proj") not in rows


def test_analyses_take_weights_whose_errors_are_not_known(tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.manual_seed(0)
        trained(tmp_path / name, Model(RECIPES["mxfp8"]), RECIPES["mxfp8"], lambda name: None, lambda: None)
    assert compare(tmp_path / "b", tmp_path / "a").out_of_band.is_empty()
    assert diagnose(tmp_path / "a", tmp_path / "b").culprit is None
    assert not [change for change in recommend(tmp_path / "a").plan.changes if change.role == "weight"]


def replace(weight: Any, by: Any) -> None:
    """Codes and scales of another weight."""
    for name, kept in vars(by).items():
        if isinstance(kept, torch.Tensor) and isinstance(mine := getattr(weight, name), torch.Tensor):
            mine.data.copy_(kept)


def round_wrongly(weight: Any) -> None:
    """Some codes are those next to what is nearest."""
    codes = next(data for name in ("_data", "_rowwise_data") if (data := getattr(weight, name, None)) is not None)
    codes.view(-1)[:64] ^= 1


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("fault", [None, "stale", "gathered from elsewhere", "cast wrongly"])
def test_weights_are_the_casts_of_their_masters_but_for_one_that_is_not(
    tmp_path: Path, recipe: Any, fault: str | None
) -> None:
    """It has codes and scales of a step before or of another weight, or codes that are not the nearest ones."""
    name = "experts.1"
    model = Model(recipe)
    optimizer = FusedAdam(model.parameters(), lr=3e-3, master_weights=True)
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise", replicas=True)
    for step in range(3):
        with monitor.step(step):
            with te.autocast(enabled=True, recipe=recipe):
                y = model(torch.cat([tokens(step, SIZE)] * 4, 1))
            y.float().square().mean().backward()
            weight = model.get_parameter(WEIGHTS[name])
            earlier = copy.deepcopy(weight)
            optimizer.step()
            if fault == "stale" and step == 1:
                replace(weight, earlier)
            elif fault == "gathered from elsewhere" and step == 1:
                replace(weight, model.get_parameter(WEIGHTS["experts.0"]))
            elif fault == "cast wrongly" and step == 1:
                round_wrongly(weight)
            optimizer.zero_grad()
    monitor.close()
    rows = read_record(str(tmp_path), "replicas")
    assert set(rows["what"]) == {"master"} and sorted(rows.filter(step=1)["layer"]) == sorted(WEIGHTS)
    apart = rows.filter(outcome="apart").select("step", "layer", "rank").rows()
    assert apart == ([(2, name, 0)] if fault else [])
    if fault:
        assert f"W of {name} is not what its master weight is cast to" in diagnose(tmp_path).verdict()
