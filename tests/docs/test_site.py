"""The documentation as a site: what a strict build does not find by itself."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import sys
import threading
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import PATIENCE_MS, chromium
from processes import finished

import nemo_fp8_debug

ROOT = Path(__file__).parents[2]
#: elements by which a page has a browser load something, and the attributes that say what
_LOADING = {
    **dict.fromkeys(("script", "img", "iframe", "source", "video", "audio", "embed"), ("src", "srcset")),
    "link": ("href",),
    "object": ("data",),
}


class _Loaded(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if name in _LOADING.get(tag, ()) and value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as scripts/lint.sh builds them."""
    folder = tmp_path_factory.mktemp("site")
    done = finished(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_name_for_users_has_an_entry(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    assert {f"nemo_fp8_debug.{name}" for name in nemo_fp8_debug.__all__} <= entries
    page = (site / "api.html").read_text()
    for name in nemo_fp8_debug.__all__:
        assert f'id="nemo_fp8_debug.{name}"' in page, name


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = _Loaded()
        loaded.feed(page.read_text())
        assert loaded.addresses
        for address in loaded.addresses:
            assert not re.match(r"(\w+:)?//", address), f"{page.name} loads {address}"
            # The page for what is not found has addresses from the root on.
            assert page.name == "404.html" or (page.parent / re.sub(r"[?#].*", "", address)).exists(), address
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import\s*|url\()[\"']?(https?:)?//", sheet.read_text()), sheet


def test_a_browser_draws_the_architecture_and_asks_nobody_else(site: Path) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page, asked = browser.new_page(), []
        page.on("request", lambda request: asked.append(request.url))
        home = f"http://127.0.0.1:{server.server_address[1]}/"
        page.goto(f"{home}design.html", timeout=PATIENCE_MS)
        # Drawn, it is no longer the text of the diagram: its box has the picture's height.
        page.wait_for_selector("div.mermaid", timeout=PATIENCE_MS)
        box = page.locator("div.mermaid").bounding_box()
        server.shutdown()
    assert box and box["height"] > 200
    assert f"{home}assets/mermaid.min.js" in asked
    assert [url for url in asked if not url.startswith((home, "data:", "blob:"))] == []


def test_a_source_distribution_is_complete(tmp_path: Path) -> None:
    """With docs, recipes, scripts and tests; and its README has no link that leads nowhere on a package index."""
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "*.egg-info", "__pycache__", "node_modules", ".*_cache", "runs", "dist"
    )
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=ignored)
    command = ("-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check", "--outdir", tmp_path, tree)
    done = finished(sys.executable, *command)
    assert done.returncode == 0, done.stderr
    (tmp_path / "unpacked").mkdir()  # by tar: Python 3.11 before 3.11.4 has no filter for what it unpacks
    assert finished("tar", "-xzf", next(tmp_path.glob("*.tar.gz")), "-C", tmp_path / "unpacked").returncode == 0
    unpacked = next((tmp_path / "unpacked").iterdir())
    top = {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "mkdocs.yml",
        "pyproject.toml",
        "setup.cfg",
        "setup.py",
    }
    assert top <= {path.name for path in unpacked.iterdir()}
    for folder in ("docs", "recipes", "scripts", "tests", "nemo_fp8_debug"):
        there = {path.relative_to(tree) for path in (tree / folder).rglob("*") if path.is_file()}
        assert there == {path.relative_to(unpacked) for path in (unpacked / folder).rglob("*") if path.is_file()}
    told = (unpacked / "PKG-INFO").read_text()
    assert "scripts/demo.sh" in told
    assert not re.search(r"\]\((?!https?:)", told)
