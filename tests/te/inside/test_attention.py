"""FP8 attention of Transformer Engine: every operand that its emulation quantizes, against what the kernels were given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated_te import ATTENTION_CASTS, CASTS, te
from polars.testing import assert_frame_equal
from te_table.compare import _copy_error, _squared_error
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling

from nemo_fp8_debug import FP8DebugWarning, Monitor
from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.comparison.onset import find_onsets
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.analysis.story.summary import summarize
from nemo_fp8_debug.coverage.scan import ledger_of
from nemo_fp8_debug.record.reader import read_table_rows

LIMITS = {"e4m3": 448.0, "e5m2": 57344.0}


class Attention(nn.Module):
    """Self-attention with grouped queries."""

    def __init__(self, groups: int = 2, form: str = "sbhd") -> None:
        super().__init__()
        self.groups = groups
        self.qkv = te.Linear(32, 32 + 16 * groups, bias=False, params_dtype=torch.bfloat16)
        self.core = te.DotProductAttention(4, 8, num_gqa_groups=groups, attention_dropout=0.1, qkv_format=form)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.qkv(x)
        sizes = [32, 8 * self.groups, 8 * self.groups]
        q, k, v = (part.reshape(*y.shape[:-1], -1, 8).contiguous() for part in y.split(sizes, dim=-1))
        return self.core(q, k, v)


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("NVTE_UnfusedDPA_Emulate_FP8", "1"), ("NVTE_FLASH_ATTN", "0"), ("NVTE_FUSED_ATTN", "0")):
        monkeypatch.setenv(name, value)
    yield


def train(
    recipe: Any, folder: Path | None = None, steps: int = 3, calls: int = 1, recompute: bool | None = None, **options: Any
) -> tuple[list[bytes], dict[int, list[Any]]]:
    """Returns losses and weights, and the casts of each step."""
    torch.manual_seed(3)
    model = Attention(**options)
    monitor = Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise") if folder else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states, casts = [], {}
    for number in range(steps):
        CASTS.clear()
        if monitor:
            monitor.begin_step(number)
        for call in range(calls):
            generator = torch.Generator().manual_seed(7 * number + call)
            x = (torch.randn(16, 2, 32, generator=generator) * (1 + number)).bfloat16()
            with te.autocast(enabled=True, recipe=recipe):
                y = model(x) if recompute is None else te.checkpoint(model, x.requires_grad_(), use_reentrant=recompute)
            loss = y.float().square().mean()
            loss.backward()
            states.append(loss.detach().numpy().tobytes())
        if monitor:
            monitor.end_step()
        optimizer.step()
        optimizer.zero_grad()
        states.append(model.qkv.weight.detach().float().numpy().tobytes())
        casts[number] = [cast for cast in CASTS if cast.module is not model.qkv]
    if monitor:
        monitor.close()
    return states, casts


def expected(codes: torch.Tensor, source: torch.Tensor, scale: float, fmt: str) -> dict[str, float]:
    """Metrics of a cast from its own tensors, in float64."""
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt]
    x, y = source.double().numpy(), codes.view(kind).double().numpy() / scale
    return {
        "n": x.size,
        "scale": scale,
        "amax": np.abs(x).max(),
        "mse": np.square(x - y).mean(),
        "underflow_pct": 100 * np.count_nonzero((x != 0) & (y == 0)) / x.size,
        "overflow_pct": 100 * np.count_nonzero(np.abs(x) * scale > LIMITS[fmt] * (1 + 2**-22)) / x.size,
    }


def parts(cast: Any, roles: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The tensors of one cast, which lie one behind the other."""
    codes, source = (t.reshape(len(roles), -1) for t in (cast.codes, cast.source))
    yield from zip(roles, codes, source, strict=True)


RECIPES = {
    "delayed": DelayedScaling(fp8_dpa=True, amax_history_len=2),
    "current": Float8CurrentScaling(fp8_dpa=True),
    "mha": DelayedScaling(fp8_dpa=True, fp8_mha=True, fp8_format=Format.E4M3),
}


@pytest.mark.parametrize(("name", "form"), [("delayed", "sbhd"), ("current", "bshd"), ("mha", "bshd")])
def test_metrics_are_those_of_the_tensors_that_the_emulation_casts(tmp_path: Path, name: str, form: str) -> None:
    states, casts = train(RECIPES[name], tmp_path, form=form)
    rows = read_table_rows(tmp_path, "metrics").filter(layer="core")
    assert rows.height == 3 * 10 and set(rows["scale_source"]) == {"engine"}
    compared = 0
    for step, of_step in casts.items():
        assert len(of_step) == len(ATTENTION_CASTS)
        for cast, roles in zip(of_step, ATTENTION_CASTS, strict=True):
            for role, codes, source in parts(cast, roles):
                (row,) = rows.filter(step=step, role=role).to_dicts()
                assert row["format"] == cast.format
                for metric, value in expected(codes, source, float(cast.scale), cast.format).items():
                    assert row[metric] == pytest.approx(value, rel=1e-12, abs=0), (step, role, metric)
                    compared += 1
    assert compared == 3 * 10 * 6
    assert states == train(RECIPES[name], form=form)[0]


def test_under_mxfp8_blocks_lie_along_what_a_product_sums_over(tmp_path: Path) -> None:
    """V and dV are cast along tokens, the others along features; S and dP stay in high precision."""
    model = nn.ModuleDict({"core": te.DotProductAttention(2, 32, attention_dropout=0.0)})
    model["proj"] = te.Linear(32, 32, bias=False)
    q, k, v = ((torch.randn(128, 3, 2, 32) * torch.randn(128, 1, 1, 1).exp()).bfloat16().requires_grad_() for _ in range(3))
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise")
    with monitor.step(0), te.autocast(enabled=True, recipe=MXFP8BlockScaling(fp8_dpa=True)):
        model["core"](q, k, v).float().square().mean().backward()
    monitor.close()
    rows = {row["role"]: row for row in read_table_rows(tmp_path, "metrics").filter(layer="core").to_dicts()}
    quantized = ("query", "key", "value", "context", "grad_context", "grad_query", "grad_key", "grad_value")
    casts = [cast for cast in CASTS if cast.usage == "rowwise" or cast.source.shape[-1] == 32]
    assert len(casts) == len(quantized) and {role: rows[role]["scale_source"] for role in rows} == {
        role: "engine" if role in quantized else "not quantized" for role in (*quantized, "probabilities", "grad_scores")
    }
    for role, cast in zip(quantized, casts, strict=True):
        assert (cast.usage == "columnwise") is (role in ("value", "grad_value"))
        error2 = _copy_error(cast) if cast.usage == "columnwise" else _squared_error(cast)
        assert rows[role]["n"] == cast.source.numel()
        assert rows[role]["mse"] == pytest.approx(error2 / cast.source.numel(), rel=1e-6, abs=1e-30), role


@pytest.mark.parametrize("recompute", [None, True, False])
def test_micro_batches_and_recompute_count_once(tmp_path: Path, recompute: bool | None) -> None:
    options: dict[str, Any] = {"calls": 2, "recompute": recompute, "steps": 2}
    states, _ = train(RECIPES["current"], tmp_path, **options)
    rows = read_table_rows(tmp_path, "metrics").filter(layer="core")
    assert rows.height == 2 * 10 and set(rows["calls"]) == {2} and set(rows["scale_source"]) == {"engine"}
    assert states == train(RECIPES["current"], **options)[0]
    train(RECIPES["current"], tmp_path / "plain", calls=2, steps=2)
    columns = ["step", "role", "n", "scale", "mse", "underflow_pct"]
    assert_frame_equal(
        rows.select(columns), read_table_rows(tmp_path / "plain", "metrics").filter(layer="core").select(columns)
    )


def test_without_fp8_attention_there_are_no_rows_and_no_warning(tmp_path: Path) -> None:
    train(DelayedScaling(), tmp_path, steps=1)
    assert set(read_table_rows(tmp_path, "metrics")["layer"]) == {"qkv"}


def test_an_fp8_attention_whose_operands_nothing_shows_is_named(tmp_path: Path) -> None:
    """The module's own hook tells: here its emulation is hidden from the monitor, as fused kernels are."""
    torch.manual_seed(0)
    model = Attention()
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, roles=["weight"])
    inner, model.core.unfused_attention = model.core.unfused_attention, None
    model.core.__dict__["unfused_attention"] = lambda *args, **kwargs: inner(*args, **kwargs)
    del model.core._modules["unfused_attention"]
    with (
        pytest.warns(
            FP8DebugWarning, match=r"attention of 1 layers \(first core\) runs in FP8 and is quantized, but is not"
        ),
        monitor.step(0),
        te.autocast(enabled=True, recipe=RECIPES["current"]),
    ):
        model(torch.randn(16, 2, 32).bfloat16()).float().sum().backward()
    monitor.close()


def test_the_ledger_tells_what_an_attention_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention()

    def status() -> tuple[str, str]:
        (entry,) = [e for e in ledger_of([model]).entries if e.kind == "attention"]
        return entry.name, entry.status

    assert status() == ("core (scores)", "unknown")
    with te.autocast(enabled=True, recipe=RECIPES["current"]):
        model(torch.randn(16, 2, 32).bfloat16())
    assert status() == ("core (scores)", "quantized and observed")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    assert status() == ("core (scores)", "quantized and not observed")


def test_readers_show_the_operands_of_attention(tmp_path: Path) -> None:
    train(RECIPES["current"], tmp_path / "a", steps=6)
    train(RECIPES["delayed"], tmp_path / "b", steps=6)
    compared = compare(tmp_path / "b", tmp_path / "a")
    assert summarize(compared) and diagnose(tmp_path / "b", tmp_path / "a").verdict() and diagnose(tmp_path / "b").verdict()
    assert "dP" in set(
        find_onsets(*(MetricsTable.from_rows(read_table_rows(tmp_path / name, "metrics")) for name in "ab"))["tensor"]
    )
