"""The printed table, as a terminal or a log file gets it."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from samples import sample

from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.options.config import Config
from nemo_fp8_debug.record.console_table import ConsoleTableRecorder

NOTHING = "Nothing is quantized: what FP8 would do"


def printed(of: Sample, rows: int = 12) -> list[str]:
    out = StringIO()
    ConsoleTableRecorder(rows, out).record(of)
    return out.getvalue().splitlines()


def rows(of: Sample, **options: Any) -> list[dict[str, str]]:
    heading, *body = (re.split(r"\s{2,}", line.strip()) for line in printed(of, **options)[1:])
    return [dict(zip(heading, row, strict=True)) for row in body]


def test_shows_each_metric_under_its_heading() -> None:
    metrics = {
        "amin": 1e-5,
        "amax": 4.07,
        "scale_current": 110.0,
        "scale": 100.0,
        "cosine": 0.9996,
        "mse": 1.234e-5,
        "relative_error": 0.0261,
        "underflow_pct": 0.125,
        "overflow_pct": 0.5,
    }
    (row,) = rows(sample(120, [{"layer": "decoder.layers.0.mlp.linear_fc1", "role": "grad_output", **metrics}]))
    assert row == {
        "tensor": "dY",
        "layer": "decoder.layers.0.mlp.linear_fc1",
        "relative error": "0.0261",
        "underflow %": "0.125",
        "overflow %": "0.5",
        "amax": "4.07",
        "delayed scale": "100",
        "current scale": "110",
        "cosine": "0.9996",
        "amin": "1e−5",
        "MSE": "1.23e−5",
    }


def test_the_title_names_step_loss_and_how_many_are_shown() -> None:
    title = printed(sample(120, [{}, {}, {}], loss=2.34567), rows=2)[0]
    assert title.strip() == "FP8 at step 120, loss 2.346: 2 of 3 tensors, worst first"


def test_the_title_does_without_a_loss() -> None:
    assert printed(sample(0, [{}]))[0].strip() == "FP8 at step 0: 1 of 1 tensor, worst first"


@pytest.mark.parametrize(
    ("sources", "asked", "title"),
    [
        (["engine"], "auto", "FP8"),
        (["not quantized", "engine"], "auto", "FP8"),
        (["current", "emulated", "not quantized", "mixed"], "auto", NOTHING),
        (["unknown", "not quantized"], "auto", "What FP8 would do"),
        (["current"], "delayed", "What FP8 would do"),
        (["engine"], "delayed", "FP8"),
    ],
)
def test_the_title_says_whether_anything_is_quantized(sources: list[str], asked: str, title: str) -> None:
    """With a recipe that was asked for by name, nobody reads what the run itself casts with."""
    out = StringIO()
    table = ConsoleTableRecorder(1, out)
    table.open({"recipe": {"asked": asked}})
    table.record(sample(7, [{"layer": str(i), "scale_source": source} for i, source in enumerate(sources)]))
    assert out.getvalue().startswith(f"{title} at step 7: ")


def test_the_worst_come_first() -> None:
    lost = {
        "rounding": (0, 0, 0.9),
        "clipped": (0, 30, 0),
        "fine": (0, 0, 0.1),
        "underflowing": (20, 0, 0),
        "both": (25, 25, 0),
    }
    of = sample(
        0,
        [
            {"layer": layer, "underflow_pct": under, "overflow_pct": over, "relative_error": error}
            for layer, (under, over, error) in lost.items()
        ],
    )
    assert [row["layer"] for row in rows(of)] == ["both", "clipped", "underflowing", "rounding", "fine"]


def test_rows_are_limited_to_the_worst() -> None:
    of = sample(0, [{"layer": f"layers.{i}", "underflow_pct": float(i)} for i in range(9)])
    assert [row["layer"] for row in rows(of, rows=3)] == ["layers.8", "layers.7", "layers.6"]


@pytest.mark.parametrize(("role", "shown"), [("input", "X"), ("weight", "W"), ("grad_output", "dY")])
def test_tensors_go_by_the_names_people_write(role: str, shown: str) -> None:
    assert rows(sample(0, [{"role": role}]))[0]["tensor"] == shown


def test_an_absent_metric_is_a_dash_and_a_column_of_them_is_left_out() -> None:
    absent = dict.fromkeys(("amin", "cosine", "mse", "underflow_pct", "overflow_pct", "relative_error"))
    first, second = rows(sample(0, [absent | {"underflow_pct": 1.0}, absent]))
    assert (first["underflow %"], second["underflow %"]) == ("1", "-")
    assert first.keys() == {"tensor", "layer", "underflow %", "amax", "delayed scale", "current scale"}


def test_current_scaling_has_no_delayed_scale() -> None:
    (row,) = rows(sample(0, [{"scale_source": "current"}]))
    assert "delayed scale" not in row and "current scale" in row


def test_what_the_run_does_not_quantize_is_marked_and_comes_last() -> None:
    lost = {"head": ("not quantized", 90.0), "fc1": ("engine", 1.0), "odd": ("unknown", 2.0)}
    of = sample(0, [{"layer": layer, "scale_source": s, "underflow_pct": under} for layer, (s, under) in lost.items()])
    assert [(row["layer"], row["cast"]) for row in rows(of)] == [
        ("fc1", "quantized"),
        ("head", "not quantized"),
        ("odd", "unknown"),
    ]
    plain = sample(0, [{"layer": "head", "scale_source": "not quantized"}])
    assert "cast" not in rows(plain)[0], "the title says that nothing is quantized"


@pytest.mark.parametrize("columns", ["80", "120", None])
def test_a_sample_takes_eight_lines_and_a_terminal_is_wide_enough(columns: str | None, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", columns or "0")
    of = sample(0, [{"layer": f"decoder.layers.{i}.self_attention.linear_qkv"} for i in range(30)])
    lines = printed(of, rows=Config().table_rows)
    assert len(lines) <= 8 and (columns is None or max(map(len, lines)) <= int(columns))


def test_a_log_file_gets_names_whole() -> None:
    layer = "decoder.layers.31.self_attention.linear_qkv"
    wide = dict.fromkeys(("amin", "amax", "scale", "scale_current", "mse", "underflow_pct", "overflow_pct"), 1.234e-10)
    assert any(layer in line for line in printed(sample(0, [{"layer": layer, **wide}])))
