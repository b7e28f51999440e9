"""A run record of three samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_record import measured, start


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A record of steps 0, 10 and 20."""
    record = start(tmp_path / "run")
    for step in (0, 10, 20):
        record.record(measured(step))
        record.record_steps({s: {"loss": 3.0 - s / 100} for s in range(step, step + 10)})
    record.close()
    return tmp_path / "run"
