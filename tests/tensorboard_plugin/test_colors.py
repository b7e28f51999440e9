"""What the eye falls on, in pixels: the culprit of a run that FP8 spoils, and nothing in a run like its baseline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import tensorboard, window
from ciede2000 import Lab, ciede2000, lab
from playwright.sync_api import Browser, Page, expect
from verdict_records import CULPRIT, MLP, ONSET, record

from nemo_fp8_debug.tensorboard_plugin.web import link

#: CIEDE2000 of a cell from the picture's median that no cell of a clean pair may reach
STANDS_OUT = 10.0
#: the colors of a picture, which lies on a canvas of its own: how many pixels, and where the first and last is
COLORS = """box => {
    const canvas = box.querySelector('canvas');
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    const found = new Map();
    const fine = canvas.width / canvas.clientWidth;
    for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] < 255) continue;
        const color = [data[i], data[i + 1], data[i + 2]].join();
        const at = [(i / 4) % canvas.width / fine, Math.floor(i / 4 / canvas.width) / fine];
        const one = found.get(color) ?? {color, count: 0, first: at};
        found.set(color, Object.assign(one, {count: one.count + 1, last: at}));
    }
    return [...found.values()];
}"""


class Otherwise(MLP):
    """The same weights, which learn other data."""

    def __init__(self) -> None:
        super().__init__()
        torch.rand(1)


@pytest.fixture(scope="module")
def board_of_pairs(logdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    clean = tmp_path_factory.mktemp("clean")
    record(clean, fault=False, fp8=True, model=Otherwise)
    places = {"baseline": logdir / "baseline", "bad": logdir / "bad", "clean": clean}
    with tensorboard("--logdir_spec", ",".join(f"{name}:{place}" for name, place in places.items())) as address:
        yield address


@pytest.fixture(scope="module")
def page(browser: Browser, board_of_pairs: str) -> Iterator[Page]:
    page = window(browser).new_page()
    page.address = board_of_pairs  # type: ignore[attr-defined]
    yield page
    page.close()


def shown(page: Page, **state: object) -> Page:
    address = link(page.address, baseline="baseline", reference="", **state)  # type: ignore[attr-defined]
    page.goto("about:blank")
    page.goto(address.replace("/#fp8&", "/data/plugin_entry.html?name=fp8#"))
    page.locator(".legend", has_text="x threshold").first.wait_for()
    page.locator("[data-drawn]:not([data-drawn=''])").first.wait_for()
    page.locator(".headline[data-stage=all]").wait_for()  # which moves what is below it
    return page


def colors(page: Page) -> list[dict[str, Any]]:
    """Of the picture, once it no longer changes: its scale is asked for when it has been drawn."""
    before: list[dict[str, Any]] = []
    for _ in range(50):
        found: list[dict[str, Any]] = page.locator(".chart-box").first.evaluate(COLORS)
        if len(found) > 1 and found == before:
            return found
        before = found
        page.wait_for_timeout(200)
    raise AssertionError(f"the picture has {len(before)} colors, or changes all the time")


def farthest(page: Page) -> tuple[float, dict[str, Any]]:
    """How far the farthest color lies from the picture's median color, and where it is."""
    found = colors(page)
    labs = [lab(tuple(map(int, one["color"].split(",")))) for one in found]  # type: ignore[arg-type]
    weights = [one["count"] for one in found]
    median: Lab = tuple(median_of([color[i] for color in labs], weights) for i in range(3))  # type: ignore[assignment]
    return max(((ciede2000(median, color), one) for color, one in zip(labs, found, strict=True)), key=lambda pair: pair[0])


def median_of(values: list[float], weights: list[int]) -> float:
    order = np.argsort(values)
    upto = np.cumsum(np.array(weights)[order])
    return float(np.array(values)[order][np.searchsorted(upto, upto[-1] / 2)])


def told_at(page: Page, place: list[float]) -> str:
    """The tooltip of a place of the picture."""
    box = page.locator(".chart-box").first.bounding_box()
    assert box
    page.mouse.move(box["x"] + place[0] + 0.5, box["y"] + place[1] + 0.5)
    return page.locator(".under").inner_text()


#: pairs of colors and how different they are: all that Sharma, Wu and Dalal published
SHARMA = """
50.0000 2.6772 -79.7751 50.0000 0.0000 -82.7485 2.0425
50.0000 3.1571 -77.2803 50.0000 0.0000 -82.7485 2.8615
50.0000 2.8361 -74.0200 50.0000 0.0000 -82.7485 3.4412
50.0000 -1.3802 -84.2814 50.0000 0.0000 -82.7485 1.0000
50.0000 -1.1848 -84.8006 50.0000 0.0000 -82.7485 1.0000
50.0000 -0.9009 -85.5211 50.0000 0.0000 -82.7485 1.0000
50.0000 0.0000 0.0000 50.0000 -1.0000 2.0000 2.3669
50.0000 -1.0000 2.0000 50.0000 0.0000 0.0000 2.3669
50.0000 2.4900 -0.0010 50.0000 -2.4900 0.0009 7.1792
50.0000 2.4900 -0.0010 50.0000 -2.4900 0.0010 7.1792
50.0000 2.4900 -0.0010 50.0000 -2.4900 0.0011 7.2195
50.0000 2.4900 -0.0010 50.0000 -2.4900 0.0012 7.2195
50.0000 -0.0010 2.4900 50.0000 0.0009 -2.4900 4.8045
50.0000 -0.0010 2.4900 50.0000 0.0010 -2.4900 4.8045
50.0000 -0.0010 2.4900 50.0000 0.0011 -2.4900 4.7461
50.0000 2.5000 0.0000 50.0000 0.0000 -2.5000 4.3065
50.0000 2.5000 0.0000 73.0000 25.0000 -18.0000 27.1492
50.0000 2.5000 0.0000 61.0000 -5.0000 29.0000 22.8977
50.0000 2.5000 0.0000 56.0000 -27.0000 -3.0000 31.9030
50.0000 2.5000 0.0000 58.0000 24.0000 15.0000 19.4535
50.0000 2.5000 0.0000 50.0000 3.1736 0.5854 1.0000
50.0000 2.5000 0.0000 50.0000 3.2972 0.0000 1.0000
50.0000 2.5000 0.0000 50.0000 1.8634 0.5757 1.0000
50.0000 2.5000 0.0000 50.0000 3.2592 0.3350 1.0000
60.2574 -34.0099 36.2677 60.4626 -34.1751 39.4387 1.2644
63.0109 -31.0961 -5.8663 62.8187 -29.7946 -4.0864 1.2630
61.2901 3.7196 -5.3901 61.4292 2.2480 -4.9620 1.8731
35.0831 -44.1164 3.7933 35.0232 -40.0716 1.5901 1.8645
22.7233 20.0904 -46.6940 23.0331 14.9730 -42.5619 2.0373
36.4612 47.8580 18.3852 36.2715 50.5065 21.2231 1.4146
90.8027 -2.0831 1.4410 91.1528 -1.6435 0.0447 1.4441
90.9257 -0.5406 -0.9208 88.6381 -0.8985 -0.7239 1.5381
6.7747 -0.2908 -2.4247 5.8714 -0.0985 -2.2286 0.6377
2.0776 0.0795 -1.1350 0.9033 -0.0636 -0.5514 0.9082
"""


def test_differences_of_colors_are_those_that_were_published() -> None:
    for line in SHARMA.strip().splitlines():
        l1, a1, b1, l2, a2, b2, published = map(float, line.split())
        assert round(ciede2000((l1, a1, b1), (l2, a2, b2)), 4) == pytest.approx(published, abs=1.01e-4)


@pytest.mark.parametrize("state", [{"view": "map", "step": ONSET}, {"view": "course"}], ids=["map", "course"])
def test_the_eye_falls_on_the_culprit(page: Page, state: dict[str, object]) -> None:
    shown(page, run="bad", **state)
    expect(page.locator("[data-picker=metric]")).to_have_value("scale_ratio_log2")  # of the first onset
    page.locator("[data-panel=run], .chart-box[data-drawn^=scale_ratio]").first.wait_for()
    distance, place = farthest(page)
    assert distance > 4 * STANDS_OUT
    for end, inward in (("first", 1), ("last", -1)):  # a border of cells may lie within a pixel
        assert told_at(page, [at + inward for at in place[end]]).startswith(f"X of {CULPRIT}\n")


@pytest.mark.parametrize("state", [{"view": "map"}, {"view": "course"}], ids=["map", "course"])
def test_of_a_clean_pair_nothing_stands_out(page: Page, state: dict[str, object]) -> None:
    """By the metric that moves from sample to sample in any run."""
    distance, _ = farthest(shown(page, run="clean", metric="relative_error", **state))
    assert distance < STANDS_OUT
