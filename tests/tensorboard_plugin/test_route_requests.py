"""Requests that the tab refuses, and parameters of every kind, none of which makes it fail."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import sample
from tab import FC1, Tab, start


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:9999"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[bad"}, 403),
        ({"Origin": "http://localhost:6006", "Host": "localhost:6006"}, 200),
        ({"Origin": "http://localhost:6007", "Host": "localhost:6006"}, 403),
        ({"Origin": "https://hub.example", "Host": "10.0.0.7:6006", "X-Forwarded-Host": "hub.example, inner"}, 403),
        ({"Host": "rebound.example:6006", "Origin": "http://rebound.example:6006"}, 403),
        ({"Host": "rebound.example:6006", "Sec-Fetch-Site": "same-origin"}, 403),
        ({"Host": "rebound.example"}, 403),
        ({"Host": "127.0.0.1.rebound.example"}, 403),
        ({"Host": "[bad"}, 403),
        ({"Host": "[::1]:6006"}, 200),
        ({"Host": "10.0.0.7"}, 200),
        ({"Host": f"{socket.gethostname()}:6006"}, 200),
        ({"Origin": "https://hub.example", "Host": "10.0.0.7:6006", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://evil.example", "Host": "10.0.0.7:6006", "X-Forwarded-Host": "hub.example"}, 403),
    ],
)
def test_other_sites_are_refused(tab: Tab, headers: dict[str, str], status: int) -> None:
    for route in ("runs", "index.js"):
        assert tab.get(route, headers).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "hub.example"}, 200),
        ({"Host": "other.example"}, 403),
        ({"Origin": "https://hub.example", "Host": "10.0.0.7:6006", "X-Forwarded-Host": "hub.example, inner"}, 200),
        ({"Origin": "https://evil.example", "Host": "10.0.0.7:6006", "X-Forwarded-Host": "evil.example"}, 403),
    ],
)
def test_names_that_are_allowed(
    two_runs: Path, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], status: int
) -> None:
    monkeypatch.setenv("NEMO_FP8_DEBUG_HOSTS", "hub.example")
    assert Tab(two_runs).get("index.js", headers).status_code == status


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_only_get_is_answered(tab: Tab, method: str) -> None:
    assert getattr(tab.client, method)("/data/plugin/fp8/runs").status_code == 405


def test_works_below_a_prefix(two_runs: Path) -> None:
    tab = Tab(two_runs, prefix="/proxy/6006")
    assert [run["name"] for run in tab.json("runs")["runs"]] == ["counted", "odd"]


ROUTES = ("runs", "run", "frames", "extent", "course", "spread", "timeline", "loss", "histogram", "others", "fingerprints")
NAMES = ("run", "layer", "role", "step", "metric", "metrics", "from", "to", "a", "b", "recipe", "columns", "x")
WORDS = (
    *("odd", "counted", FC1, "input", "mse", "mse,amax", "nonfinite", "mse,mse", "0", "10", "700"),
    *("-1", "NaN", "1e400", "9" * 40, "1_0", "\u0663", "+1", "", "\x00", "\ud800", "a" * 5000),
    *("../../etc/passwd", "/etc/passwd", "odd/../odd", "<script>alert(1)</script>"),
)
HOSTILE = st.one_of(st.sampled_from(WORDS), st.text(max_size=20))
USUAL = {"run": "odd", "layer": FC1, "role": "input", "step": "10", "metric": "mse", "metrics": "mse"} | {
    "from": "0",
    "to": "90",
    "columns": "50",
}


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    route=st.sampled_from(ROUTES),
    given_=st.lists(st.tuples(st.sampled_from(NAMES), HOSTILE), max_size=5),
    right=st.booleans(),
)
def test_no_parameter_makes_it_fail(tab: Tab, route: str, given_: list[tuple[str, str]], right: bool) -> None:
    takes = {
        "runs": (),
        "run": ("run",),
        "frames": ("run", "metric", "from", "to"),
        "extent": ("run", "metric"),
        "course": ("run", "metric", "columns"),
        "spread": ("run", "metric"),
        "timeline": ("run", "layer", "role", "metrics"),
        "loss": ("run",),
        "histogram": ("run", "layer", "role", "step"),
        "others": ("run", "step"),
        "fingerprints": ("a",),
    }[route]
    query: list[tuple[str, str]] = given_
    if right:  # one odd value among usual ones
        query = list(({name: USUAL.get(name, "odd") for name in takes} | dict(given_[:1])).items())
    pairs = [(name, value.encode("utf-8", "surrogatepass")) for name, value in query]
    response = tab.client.get(f"/data/plugin/fp8/{route}?{urlencode(pairs)}")
    assert response.status_code in (200, 400, 403, 404, 409), response.text
    if response.status_code != 200:
        ((name, sentence),) = json.loads(response.text).items()
        assert name == "error" and 10 < len(sentence) < 1000 and "Traceback" not in sentence
    elif route not in ("frames", "course", "spread"):
        json.loads(response.text, parse_constant=lambda name: pytest.fail(name))


def test_too_many_steps_at_once(tmp_path: Path) -> None:
    record = start(tmp_path)
    for step in range(130):
        record.record(sample(step, [{}]))
    record.close()
    tab = Tab(tmp_path)
    status, why = tab.error("frames", run=".", metric="mse", from_=0, to=200)
    assert status == 400 and "130 sampled steps" in why and "128" in why
    assert len(tab.frames(run=".", metric="mse", from_=2, to=200)[0]["steps"]) == 128
