"""`control` on the command line: what it writes and shows, and what it refuses to write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from controlled_runs import run, sampled
from typer.testing import CliRunner, Result

from nemo_fp8_debug.cli import app
from nemo_fp8_debug.record.dump import dumped_files
from nemo_fp8_debug.record.storage import FolderStorage


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Path]:
    """The record of a run that was killed after it had sampled steps 0 and 10: it never said that it ended."""
    run(tmp_path / "run", {}, steps=11)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    del status["ended"]
    (tmp_path / "run" / "status.json").write_text(json.dumps(status))
    yield tmp_path


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["control", *map(str, arguments)])


class TestCommandLine:
    def test_it_writes_what_the_run_applies(self, recorded: Path) -> None:
        result = cli(recorded, "--dump", "0", "--steps", 2, "--interval", 20, "--what-if", "current-e4m3")
        assert result.exit_code == 0, result.output
        assert f"We wrote {recorded}/run/control.yaml." in result.output
        assert not run(recorded / "run", {}, start=15, steps=45)
        assert {step for _, step, _, _ in dumped_files(FolderStorage(recorded / "run"))} == {20, 21}
        assert sampled(recorded / "run", attempt=1) == [20, 21, 40]

    def test_without_options_it_shows_what_became_of_it(self, recorded: Path) -> None:
        cli(recorded, "--dump", "0", "--steps", 2)
        run(recorded / "run", {}, start=15, steps=25)
        shown = cli(recorded).output
        assert "at step 21" in shown and "dump:" in shown and "6 tensors" in shown

    def test_reset(self, recorded: Path) -> None:
        cli(recorded, "--interval", 3)
        assert cli(recorded, "--reset").exit_code == 0
        run(recorded / "run", {}, start=15, steps=45)
        assert sampled(recorded / "run", attempt=1) == [20, 30, 40]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--interval", "-1"], "interval is -1"),
            (["--what-if", "fp7"], "unknown recipe 'fp7'"),
            (["--steps", "0"], "steps in control.yaml is 0"),
            (["--roles", "dY"], "unknown roles"),
            (["--layers", "re:("], "takes globs only"),
        ],
    )
    def test_bad_options_are_refused_and_nothing_is_written(
        self, recorded: Path, arguments: list[str], message: str
    ) -> None:
        result = cli(recorded, *arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ") and message in result.stderr and result.stderr.count("\n") == 1
        assert not (recorded / "run" / "control.yaml").exists()

    def test_a_run_that_has_ended_is_named_and_nothing_is_written(self, tmp_path: Path) -> None:
        run(tmp_path, {}, steps=31)
        for arguments in (["--interval", 3], ["--reset"]):
            result = cli(tmp_path, *arguments)
            assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
            assert f"error: the run in {tmp_path} ended on 20" in result.stderr and "at step 30" in result.stderr
        assert not (tmp_path / "control.yaml").exists()
        assert "ended" in cli(tmp_path).stdout

    def test_a_run_that_is_started_again_in_the_folder_can_be_told(self, tmp_path: Path) -> None:
        run(tmp_path, {}, steps=31)
        run(tmp_path, {}, start=31, steps=35, close=False)  # before its first sample
        result = cli(tmp_path, "--interval", 3)
        assert result.exit_code == 0 and "its last status is of 20" in result.stdout, result.output
        assert (tmp_path / "control.yaml").read_text() == "interval: 3\n"

    def test_no_record(self, tmp_path: Path) -> None:
        result = cli(tmp_path / "nothing", "--interval", 3)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert "holds no run record" in result.stderr

    @pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"control": 1, "dump": 2}', b"\xff"])
    def test_a_damaged_status_is_named(self, recorded: Path, content: bytes) -> None:
        (recorded / "run" / "status.json").write_bytes(content)
        result = cli(recorded)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert f"{recorded}/run/status.json cannot be read" in result.stderr
        run(recorded / "run", {}, start=15, steps=25)  # a resumed run does without

    @pytest.mark.parametrize("dump", [{"bytes": {}}, {"bytes": 10**400}, {"left_out": "full"}])
    def test_what_should_be_numbers_is_something_else(self, recorded: Path, dump: dict[str, object]) -> None:
        status = json.loads((recorded / "run" / "status.json").read_text())
        (recorded / "run" / "status.json").write_text(json.dumps(status | {"dump": dump}))
        result = cli(recorded)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert "status.json cannot be read" in result.stderr

    def test_a_time_that_no_calendar_has(self, recorded: Path) -> None:
        status = json.loads((recorded / "run" / "status.json").read_text())
        (recorded / "run" / "status.json").write_text(json.dumps(status | {"ended": 17e12}))
        shown, refused = cli(recorded), cli(recorded, "--interval", 3)
        assert shown.exit_code == 0 and "an unknown day" in shown.stdout
        assert refused.exit_code == 1 and "ended on" in refused.stderr

    def test_a_status_nested_without_end(self, recorded: Path) -> None:
        (recorded / "run" / "status.json").write_bytes(b"[" * 100_000)
        assert not run(recorded / "run", {}, start=15, steps=25)
