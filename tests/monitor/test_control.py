"""The control file: obeyed while the run goes on, refused where it cannot be, and no way in for anyone."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from controlled_runs import run, sampled
from hypothesis import given
from hypothesis import strategies as st

from nemo_fp8_debug import ConfigError
from nemo_fp8_debug.monitor.schedule import SamplingSchedule
from nemo_fp8_debug.options.config import MOST_WHAT_IF, Config
from nemo_fp8_debug.options.control_file import ControlSettings
from nemo_fp8_debug.record.dump import dumped_files
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.storage import FolderStorage


class TestObeyed:
    def test_interval(self, tmp_path: Path) -> None:
        assert not run(tmp_path, {3: "interval: 15"})
        assert sampled(tmp_path) == [0, 10, 15, 30, 45]

    def test_layers_and_roles(self, tmp_path: Path) -> None:
        assert not run(tmp_path, {3: "layers: ['1']\nroles: [weight]"})
        assert sampled(tmp_path, layer="1", role="weight") == [0, 10, 20, 30, 40, 50]
        assert sampled(tmp_path, layer="0") == sampled(tmp_path, role="input") == [0]

    def test_recipes_to_try(self, tmp_path: Path) -> None:
        assert not run(tmp_path, {3: "what_if: [current-e5m2, {name: delayed, margin: 1}]"})
        what_if = read_table_rows(tmp_path, "what_if")
        assert what_if["step"].unique().to_list() == [10, 20, 30, 40, 50]
        assert set(what_if["recipe"]) == {"current-e5m2", "delayed-hybrid(margin=1)"}

    def test_dump_on_and_off(self, tmp_path: Path) -> None:
        assert not run(tmp_path, {3: "dump: ['0']", 23: "dump: []"})
        assert {step for _, step, _, _ in dumped_files(FolderStorage(tmp_path))} == {10, 20}

    def test_a_number_of_steps(self, tmp_path: Path) -> None:
        assert not run(tmp_path, {3: "dump: ['0']\nsteps: 4"})
        assert sampled(tmp_path) == [0, 10, 11, 12, 13, 20, 30, 40, 50]
        assert {step for _, step, _, _ in dumped_files(FolderStorage(tmp_path))} == {10, 11, 12, 13}

    def test_removed_it_is_as_the_run_was_started(self, tmp_path: Path) -> None:
        assert not run(tmp_path, {3: "interval: 15\nlayers: ['1']", 16: None})
        assert sampled(tmp_path) == [0, 10, 15, 30, 40, 50]
        assert sampled(tmp_path, layer="0") == [0, 30, 40, 50]

    def test_a_resumed_run_does_not_count_the_steps_again(self, tmp_path: Path) -> None:
        run(tmp_path, {3: "dump: ['0']\nsteps: 4"}, steps=12)  # it is interrupted after two of the four
        run(tmp_path, {}, start=12, steps=40)
        assert {(attempt, step) for attempt, step, _, _ in dumped_files(FolderStorage(tmp_path))} == {(0, 10), (0, 11)}
        assert sampled(tmp_path) == [0, 10, 11, 20, 30]

    def test_a_resumed_run_finishes_the_steps(self, tmp_path: Path) -> None:
        run(tmp_path, {3: "dump: ['0']\nsteps: 14"}, steps=18)
        run(tmp_path, {}, start=18, steps=40)
        again = {step for attempt, step, _, _ in dumped_files(FolderStorage(tmp_path)) if attempt == 1}
        assert again == {20, 21, 22, 23}


class TestLeftOver:
    """In a folder that a run has used before."""

    def test_a_run_that_starts_over_ignores_it_and_says_so_once(self, tmp_path: Path) -> None:
        run(tmp_path, {3: "interval: 15"})
        (warning,) = run(tmp_path, {})
        assert f"{tmp_path}/control.yaml was written for an earlier run in this folder, and changes nothing" in warning
        assert "starts over at step 0" in warning and f"touch {tmp_path}/control.yaml" in warning
        assert sampled(tmp_path, attempt=1) == [0, 10, 20, 30, 40, 50]
        assert (tmp_path / "control.yaml").read_text() == "interval: 15"
        assert "ignored" in json.loads((tmp_path / "status.json").read_text())["control"]

    def test_so_do_those_that_resume_it_and_those_that_start_over_again(self, tmp_path: Path) -> None:
        run(tmp_path, {3: "interval: 15"})
        run(tmp_path, {}, steps=25)
        assert len(run(tmp_path, {}, start=25, steps=41)) == 1
        assert len(run(tmp_path, {}, steps=21)) == 1
        assert sampled(tmp_path, attempt=2) == [30, 40] and sampled(tmp_path, attempt=3) == [0, 10, 20]

    def test_a_resumed_run_goes_on_by_it(self, tmp_path: Path) -> None:
        assert not run(tmp_path, {3: "interval: 15"}, steps=50)
        assert not run(tmp_path, {}, start=40, steps=70)  # from a checkpoint before the end
        assert not run(tmp_path, {}, start=41, steps=80)
        assert sampled(tmp_path, attempt=2) == [50, 60, 75]  # it is read before a sampled step, and 50 is the first

    def test_written_again_it_holds_and_its_steps_are_counted_from_then(self, tmp_path: Path) -> None:
        run(tmp_path, {3: "dump: ['0']\nsteps: 4"}, steps=30)
        os.utime(tmp_path / "control.yaml")
        assert not run(tmp_path, {}, steps=30)
        assert sampled(tmp_path, attempt=1) == [0, 1, 2, 3, 10, 20]

    def test_the_same_text_written_again_is_obeyed_again(self, tmp_path: Path) -> None:
        text = "dump: ['0']\nsteps: 3"
        assert not run(tmp_path, {3: text, 23: text}, steps=40)
        assert sampled(tmp_path) == [0, 10, 11, 12, 20, 30, 31, 32]

    def test_written_before_the_first_run_it_holds_and_is_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "control.yaml").write_text("interval: 15\nlayers: ['1']")
        assert not run(tmp_path, {}, steps=31, table_rows=1)
        assert sampled(tmp_path) == [0, 15, 30]
        assert "nemo_fp8_debug: from step 0 on, control.yaml applies: interval 15; layers 1\n" in capsys.readouterr().out

    def test_one_of_a_run_that_the_first_version_recorded(self, tmp_path: Path) -> None:
        run(tmp_path, {3: "interval: 15"})
        status = json.loads((tmp_path / "status.json").read_text())
        del status["first_step"], status["ended"], status["control"]["written"]
        (tmp_path / "status.json").write_text(json.dumps(status))
        assert len(run(tmp_path, {}, steps=21)) == 1
        assert sampled(tmp_path, attempt=1) == [0, 10, 20]


REFUSED = {
    "interval: 0": "interval is 0; it must be a whole number, at least 1",
    "interval: ten": "interval is 'ten'",
    "layers: ['9']": "no GEMM layer matches ['9']; the model has '0', '1'",
    "dump: [nope]": "no GEMM layer matches ['nope']",
    "layers: 1": "layers is 1; it takes a list of strings",
    "layers: ['re:(a+)+$']": "takes globs only, because a regular expression can take forever to match",
    "roles: [X]": "unknown roles ['X']",
    "what_if: [fp7]": "unknown recipe 'fp7'",
    "what_if: current": "what_if is 'current'; it takes a list of recipes",
    "steps: 0": "steps in control.yaml is 0",
    "steps: true": "steps in control.yaml is True",
    "output: /tmp/elsewhere": "unknown keys output; valid keys are interval, layers, roles, what_if, dump, steps",
    "[1, 2]": "must map keys to values; it is a list",
    "just text": "must map keys to values; it is a str",
    "a: [": "is not YAML",
    "dump: *fc2": "uses aliases (*name), which are not supported; quote patterns that begin with *",
    "a: &x [1]\nb: *x": "uses aliases",
    "interval: !!python/object/apply:os.system ['touch HACKED']": "is not YAML",
    "interval: !!python/name:os.system": "is not YAML",
    "interval: " + "[" * 1500: "has lists that are nested more than 8 levels deep",
    "[" * 60_000: "has lists that are nested more than 8 levels deep",
    "- " * 30_000: "has lists that are nested more than 8 levels deep",
    "? " * 30_000: "has lists that are nested more than 8 levels deep",
    "layers: [" + "a, " * 20_000 + "a]": "has more than 4096 values",
    "interval: 1:59" + ":59" * 300: "which YAML reads as a number in base 60",
    "interval: 1:30": "control.yaml has 1:30, which YAML reads as a number in base 60; write it in digits",
    "interval: " + "9" * 5000: "has a value of more than 1000 characters",
    "what_if: [" + "current, " * 20 + "current]": "what_if has 21 recipes; it takes at most 16",
    "what_if: [" + "delayed(amax_history_len=1000000), " * 12 + "]": "take 274 MiB of memory, more than the limit of 256",
    "interval: 9" + " " * 70000: "longer than 64 KiB",
    "interval: 2001-13-45": "is not YAML: month must be in 1..12",
    "interval: 2001-12-15": "interval is datetime.date(2001, 12, 15)",
    "? {a: 1}\n: 2": "is not YAML",
}


class TestRefused:
    @pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
    def test_it_changes_nothing_and_says_why(self, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (warning,) = run(tmp_path / "run", {3: text}, steps=40)
        assert "the control file changes nothing at step 10: " in warning and REFUSED[text] in warning
        assert sampled(tmp_path / "run") == [0, 10, 20, 30]
        assert REFUSED[text] in json.loads((tmp_path / "run" / "status.json").read_text())["control"]["refused"]
        assert [p.name for p in tmp_path.iterdir()] == ["run"]

    @pytest.mark.parametrize("content", [b"\xff\xfe\x00interval", b"\x00\x00", bytes(range(256))])
    def test_bytes_that_are_no_text(self, tmp_path: Path, content: bytes) -> None:
        (warning,) = run(tmp_path, {3: content}, steps=20)
        assert "changes nothing" in warning

    def test_a_file_without_end(self, tmp_path: Path) -> None:
        (tmp_path / "control.yaml").symlink_to("/dev/zero")
        (warning,) = run(tmp_path, {}, steps=20)
        assert "control.yaml is not a file" in warning and sampled(tmp_path) == [0, 10]

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "control.yaml")
        (warning,) = run(tmp_path, {}, steps=40)
        assert "control.yaml is not a file" in warning and sampled(tmp_path) == [0, 10, 20, 30]

    def test_nor_is_one_in_the_place_of_the_status(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "status.json")
        assert not run(tmp_path, {}, steps=20)
        assert sampled(tmp_path) == [0, 10]
        assert json.loads((tmp_path / "status.json").read_text())["step"] == 10

    def test_it_is_parsed_off_the_training_thread(self, tmp_path: Path) -> None:
        parsed = list[threading.Thread]()

        def profile(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code is ControlSettings.parse.__func__.__code__:
                parsed.append(threading.current_thread())

        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            run(tmp_path, {3: "interval: 15"}, steps=40)
        finally:
            threading.setprofile(None)
            sys.setprofile(None)
        assert parsed and threading.main_thread() not in parsed
        assert sampled(tmp_path) == [0, 10, 15, 30]

    def test_a_folder_in_its_place_costs_no_step(self, tmp_path: Path) -> None:
        (tmp_path / "control.yaml").mkdir()
        run(tmp_path, {}, steps=25, on_error="warn")
        assert sampled(tmp_path) == [0, 10, 20]

    @given(st.text(max_size=200))
    def test_any_text_is_obeyed_or_refused(self, text: str) -> None:
        with contextlib.suppress(ConfigError):
            assert ControlSettings.parse(text) == ControlSettings.parse(str(ControlSettings.parse(text)))

    @given(
        st.fixed_dictionaries(
            {},
            optional={
                "interval": st.integers(1, 10**6),
                "layers": st.lists(st.sampled_from(["layers.*", "*fc2", "[ab]"]), min_size=1).map(tuple),
                "roles": st.lists(st.sampled_from(["input", "weight"]), min_size=1).map(tuple),
                "what_if": st.lists(st.sampled_from(["current", "delayed(margin=1)"]), max_size=MOST_WHAT_IF).map(tuple),
                "dump": st.lists(st.sampled_from(["layers.*", "*"])).map(tuple),
            },
        ),
        st.none() | st.integers(1, 100),
    )
    def test_what_is_written_is_what_is_read(self, changes: dict[str, Any], steps: int | None) -> None:
        control = ControlSettings(changes, steps)
        assert (
            ControlSettings.parse(str(control))
            == control
            == ControlSettings.from_plain_values(json.loads(json.dumps(control.plain_values)))
        )


class TestSchedule:
    @given(st.integers(1, 20), st.integers(0, 50), st.integers(1, 10), st.integers(0, 50))
    def test_windows_and_turns(self, interval: int, at: int, steps: int, trigger: int) -> None:
        schedule = SamplingSchedule(Config(interval=interval, trigger_steps=2))
        schedule.apply_control(ControlSettings({"dump": ("x",)}, steps), at)
        schedule.trigger_samples(trigger, "why")
        for step in range(80):
            in_window, triggered = at <= step < at + steps, trigger <= step < trigger + 2
            # A trigger forgets windows that are over.
            assert schedule.is_sampled(step) == (step % interval == 0 or triggered or (in_window and at + steps > trigger))
            if in_window and at + steps > trigger:
                assert schedule.list_dumped_layers(step) == ["x"]
            assert ("why" in (schedule.explain_sampling(step) or "")) == triggered
