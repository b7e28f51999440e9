"""All options of torchao's Float8Linear in pairs: what is reported against the codes and scales that it multiplied."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import combinations

import pytest
import torch
from helpers import Samples
from pairs import pairs_of
from torch import nn
from torchao.float8.config import CastConfig, Float8GemmConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao_engine import Cast, casts_of_a_layer, float8, multiplied, operands
from torchao_pairs import FACTORS, PRODUCTS, is_allowed, rows

from nemo_fp8_debug import Monitor

#: the product whose cast a row of the record has
OWN = {"input": "fprop", "weight": "fprop", "grad_output": "dgrad"}
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: fields of the configuration that change no cast, or that another test has (sharded ranks)
ELSEWHERE = {"emulate", "enable_fsdp_float8_all_gather", "force_recompute_fp8_weight_in_bwd"}


def config_of(row: Mapping[str, str]) -> Float8LinearConfig:
    casts = {}
    for of_product, fields in PRODUCTS.items():
        kind = ScalingType.DYNAMIC if row[of_product] == "cast" else ScalingType.DISABLED
        for field in fields:
            fmt = FORMATS[row[f"{field.partition('_for_')[0]}_dtype"]]
            casts[f"cast_config_{field}"] = CastConfig(kind, ScalingGranularity[row[field]], fmt)
    gemm = Float8GemmConfig(use_fast_accum=row["use_fast_accum"] == "True")
    gemms = dict.fromkeys(("gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight"), gemm)
    flags = {name: row[name] == "True" for name in ("round_scales_to_power_of_2", "pad_inner_dim")}
    return Float8LinearConfig(**casts, **gemms, **flags, emulate=True)


def test_no_option_is_left_out_and_no_pair() -> None:
    fields = {field.name for field in dataclasses.fields(Float8LinearConfig)}
    built = {field.name for field in dataclasses.fields(Float8LinearConfig) if field.name.startswith(("cast_", "gemm_"))}
    assert fields - built - FACTORS.keys() == ELSEWHERE
    covered = {pair for row in rows() for pair in combinations(row.items(), 2)}
    assert {pair for pair in pairs_of(FACTORS) if is_allowed(dict(pair))} == covered


def squared_error(x: torch.Tensor, cast: Cast) -> float:
    finite = x.double()
    return float((cast.values - finite).square().sum())


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(row.values()))
def test_what_is_reported_is_what_torchao_multiplied(row: dict[str, str]) -> None:
    shape, dtype, calls = [int(n) for n in row["shape"].split("x")], getattr(torch, row["dtype"]), int(row["micro_batches"])
    given = operands(shape[0], shape[1], shape[2], dtype)
    layer = nn.Linear(shape[1], shape[2], bias=row["bias"] == "True", dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(given["weight"])
    model = float8(nn.Sequential(layer), config_of(row))
    samples, theirs, seen_by = Samples(), [], []
    monitor = Monitor(model, recorders=[samples], interval=1, on_error="raise")
    with monitor.step(0):
        for number in range(calls):
            mine = {role: x * 2.0**-number if role != "weight" else x for role, x in given.items()}
            with multiplied() as seen:
                model(mine["input"].detach().requires_grad_()).backward(mine["grad_output"])
            theirs.append(casts_of_a_layer(seen))
            seen_by.append(mine)
    monitor.close()
    found = samples.rows(0)
    assert len(found) == 3
    for (_, role), line in found.items():
        of_calls = [casts.get((OWN[role], role)) for casts in theirs][: 1 if role == "weight" else calls]
        if of_calls[0] is None:
            assert line["scale_source"] == "not quantized"
            continue
        assert line["scale_source"] == "engine" and FORMATS[line["format"]] == of_calls[0].codes.dtype
        tensors = [mine[role] for mine in seen_by]
        error = sum(squared_error(x, cast) for x, cast in zip(tensors, of_calls, strict=False) if cast)
        lost = sum(int(((x != 0) & (cast.values == 0)).sum()) for x, cast in zip(tensors, of_calls, strict=False) if cast)
        count = tensors[0].numel() * len(of_calls)
        assert line["mse"] * count == pytest.approx(error, rel=1e-5)
        assert line["underflow_pct"] == pytest.approx(100 * lost / count, rel=1e-9)
