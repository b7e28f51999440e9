"""The audit of real checkpoints against a float64 oracle that casts value by value."""

from __future__ import annotations

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from audited import assert_audited, assert_cast
from safetensors.torch import save_file
from saved_checkpoints import (
    TE_STATE,
    gemm_weights,
    hf_state,
    hf_weights,
    normal,
    save_indexed,
    save_megatron,
    te_extra,
    te_states,
)
from typer.testing import CliRunner

from nemo_fp8_debug.analysis.checkpoint.audit import audit
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.core.layer_names import compile_layer_patterns
from nemo_fp8_debug.errors import ConfigError

# --- Megatron, NeMo, DCP -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("homogeneous", [True, False])
def test_megatron_checkpoint(gpt: Any, tmp_path: Path, homogeneous: bool) -> None:
    """Layers stacked in one tensor, or each for itself; the states are Transformer Engine's own, saved by Megatron."""
    state = gpt.sharded_state_dict(metadata={"non_homogeneous_layers": not homogeneous})
    given = te_states()
    for key, value in state.items():
        if key.endswith("linear_qkv._extra_state"):
            value.data = given[f"decoder.layers.{key.split('.')[2]}.linear_qkv._extra_state"]
    found = audit(save_megatron(state, tmp_path / "saved"))
    weights = gemm_weights(gpt)
    rows = assert_audited(found, weights)
    assert len(weights) == 3 * 4 + 1
    assert found.left_out["embeddings"] == 2 and not found.faults
    with_scale = [name for name, row in rows.items() if row["fp8_stored"]]
    assert sorted(with_scale) == [f"decoder.layers.{i}.self_attention.linear_qkv" for i in range(3)]
    for i, name in enumerate(sorted(with_scale)):
        assert_cast(rows[name]["fp8_stored"], weights[name], float(te_extra(f"{i}.linear_qkv")["scale_fwd"][1]))


def test_pieces_of_tensor_parallel_ranks_and_experts(megatron: None, tmp_path: Path) -> None:
    """[layers, experts, rows, columns], each expert's rows in two pieces; and columns in two pieces."""
    from megatron.core.dist_checkpointing import ShardedTensor

    experts = normal(2, 3, 8, 6)
    proj = normal(2, 8, 10, seed=1)
    state: dict[str, Any] = {}
    for layer in range(2):
        for rank in range(2):
            for expert in range(3):
                piece = experts[layer, expert, 4 * rank : 4 * rank + 4]
                state[f"e{layer}{expert}{rank}"] = ShardedTensor.from_rank_offsets(
                    "decoder.layers.mlp.experts.linear_fc1.weight",
                    piece.contiguous(),
                    *((0, layer, 2), (1, expert, 3), (2, rank, 2)),
                    prepend_axis_num=2,
                )
            state[f"p{layer}{rank}"] = ShardedTensor.from_rank_offsets(
                "decoder.layers.self_attention.linear_proj.weight",
                proj[layer, :, 5 * rank : 5 * rank + 5].contiguous(),
                *((0, layer, 2), (2, rank, 2)),
                prepend_axis_num=1,
            )
    weights = {f"decoder.layers.{i}.mlp.experts.{e}.linear_fc1": experts[i, e] for i in range(2) for e in range(3)}
    weights |= {f"decoder.layers.{i}.self_attention.linear_proj": proj[i] for i in range(2)}
    assert_audited(audit(save_megatron(state, tmp_path / "saved")), weights)


def test_plain_dcp_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"model": {"a.weight": normal(6, 5, dtype=torch.float32), "a.bias": torch.ones(6)}, "step": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(tmp_path / "saved"))
    assert_audited(audit(tmp_path / "saved"), {"model.a": state["model"]["a.weight"]})


# --- safetensors, torch files, Lightning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ["file", "index", "folder", "torch.save"])
def test_files_of_every_kind_and_dtype(tmp_path: Path, dtype: torch.dtype, how: str) -> None:
    state = hf_state(dtype)
    path = tmp_path
    if how == "file":
        path = tmp_path / "model.safetensors"
        save_file(state, path)
    elif how == "torch.save":
        path = tmp_path / "model.pt"
        torch.save({"model": state, "iteration": 7, "optimizer": {"lr": 0.1}}, path)
    else:
        save_indexed(state, tmp_path)
        if how == "folder":
            (tmp_path / "model.safetensors.index.json").unlink()
    found = audit(path)
    rows = assert_audited(found, hf_weights(state))
    assert found.left_out == {"embeddings": 1, "routers": 1, "norms, biases and others": 2}
    assert {row["dtype"] for row in rows.values()} == {str(dtype).removeprefix("torch.")}
    assert (dtype == torch.bfloat16) == all(row["bf16"]["relative_error"] == 0 for row in rows.values())


def test_a_weight_of_many_blocks(tmp_path: Path) -> None:
    """More values than are read at once, as float32 (sums of blocks) and bfloat16 (one histogram)."""
    state = {f"{dtype}.weight": normal(2100, 2101, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    save_file(state, tmp_path / "a.safetensors")
    assert_audited(audit(tmp_path), {name.removesuffix(".weight"): w for name, w in state.items()})


def test_views_of_one_storage(tmp_path: Path) -> None:
    """torch.save keeps strides and storages: transposed, strided, and a part of a larger buffer."""
    buffer = normal(4000)
    state = {
        "transposed.weight": normal(30, 20).t(),
        "strided.weight": normal(60, 40)[::3, 1::2],
        "part.weight": buffer[100:700].view(20, 30),
        "parameter.weight": torch.nn.Parameter(buffer[700:1300].view(20, 30)),
    }
    torch.save(state, tmp_path / "a.pt")
    assert_audited(audit(tmp_path / "a.pt"), {name.removesuffix(".weight"): w for name, w in state.items()})


class Net(pl.LightningModule):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.fc = torch.nn.Linear(8, width)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.fc(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [5])]


def test_lightning_checkpoint(tmp_path: Path) -> None:
    net = Net()
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, filename="last")
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, callbacks=[checkpoint], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(net, torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4))
    found = audit(tmp_path / "last.ckpt")
    assert found.format == "Lightning checkpoint"
    assert_audited(found, {"fc": net.fc.weight})


def test_plain_objects_beside_the_weights(tmp_path: Path) -> None:
    """Arguments, paths and numpy's numbers, as Megatron and Lightning save them, are read as stand-ins."""
    beside = {"args": argparse.Namespace(seq_length=8), "output": Path("/runs"), "rng": np.random.get_state()}
    torch.save({"model": {"a.weight": normal(8, 8)}, "checkpoint_version": 3.0, **beside}, tmp_path / "a.pt")
    assert_audited(audit(tmp_path / "a.pt"), {"a": normal(8, 8)})


def test_nonfinite_values_come_first(tmp_path: Path) -> None:
    bad = normal(8, 8)
    bad[1, 2], bad[3, 4] = torch.nan, torch.inf
    save_file({"baseline.weight": normal(8, 8), "bad.weight": bad}, tmp_path / "a.safetensors")
    found = audit(tmp_path)
    assert [(r["layer"], r["nan"], r["inf"], r["n"]) for r in found.rows] == [("bad", 1, 1, 62), ("baseline", 0, 0, 64)]
    assert any("NaN or infinity: bad" in sentence for sentence in found.verdict())


# --- weights stored in FP8 -----------------------------------------------------------------------------------------------


def test_fp8_weight_with_one_scale(tmp_path: Path) -> None:
    codes = (normal(64, 48).float() * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.0123)
    save_file({"a.weight": codes, "a.weight_scale": scale}, tmp_path / "a.safetensors")
    found = audit(tmp_path)
    values = codes.float() * scale
    row = assert_audited(found, {"a": values})["a"]
    assert row["dtype"] == "float8_e4m3fn"
    assert row["fp8_stored"]["state"] == "fits"
    assert_cast(row["fp8_stored"], values, float(1 / scale))
    assert row["fp8_stored"]["relative_error"] < 1e-7
    assert row["bf16"]["relative_error"] > 1e-4


def test_fp8_weights_with_a_scale_for_each_row_or_block(tmp_path: Path) -> None:
    codes = (normal(300, 200).float() * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    rows, blocks = normal(300, 1).float().abs(), normal(3, 2).float().abs()
    state = {"r.weight": codes, "r.weight_scale": rows, "b.weight": codes.clone(), "b.weight_scale_inv": blocks}
    save_file(state, tmp_path / "a.safetensors")
    by_block = torch.empty(300, 200)
    for i in range(300):
        for j in range(200):
            by_block[i, j] = codes[i, j].float() * blocks[i // 128, j // 128]
    found = assert_audited(audit(tmp_path), {"r": codes.float() * rows, "b": by_block})
    assert {name: row["fp8_stored"]["state"] for name, row in found.items()} == {"r": "one a row", "b": "one a block"}


def test_fp8_weights_without_a_scale_come_first(tmp_path: Path) -> None:
    """A checkpoint that lost half of its scales, and has a weight with NaN and one in BF16 that loses far more."""
    codes = (normal(64, 48).float() * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    scaled = {"kept.0": codes, "kept.1": codes.clone()}
    state = {f"{name}.weight": weight for name, weight in scaled.items()}
    state |= {f"{name}.weight_scale": torch.tensor(0.0123) for name in scaled}
    state |= {f"lost.{i}.weight": codes.clone() for i in range(5)}
    bad, wide = normal(8, 8), normal(8, 8)
    bad[1, 2], wide[0, 0] = torch.nan, 1e6
    save_file(state | {"bad.weight": bad, "wide.weight": wide}, tmp_path / "a.safetensors")
    found = audit(tmp_path)
    assert {row["layer"] for row in found.rows[:5]} == {f"lost.{i}" for i in range(5)}
    assert [row["layer"] for row in found.rows[5:7]] == ["bad", "wide"]
    assert {row["fp8_stored"]["state"] for row in found.rows[:5]} == {"no scale"}
    first, second, *others = found.verdict()
    assert first.startswith("Weights: 9")
    assert second == (
        "5 of 7 FP8 weights have no stored scale: 'lost.0', 'lost.1', 'lost.2', 'lost.3', 'lost.4'. If the checkpoint lost "
        "their scales, a server loads wrong weights. The errors below leave these weights out."
    )
    assert "Stored scales of 2 weights: fits (2)." in others
    kept = audit(tmp_path, matches=compile_layer_patterns(["kept.*", "bad", "wide"]))
    assert kept.verdict()[2:4] == others[1:3]  # errors in FP8, and stored scales


# --- what is asked for ---------------------------------------------------------------------------------------------------


def test_recipe_gives_the_format(tmp_path: Path) -> None:
    weight = normal(32, 32)
    save_file({"a.weight": weight}, tmp_path / "a.safetensors")
    row = audit(tmp_path, {"name": "current", "fp8_format": "e5m2"}).rows[0]
    assert_cast(row["fp8_current"], weight, fmt="e5m2")
    power = audit(tmp_path, {"name": "current", "power_of_two": True}).rows[0]["fp8_current"]
    assert_cast({k: v for k, v in power.items() if k != "scale_ratio_log2"}, weight, power["scale"])
    assert math.log2(power["scale"]).is_integer()


def test_layers(tmp_path: Path) -> None:
    save_indexed(hf_state(), tmp_path)
    assert [row["layer"] for row in audit(tmp_path, matches=compile_layer_patterns(["lm_head"])).rows] == ["lm_head"]
    with pytest.raises(ConfigError, match=r"no weight matches; the checkpoint has 'lm_head', 'model\.layers"):
        audit(tmp_path, matches=compile_layer_patterns(["linear_fc2"]))


def test_command(tmp_path: Path) -> None:
    run = CliRunner()
    printed = run.invoke(app, ["audit", str(TE_STATE), "--layers", "linear_proj"])
    assert printed.exit_code == 0, printed.output
    lines = printed.output.splitlines()
    assert lines[0] == audit(TE_STATE, matches=compile_layer_patterns(["linear_proj"])).verdict()[1]
    table = lines[lines.index("") :]
    assert "decoder.layers.1.linear_proj" in next(line for line in table if "linear_proj" in line)
    assert "linear_qkv" not in printed.output
    assert "left out: 8 tensors that are not GEMM weights" in printed.output
    as_json = run.invoke(app, ["audit", str(TE_STATE), "--json"])
    found = json.loads(as_json.output)
    assert found["verdict"] == audit(TE_STATE).verdict() and len(found["weights"]) == 8
    assert found["weights"][0]["bf16"]["sqnr_db"] is None
    assert run.invoke(app, ["audit", str(TE_STATE), "--recipe", "{bad"]).exit_code == 1
