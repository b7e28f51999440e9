"""The audit of real checkpoints against a float64 oracle that casts value by value, and of hostile and damaged ones."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from audited import assert_audited, assert_cast
from safetensors.torch import save_file
from typer.testing import CliRunner

from nemo_fp8_debug.analysis.checkpoint.audit import audit
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.core.layer_names import compile_patterns
from nemo_fp8_debug.errors import ConfigError, FP8DebugWarning, RecordError

#: real Transformer Engine modules after three FP8 steps: see make_te_state.py
TE_STATE = Path(__file__).with_name("te_state.pt")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * (1 + x.abs())).to(dtype)


def te_states() -> dict[str, torch.Tensor]:
    return torch.load(TE_STATE, weights_only=True)["model"]


def te_extra(module: str) -> dict[str, Any]:
    """What is in a module's extra state, but for the recipe."""
    return torch.load(TE_STATE, weights_only=True)["plain"][f"decoder.layers.{module}._extra_state"]


def pickled(extra: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(extra)), dtype=torch.uint8)


# --- Megatron, NeMo, DCP -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt(megatron: None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, gradient_accumulation_fusion=False
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16, share_embeddings_and_output_weights=False
    )
    return model.bfloat16()


def gemm_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    kinds = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight", "output_layer.weight")
    return {n.removesuffix(".weight"): p for n, p in model.named_parameters() if n.endswith(kinds)}


def save_megatron(state: dict[str, Any], folder: Path) -> Path:
    from megatron.core import dist_checkpointing

    folder.mkdir()
    dist_checkpointing.save(state, str(folder))
    return folder


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


HF = {
    "model.embed_tokens.weight": (32, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.gate.weight": (4, 8),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 8, 12),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.conv.weight": (8, 1, 4),
    "lm_head.weight": (32, 8),
}


def hf_state(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: normal(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(HF.items())}


def hf_weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    experts = state["model.layers.0.mlp.experts.gate_up_proj"]
    names = ("model.layers.0.self_attn.q_proj", "lm_head")
    weights = {name: state[f"{name}.weight"] for name in names}
    return weights | {f"model.layers.0.mlp.experts.{i}.gate_up_proj": w for i, w in enumerate(experts)}


def save_indexed(state: dict[str, torch.Tensor], folder: Path) -> list[Path]:
    """As Hugging Face does: files of a tensor or more, and an index."""
    folder.mkdir(exist_ok=True)
    weight_map = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(state)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in state.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [folder / file for file in weight_map.values()]


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


# --- scales that Transformer Engine stored -------------------------------------------------------------------------------


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


# --- hostile checkpoints -------------------------------------------------------------------------------------------------


class Hostile:
    """Unpickled in full, makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Hostile]:
    """Works when unpickled in full, and was not when the test is over."""
    proof = Hostile(tmp_path / "proof")
    pickle.loads(pickle.dumps(proof))
    assert proof.marker.exists()
    thing = Hostile(tmp_path / "marker")
    yield thing
    assert not thing.marker.exists()


REFUSED = "was not read: it names posix.system, which unpickling would run"


def test_hostile_torch_file(hostile: Hostile, tmp_path: Path) -> None:
    torch.save({"a.weight": normal(4, 4), "b": hostile}, tmp_path / "a.pt")
    with pytest.raises(RecordError, match=f"a.pt {REFUSED}"):
        audit(tmp_path / "a.pt")


def test_hostile_metadata(hostile: Hostile, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": hostile}))
    with pytest.raises(RecordError, match=rf"\.metadata {REFUSED}"):
        audit(tmp_path)


def hostile_states(thing: Hostile) -> dict[str, Any]:
    """Extra states that would run code: as bytes, in the bytes of a storage within, and as version 1's io.BytesIO."""

    class Storage:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (pickle.dumps(thing),)

    torch.save({"scale_fwd": thing}, version_1 := io.BytesIO())
    return {"bytes": pickled(thing), "storage": pickled({"scale_fwd": Storage()}), "version 1": version_1}


@pytest.mark.parametrize("kind", ["bytes", "storage", "version 1"])
def test_hostile_extra_state(hostile: Hostile, tmp_path: Path, kind: str) -> None:
    """The weight itself is audited; its scale is not."""
    weight = normal(16, 16)
    torch.save({"a.weight": weight, "a._extra_state": hostile_states(hostile)[kind]}, tmp_path / "a.pt")
    with pytest.warns(FP8DebugWarning, match=r"a\.pt: a\._extra_state was not read"):
        found = audit(tmp_path / "a.pt")
    assert assert_audited(found, {"a": weight})["a"]["fp8_stored"] == {"state": "unreadable"}


def test_hostile_objects_in_a_megatron_checkpoint(gpt: Any, hostile: Hostile, tmp_path: Path) -> None:
    """An extra state's pickle and common.pt; neither keeps the weights from being audited."""
    state = gpt.sharded_state_dict()
    state["decoder.layers.1.mlp.linear_fc2._extra_state"].data = hostile_states(hostile)["bytes"]
    folder = save_megatron(state, tmp_path / "saved")
    torch.save(hostile, folder / "common.pt")
    with pytest.warns(FP8DebugWarning, match="linear_fc2._extra_state/shard_1_3 was not read"):
        found = audit(folder)
    assert_audited(found, gemm_weights(gpt))


def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    save_file({"a.weight": normal(4, 4)}, tmp_path / "secret.safetensors")
    (tmp_path / "in").mkdir()
    index = {"weight_map": {"a.weight": "../secret.safetensors"}}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RecordError, match="names a file outside its folder"):
        audit(tmp_path / "in")


# --- damaged checkpoints -------------------------------------------------------------------------------------------------


def truncated(path: Path) -> Path:
    save_file(hf_state(), path / "a.safetensors")
    os.truncate(path / "a.safetensors", 300)
    return path / "a.safetensors"


def values_cut_off(path: Path) -> Path:
    save_file({"a.weight": normal(64, 64)}, path / "a.safetensors")
    os.truncate(path / "a.safetensors", (path / "a.safetensors").stat().st_size - 2)
    return path / "a.safetensors"


def garbage(name: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        (path / name).write_bytes(np.random.default_rng(0).bytes(1000))
        return path / name

    return write


def no_weights(path: Path) -> Path:
    torch.save({"a.bias": torch.ones(3)}, path / "bias.pt")
    return path / "bias.pt"


def missing_file_of_an_index(path: Path) -> Path:
    for file in save_indexed({"a.weight": normal(4, 4)}, path):
        file.unlink()
    return path


def absurd_shape(path: Path) -> Path:
    header = json.dumps({"a.weight": {"dtype": "BF16", "shape": [1 << 40, 1 << 10], "data_offsets": [0, 1 << 51]}}).encode()
    (path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    return path / "a.safetensors"


DAMAGED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "wrong path": (lambda path: path / "none.pt", "none.pt does not exist"),
    "empty folder": (lambda path: path, "is not a checkpoint: .* it is empty"),
    "truncated header": (truncated, "a.safetensors is damaged"),
    "truncated values": (values_cut_off, "a.safetensors is damaged"),
    "garbage torch file": (garbage("a.pt"), "a.pt is not a torch file, or damaged"),
    "garbage safetensors": (garbage("a.safetensors"), "a.safetensors is"),
    "garbage metadata": (lambda path: garbage(".metadata")(path).parent, r"\.metadata is damaged"),
    "empty metadata": (lambda path: (path / ".metadata").write_bytes(b"") or path, r"\.metadata is damaged"),
    "zarr": (lambda path: (path / "metadata.json").write_text('{"sharded_backend": "zarr"}') and path, "zarr"),
    "unfinished": (lambda path: (path / "metadata.json").write_text("{}") and path, "has metadata.json but no .metadata"),
    "no weights": (no_weights, "bias.pt holds no weight of a GEMM"),
    "missing file": (missing_file_of_an_index, "model-00001-of-00003.safetensors cannot be read"),
    "absurd shape": (absurd_shape, "a.safetensors is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged(tmp_path: Path, kind: str) -> None:
    make, message = DAMAGED[kind]
    path = make(tmp_path)
    with pytest.raises(RecordError, match=message):
        audit(path)
    done = CliRunner().invoke(app, ["audit", str(path)])
    assert done.exit_code == 1 and "Traceback" not in done.output


@pytest.mark.parametrize("cut", [None, 12])
def test_one_bad_file_costs_its_own_weights(tmp_path: Path, cut: int | None) -> None:
    state = {f"layers.{i}.fc.weight": normal(16, 16, seed=i) for i in range(6)}
    bad = save_indexed(state, tmp_path)[1]
    if cut is None:
        bad.unlink()
    else:
        os.truncate(bad, bad.stat().st_size - cut)
    with pytest.warns(FP8DebugWarning, match=bad.name):
        found = audit(tmp_path)
    # The end of a file is missing: the weight that ends there is lost, not the other.
    kept = (0, 2, 3, 5) if cut is None else (0, 1, 2, 3, 5)
    assert_audited(found, {f"layers.{i}.fc": state[f"layers.{i}.fc.weight"] for i in kept})


def test_a_bad_file_of_a_megatron_checkpoint(gpt: Any, tmp_path: Path) -> None:
    folder = save_megatron(gpt.sharded_state_dict(), tmp_path / "saved")
    bad = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    bad.write_bytes(bad.read_bytes()[: bad.stat().st_size // 2])
    with pytest.warns(FP8DebugWarning, match=bad.name):
        found = audit(folder)
    whole, weights = [row["layer"] for row in found.rows], gemm_weights(gpt)
    assert 0 < len(whole) < len(weights)
    assert_audited(found, {name: weights[name] for name in whole})


@pytest.mark.parametrize("kind", ["safetensors", "torch.save", "dcp"])
def test_flipped_bytes_never_get_a_traceback(tmp_path: Path, kind: str) -> None:
    state = hf_state()
    if kind == "dcp":
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
        path, file = tmp_path / "saved", tmp_path / "saved" / ".metadata"
    else:
        path = file = tmp_path / ("a.safetensors" if kind == "safetensors" else "a.pt")
        save_file(state, path) if kind == "safetensors" else torch.save(state, path)
    whole, random = file.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for at in random.integers(0, min(len(whole), 4000), 3):
            damaged[at] = random.integers(256)
        file.write_bytes(damaged)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FP8DebugWarning)
                audit(path)
        except RecordError as error:
            assert str(tmp_path) in str(error)
            refused += 1
    assert refused


def test_a_weight_with_a_piece_missing_is_not_audited(megatron: None, tmp_path: Path) -> None:
    """As where a rank's part of the metadata was lost: half a weight has other metrics than the weight."""
    from megatron.core.dist_checkpointing import ShardedTensor

    halves = [ShardedTensor.from_rank_offsets("a.weight", normal(4, 6, seed=i), (0, i, 2)) for i in range(2)]
    whole = ShardedTensor.from_rank_offsets("b.weight", normal(4, 6))
    folder = save_megatron({"a0": halves[0], "a1": halves[1], "b": whole}, tmp_path / "saved")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["a.weight"].chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.warns(FP8DebugWarning, match="24 of the 48 values of a are there"):
        found = audit(folder)
    assert_audited(found, {"b": normal(4, 6)})


def test_an_fp8_weight_whose_scale_is_lost_is_left_out(tmp_path: Path) -> None:
    codes = normal(16, 16).to(torch.float8_e4m3fn)
    files = save_indexed({"a.weight": codes, "a.weight_scale_inv": torch.ones(1, 1), "b.weight": normal(4, 4)}, tmp_path)
    files[1].unlink()
    with pytest.warns(FP8DebugWarning, match=files[1].name):
        found = audit(tmp_path)
    assert [row["layer"] for row in found.rows] == ["b"]
    assert found.left_out["in FP8, with their scales lost"] == 1


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
    assert [row["layer"] for row in audit(tmp_path, matches=compile_patterns(["lm_head"])).rows] == ["lm_head"]
    with pytest.raises(ConfigError, match=r"no weight matches; the checkpoint has lm_head, model\.layers"):
        audit(tmp_path, matches=compile_patterns(["linear_fc2"]))


def test_command(tmp_path: Path) -> None:
    run = CliRunner()
    printed = run.invoke(app, ["audit", str(TE_STATE), "--layers", "linear_proj"])
    assert printed.exit_code == 0, printed.output
    lines = printed.output.splitlines()
    assert "decoder.layers.1.linear_proj" in next(line for line in lines if "linear_proj" in line)
    assert "linear_qkv" not in printed.output
    assert "left out: 8 tensors that are no GEMM weights" in printed.output
    as_json = run.invoke(app, ["audit", str(TE_STATE), "--json"])
    found = json.loads(as_json.output)
    assert found["verdict"] == audit(TE_STATE).verdict() and len(found["weights"]) == 8
    assert found["weights"][0]["bf16"]["sqnr_db"] is None
    assert run.invoke(app, ["audit", str(TE_STATE), "--recipe", "{bad"]).exit_code == 1
