"""The run record with damage of every kind, and on a disk that goes away or is full."""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from processes import finished
from samples import sample
from small_record import measured, start

from nemo_fp8_debug.errors import FP8DebugWarning, RecordError
from nemo_fp8_debug.record import merging, parquet, writer
from nemo_fp8_debug.record.reader import read_fingerprint, read_table_rows
from nemo_fp8_debug.record.schema import SCHEMAS, VERSION, Part


def a_part(run: Path, table: str = "metrics") -> Path:
    return sorted((run / table).glob("*.parquet"))[1]


#: in a process of its own, since a reader may not only raise but abort; prints the bytes whose change went unseen
READ_WITH_EACH_BYTE_FLIPPED = """
import pathlib, sys, warnings
from nemo_fp8_debug.errors import FP8DebugWarning
from nemo_fp8_debug.record.reader import read_table_rows

part = pathlib.Path(sys.argv[1])
content = part.read_bytes()
warnings.simplefilter("always")
for place in map(int, sys.argv[2:]):
    part.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
    with warnings.catch_warnings(record=True) as seen:
        read_table_rows(part.parent.parent, "metrics")
    if not any(str(part) in str(warning.message) for warning in seen):
        print(place, end=" ", flush=True)
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
    @pytest.mark.parametrize("table", ["metrics", "steps", "histograms"])
    def test_a_damaged_part_is_named_and_all_else_is_read(self, run: Path, table: str, damage: str) -> None:
        whole, part = read_table_rows(run, table), a_part(run, table)
        lost = pl.read_parquet(part)["step"].unique()
        part.write_bytes(DAMAGE[damage](part.read_bytes()))
        with pytest.warns(
            FP8DebugWarning, match=re.escape(f"{part} is left out, because it cannot be read as a part of {table}: ") + "."
        ):
            left = read_table_rows(run, table)
        assert left.equals(whole.filter(~pl.col("step").is_in(lost.implode())))
        assert not left.is_empty()

    def test_many_damaged_parts_are_one_warning_with_their_number(self, run: Path) -> None:
        parts = list((run / "metrics").iterdir())
        for part in parts:
            part.write_bytes(b"nothing")
        with pytest.warns(FP8DebugWarning) as told:
            assert read_table_rows(run, "metrics").is_empty()
        assert [f"{len(parts) - 1} other parts" in str(warning.message) for warning in told] == [True]

    @pytest.mark.parametrize("where", ["pages", "footer"])
    def test_a_flipped_byte_is_seen(self, run: Path, where: str) -> None:
        part = a_part(run)
        content = part.read_bytes()
        footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        places = range(4, footer, 17) if where == "pages" else range(footer, len(content), 17)
        arguments = [sys.executable, "-W", "ignore", "-c", READ_WITH_EACH_BYTE_FLIPPED, str(part), *map(str, places)]
        reader = finished(*arguments)
        assert (reader.returncode, reader.stdout) == (0, ""), reader.stderr

    @pytest.mark.parametrize(
        "foreign",
        [
            pl.DataFrame({"a": [1]}),
            pl.DataFrame(schema={k: v for k, v in SCHEMAS["metrics"].items() if k != "mse"}),
            pl.DataFrame(schema=SCHEMAS["metrics"] | {"mse": pl.String}),
            pl.DataFrame(schema=SCHEMAS["metrics"] | {"step": pl.Float64}),
        ],
        ids=["other columns", "a column missing", "a metric as text", "steps as floats"],
    )
    def test_a_foreign_part_is_named(self, run: Path, foreign: pl.DataFrame) -> None:
        before = read_table_rows(run, "metrics")
        part = run / "metrics" / "attempt-0-step-00000099-00000000.parquet"
        foreign.write_parquet(part)
        with pytest.warns(FP8DebugWarning, match=re.escape(f"{part} is left out")):
            assert read_table_rows(run, "metrics").equals(before)

    def test_a_part_of_another_table_is_named(self, run: Path) -> None:
        part = a_part(run, "steps").rename(run / "metrics" / a_part(run, "steps").name)
        with pytest.warns(FP8DebugWarning, match=re.escape(f"{part} is left out")):
            assert len(read_table_rows(run, "metrics")) == 9

    def test_a_part_of_another_attempt_hides_no_row(self, run: Path) -> None:
        before = read_table_rows(run, "metrics")
        part = a_part(run)
        copy = part.with_name(part.name.replace("attempt-0", "attempt-7"))
        copy.write_bytes(part.read_bytes())
        with pytest.warns(FP8DebugWarning, match=re.escape(f"{copy} is left out") + ".*attempt"):
            assert read_table_rows(run, "metrics").equals(before)

    def test_a_number_that_no_attempt_can_have_is_none(self, run: Path) -> None:
        before = read_table_rows(run, "metrics")
        (run / "attempt-99999999999.json").write_text("{}")
        part = a_part(run)
        copy = part.with_name(part.name.replace("attempt-0", "attempt-99999999999"))
        copy.write_bytes(part.read_bytes())
        with pytest.warns(FP8DebugWarning, match=re.escape(f"{copy} is skipped")):
            assert read_table_rows(run, "metrics").equals(before)
        start(run)
        assert read_fingerprint(run)["attempt"] == 1

    def test_rows_that_two_merged_parts_hold_are_read_once(self, tmp_path: Path) -> None:
        """As two processes leave them that tidy up at the same time."""
        record = start(tmp_path)
        for step in range(2 * merging.MERGED):
            record.record(sample(step, [{"layer": "l"}]))
        rows = read_table_rows(tmp_path, "metrics")
        writer.add_rows_to_table(record.storage, "metrics", rows[merging.MERGED // 2 : 3 * merging.MERGED // 2])
        assert len(list((tmp_path / "metrics").iterdir())) == 3
        assert read_table_rows(tmp_path, "metrics").equals(rows)

    def test_a_file_of_another_name_is_named(self, run: Path) -> None:
        (run / "metrics" / "notes.txt").write_text("mine")
        with pytest.warns(FP8DebugWarning, match=re.escape(f"{run}/metrics/notes.txt is skipped")):
            assert len(read_table_rows(run, "metrics")) == 9

    def test_a_part_left_unfinished_by_a_crash_is_ignored(self, run: Path) -> None:
        (run / "metrics" / "attempt-0-step-00000030.part").write_bytes(b"PAR1 and then nothing")
        assert read_table_rows(run, "metrics")["step"].max() == 20

    def test_a_record_of_version_2_is_read_and_gone_on_with(self, run: Path) -> None:
        """Its parts lack what has come since; here they are written again without that, as version 2 wrote them."""
        added = {"metrics": {"unscaled_amax", "unscaled_amin", "unscaled_mse"}, "steps": {"grad_scale"}}
        before = {table: read_table_rows(run, table) for table in added}
        for table, names in added.items():
            for path in sorted((run / table).glob("*.parquet")):
                content, checksum = parquet.encode_parquet(pq.read_table(path).drop_columns(sorted(names)))
                part = Part.parse_part_name(path.parent.name, path.name)
                assert part and not part.merged
                path.unlink()
                (run / Part.make_part_name(table, part.attempt, part.first, None, checksum).path).write_bytes(content)
        path = run / "attempt-0.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
        assert read_fingerprint(run)["schema_version"] == 2
        for table in added:
            assert read_table_rows(run, table).equals(before[table])
        resumed = start(run)
        resumed.record(measured(30))  # merges what the first attempt left
        resumed.close()
        assert len(list((run / "metrics").glob("attempt-0-steps-*.parquet"))) == 1
        metrics = read_table_rows(run, "metrics")
        assert metrics.filter(pl.col("step") < 30).equals(before["metrics"]) and metrics["step"].max() == 30

    @pytest.mark.parametrize("version", [None, 0, VERSION + 1, "1"])
    def test_another_schema_version_is_refused(self, run: Path, version: object) -> None:
        path = run / "attempt-0.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": version}))
        message = f"{path} has schema version {version}; this release reads 2, 3, 4"
        with pytest.raises(RecordError, match=re.escape(message)):
            read_fingerprint(run)

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000], ids=lambda content: str(content[:9])
    )
    def test_what_is_not_a_fingerprint_is_named(self, run: Path, content: bytes) -> None:
        (run / "attempt-0.json").write_bytes(content)
        start(run)
        assert read_fingerprint(run)["attempt"] == 1
        (run / "attempt-1.json").write_bytes(content)
        with pytest.warns(FP8DebugWarning, match=re.escape(f"{run / 'attempt-1.json'} is not a fingerprint")):
            assert read_fingerprint(run) == {}

    def test_a_file_that_only_looks_like_an_attempt_does_no_harm(self, run: Path) -> None:
        (run / "attempt-notes.json").write_text("{}")
        assert read_fingerprint(run)["attempt"] == 0


class TestUnwritable:
    """The place of the record goes away in mid-run and comes back."""

    def test_nothing_is_lost_and_one_warning_says_so(self, run: Path) -> None:
        record = start(run)
        away = run.rename(run.with_name("away"))
        run.write_text("no folder")
        with pytest.warns(FP8DebugWarning) as caught:
            for step in (30, 40, 50):
                record.record(measured(step))
                record.record_steps({step: {"loss": 1.0}})
        assert len(caught) == 1
        assert f"the record at {run} cannot be written (NotADirectoryError" in str(caught[0].message)
        run.unlink()
        away.rename(run)
        record.record(measured(60))
        for table in ("metrics", "histograms"):
            assert read_table_rows(run, table)["step"].unique().to_list() == [0, 10, 20, 30, 40, 50, 60]
        assert {30, 40, 50} <= set(read_table_rows(run, "steps")["step"])

    def test_what_does_not_fit_into_the_backlog_is_counted(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writer, "BACKLOG", 40_000)
        record = start(run)
        away = run.rename(run.with_name("away"))
        run.write_text("no folder")
        with pytest.warns(FP8DebugWarning, match="cannot be written"):
            for step in range(30, 60):
                record.record(measured(step))
        run.unlink()
        away.rename(run)
        with pytest.warns(FP8DebugWarning, match=r"(\d+) parts of the record were lost") as caught:
            record.close()
        tables = ("metrics", "histograms")
        metrics, histograms = (read_table_rows(run, table, where={"attempt": 1})["step"].n_unique() for table in tables)
        lost = int(re.search(r"(\d+) parts", str(caught[0].message))[1])
        assert (metrics + histograms + lost, lost > 0) == (60, True)
        assert metrics >= histograms  # histograms go first

    def test_a_full_disk(self, run: Path) -> None:
        """A limit on file size stands for the full disk: the kernel refuses the write in the same way."""
        record = start(run)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
            with pytest.warns(FP8DebugWarning, match=r"cannot be written \(OSError: .*File too large"):
                record.record(measured(30))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not list(run.rglob("*.part"))  # what was begun is removed: a full disk needs the space
        record.close()
        assert 30 in read_table_rows(run, "metrics")["step"] and 30 in read_table_rows(run, "histograms")["step"]
