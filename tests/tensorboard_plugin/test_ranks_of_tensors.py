"""Of how many ranks a tensor's values are: what the card below Course says, against the record."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import tensorboard, window
from playwright.sync_api import Browser, Locator, expect
from samples import sample
from tab import start

from nemo_fp8_debug.tensorboard_plugin.web import link

EXPERTS, TOLD, UNTOLD = "layers.0.experts.*.fc1", "layers.0.fc", "layers.1.fc"
STEPS, LOST = range(0, 100, 10), range(40, 70, 10)


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ranks")
    record = start(folder / "run")
    for step in STEPS:
        missing = 2 if step in LOST else 0
        ranks = {"ranks": 16 - missing, "ranks_missing": missing}
        untold = {"layer": UNTOLD, "ranks": None, "ranks_missing": None}
        record.record(sample(step, [{"layer": TOLD, **ranks}, {"layer": EXPERTS, "ranks": 64}, untold]))
        record.record_steps({step: {"loss": 2.0}})
    record.close()
    with tensorboard("--logdir", folder) as address:
        yield address


@pytest.fixture
def card(browser: Browser, board: str) -> Iterator[Locator]:
    context = window(browser)
    page = context.new_page()
    state = {"view": "course", "run": "run", "layer": TOLD, "role": "input", "step": LOST[1]}
    page.goto(link(board, **state).replace("/#fp8&", "/data/plugin_entry.html?name=fp8#"))
    yield page.locator("main .card.in-line")
    context.close()


def look_at(card: Locator, **state: object) -> None:
    card.page.evaluate(
        """state => {
          const at = new URLSearchParams(location.hash.slice(1));
          for (const [name, value] of Object.entries(state)) at.set(`p.fp8.${name}`, value);
          location.hash = at.toString();
        }""",
        state,
    )


def test_the_card_says_how_many_ranks_were_missing_and_marks_where(card: Locator) -> None:
    ranks = card.locator("[data-words=ranks]")
    expect(ranks).to_have_text("ranks: 14 of 16; 2 missing at step 50 (some are missing at 3 of 10 samples)")
    marks = card.locator("[data-marker=missing]").get_attribute("d")
    assert marks and marks.count("M") == len(LOST)
    look_at(card, step=LOST[0] - 10)
    expect(ranks).to_have_text("ranks: 16 at step 30 (some are missing at 3 of 10 samples)")


def test_where_none_is_missing_it_says_how_many_there_are(card: Locator) -> None:
    look_at(card, layer=EXPERTS)
    expect(card.locator("[data-words=ranks]")).to_have_text("parts of experts: 64")
    expect(card.locator("[data-marker=missing]")).to_have_count(0)


def test_it_says_nothing_where_the_record_does_not_tell(card: Locator) -> None:
    look_at(card, layer=UNTOLD)
    expect(card).to_have_attribute("data-card", f"X of {UNTOLD}")
    expect(card.locator("[data-words=values]")).to_be_visible()
    expect(card.locator("[data-words=ranks]")).to_have_count(0)
