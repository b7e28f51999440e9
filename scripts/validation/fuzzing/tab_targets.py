"""Routes of the tab: any address, query and header, over a record whose values are any."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hypothesis import strategies as st
from werkzeug.test import EnvironBuilder

from nemo_fp8_debug.record.schema import SCHEMAS
from nemo_fp8_debug.tensorboard_plugin.plugin import FP8Plugin
from nemo_fp8_debug.tensorboard_plugin.records.logdir import LogdirRoot
from nemo_fp8_debug.tensorboard_plugin.web import list_accepted_host_names, make_route_handler, make_wsgi_application

from .limits import Finding
from .mutations import words
from .record_targets import Changes, record
from .records import changes, copied, rewritten

#: routes that start a process are asked by their names alone
_JOBS = ("verdict", "headline", "what_if", "rows")
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "run": ("run",),
    "baseline": ("run",),
    "reference": ("run",),
    "a": ("run",),
    "b": ("run",),
    "layer": ("0", "2", "1"),
    "role": ("input", "weight", "grad_output", "norm_input", "first_moment"),
    "metric": ("mse", "nonfinite", "underflow_pct", "cosine", "amax", "norm"),
    "metrics": ("mse", "mse,amax", "cosine,nonfinite"),
    "table": ("metrics", "states", "activations"),
    "step": ("0", "3", "5", "999999999999999999"),
    "from": ("0", "3"),
    "to": ("5", "64"),
    "columns": ("1", "100", "2000"),
    "recipe": ("current", "delayed"),
    "by": ("step", "samples"),
}
_HEADERS = ("Host", "Origin", "X-Forwarded-Host", "Sec-Fetch-Site", "X-Forwarded-For", "Accept-Encoding", "If-None-Match")
_HOSTS = (
    "localhost",
    "localhost:6006",
    "127.0.0.1",
    "[::1]:6006",
    "hub.example",
    "evil.example",
    "same-origin",
    "cross-site",
)


@functools.cache
def plugin() -> FP8Plugin:
    """Of the tab over the real record."""
    return opened(record().parent)


def opened(folder: Path) -> FP8Plugin:
    """Of a tab over a folder, whose records have been found."""
    found = FP8Plugin.open_folders([LogdirRoot("", str(folder))])
    found.await_record_search()
    return found


def ask(tab: FP8Plugin, route: str, query: str, headers: dict[str, str] | None = None, names: Any = None) -> int:
    """The status of an answer, which is one that a page can show.

    Raises:
        Finding: it is not.
    """
    routes = {name: make_wsgi_application(make_route_handler(found), names) for name, found in tab.routes().items()}
    environ = EnvironBuilder(path=f"/data/plugin/fp8/{route}", query_string=query).get_environ()
    environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in (headers or {}).items()}
    began: list[tuple[str, list[tuple[str, str]]]] = []
    content = b"".join(routes[route](environ, lambda status, told, *_: began.append((status, told))))
    content = gzip.decompress(content) if dict(began[0][1]).get("Content-Encoding") == "gzip" else content
    status, text = int(began[0][0].split()[0]), content.decode(errors="replace")
    if status >= 500:
        raise Finding(f"{route}?{query} answers {status}: {text[:300]}")
    if status >= 400 and not json.loads(text)["error"].isprintable():
        raise Finding(f"{route}?{query} explains in lines: {text[:300]}")
    return status


def _request(given: tuple[str, list[tuple[str, str]], dict[str, str]], folder: Path) -> None:
    route, query, headers = given
    text = urlencode(query, errors="replace")
    sent = {name: _header(value) for name, value in headers.items()}
    status = ask(plugin(), route, text, sent, list_accepted_host_names("localhost"))
    if _header(headers.get("Host", "localhost")) in ("hub.example", "evil.example") and status != 403:
        raise Finding(f"{headers} is answered with {status}")


def _header(text: str) -> str:
    return "".join(c for c in text if " " <= c <= "~")


def _usual(route: str) -> list[tuple[str, str]]:
    wanted = plugin().routes()[route].parameters
    return [(name, _PARAMETERS[name][0]) for name in wanted if wanted[name].default is ...]


def _requests() -> st.SearchStrategy[Any]:
    values = st.sampled_from(sorted(_PARAMETERS)).flatmap(lambda name: st.tuples(st.just(name), words(_PARAMETERS[name])))
    asked = [name for name in plugin().routes() if name not in _JOBS]

    def of(route: str) -> st.SearchStrategy[Any]:
        def merged(changed: list[tuple[str, str]]) -> list[tuple[str, str]]:
            told = dict(changed)
            return [(name, told.pop(name, value)) for name, value in _usual(route)] + list(told.items())[:1]

        query = st.lists(values, max_size=3).map(merged)
        headers = st.dictionaries(st.sampled_from(_HEADERS), words(_HOSTS), max_size=2)
        return st.tuples(st.just(route), query, headers)

    return st.sampled_from(asked).flatmap(of)


def _hostile_record(given: tuple[str, Changes], folder: Path) -> None:
    """Every route over values that no run writes."""
    table, of = given
    run = copied(record(), folder / "logs" / "run")
    for path in sorted((run / table).glob("*.parquet"))[:1]:
        for change in of:
            path = rewritten(path, change)
    tab = opened(folder / "logs")
    for route in tab.routes():
        if route not in _JOBS:
            ask(tab, route, urlencode(_usual(route)))


_of_values = st.sampled_from(("metrics", "metrics", "steps", "histograms", "states", "activations")).flatmap(
    lambda table: st.tuples(st.just(table), changes(list(SCHEMAS[table])))
)

TARGETS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any, Path], None], int]] = {
    "requests": (st.deferred(_requests), _request, 100),
    "tab over values of a record": (_of_values, _hostile_record, 10),
}
