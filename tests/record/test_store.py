"""The run record on a real disk: written, read back, resumed, and damaged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import torch
from samples import COLUMNS, FINGERPRINT, measured_sample, sample

from nemo_fp8_debug.errors import ConfigError, RecordError
from nemo_fp8_debug.record.store import (
    FIGURE_SCHEMA,
    SCHEMA_VERSION,
    SKETCH_SCHEMA,
    STEP_SCHEMA,
    RunRecord,
    find_run,
    read_fingerprint,
    read_table,
)
from nemo_fp8_debug.sample import Sample


def measured(step: int) -> Sample:
    x = torch.randn(64, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(step))
    return measured_sample(
        step,
        {
            ("decoder.layers.0.mlp.linear_fc1", "input"): x,
            ("decoder.layers.0.mlp.linear_fc1", "weight"): x[:8].float(),
            ("decoder.layers.0.mlp.linear_fc2", "grad_output"): torch.zeros(4, dtype=torch.bfloat16),
        },
    )


def start(folder: Path) -> RunRecord:
    record = RunRecord(folder)
    record.open(FINGERPRINT)
    return record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A record of steps 0, 10 and 20."""
    record = start(tmp_path / "run")
    for step in (0, 10, 20):
        record.record(measured(step))
        record.record_steps({s: {"loss": 3.0 - s / 100} for s in range(step, step + 10)})
    record.close()
    return tmp_path / "run"


def a_part(run: Path, table: str = "figures") -> Path:
    return sorted((run / table).glob("*.parquet"))[1]


class TestWritten:
    def test_figures_are_read_back_as_measured(self, run: Path) -> None:
        table = read_table(run, "figures")
        assert table.schema == pl.Schema(FIGURE_SCHEMA)
        assert table["step"].unique().to_list() == [0, 10, 20]
        for step in (0, 10, 20):
            rows = table.filter(pl.col("step") == step).select(COLUMNS)
            assert rows.to_dict(as_series=False) == measured(step).columns

    def test_sketches_are_read_back_whole(self, run: Path) -> None:
        table = read_table(run, "sketches")
        assert table.schema == pl.Schema(SKETCH_SCHEMA)
        columns = table.filter(step=20).drop("attempt", "step").to_dict(as_series=False)
        assert columns == {
            name: [getattr(v, "tolist", lambda v=v: v)() for v in values] for name, values in measured(20).sketches.items()
        }
        counted = table.with_columns(n=pl.col("counts").list.sum())
        assert counted["n"].to_list() == 3 * [64 * 32, 8 * 32, 4]

    def test_a_figure_that_cannot_be_had_is_null(self, run: Path) -> None:
        zeros = read_table(run, "figures").filter(pl.col("role") == "grad_output")
        assert zeros["relative_error"].null_count() == zeros["cosine"].null_count() == len(zeros) == 3
        assert zeros["mse"].to_list() == [0, 0, 0]

    def test_losses_are_read_back(self, run: Path) -> None:
        table = read_table(run, "steps")
        assert table.schema == pl.Schema(STEP_SCHEMA)
        assert dict(zip(table["step"], table["loss"], strict=True)) == {s: 3.0 - s / 100 for s in range(30)}

    def test_any_parquet_reader_reads_it(self, run: Path) -> None:
        assert pl.read_parquet(run / "figures").equals(read_table(run, "figures"))

    def test_nothing_temporary_is_left(self, run: Path) -> None:
        assert {p.suffix for p in run.rglob("*") if p.is_file()} == {".json", ".parquet"}

    def test_the_fingerprint_is_read_back(self, run: Path) -> None:
        assert read_fingerprint(run) == {"schema_version": SCHEMA_VERSION, "attempt": 0, **FINGERPRINT}

    def test_a_nan_loss_stays_one(self, run: Path) -> None:
        start(run).record_steps({30: {"loss": float("nan")}})
        assert read_table(run, "steps").filter(pl.col("step") == 30)["loss"].is_nan().all()

    def test_a_record_without_samples_has_the_columns(self, tmp_path: Path) -> None:
        start(tmp_path)
        assert read_table(tmp_path, "figures").schema == pl.Schema(FIGURE_SCHEMA)
        assert read_table(tmp_path, "steps").is_empty()


class TestResumed:
    def test_nothing_is_overwritten(self, run: Path) -> None:
        before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
        again = start(run)
        again.record(measured(20))
        again.record_steps({20: {"loss": 1.0}})
        assert {p: p.read_bytes() for p in before} == before
        assert len(before) < len([p for p in run.rglob("*") if p.is_file()])

    def test_the_latest_attempt_counts_step_by_step(self, run: Path) -> None:
        again = start(run)
        again.record(sample(20, [{"layer": "resumed"}]))
        again.record(sample(30, [{"layer": "resumed"}]))
        table = read_table(run, "figures")
        found = table.group_by("step", maintain_order=True).agg(pl.col("attempt").unique(), pl.len())
        assert found.rows() == [(0, [0], 3), (10, [0], 3), (20, [1], 1), (30, [1], 1)]

    def test_losses_of_overlapping_steps_are_those_of_the_latest_attempt(self, run: Path) -> None:
        start(run).record_steps({25: {"loss": 1.0}, 26: {"loss": 2.0}})
        start(run).record_steps({26: {"loss": 7.0}})
        losses = read_table(run, "steps").filter(pl.col("step") >= 24)
        assert losses.select("attempt", "step", "loss").rows()[:3] == [(0, 24, 3.0 - 0.24), (1, 25, 1.0), (2, 26, 7.0)]

    def test_the_tenth_attempt_comes_after_the_ninth(self, tmp_path: Path) -> None:
        for attempt in range(11):
            start(tmp_path).record(sample(0, [{"layer": f"attempt {attempt}"}]))
        assert read_fingerprint(tmp_path)["attempt"] == 10
        assert read_table(tmp_path, "figures")["layer"].to_list() == ["attempt 10"]

    def test_an_attempt_is_safe_though_an_earlier_fingerprint_was_removed(self, tmp_path: Path) -> None:
        for attempt in range(2):
            start(tmp_path).record(sample(attempt, [{"layer": f"attempt {attempt}"}]))
        (tmp_path / "attempt-0.json").unlink()
        start(tmp_path).record(sample(1, [{"layer": "attempt 2"}]))
        assert read_fingerprint(tmp_path)["attempt"] == 2
        assert len(list((tmp_path / "figures").iterdir())) == 3


class TestFolder:
    @pytest.mark.parametrize("inside", [".", "below", "figures"])
    def test_a_file_in_the_way_is_a_config_error(self, tmp_path: Path, inside: str) -> None:
        folder = tmp_path / "run"
        if inside == "figures":
            folder.mkdir()
            (folder / "figures").write_text("in the way")
        else:
            folder.write_text("in the way")
        with pytest.raises(ConfigError, match=r"cannot be written to .*run"):
            start(folder / "below" if inside == "below" else folder)

    def test_missing_folders_above_are_made(self, tmp_path: Path) -> None:
        start(tmp_path / "a" / "b")
        assert find_run(tmp_path) == tmp_path / "a" / "b"

    def test_find_run_takes_the_folder_itself_or_one_above(self, run: Path) -> None:
        assert find_run(run) == find_run(run.parent) == find_run(str(run)) == run

    def test_find_run_refuses_what_holds_none(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(RecordError, match=re.escape(f"{path} holds no run record")):
                find_run(path)

    def test_find_run_refuses_several_and_names_them(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            start(tmp_path / name)
        with pytest.raises(RecordError, match=re.escape(f"2 run records; name one of {tmp_path / 'a'}, {tmp_path / 'b'}")):
            find_run(tmp_path)


#: in a process of its own, since a reader may not only raise but abort
READ_WITH_EACH_BYTE_FLIPPED = """
import contextlib, pathlib, sys
from nemo_fp8_debug.errors import RecordError
from nemo_fp8_debug.record.store import read_table

part = pathlib.Path(sys.argv[1])
content = part.read_bytes()
for place in map(int, sys.argv[2:]):
    print("byte", place, flush=True)
    part.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
    with contextlib.suppress(RecordError):
        read_table(part.parent.parent, "figures")
"""

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "last byte missing": lambda content: content[:-1],
    "middle zeroed": lambda content: content[:100] + bytes(len(content) - 200) + content[-100:],
    "footer length wrong": lambda content: content[:-8] + b"\xff\xff\xff\x7f" + content[-4:],
    "text": lambda content: b"step,layer\n0,a\n",
}


class TestDamaged:
    @pytest.mark.parametrize("damage", DAMAGE)
    @pytest.mark.parametrize("table", ["figures", "steps"])
    def test_a_damaged_part_is_named(self, run: Path, table: str, damage: str) -> None:
        part = a_part(run, table)
        part.write_bytes(DAMAGE[damage](part.read_bytes()))
        with pytest.raises(RecordError, match=re.escape(f"{part} cannot be read as a part of {table}: ") + "."):
            read_table(run, table)

    @pytest.mark.parametrize("where", ["pages", "footer"])
    def test_a_flipped_byte_gives_rows_or_a_record_error(self, run: Path, where: str) -> None:
        part = a_part(run)
        content = part.read_bytes()
        footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        places = range(4, footer, 17) if where == "pages" else range(footer, len(content), 17)
        arguments = [sys.executable, "-W", "ignore", "-c", READ_WITH_EACH_BYTE_FLIPPED, str(part), *map(str, places)]
        reader = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        assert reader.returncode == 0, reader.stdout + reader.stderr

    @pytest.mark.parametrize(
        "foreign",
        [
            pl.DataFrame({"a": [1]}),
            pl.DataFrame(schema={k: v for k, v in FIGURE_SCHEMA.items() if k != "mse"}),
            pl.DataFrame(schema=FIGURE_SCHEMA | {"mse": pl.String}),
            pl.DataFrame(schema=FIGURE_SCHEMA | {"step": pl.Float64}),
        ],
        ids=["other columns", "a column missing", "a figure as text", "steps as floats"],
    )
    def test_a_foreign_part_is_named(self, run: Path, foreign: pl.DataFrame) -> None:
        part = run / "figures" / "attempt-0-step-00000099.parquet"
        foreign.write_parquet(part)
        with pytest.raises(RecordError, match=re.escape(f"{part} cannot be read")):
            read_table(run, "figures")

    def test_a_part_left_unfinished_by_a_crash_is_ignored(self, run: Path) -> None:
        (run / "figures" / "attempt-0-step-00000030.part").write_bytes(b"PAR1 and then nothing")
        assert read_table(run, "figures")["step"].max() == 20

    @pytest.mark.parametrize("version", [None, 0, SCHEMA_VERSION + 1, "1"])
    def test_another_schema_version_is_refused(self, run: Path, version: object) -> None:
        path = run / "attempt-0.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": version}))
        message = f"{path} has schema version {version}; this release reads {SCHEMA_VERSION}"
        with pytest.raises(RecordError, match=re.escape(message)):
            read_fingerprint(run)

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe"], ids=str)
    def test_what_is_not_a_fingerprint_is_named(self, run: Path, content: bytes) -> None:
        (run / "attempt-0.json").write_bytes(content)
        with pytest.raises(RecordError, match=re.escape(f"{run / 'attempt-0.json'} ")):
            read_fingerprint(run)

    def test_a_file_that_only_looks_like_an_attempt_does_no_harm(self, run: Path) -> None:
        (run / "attempt-notes.json").write_text("{}")
        assert read_fingerprint(run)["attempt"] == 0
