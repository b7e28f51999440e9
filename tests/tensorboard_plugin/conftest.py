"""Logdirs of small runs, a real TensorBoard on one, once a session, and a real Chromium; the tab by itself on two runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import chromium, tensorboard, window
from cast_records import record_casts
from playwright.sync_api import Browser, Page
from processes import GUARD
from tab import Tab, write_counted_run, write_odd_run
from verdict_records import record_all

from nemo_fp8_debug.tensorboard_plugin import runs_table
from nemo_fp8_debug.tensorboard_plugin.records import logdir as logdir_module
from nemo_fp8_debug.tensorboard_plugin.web import link

Open = Callable[..., Page]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process an answer waits for all that is looked for, however slow the machine is."""
    monkeypatch.setattr(logdir_module, "_FIRST", GUARD)
    monkeypatch.setattr(runs_table, "_PATIENCE", GUARD)


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where verdicts are kept, of this process and those that it starts."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "nemo_fp8_debug" / "verdicts"


@pytest.fixture(scope="session")
def casts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("casts")
    record_casts(folder)
    return folder


@pytest.fixture(scope="session")
def board_of_casts(casts: Path) -> Iterator[str]:
    with tensorboard("--logdir", casts) as address:
        yield address


@pytest.fixture(scope="session")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logdir")
    record_all(folder)
    return folder


@pytest.fixture(scope="session")
def board(logdir: Path) -> Iterator[str]:
    with tensorboard("--logdir", logdir) as address:
        yield address


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-runs")
    write_odd_run(folder / "odd" / "fp8_debug")
    write_counted_run(folder / "counted" / "fp8_debug")
    return folder


@pytest.fixture(scope="module")
def tab(two_runs: Path) -> Tab:
    return Tab(two_runs)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the whole session: a process drives one browser at a time, and other tests have theirs."""
    with chromium() as found:
        yield found


@contextlib.contextmanager
def _opener(browser: Browser, address: str) -> Iterator[Open]:
    """Opens what TensorBoard has in the tab's frame, by itself, on a state."""
    context = window(browser)
    context.grant_permissions(["clipboard-read", "clipboard-write"])

    def open_on(script: str = "window.hack = () => { window.hacked = true; }", **state: object) -> Page:
        page = context.new_page()
        page.add_init_script(script)
        page.goto(link(address, **state).replace("/#fp8&", "/data/plugin_entry.html?name=fp8#"))
        return page

    yield open_on
    context.close()


@pytest.fixture
def casts_shown(browser: Browser, board_of_casts: str) -> Iterator[Open]:
    with _opener(browser, board_of_casts) as open_on:
        yield open_on


@pytest.fixture
def frame(browser: Browser, board: str) -> Iterator[Open]:
    with _opener(browser, board) as open_on:
        yield open_on
