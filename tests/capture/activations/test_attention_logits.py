"""Logits of attention, against all of them in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models.megatron import gpt, loss_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertForMaskedLM

from nemo_fp8_debug import FP8DebugWarning, Monitor, read_record
from nemo_fp8_debug.observations.activations.attention_logits import ROWS, rows_of

HEADS, WIDTH = 4, 32


class Attention(nn.Module):
    """Of a batch of rows, as a model writes it that nobody here has seen."""

    def __init__(self, groups: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.qkv, self.options, self.groups = nn.Linear(WIDTH, WIDTH * (HEADS + 2 * groups) // HEADS), options, groups
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = WIDTH // HEADS
        q, k, v = self.qkv(x).split([WIDTH, self.groups * size, self.groups * size], -1)
        q, k, v = (y.unflatten(-1, (-1, size)).transpose(1, 2) for y in (q, k, v))
        self.given = q.detach(), k.detach()
        options = self.options | ({"enable_gqa": True} if self.groups != HEADS else {})
        return F.scaled_dot_product_attention(q, k, v, **options)


def expected(module: Attention, rows: list[int]) -> dict[str, float]:
    assert module.given is not None
    q, k = (x.double() for x in module.given)
    k = k.repeat_interleave(HEADS // module.groups, 1)
    logits = q @ k.transpose(-1, -2) * module.options.get("scale", 1 / math.sqrt(q.shape[-1]))
    queries, keys = logits.shape[-2:]
    if module.options.get("is_causal"):
        logits = logits.masked_fill(torch.ones(queries, keys).triu(1).bool(), -math.inf)
    mask = module.options.get("attn_mask")
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    logits = logits[:, :, rows]
    weights = logits.softmax(-1)
    return {
        "amax": float(logits[weights > 0].abs().max()),
        "entropy": float(-(weights * weights.clamp_min(1e-300).log()).sum(-1).mean()),
        "sink_pct": float(100 * weights[..., 0].mean()),
        "rows": float(logits[..., 0].numel()),
    }


def record_of(module: nn.Module, x: torch.Tensor, folder: Path, **options: Any) -> list[dict[str, Any]]:
    monitor = Monitor(module, str(folder), interval=1, table_rows=0, on_error="raise", activations=("attention",))
    with monitor.step(0):
        out = module(x, **options)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    monitor.close()
    return read_record(str(folder), "activations").to_dicts()


MASKED = {
    "all": {},
    "causal": {"is_causal": True},
    "scaled": {"is_causal": True, "scale": 0.5},
    "seen": {"attn_mask": torch.arange(40) < torch.arange(1, 41)[:, None]},
    "added": {"attn_mask": torch.linspace(-3, 3, 40).expand(40, 40)},
}


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("options", MASKED.values(), ids=MASKED)
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_torchs_operator(tmp_path: Path, kernel: SDPBackend, options: dict[str, Any], groups: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Attention(groups, **options))
    with sdpa_kernel([kernel, SDPBackend.MATH]):
        (row,) = record_of(module, torch.randn(3, 40, WIDTH), tmp_path)
    assert row["layer"] == "0" and row["dtype"] == "float32"
    of_all = expected(module[0], rows_of(40, 1))
    for metric, value in of_all.items():
        assert row[metric] == pytest.approx(value, rel=2e-6), metric
    assert row["rows"] == 3 * HEADS * ROWS


def test_nan_and_rows_that_see_nothing(tmp_path: Path) -> None:
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[2] = False
    module = nn.Sequential(Attention(attn_mask=mask))
    (row,) = record_of(module, torch.randn(1, 8, WIDTH), tmp_path / "masked")
    assert (row["rows"], row["nan"], row["inf"]) == (HEADS * 7, 0, 0)
    x = torch.randn(1, 8, WIDTH)
    x[0, 3] = float("nan")
    (row,) = record_of(nn.Sequential(Attention()), x, tmp_path / "lost")
    assert row["nan"] > 0 and row["entropy"] is None


def test_torchs_module(tmp_path: Path) -> None:
    """It calls torch's operator, or multiplies and takes a softmax itself if it has to return the weights."""

    class Block(nn.Module):
        def __init__(self, need: bool) -> None:
            super().__init__()
            self.attention, self.fc, self.need = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.Linear(8, 8), need

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attention(x, x, x, need_weights=self.need)[0]
            return out

    found = []
    for need in (True, False):
        torch.manual_seed(0)
        (row,) = record_of(Block(need), torch.randn(2, 10, WIDTH), tmp_path / str(need))
        found.append([row[name] for name in ("layer", "rows", "amax", "entropy", "sink_pct")])
    assert found[0][:2] == found[1][:2]
    assert found[0][2:] == pytest.approx(found[1][2:], rel=1e-5)


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_tokens_of_padding_are_not_seen(tmp_path: Path, way: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1}
    model = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=HEADS, attn_implementation=way))
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise", activations=("attention",))
    ids, mask = torch.randint(64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, 5:] = 0
    with monitor.step(0):
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    monitor.close()
    (row,) = read_record(str(tmp_path), "activations").to_dicts()
    assert row["amax"] < 10
    assert row["entropy"] < (math.log(12) + math.log(5)) / 2 < row["entropy"] + 0.05


def test_an_attention_whose_kernel_shows_nothing_is_said(tmp_path: Path) -> None:
    class MixingAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.fc(x).cumsum(1)
            return out

    model = nn.Sequential(MixingAttention())
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, activations=("attention",))
    told = "logits of 0 is missing .*: LookupError: no torch operator received them"
    with pytest.warns(FP8DebugWarning, match=told), monitor.step(0):
        model(torch.randn(2, 4, 8)).sum().backward()
    monitor.close()


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("options", [{}, {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}])
def test_megatrons_attention(tmp_path: Path, options: dict[str, Any]) -> None:
    model = gpt(**options)
    scores: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("scale_mask_softmax"):  # it is given logits that are not scaled by the layer's number again yet
            module.register_forward_hook(lambda m, args, out: scores.append(args[0].detach().double() * (m.scale or 1.0)))
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise", activations=("attention",))
    with monitor.step(0):
        loss_of(model, 0).backward()
    monitor.close()
    rows = read_record(str(tmp_path), "activations").to_dicts()
    assert len(rows) == len(scores) > 0
    for row, found in zip(rows, scores, strict=True):
        queries, keys = found.shape[-2:]
        seen = found.masked_fill(torch.ones(queries, keys).triu(1).bool(), -math.inf)[:, :, rows_of(queries, 1)]
        weights = seen.softmax(-1)
        assert row["layer"].endswith("core_attention")
        assert row["amax"] == pytest.approx(seen[weights > 0].abs().max().item(), rel=1e-2)
        assert row["entropy"] == pytest.approx(float(torch.special.entr(weights).sum(-1).mean()), rel=1e-2)
