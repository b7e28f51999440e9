"""The audit of hostile and damaged checkpoints."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from audited import assert_audited
from safetensors.torch import save_file
from saved_checkpoints import gemm_weights, hf_state, normal, pickled, save_indexed, save_megatron
from torch.distributed.checkpoint import save as save_distributed
from typer.testing import CliRunner

from nemo_fp8_debug.analysis.checkpoint.audit import audit
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.errors import FP8DebugWarning, RecordError

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


@pytest.mark.parametrize("name", ["_inductor", "onnx", "_export"])
def test_modules_of_torch_are_not_imported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`getattr(torch, name)` imports them."""
    monkeypatch.delattr(torch, name, raising=False)
    monkeypatch.delitem(sys.modules, f"torch.{name}", raising=False)
    save_file({"a.weight": normal(4, 4)}, tmp_path / "a.safetensors")
    (tmp_path / ".metadata").write_bytes(f"ctorch\n{name}\n.".encode())
    with pytest.raises(RecordError, match=f"it names torch.{name}, which unpickling would run"):
        audit(tmp_path)
    assert f"torch.{name}" not in sys.modules


def test_what_others_in_the_process_allow_is_not_run(tmp_path: Path) -> None:
    ran = list[int]()

    def run(number: int) -> None:
        ran.append(number)

    class Runs:
        def __reduce__(self) -> Any:
            return run, (1,)

    run.__qualname__ = "run"
    with patch.object(sys.modules[__name__], "run", run, create=True), torch.serialization.safe_globals([run]):
        torch.save({"a.weight": normal(4, 4), "b": Runs()}, tmp_path / "a.pt")
        with pytest.raises(RecordError, match="which unpickling would run"):
            audit(tmp_path / "a.pt")
        assert not ran and run in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("size", [(3,), (1 << 40,)])
def test_a_scale_beyond_its_storage(size: tuple[int, ...], tmp_path: Path) -> None:
    """Its values would be whatever lies in memory."""
    tensor = torch.ones(1)

    class Reaches:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (tensor.storage(), 0, size, (1,), False, None)

    state = pickled({"scale_fwd": Reaches(), "amax_history_fwd": torch.ones(1, 3)})
    weight = normal(4, 4)
    torch.save({"a.weight": weight, "a._extra_state": state}, tmp_path / "a.pt")
    with pytest.warns(FP8DebugWarning, match="a tensor reaches beyond its storage"):
        assert_audited(audit(tmp_path / "a.pt"), {"a": weight})


WITHOUT_VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "meta": lambda: torch.zeros(4, 4, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)]),
}


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_a_tensor_without_values_costs_itself(kind: str, tmp_path: Path) -> None:
    fp8 = normal(4, 4).to(torch.float8_e4m3fn)
    state = {"a.weight": normal(4, 4), "b.weight": fp8, "b.weight_scale": WITHOUT_VALUES[kind]()}
    torch.save(state, tmp_path / "a.pt")
    with pytest.warns(FP8DebugWarning, match=r"a\.pt: b\.weight_scale was not read: a sparse, nested or meta tensor"):
        assert_audited(audit(tmp_path / "a.pt"), {"a": state["a.weight"]})


@pytest.mark.parametrize(
    "state",
    [
        torch.eye(4, dtype=torch.uint8).to_sparse(),
        torch.zeros(4, dtype=torch.uint8, device="meta"),
        pickled({"scale_fwd": torch.full((3,), 1j), "amax_history_fwd": torch.ones(1, 3)}),
    ],
)
def test_an_extra_state_without_numbers(state: torch.Tensor, tmp_path: Path) -> None:
    weight = normal(4, 4)
    torch.save({"a.weight": weight, "a._extra_state": state}, tmp_path / "a.pt")
    with pytest.warns(FP8DebugWarning, match=r"a\._extra_state is damaged.*affects the stored scale of a"):
        assert_audited(audit(tmp_path / "a.pt"), {"a": weight})


@pytest.mark.parametrize("place", [5, ("a", 1, 2), "a\0b", "\ud800"])
def test_a_place_that_is_none(place: Any, tmp_path: Path) -> None:
    save_distributed({"a.weight": normal(4, 4)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (key,) = metadata.storage_data
    if isinstance(place, str):
        metadata.storage_data[key].relative_path = place
    else:
        metadata.storage_data[key] = place
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RecordError, match=r"does not say where a\.weight at \(0, 0\) is|cannot be read"):
        audit(tmp_path)


def test_pickles_are_refused_on_older_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until torch 2.6, torch.load with weights_only could be made to run code. Safetensors are read on any release."""
    torch.save({"a.weight": normal(4, 4)}, tmp_path / "a.pt")
    save_file({"a.weight": normal(4, 4)}, tmp_path / "a.safetensors")
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    with pytest.raises(RecordError, match=r"a\.pt was not read: pickles need torch 2\.6 or later, this is 2\.5\.1\+cu124"):
        audit(tmp_path / "a.pt")
    assert_audited(audit(tmp_path / "a.safetensors"), {"a": normal(4, 4)})


def shared(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(levels):
        inner = {"a": inner, "b": inner}
    return inner


def cyclic() -> dict[str, Any]:
    around: dict[str, Any] = {"w": torch.ones(1)}
    around["again"] = around
    return around


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (shared(40), "it has more than 1,000,000 entries"),
        (cyclic(), "it has more than 64 levels"),
        ({"a.weight": torch.ones(1).expand(1 << 22, 1 << 22)}, "repeats the values of its storage too many times"),
    ],
    ids=["a dict shared on 40 levels", "a dict that holds itself", "a tensor of 2^44 elements"],
)
def test_a_small_torch_file_that_stands_for_much(tmp_path: Path, content: Any, why: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(RecordError, match=why):
        audit(tmp_path / "a.pt")


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"p2147483647\n"], ids=["binary", "text"])
def test_a_memo_index_that_takes_gigabytes(tmp_path: Path, put: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02}" + put + b".")
    with pytest.raises(RecordError, match=r"it has the memo index 2147483647, in a pickle of [0-9]+ bytes"):
        audit(tmp_path)


def test_a_compressed_torch_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"\x00" * 50_000_000)
    with pytest.raises(RecordError, match=r"a compressed archive, which torch\.save does not write"):
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
    assert_audited(found, {f"layers.{i}.fc": state[f"layers.{i}.fc.weight"] for i in (0, 2, 3, 5)})


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
    with pytest.warns(FP8DebugWarning, match="has only 24 of the 48 values of a"):
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
