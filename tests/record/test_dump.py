"""Dumped tensors: what is in the files, the bounds that they keep, and files that others have had their hands on."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import GUARD
from torch import nn

from nemo_fp8_debug import ConfigError, Monitor
from nemo_fp8_debug.analysis.replay.replay import replay
from nemo_fp8_debug.errors import FP8DebugWarning
from nemo_fp8_debug.numerics.formats import E4M3, E5M2
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling
from nemo_fp8_debug.record import dump
from nemo_fp8_debug.record.dump import DumpedTensorInfo, TensorDumper, dumped_files, read_dump
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.storage import FolderStorage

NUMPY = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def about(layer: str = "layers.0", role: str = "input", call: int = 0, fmt: Any = E4M3) -> DumpedTensorInfo:
    return DumpedTensorInfo(0, 7, 3, layer, role, call, "delayed-hybrid", fmt, "engine")


def at_once(job: Callable[[], None]) -> None:
    job()


def writer(folder: Path, max_bytes: int = 1 << 30, min_free_bytes: int = 0, submit: Any = at_once) -> TensorDumper:
    return TensorDumper(FolderStorage(folder), 3, max_bytes, min_free_bytes, submit)


def the_file(folder: Path) -> Path:
    (name,) = (name for _, _, _, name in dumped_files(FolderStorage(folder)))
    return folder / name


class TestContent:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
    def test_value_codes_and_scale(self, tmp_path: Path, dtype: torch.dtype, fmt: Any) -> None:
        x = (torch.randn(33, 17, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
        x[0, :4] = torch.tensor([1e4, -1e4, 0.0, 1e-6]).to(dtype)
        scale = torch.tensor(37.5)
        writer(tmp_path).dump_tensor(about(fmt=fmt), x, scale)
        found, tensors = read_dump(FolderStorage(tmp_path), str(the_file(tmp_path).relative_to(tmp_path)))
        assert found == about(fmt=fmt)
        assert torch.equal(tensors["value"], x) and tensors["value"].dtype == dtype
        assert tensors["scale"].item() == 37.5
        scaled = np.clip(x.float().numpy() * np.float32(37.5), -fmt.max, fmt.max)
        expected = scaled.astype(NUMPY[fmt.name]).view(np.uint8)
        assert np.array_equal(tensors["codes"].view(torch.uint8).numpy(), expected)

    def test_a_rule_finds_the_scale_of_each_tensor(self, tmp_path: Path) -> None:
        x = torch.randn(8, 8).bfloat16()
        writer(tmp_path).dump_tensor(about(), x, CurrentScaling())
        _, tensors = read_dump(FolderStorage(tmp_path), str(the_file(tmp_path).relative_to(tmp_path)))
        assert tensors["scale"].item() == (torch.tensor(448.0) / x.abs().max().float()).item()

    def test_the_values_are_those_of_the_call_though_they_change_later(self, tmp_path: Path) -> None:
        jobs: list[Callable[[], None]] = []
        x = torch.randn(16, 16).bfloat16()
        kept = x.clone()
        writer(tmp_path, submit=jobs.append).dump_tensor(about(), x, torch.tensor(1.0))
        x.zero_()
        jobs[0]()
        assert torch.equal(safetensors.torch.load_file(the_file(tmp_path))["value"], kept)

    @pytest.mark.parametrize(
        "x", [torch.randn(6, 4).t(), torch.randn(4, 1).expand(4, 5), torch.randn(3)[1], torch.zeros(0, 4)]
    )
    def test_strides_and_odd_shapes(self, tmp_path: Path, x: torch.Tensor) -> None:
        writer(tmp_path).dump_tensor(about(), x.bfloat16(), torch.tensor(1.0))
        _, tensors = read_dump(FolderStorage(tmp_path), str(the_file(tmp_path).relative_to(tmp_path)))
        assert torch.equal(tensors["value"], x.bfloat16()) and tensors["codes"].shape == x.shape

    @pytest.mark.parametrize(
        "layer", ["../../../etc/passwd", "a/b", "x" * 5000, "ü\n\x00%", ".", "decoder.layers.3.mlp.linear_fc2"]
    )
    def test_no_name_leads_out_of_the_folder(self, tmp_path: Path, layer: str) -> None:
        (tmp_path / "run").mkdir()
        writer(tmp_path / "run").dump_tensor(about(layer), torch.ones(2).bfloat16(), torch.tensor(1.0))
        path = the_file(tmp_path / "run")
        assert path.parent == tmp_path / "run" / "tensors" / "attempt-0-step-00000007"
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
        assert read_dump(FolderStorage(tmp_path / "run"), str(path.relative_to(tmp_path / "run")))[0].layer == layer


class TestBounds:
    def test_the_budget(self, tmp_path: Path) -> None:
        out = writer(tmp_path, max_bytes=3 * 64 * 3)
        for call in range(5):
            out.dump_tensor(about(call=call), torch.ones(64).bfloat16(), torch.tensor(1.0))
        assert len(list(dumped_files(FolderStorage(tmp_path)))) == 3
        assert out.progress()["left_out"] == {"the dump's budget of 5.36e−7 GiB is used up": 2}

    def test_the_budget_counts_what_earlier_starts_of_the_run_wrote(self, tmp_path: Path) -> None:
        writer(tmp_path).dump_tensor(about(), torch.ones(1000).bfloat16(), torch.tensor(1.0))
        again = writer(tmp_path, max_bytes=3000)
        again.dump_tensor(about(call=1), torch.ones(1000).bfloat16(), torch.tensor(1.0))
        assert len(list(dumped_files(FolderStorage(tmp_path)))) == 1

    def test_the_disk_keeps_its_free_bytes(self, tmp_path: Path) -> None:
        free = shutil.disk_usage(tmp_path).free
        out = writer(tmp_path, min_free_bytes=2 * free)
        out.dump_tensor(about(), torch.ones(64).bfloat16(), torch.tensor(1.0))
        assert not list(dumped_files(FolderStorage(tmp_path)))
        (why,) = out.progress()["left_out"]
        assert why.startswith("the disk would be left with less than")

    def test_what_waits_to_be_written_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dump, "IN_FLIGHT", 1000)
        monkeypatch.setattr(dump, "PATIENCE", GUARD)
        jobs: list[Callable[[], None]] = []
        out = writer(tmp_path, submit=jobs.append)
        out.dump_tensor(about(call=0), torch.ones(300).bfloat16(), torch.tensor(1.0))
        waiting = threading.Thread(
            target=out.dump_tensor, args=(about(call=1), torch.ones(300).bfloat16(), torch.tensor(1.0))
        )
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive() and len(jobs) == 1
        jobs[0]()
        waiting.join(GUARD)
        assert len(jobs) == 2 and not out.left_out

    def test_a_write_that_hangs_costs_tensors_and_not_the_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dump, "IN_FLIGHT", 1000)
        monkeypatch.setattr(dump, "PATIENCE", 0.1)
        out = writer(tmp_path, submit=lambda job: None)
        for call in range(2):
            out.dump_tensor(about(call=call), torch.ones(300).bfloat16(), torch.tensor(1.0))
        assert sum(out.left_out.values()) == 1 and "still waiting to be written" in next(iter(out.left_out))

    def test_a_place_that_cannot_be_written_costs_tensors_and_not_the_run(self, tmp_path: Path) -> None:
        (tmp_path / "tensors").write_text("in the way")
        out = writer(tmp_path)
        out.dump_tensor(about(), torch.ones(4).bfloat16(), torch.tensor(1.0))
        assert sum(out.progress()["left_out"].values()) == 1
        assert out.progress()["bytes_waiting"] == 0


def crafted(folder: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> str:
    """A file with a checksum that is right."""
    return put(folder, safetensors.torch.save(tensors, metadata))


def put(folder: Path, content: bytes) -> str:
    name = f"tensors/attempt-0-step-00000000/rank-00000.call-000.input.0.{zlib.crc32(content):08x}.safetensors"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return name


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('code of the file ran')",)


GOOD = {"value": torch.ones(4).bfloat16(), "codes": torch.ones(4).to(torch.float8_e4m3fn), "scale": torch.tensor(1.0)}
METADATA = about().metadata()
HOSTILE: dict[str, Callable[[Path], str]] = {
    "pickle": lambda folder: put(folder, pickle.dumps(Bomb())),
    "empty": lambda folder: put(folder, b""),
    "text": lambda folder: put(folder, b"not a tensor at all"),
    "header longer than the file": lambda folder: put(folder, (1 << 60).to_bytes(8, "little") + b"{}"),
    "header that nests": lambda folder: put(folder, (20000).to_bytes(8, "little") + b"[" * 20000),
    "no metadata": lambda folder: crafted(folder, GOOD, None),
    "no scale": lambda folder: crafted(folder, {k: GOOD[k] for k in ("value", "codes")}, METADATA),
    "metadata with another format": lambda folder: crafted(folder, GOOD, METADATA | {"format": "os.system"}),
    "metadata with another role": lambda folder: crafted(folder, GOOD, METADATA | {"role": "../x"}),
    "step that is no number": lambda folder: crafted(folder, GOOD, METADATA | {"step": "__import__('os')"}),
    "codes of another shape": lambda folder: crafted(folder, GOOD | {"codes": GOOD["codes"][:2].clone()}, METADATA),
    "values of another kind": lambda folder: crafted(folder, GOOD | {"value": torch.ones(4, dtype=torch.int64)}, METADATA),
    "scale of another kind": lambda folder: crafted(folder, GOOD | {"scale": torch.ones(3)}, METADATA),
}


class TestHostile:
    @pytest.mark.parametrize("kind", HOSTILE)
    def test_a_crafted_file_runs_no_code_and_is_refused(self, tmp_path: Path, kind: str) -> None:
        name = HOSTILE[kind](tmp_path)
        with pytest.raises(ValueError, match="not a dump of a tensor"):
            read_dump(FolderStorage(tmp_path), name)

    @settings(max_examples=40)
    @given(st.data())
    def test_no_changed_byte_goes_unseen(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        folder = tmp_path_factory.mktemp("dump")
        name = crafted(folder, GOOD, METADATA)
        content = bytearray((folder / name).read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        (folder / name).write_bytes(bytes(content))
        with pytest.raises(ValueError, match="its name does not end in the checksum"):
            read_dump(FolderStorage(folder), name)

    def test_metadata_of_a_file_leads_to_no_other_place(self, tmp_path: Path) -> None:
        """Replaying adds rows about a layer of any name to the record, and writes nowhere else."""
        run = dumping(tmp_path / "run")
        for file in (tmp_path / "run" / "tensors").rglob("*.safetensors"):
            tensors, metadata = safetensors.torch.load_file(file), about("../../escape").metadata()
            content = safetensors.torch.save(tensors, metadata | {"step": "0"})
            file.with_name(f"rank-00000.call-000.input.x.{zlib.crc32(content):08x}.safetensors").write_bytes(content)
            file.unlink()
        before = {p for p in tmp_path.rglob("*") if not p.is_relative_to(tmp_path / "run")}
        assert "../../escape" in replay(run, "current", "dumps")["layer"].to_list()
        assert {p for p in tmp_path.rglob("*") if not p.is_relative_to(tmp_path / "run")} == before


def dumping(folder: Path, steps: int = 3, **options: Any) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
    options = {"interval": 1, "dump": ["*"], "table_rows": 0, "dump_min_free_bytes": 0, "on_error": "raise"} | options
    monitor = Monitor(model, str(folder), **options)
    for step in range(steps):
        with monitor.step(step):
            for _ in range(2):
                model(torch.randn(4, 16).bfloat16()).float().square().mean().backward()
    monitor.close()
    return folder


class TestInARun:
    def test_every_operand_of_every_micro_batch_is_there(self, tmp_path: Path) -> None:
        run = dumping(tmp_path)
        found = sorted(
            read_dump(FolderStorage(run), name)[0].metadata().items() for *_, name in dumped_files(FolderStorage(run))
        )
        keys = {tuple(dict(m)[k] for k in ("step", "layer", "role", "call")) for m in found}
        expected = {
            (str(s), layer, role, c) for s in range(3) for layer in "02" for role in ("input", "grad_output") for c in "01"
        }
        expected |= {(str(s), layer, "weight", "0") for s in range(3) for layer in "02"}
        assert keys == expected and len(found) == len(expected)

    def test_chosen_layers_and_roles_only(self, tmp_path: Path) -> None:
        run = dumping(tmp_path, dump=["2"], roles=["grad_output"])
        about = [read_dump(FolderStorage(run), name)[0] for *_, name in dumped_files(FolderStorage(run))]
        assert {(a.layer, a.role) for a in about} == {("2", "grad_output")}

    def test_a_damaged_dump_is_named_and_the_rest_is_replayed(self, tmp_path: Path) -> None:
        run = dumping(tmp_path)
        whole = replay(run, None, "dumps")
        file = next(run.glob("tensors/*step-00000001/*input.0.*"))
        file.write_bytes(file.read_bytes()[:-3])
        with pytest.warns(FP8DebugWarning, match=re.escape(f"{file} is left out")):
            left = replay(run, None, "dumps")
        assert len(whole) == 18 and 17 <= len(left) <= 18

    def test_progress_is_told_beside_the_record(self, tmp_path: Path) -> None:
        status = json.loads((dumping(tmp_path) / "status.json").read_text())
        assert status["dump"]["tensors"] == 30 and status["dump"]["bytes_waiting"] == 0
        assert status["dump"]["bytes"] == sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors"))

    def test_layers_that_do_not_exist_are_refused_before_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no GEMM layer matches \['linear_fc9'\]"):
            dumping(tmp_path, dump=["linear_fc9"])

    def test_a_dump_is_no_sample_of_less(self, tmp_path: Path) -> None:
        """Metrics are the same whether tensors are dumped or not."""
        columns = ["step", "layer", "role", "mse", "cosine", "n"]
        plain, dumped = (dumping(tmp_path / name, dump=d) for name, d in (("plain", []), ("dumped", ["*"])))
        assert read_table_rows(plain, "metrics", columns).equals(read_table_rows(dumped, "metrics", columns))
