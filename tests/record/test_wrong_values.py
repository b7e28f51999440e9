"""Values that no run writes, under checksums that hold: the part is left out with a reason, and nothing else fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from fuzzing.records import rewritten, with_value
from fuzzing.tab_targets import ask, opened
from small_record import measured, start

from nemo_fp8_debug import RecordError
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.replay.replay import replay
from nemo_fp8_debug.errors import capture_warnings
from nemo_fp8_debug.record.parts import HISTOGRAMS, MAGNITUDES
from nemo_fp8_debug.record.reader import read_fingerprint, read_record

ROUTES = {
    "runs": "",
    "run": "run=run",
    "frames": "run=run&metric=mse&from=0&to=9",
    "timeline": "run=run&layer=decoder.layers.0.mlp.linear_fc1&role=input&metrics=mse",
    "histogram": "run=run&layer=decoder.layers.0.mlp.linear_fc1&role=input&step=1",
    "others": "run=run&step=1",
    "extent": "run=run&metric=cosine",
    "course": "run=run&metric=mse&columns=9",
    "loss": "run=run",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    record = start(folder / "run")
    for step in range(4):
        record.record(measured(step))
        record.record_steps({step: {"loss": 2.0, "grad_scale": 4.0}})
    record.close()
    return folder / "run"


def longer(rows: pa.Table) -> pa.Table:
    return with_value("counts", 0, [1])(rows)


@pytest.mark.parametrize(
    ("table", "change", "why"),
    [
        ("metrics", with_value("step", 0, None), "step is missing in some rows"),
        ("metrics", with_value("layer", 0, None), "layer is missing in some rows"),
        ("metrics", with_value("role", 1, None), "role is missing in some rows"),
        ("metrics", with_value("step", 0, -(2**63)), "step is negative"),
        ("metrics", with_value("nan", 0, -1), "nan is negative"),
        ("metrics", with_value("cosine", 0, 7.0), "cosine is not between -1 and 1"),
        ("metrics", with_value("underflow_pct", 0, 101.0), "underflow_pct is not between 0 and 100"),
        ("histograms", with_value("bins", 0, [40000]), "bins and counts differ in length"),
        ("histograms", longer, "bins and counts differ in length"),
        ("histograms", lambda rows: longer(with_value("bins", 0, [40000])(rows)), "bins reach 40000; must be below 32768"),
        ("histograms", with_value("dtype", 0, "save"), "dtype is 'save'; it can be bfloat16, float16"),
        ("histograms", with_value("format", 0, None), "format is 'None'; it can be e4m3"),
        ("histograms", lambda rows: with_value("counts", 0, [-1])(with_value("bins", 0, [3])(rows)), "counts is negative"),
        (
            "histograms",
            lambda rows: with_value("counts", 0, [1, 1])(with_value("bins", 0, [3, 3])(rows)),
            "bins do not ascend",
        ),
        ("steps", with_value("step", 0, None), "step is missing in some rows"),
        ("steps", with_value("grad_scale", 0, 0.0), None),
    ],
)
def test_a_part_with_wrong_values_is_left_out(
    sound: Path, tmp_path: Path, table: str, change: Callable[[pa.Table], pa.Table], why: str | None
) -> None:
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    whole = len(read_record(run, table))
    path = rewritten(sorted((run / table).iterdir())[1], change)
    with capture_warnings() as heard:
        left = read_record(run, table)
    if why is None:
        assert heard == [] and len(left) == whole
    else:
        assert path.name in heard[0] and why in heard[0] and 0 < len(left) < whole
    tab = opened(tmp_path)
    statuses = {route: ask(tab, route, query) for route, query in ROUTES.items()}
    assert {route for route, status in statuses.items() if status != 200} <= {"histogram"}
    with capture_warnings():
        diagnose(run, sound)
        assert set(replay(run, "current-e5m2")["step"]) >= {0, 2, 3}


def test_a_fingerprint_whose_sections_are_no_mappings_is_read_without_them(sound: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    (run / "attempt-0.json").write_text('{"schema_version": 4, "backend_options": null, "versions": [1], "recipe": {}}')
    with capture_warnings() as heard:
        assert read_fingerprint(run) == {"schema_version": 4, "recipe": {}}
        diagnose(run)
    assert any("read without versions, backend_options: a JSON object is expected there" in text for text in heard)


def test_the_known_dtypes_formats_and_magnitudes_are_those_that_are_measured() -> None:
    from nemo_fp8_debug.numerics.formats import FORMATS
    from nemo_fp8_debug.numerics.histogram import BINS, DTYPES

    assert BINS == MAGNITUDES and set(HISTOGRAMS["format"]) == set(FORMATS)
    assert {str(dtype) for dtype in DTYPES} == {f"torch.{name}" for name in HISTOGRAMS["dtype"]}


@pytest.mark.parametrize("name", ["a\x1b[2J\nb", "x" * 100_000])
def test_hostile_names_are_told_in_one_short_line(name: str) -> None:
    text = str(RecordError(f"no layer {name}"))
    assert text.isprintable() and len(text) < 2000 and text.startswith("no layer")
