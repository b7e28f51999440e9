"""Logs of other tools with damage of every kind, and what is refused."""

from __future__ import annotations

import math
import re
import shutil
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_logs import LOGS, SECOND_MONITOR, TE_EVENTS, TE_TEXT, line, table, text_log

from nemo_fp8_debug.errors import FP8DebugWarning, RecordError
from nemo_fp8_debug.record.imports import import_logs
from nemo_fp8_debug.record.reader import read_table_rows


def warned(source: Path, output: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import_logs(source, output)
    return [str(w.message) for w in caught if issubclass(w.category, FP8DebugWarning)]


class TestDamagedLogs:
    def test_a_text_log_that_breaks_off(self, tmp_path: Path) -> None:
        log = text_log(tmp_path / "logs", TE_TEXT.read_text()[:-3])
        lines = TE_TEXT.read_text().count("\n")
        (warning,) = warned(log, tmp_path / "run")
        assert f"{log}, line {lines}: the line is cut off" in warning
        assert len(read_table_rows(tmp_path / "run", "metrics")) == 36

    def test_foreign_lines_and_bytes(self, tmp_path: Path) -> None:
        log = tmp_path / "nvdlfw_inspect_globalrank-0.log"
        content = TE_TEXT.read_bytes().splitlines(keepends=True)
        content.insert(3, b"Traceback (most recent call last):\n")
        content.insert(7, b"\xff\xfe\x00 value=1.0\n")
        content.insert(9, line("fc_weight_cur_amax", "1e5").encode())
        log.write_bytes(b"".join(content))
        (warning,) = warned(log, tmp_path / "run")
        assert f"{log}, line 4, and 2 more lines: it is not a statistic; left out" in warning
        assert len(read_table_rows(tmp_path / "run", "metrics")) == 36

    @pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
    def test_values_that_are_no_numbers_are_absent(self, tmp_path: Path, value: str) -> None:
        log = text_log(tmp_path / "logs", line("fc_weight_cur_amax", value), line("fc_weight_dynamic_range", "3.0000"))
        (row,) = table(log, tmp_path / "run").iter_rows(named=True)
        assert (row["amax"], row["dynamic_range_log2"]) == (None, 3)

    def test_an_event_file_that_breaks_off(self, tmp_path: Path) -> None:
        events = tmp_path / TE_EVENTS.name
        events.write_bytes(TE_EVENTS.read_bytes()[: TE_EVENTS.stat().st_size // 2])
        (warning,) = warned(events, tmp_path / "run")
        assert f"{events} is damaged or cut off before byte" in warning
        assert 0 < len(read_table_rows(tmp_path / "run", "metrics")) < 36

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ("-1,0,fc.input.0,forw", "it has 4 columns, not 7"),
            ("-1,0,fc.input.0,forward,low,1.0,0", "could not convert"),
            ("-1,-3,fc.input.0,forward,0.0,1.0,0", "step -3"),
            (f"-1,{10**30},fc.input.0,forward,0.0,1.0,0", f"step {10**30}"),
            ("-1,0,fc.input.0,forward,0.0,1.0,1e300", "NaN count 1e[+]300 is out of range"),
            ("-1,0,\x00,forward,0.0,1.0,0", ""),
            ('"' + "x" * 200_000, "field larger|columns"),
        ],
    )
    def test_a_row_that_is_none(self, tmp_path: Path, row: str, reason: str) -> None:
        path = tmp_path / "rank_0" / "module_step0-9.csv"
        path.parent.mkdir()
        header, good = "vpp_stage,step,module_name,scope,min,max,nans", "-1,1,fc.input.0,forward,-2.0,1.0,0.0"
        path.write_text("\n".join([header, row, good, ""]))
        messages = warned(tmp_path, tmp_path / "run")
        assert read_table_rows(tmp_path / "run", "metrics")["step"].to_list() == [1]
        if reason:
            (message,) = messages
            assert f"{path}, line 2: " in message
            assert re.search(reason, message)

    def test_a_csv_that_breaks_off(self, tmp_path: Path) -> None:
        logs = tmp_path / "rank_0"
        shutil.copytree(SECOND_MONITOR / "rank_0", logs)
        path = logs / "module_step0-2.csv"
        path.write_bytes(path.read_bytes()[:-8])
        (warning,) = warned(logs, tmp_path / "run")
        assert f"{path}, line {path.read_text().count(chr(10)) + 1}: the line is cut off" in warning

    @settings(max_examples=60)
    @given(data=st.data())
    def test_any_damage_costs_no_more_than_what_it_hits(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        source = data.draw(st.sampled_from([TE_TEXT, TE_EVENTS, SECOND_MONITOR / "rank_0" / "module_step0-2.csv"]))
        content = bytearray(source.read_bytes())
        for _ in range(data.draw(st.integers(1, 5))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
        folder = tmp_path_factory.mktemp("damaged")
        (folder / source.name).write_bytes(bytes(content))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FP8DebugWarning)
            try:
                import_logs(folder / source.name, folder / "run")
            except RecordError as error:
                assert str(folder) in str(error)
            else:
                rows = read_table_rows(folder / "run", "metrics")
                assert len(rows) > 0
                assert all(v is None or math.isfinite(v) for metric in ("amax", "mse", "scale") for v in rows[metric])


class TestRefused:
    @pytest.mark.parametrize("content", [b"", b"\x00" * 1000, b"step,loss\n1,2.0\n", b"hello\n"])
    @pytest.mark.parametrize("name", ["a.log", "a.csv", "events.out.tfevents.1.a", "a.bin"])
    def test_nothing_that_can_be_read(self, tmp_path: Path, name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecordError, match="is not a log that can be imported, and contains no such log") as error:
            import_logs(tmp_path / name, tmp_path / "run")
        assert str(tmp_path / name) in str(error.value)
        assert "vpp_stage" in str(error.value)
        assert not (tmp_path / "run").exists()

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(RecordError, match="missing does not exist"):
            import_logs(tmp_path / "missing", tmp_path / "run")

    def test_logs_of_two_tools(self, tmp_path: Path) -> None:
        with pytest.raises(
            RecordError, match=r"contains logs of 2 tools: nvdlfw_inspect .*, msprobe .*; name a folder with logs of one"
        ):
            import_logs(LOGS, tmp_path / "run")

    def test_a_log_without_a_metric(self, tmp_path: Path) -> None:
        log = text_log(tmp_path / "logs", line("fc_output_std", "1.0000"))
        with pytest.raises(RecordError, match=r"no metric that can be imported .*output: not an operand of a GEMM \(1\)"):
            import_logs(log, tmp_path / "run")
