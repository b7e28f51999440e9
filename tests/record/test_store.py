"""The run record on a real disk: written, read back, resumed, merged, and where it can lie."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import COLUMNS, FINGERPRINT, measured_sample, sample
from small_record import measured, start

from nemo_fp8_debug.errors import ConfigError, FP8DebugWarning, RecordError
from nemo_fp8_debug.record import merging, parquet
from nemo_fp8_debug.record.reader import find_record, read_fingerprint, read_table_rows
from nemo_fp8_debug.record.schema import SCHEMAS, VERSION, Part
from nemo_fp8_debug.record.writer import RunRecordWriter


class TestWritten:
    def test_metrics_are_read_back_as_measured(self, run: Path) -> None:
        table = read_table_rows(run, "metrics")
        assert table.schema == pl.Schema(SCHEMAS["metrics"])
        assert table["step"].unique().to_list() == [0, 10, 20]
        for step in (0, 10, 20):
            rows = table.filter(pl.col("step") == step).select(COLUMNS)
            assert rows.to_dict(as_series=False) == measured(step).operand_columns

    def test_histograms_are_read_back_whole(self, run: Path) -> None:
        table = read_table_rows(run, "histograms")
        assert table.schema == pl.Schema(SCHEMAS["histograms"])
        columns = table.filter(step=20).drop("attempt", "step").to_dict(as_series=False)
        recorded = measured(20).get_table("histograms")
        assert columns == {
            name: [getattr(v, "tolist", lambda v=v: v)() for v in values] for name, values in recorded.items()
        }
        counted = table.with_columns(n=pl.col("counts").list.sum())
        assert counted["n"].to_list() == 3 * [64 * 32, 8 * 32, 4]

    def test_a_metric_that_cannot_be_had_is_null(self, run: Path) -> None:
        zeros = read_table_rows(run, "metrics").filter(pl.col("role") == "grad_output")
        assert zeros["relative_error"].null_count() == zeros["cosine"].null_count() == len(zeros) == 3
        assert zeros["mse"].to_list() == [0, 0, 0]

    def test_losses_are_read_back(self, run: Path) -> None:
        table = read_table_rows(run, "steps")
        assert table.schema == pl.Schema(SCHEMAS["steps"])
        assert dict(zip(table["step"], table["loss"], strict=True)) == {s: 3.0 - s / 100 for s in range(30)}

    def test_any_parquet_reader_reads_it(self, run: Path) -> None:
        assert pl.read_parquet(run / "metrics").equals(read_table_rows(run, "metrics"))

    def test_nothing_temporary_is_left(self, run: Path) -> None:
        assert {p.suffix for p in run.rglob("*") if p.is_file()} == {".json", ".parquet"}

    def test_the_fingerprint_is_read_back(self, run: Path) -> None:
        assert read_fingerprint(run) == {"schema_version": VERSION, "attempt": 0, **FINGERPRINT}

    def test_a_nan_loss_stays_one(self, run: Path) -> None:
        start(run).record_steps({30: {"loss": float("nan")}})
        assert read_table_rows(run, "steps").filter(pl.col("step") == 30)["loss"].is_nan().all()

    def test_a_record_without_samples_has_the_columns(self, tmp_path: Path) -> None:
        start(tmp_path)
        assert read_table_rows(tmp_path, "metrics").schema == pl.Schema(SCHEMAS["metrics"])
        assert read_table_rows(tmp_path, "steps").is_empty()


class TestResumed:
    def test_no_row_is_overwritten(self, run: Path) -> None:
        def rows(table: str) -> list[object]:
            return pl.concat(pl.read_parquet(p) for p in sorted((run / table).glob("*.parquet"))).rows()

        before = {table: rows(table) for table in ("metrics", "histograms", "steps")}
        again = start(run)
        again.record(measured(20))
        again.record_steps({20: {"loss": 1.0}})
        for table in before:
            assert all(row in rows(table) for row in before[table])
            assert len(rows(table)) > len(before[table])

    def test_the_latest_attempt_counts_step_by_step(self, run: Path) -> None:
        again = start(run)
        again.record(sample(20, [{"layer": "resumed"}]))
        again.record(sample(30, [{"layer": "resumed"}]))
        table = read_table_rows(run, "metrics")
        found = table.group_by("step", maintain_order=True).agg(pl.col("attempt").unique(), pl.len())
        assert found.rows() == [(0, [0], 3), (10, [0], 3), (20, [1], 1), (30, [1], 1)]

    def test_losses_of_overlapping_steps_are_those_of_the_latest_attempt(self, run: Path) -> None:
        start(run).record_steps({25: {"loss": 1.0}, 26: {"loss": 2.0}})
        start(run).record_steps({26: {"loss": 7.0}})
        losses = read_table_rows(run, "steps").filter(pl.col("step") >= 24)
        assert losses.select("attempt", "step", "loss").rows()[:3] == [(0, 24, 3.0 - 0.24), (1, 25, 1.0), (2, 26, 7.0)]

    def test_the_tenth_attempt_comes_after_the_ninth(self, tmp_path: Path) -> None:
        for attempt in range(11):
            start(tmp_path).record(sample(0, [{"layer": f"attempt {attempt}"}]))
        assert read_fingerprint(tmp_path)["attempt"] == 10
        assert read_table_rows(tmp_path, "metrics")["layer"].to_list() == ["attempt 10"]

    def test_an_attempt_is_safe_though_an_earlier_fingerprint_was_removed(self, tmp_path: Path) -> None:
        for attempt in range(2):
            start(tmp_path).record(sample(attempt, [{"layer": f"attempt {attempt}"}]))
        (tmp_path / "attempt-0.json").unlink()
        start(tmp_path).record(sample(1, [{"layer": "attempt 2"}]))
        assert read_fingerprint(tmp_path)["attempt"] == 2
        assert read_table_rows(tmp_path, "metrics")["layer"].to_list() == ["attempt 0", "attempt 2"]


class TestFolder:
    @pytest.mark.parametrize("inside", [".", "below", "metrics"])
    def test_a_file_in_the_way_is_a_config_error(self, tmp_path: Path, inside: str) -> None:
        folder = tmp_path / "run"
        if inside == "metrics":
            folder.mkdir()
            (folder / "metrics").write_text("in the way")
        else:
            folder.write_text("in the way")
        with pytest.raises(ConfigError, match=r"cannot be written to .*run"):
            start(folder / "below" if inside == "below" else folder)

    def test_missing_folders_above_are_made(self, tmp_path: Path) -> None:
        start(tmp_path / "a" / "b")
        assert Path(find_record(tmp_path)) == tmp_path / "a" / "b"

    def test_find_run_takes_the_folder_itself_or_one_above(self, run: Path) -> None:
        assert find_record(run) == find_record(run.parent) == find_record(str(run))
        assert str(find_record(run)) == str(run)

    @pytest.mark.parametrize("name", ["a b", "ünï✓", "a#b%20", "a[1]", "[", "a*", "**", "a?", "{a}", "a::b", "~a", "a\nb"])
    def test_any_name(self, tmp_path: Path, name: str) -> None:
        start(tmp_path / name).record(measured(0))
        assert [p.name for p in tmp_path.iterdir()] == [name]
        for above in (tmp_path, tmp_path / name):
            assert str(find_record(above)) == str(tmp_path / name)
        assert len(read_table_rows(find_record(tmp_path), "metrics")) == 3

    def test_find_run_takes_a_record_that_has_another_below(self, run: Path) -> None:
        start(run / "again")
        assert str(find_record(run)) == str(run) and str(find_record(run / "again")) == str(run / "again")
        with pytest.raises(RecordError, match="2 run records"):
            find_record(run.parent)
        with pytest.raises(RecordError, match="holds no run record"):
            find_record(run / "attempt-0.json")

    def test_find_run_refuses_what_holds_none(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(RecordError, match=re.escape(f"{path} holds no run record")):
                find_record(path)

    def test_find_run_refuses_several_and_names_them(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            start(tmp_path / name)
        with pytest.raises(RecordError, match=re.escape(f"2 run records; name one of {tmp_path / 'a'}, {tmp_path / 'b'}")):
            find_record(tmp_path)


class TestMerged:
    @pytest.fixture
    def long(self, tmp_path: Path) -> Path:
        """A record of 2.5 times as many samples as are merged into one part."""
        record = start(tmp_path)
        for step in range(5 * merging.MERGED // 2):
            record.record(sample(step, [{"layer": f"l{i}", "mse": step + i / 4} for i in range(3)]))
            record.record_steps({step: {"loss": float(step)}})
        return tmp_path

    def test_there_are_few_parts_and_all_rows(self, long: Path) -> None:
        assert len(list((long / "metrics").iterdir())) == len(list((long / "steps").iterdir())) == 2 + merging.MERGED // 2
        n = 5 * merging.MERGED // 2
        metrics = read_table_rows(long, "metrics")
        assert metrics["step"].to_list() == [step for step in range(n) for _ in range(3)]
        assert metrics["mse"].to_list() == [step + i / 4 for step in range(n) for i in range(3)]
        assert read_table_rows(long, "steps")["loss"].to_list() == [float(step) for step in range(n)]

    def test_parts_of_the_table_are_read(self, long: Path) -> None:
        whole = read_table_rows(long, "metrics")
        for where in (
            {"step": 3},
            {"step": 2 * merging.MERGED + 1},
            {"layer": "l1"},
            {"layer": "l2", "step": 70},
            {"step": 10**6},
        ):
            expected = whole.filter(**where)
            assert read_table_rows(long, "metrics", where=where).equals(expected)
            assert read_table_rows(long, "metrics", ["mse", "step"], where).equals(expected.select("mse", "step"))

    @pytest.fixture
    def longest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A record of 200 samples whose parts are merged three times over, histograms included."""
        monkeypatch.setattr(merging, "MERGED", 4)
        record = start(tmp_path)
        for step in range(200):
            x = torch.full((4, 4), 1.0 + step)
            record.record(measured_sample(step, {("l0", "input"): x, ("l1", "weight"): 2 * x}))
        return tmp_path

    def test_parts_of_parts_are_merged_and_so_are_histograms(self, longest: Path) -> None:
        for table in ("metrics", "histograms"):
            assert len(list((longest / table).iterdir())) == 3 + 0 + 2 + 0  # 3 of 64, none of 16, 2 of 4
            rows = read_table_rows(longest, table)
            assert rows["step"].to_list() == [step for step in range(200) for _ in range(2)]
        assert read_table_rows(longest, "metrics")["amax"].to_list() == [(1.0 + i // 2) * (1 + i % 2) for i in range(400)]

    def test_a_step_of_a_merged_part_is_read_alone(self, longest: Path) -> None:
        whole = read_table_rows(longest, "histograms")
        part = next(
            p
            for part in (longest / "histograms").iterdir()
            if (p := Part.parse_part_name("histograms", part.name)) and p.first == 0
        )
        with (longest / part.path).open("rb") as file:
            rows = parquet.OpenPartFile(file, part.checksum)
            assert rows.count == 128
            assert rows.read_wanted_row_groups(["step"], rows.find_row_groups(17))[0]["step"].to_pylist() == [17, 17]
            picked = rows.read_few_rows(["step", "layer"], [34, 35, 127], 10).to_pylist()
        assert picked == [{"step": 17, "layer": "l0"}, {"step": 17, "layer": "l1"}, {"step": 63, "layer": "l1"}]
        assert read_table_rows(longest, "histograms", where={"step": 17}).equals(whole.filter(step=17))

    def test_large_parts_are_merged_no_more(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        record, values = start(tmp_path), np.random.default_rng(0).random((30, 1000))
        for step in range(30):
            if step == 1:
                size = next((tmp_path / "metrics").iterdir()).stat().st_size
                monkeypatch.setattr(merging, "LARGEST", 3 * size)
            record.record(sample(step, [{"layer": f"l{i}", "mse": values[step, i]} for i in range(1000)]))
        sizes = sorted(part.stat().st_size for part in (tmp_path / "metrics").iterdir())
        assert len(sizes) >= 30 // 4 and sizes[0] >= size and sizes[-1] <= 2 * 3 * size
        assert read_table_rows(tmp_path, "metrics")["step"].unique().to_list() == list(range(30))

    def test_a_sample_with_values_that_no_run_writes_costs_no_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(merging, "MERGED", 4)
        record = start(tmp_path)
        for step in range(16):
            record.record(sample(step, [{"layer": "l", "cosine": 7.0 if step == 5 else 1.0}]))
        with pytest.warns(FP8DebugWarning, match="cosine is not between"):
            assert read_table_rows(tmp_path, "metrics")["step"].to_list() == [step for step in range(16) if step != 5]

    def test_a_merge_of_merged_parts_cut_short_doubles_no_row(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(merging, "MERGED", 4)
        record = start(tmp_path)
        for step in range(15):
            record.record(sample(step, [{"layer": "l"}]))
        before = {p: p.read_bytes() for p in (tmp_path / "metrics").iterdir()}
        record.record(sample(15, [{"layer": "l"}]))
        for part, content in before.items():
            part.write_bytes(content)
        assert read_table_rows(tmp_path, "metrics")["step"].to_list() == list(range(16))
        start(tmp_path).record(sample(10**6, [{"layer": "l"}]))
        assert len(list((tmp_path / "metrics").iterdir())) == 2
        assert read_table_rows(tmp_path, "metrics")["step"].to_list() == [*range(16), 10**6]

    def test_a_merge_cut_short_doubles_no_row(self, tmp_path: Path) -> None:
        record = start(tmp_path)
        for step in range(merging.MERGED - 1):
            record.record(sample(step, [{"layer": "l"}]))
        small = {p: p.read_bytes() for p in (tmp_path / "metrics").iterdir()}
        record.record(sample(merging.MERGED - 1, [{"layer": "l"}]))
        whole = read_table_rows(tmp_path, "metrics")
        for part in list(small)[10:]:  # the process was killed while it removed them
            part.write_bytes(small[part])
        assert read_table_rows(tmp_path, "metrics").equals(whole)
        start(tmp_path).record(sample(10**6, [{"layer": "l"}]))  # another attempt tidies up
        assert len(pl.read_parquet(tmp_path / "metrics")) == len(whole) + 1
        assert read_table_rows(tmp_path, "metrics")[:-1].equals(whole)

    def test_a_damaged_part_stays_where_it_is_and_is_named(self, tmp_path: Path) -> None:
        record = start(tmp_path)
        for step in range(merging.MERGED):
            if step == merging.MERGED - 1:
                part = next((tmp_path / "metrics").glob("*-00000007-*"))
                part.write_bytes(part.read_bytes()[:-1])
            record.record(sample(step, [{"layer": "l"}]))
        assert len(list((tmp_path / "metrics").iterdir())) == 2
        with pytest.warns(FP8DebugWarning, match=re.escape(f"{part} is left out")):
            steps = read_table_rows(tmp_path, "metrics")["step"].to_list()
        assert steps == [step for step in range(merging.MERGED) if step != 7]

    def test_a_resumed_run_merges_what_earlier_attempts_left(self, tmp_path: Path) -> None:
        for attempt in range(3):
            record = start(tmp_path)
            for step in range(10 * attempt, 10 * attempt + 20):
                record.record(sample(step, [{"layer": f"attempt {attempt}"}]))
        assert len(list((tmp_path / "metrics").iterdir())) == 2 + 20
        by_step = read_table_rows(tmp_path, "metrics").select("step", "attempt").rows()
        assert by_step == [(step, min(2, step // 10)) for step in range(40)]

    @settings(max_examples=30)
    @given(st.data())
    def test_no_single_bit_of_a_part_can_change_unseen(self, data: st.DataObject) -> None:
        rows = parquet.pa.table({"a": list(range(3000)), "b": [f"layer {i % 7}" for i in range(3000)]})
        content, checksum = parquet.encode_parquet(rows)
        assert parquet.OpenPartFile(io.BytesIO(content), checksum).read_wanted_row_groups()[0].cast(rows.schema).equals(rows)
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((ValueError, OSError)):
            parquet.OpenPartFile(io.BytesIO(bytes(damaged)), checksum).read_wanted_row_groups()


@pytest.mark.parametrize("address", ["memory://bucket/deep/run", "file://{tmp}/run"])
def test_any_fsspec_address(tmp_path: Path, address: str) -> None:
    address = address.format(tmp=tmp_path)
    for attempt in range(2):
        record = RunRecordWriter(address)
        record.open(FINGERPRINT)
        for step in range(merging.MERGED + 1):
            record.record(sample(step, [{"layer": f"attempt {attempt}"}]))
        record.close()
    run = find_record(address.removesuffix("/run"))
    assert read_fingerprint(run)["attempt"] == 1
    assert read_table_rows(run, "metrics")["layer"].to_list() == ["attempt 1"] * (merging.MERGED + 1)
    assert len(run.list_names("metrics")) == 3


@pytest.mark.parametrize("address", ["nowhere://a/b", "gs://bucket/run"])
def test_an_address_without_driver_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"{address} is not an address that can be written to: "):
        RunRecordWriter(address)
    with pytest.raises(RecordError, match=f"{address} is not an address"):
        find_record(address)
