"""Compaction of a record: few files and every row, thinned only as asked for, and nothing lost when it is killed."""

from __future__ import annotations

import doctest
import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import fsspec
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from processes import run_script
from small_record import measured, start
from typer.testing import CliRunner

from nemo_fp8_debug import ConfigError, Monitor, RecordError, replay
from nemo_fp8_debug.analysis.replay.replay import write_replayed_rows
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.errors import FP8DebugWarning
from nemo_fp8_debug.record import merging
from nemo_fp8_debug.record.merging import compact_record
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.schema import SCHEMAS
from nemo_fp8_debug.record.storage import FolderStorage

SCRIPT = Path(__file__).with_name("killed_compaction.py")
STEPS = 12


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 11, of which 8 to 11 were trained by a second attempt too, in a part each; two recipes replayed."""
    run = tmp_path_factory.mktemp("made") / "run"
    for first, last in ((0, STEPS), (8, STEPS)):
        record = start(run)
        for step in range(first, last):
            record.record(measured(step))
            record.record_steps({step: {"loss": step + first / 100}})
        record.record_validation(last - 1, {"valid": 1.0 + first})
        record.close()
    for recipe in ("current-e4m3", "current-e5m2"):
        write_replayed_rows(run, replay(run, recipe))
    return run


@pytest.fixture
def resumed(made_once: Path, tmp_path: Path) -> Path:
    """A copy of that."""
    return Path(shutil.copytree(made_once, tmp_path / "run"))


def tables(run: Path) -> dict[str, pl.DataFrame]:
    keys = ["step", "layer", "role", "recipe"]
    found = {table: read_table_rows(run, table) for table in SCHEMAS}
    return {**found, "replayed": found["replayed"].sort(keys)}


def same(found: dict[str, pl.DataFrame], expected: dict[str, pl.DataFrame]) -> bool:
    return all(found[table].equals(expected[table], null_equal=True) for table in SCHEMAS)


def parts(run: Path, table: str) -> list[Path]:
    return sorted((run / table).iterdir())


def test_the_example_of_compact(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.parent / "runs").mkdir()
    run.rename(run.parent / "runs" / "a")
    monkeypatch.chdir(run.parent)
    assert doctest.testmod(merging) == (0, 2)


class TestMerged:
    def test_every_row_stays_in_one_file_a_table_and_attempt(self, resumed: Path) -> None:
        before = tables(resumed)
        assert len(parts(resumed, "metrics")) == 1 + 4  # the second start had merged what the first one left
        rows = {table: size.rows for table, size in compact_record(resumed, killed=True).before.items()}
        assert same(tables(resumed), before)
        for table in rows:
            assert len(parts(resumed, table)) == 2, table
        again = compact_record(resumed, killed=True)
        assert again.before == again.after and {t: s.rows for t, s in again.after.items()} == rows

    def test_a_step_is_still_read_alone(self, resumed: Path) -> None:
        compact_record(resumed, killed=True)
        (part, _) = parts(resumed, "histograms")
        assert pl.read_parquet(part)["step"].is_sorted()
        assert pl.scan_parquet(part).collect().height == 3 * STEPS
        assert pq.ParquetFile(part).num_row_groups == STEPS

    def test_parts_have_no_more_bytes_than_they_may(self, resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = tables(resumed)
        monkeypatch.setattr(merging, "LARGEST", 3 * parts(resumed, "histograms")[-1].stat().st_size)
        compact_record(resumed, killed=True)
        assert len(parts(resumed, "histograms")) > 2 and same(tables(resumed), before)

    def test_a_damaged_part_stays_where_it_is(self, resumed: Path) -> None:
        damaged = parts(resumed, "metrics")[-1]
        content = bytearray(damaged.read_bytes())
        content[100] ^= 1
        damaged.write_bytes(content)
        done = compact_record(resumed, killed=True)
        assert done.left == [f"metrics/{damaged.name}"] and damaged.read_bytes() == content
        assert len(parts(resumed, "metrics")) == 3

    def test_what_a_killed_merge_left_is_taken_once(self, resumed: Path) -> None:
        before, small = tables(resumed), {p: p.read_bytes() for t in SCHEMAS for p in (resumed / t).glob("*.parquet")}
        compact_record(resumed, killed=True)
        for path, content in small.items():
            path.write_bytes(content)
        compact_record(resumed, killed=True)
        assert same(tables(resumed), before)
        assert len(pl.read_parquet(parts(resumed, "metrics"))) == 3 * (STEPS + 4)

    def test_killed_at_any_moment_it_loses_nothing(self, resumed: Path) -> None:
        before, copies = tables(resumed), [resumed.with_name(f"copy {i}") for i in range(5)]
        for copy in copies:
            shutil.copytree(resumed, copy)
        largest = 2 * parts(resumed, "histograms")[-1].stat().st_size
        killed = int(run_script(str(SCRIPT), str(largest), *map(str, copies)))
        assert killed >= 2
        assert any(len(parts(copy, "metrics")) - 2 > 0 for copy in copies)
        for copy in copies:
            assert same(tables(copy), before)
            compact_record(copy, killed=True)
            assert same(tables(copy), before) and len(parts(copy, "metrics")) == 2

    def test_what_a_damaged_part_has_too_stays_in_another(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two processes that merged parts of one attempt left parts that have some steps both."""
        monkeypatch.setattr(merging, "LARGEST", 1)
        record = start(tmp_path)
        draws = random.Random(0)
        for first, last in ((0, 8000), (4000, 9000)):
            steps = range(first, last)
            columns = {"attempt": [0] * len(steps), "step": steps, "loss": [draws.random() for _ in steps]}
            record.write_part("steps", columns, first, last)
        record.close()
        wide = parts(tmp_path, "steps")[0]
        content, row_group = bytearray(wide.read_bytes()), pq.ParquetFile(wide).metadata.row_group(0)
        losses = next(c for c in map(row_group.column, range(row_group.num_columns)) if c.path_in_schema == "loss")
        content[losses.data_page_offset + losses.total_compressed_size // 2] ^= 1
        wide.write_bytes(content)
        with pytest.warns(FP8DebugWarning, match="is left out"):
            before = read_table_rows(tmp_path, "steps")
        compact_record(tmp_path, killed=True)
        with pytest.warns(FP8DebugWarning, match="is left out"):
            assert read_table_rows(tmp_path, "steps").equals(before) and len(before) == 5000


def monitored(run: Path, sample: bool) -> Monitor:
    """Of a run that goes on, whose first step is sampled if asked for, and all of that is recorded."""
    model = torch.nn.Linear(4, 4)
    monitor = Monitor(model, run, interval=1, table_rows=0)
    if sample:
        with monitor.step(0):
            model(torch.randn(2, 4)).sum().backward()
    monitor.flush()
    return monitor


class TestRefused:
    def test_while_the_run_goes_on(self, tmp_path: Path) -> None:
        monitor = monitored(tmp_path / "run", sample=True)
        files = sorted(tmp_path.rglob("*.parquet"))
        with pytest.raises(RecordError, match=r"goes on, according to its status\.json.*--killed"):
            compact_record(tmp_path / "run")
        assert sorted(tmp_path.rglob("*.parquet")) == files
        monitor.close()
        assert compact_record(tmp_path / "run").before["metrics"].rows == 3

    def test_once_the_run_goes_on_again(self, tmp_path: Path) -> None:
        monitored(tmp_path / "run", sample=True).close()
        resumed = monitored(tmp_path / "run", sample=False)
        with pytest.raises(RecordError, match="goes on"):
            compact_record(tmp_path / "run")
        resumed.close()
        assert compact_record(tmp_path / "run").before["metrics"].rows == 3

    def test_a_place_that_cannot_be_written(self, resumed: Path) -> None:
        Full.is_full = False
        merging.copy_record(resumed, "full://run")
        Full.is_full = True
        with pytest.raises(RecordError, match=r"/metrics/.*cannot be written: No space left on device; nothing was lost"):
            compact_record("full://run", killed=True)
        assert len(FolderStorage("full://run").list_names("metrics")) == 5


class Full(MemoryFileSystem):
    """A file system that has no room left, once told so."""

    protocol = "full"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    is_full = False

    def pipe_file(self, *arguments: Any, **options: Any) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().pipe_file(*arguments, **options)


fsspec.register_implementation("full", Full)


class TestThinned:
    def test_histograms_go_but_for_one_in_so_many_steps_and_those_that_are_named(self, tmp_path: Path) -> None:
        record = start(tmp_path)
        for step in range(0, 100, 10):
            record.record(measured(step))
        record.record_steps({30: {"loss": 1.0, "trigger": "loss spike"}})
        record.close()
        metrics = read_table_rows(tmp_path, "metrics")
        expected = read_table_rows(tmp_path, "histograms").filter(pl.col("step").is_in([0, 30, 50, 90]))
        compact_record(tmp_path, histograms_every=50, killed=True)
        assert read_table_rows(tmp_path, "histograms").equals(expected, null_equal=True)
        assert read_table_rows(tmp_path, "metrics").equals(metrics, null_equal=True)
        compact_record(tmp_path, histograms_every=1000, killed=True)
        assert read_table_rows(tmp_path, "histograms")["step"].unique().to_list() == [0, 30, 90]

    def test_samples_with_nan_keep_their_histograms(self, tmp_path: Path) -> None:
        record = start(tmp_path)
        for step in range(4):
            columns = dict(measured(step).operand_columns) | ({"nan": [1, 0, 0]} if step == 2 else {})
            record.record(Sample(step, {"metrics": columns, "histograms": measured(step).get_table("histograms")}, {}))
        compact_record(tmp_path, histograms_every=10, killed=True)
        assert read_table_rows(tmp_path, "histograms")["step"].unique().to_list() == [0, 2, 3]

    @pytest.mark.parametrize("seed", range(4))
    def test_killed_before_old_parts_are_removed(self, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The new part has the range of the old one then, and comes before or behind it by its checksum alone."""
        record = start(tmp_path)
        for step in range(6):
            record.record(measured(100 * seed + step))
        record.close()
        compact_record(tmp_path, killed=True)
        expected = read_table_rows(tmp_path, "histograms")
        with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
            killed.setattr(FolderStorage, "delete_file", Mock(side_effect=KeyboardInterrupt))
            compact_record(tmp_path, histograms_every=1000, killed=True)
        assert len(parts(tmp_path, "histograms")) == 2
        compact_record(tmp_path, histograms_every=1000, killed=True)
        kept = expected.filter(pl.col("step").is_in([100 * seed, 100 * seed + 5]))
        assert read_table_rows(tmp_path, "histograms").equals(kept, null_equal=True)

    def test_an_interval_below_one(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="histograms_every is 0; it must be a whole number"):
            compact_record(tmp_path, histograms_every=0)


class TestCommand:
    def test_a_copy_is_compacted_and_the_record_stays(self, resumed: Path, tmp_path: Path) -> None:
        before = {path: path.read_bytes() for path in resumed.rglob("*") if path.is_file()}
        command = ["compact", str(resumed), "--output", str(tmp_path / "new" / "place"), "--killed", "--json"]
        done = CliRunner().invoke(app, command)
        told = json.loads(done.stdout)
        assert told["before"]["metrics"]["files"] == 5 and told["after"]["metrics"]["files"] == 2
        assert told["before"]["metrics"]["rows"] == told["after"]["metrics"]["rows"]
        assert {path: path.read_bytes() for path in resumed.rglob("*") if path.is_file()} == before
        assert same(tables(tmp_path / "new" / "place"), tables(resumed))
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 1 and "is not empty; name a new folder" in done.stderr

    def test_what_is_printed(self, resumed: Path) -> None:
        refused = CliRunner().invoke(app, ["compact", str(resumed)])
        assert refused.exit_code == 1 and "error: the run at" in refused.stderr
        done = CliRunner().invoke(app, ["compact", str(resumed), "--killed"])
        assert done.exit_code == 0 and "files before" in done.stdout and "metrics" in done.stdout
