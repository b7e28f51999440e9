"""Real records of earlier schemas are read in today's names; the commands and the tab say the same of them as before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from tab import Tab

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.story.summary import serialize_comparison
from nemo_fp8_debug.record import migration
from nemo_fp8_debug.record.reader import read_fingerprint, read_table_rows
from nemo_fp8_debug.record.schema import SCHEMAS

OLD = Path(__file__).parent / "old"
RECORDS = sorted(path.parent for path in OLD.glob("*/*/attempt-0.json"))
#: key in the JSON of the release that wrote schema 3: key today
KEYS = {
    **{"left": "out_of_band", "loss_left": "divergence_step", "above_good_since": "above_baseline_since"},
    **{"good": "baseline", "bad": "run", "twin": "reference", "figure": "metric"},
}
#: what is said in words, which have changed
SENTENCES = {"verdict", "notes", "evidence", "advice", "path"}


def folder_of(record: Path, table: str) -> Path:
    return next(path for name in migration.list_table_folders(table) if (path := record / name).exists())


@pytest.mark.parametrize("table", ["metrics", "what_if", "histograms", "steps"])
@pytest.mark.parametrize("record", RECORDS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_value_is_the_one_in_the_files(record: Path, table: str) -> None:
    files = [pq.read_table(path) for path in sorted(folder_of(record, table).glob("*.parquet"))]
    written = pl.concat([pl.DataFrame(pl.from_arrow(file)) for file in files]).sort("step", maintain_order=True)
    read = read_table_rows(record, table)
    earlier = {name: first_name(name) for name in read.columns}
    assert len(read) == len(written) > 0
    for name in read.columns:
        if earlier[name] in written.columns:
            expected = written[earlier[name]]
            if name == "scale_source":
                expected = expected.str.replace("not quantised", "not quantized")
            assert read[name].equals(expected.alias(name), null_equal=True), name
        else:
            assert read[name].is_null().all(), name
    assert {earlier[name] for name in read.columns} >= set(written.columns)


def first_name(column: str) -> str:
    return migration.add_earlier_column_names([column])[-1]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_fingerprints_have_todays_keys(record: Path) -> None:
    found = read_fingerprint(record)
    assert found["backend_options"] == {} and found["recipe"]["gemms_quantized_by_emulation"] in (0, 4, 8)
    assert found["sampled"]["backends"] == ["torch.nn.Linear"] and found["sampled"]["what_if"] == ["current-e5m2"]


def old_runs(schema: int) -> list[Path]:
    return [OLD / f"schema_{schema}" / name for name in ("good", "bad", "twin")]


def todays(value: Any) -> Any:
    """Values of the earlier release under today's keys, and without sentences."""
    if isinstance(value, dict):
        return {todays_key(key): todays(v) for key, v in value.items() if key not in SENTENCES}
    if isinstance(value, list):
        return [todays(v) for v in value]
    return {"departure": "divergence", "twin": "reference"}.get(value, value) if isinstance(value, str) else value


def todays_key(key: str) -> str:
    for run in ("good", "bad"):
        if key.endswith(f"_{run}"):
            return f"{key.removesuffix(run)}{KEYS[run]}"
    return KEYS.get(key, key)


def test_compare_ranks_as_the_release_that_wrote_it_did() -> None:
    good, bad, twin = old_runs(3)
    now, then = (
        todays(each)
        for each in (serialize_comparison(compare(bad, good, twin)), json.loads((OLD / "compare_3.json").read_text()))
    )
    for part in ("unit", "experts", "differences", "what_if"):
        assert now[part] == then[part]
    metrics = [{name: value for name, value in row.items() if name not in ("onset", "lead")} for row in now["tensors"]]
    for mine, theirs in zip(metrics, then["tensors"], strict=True):
        for name, value in mine.items():  # CPUs with other instructions round logarithms otherwise
            assert value == (pytest.approx(theirs[name], rel=1e-12) if isinstance(value, float) else theirs[name])


def test_diagnose_sees_the_same_harm() -> None:
    good, bad, twin = old_runs(3)
    then = todays(json.loads((OLD / "diagnose_3.json").read_text()))
    assert todays(diagnose(bad, good, twin).to_json())["harm"] == then["harm"]


def test_schema_2_is_compared_and_diagnosed() -> None:
    good, bad, _ = old_runs(2)
    found = compare(bad, good)
    assert found.divergence_step is not None and len(found.tensors) == 15
    assert diagnose(bad, good).harm == "harmful"


@pytest.mark.parametrize("schema", [2, 3])
def test_the_tab_shows_what_is_recorded(schema: int) -> None:
    tab = Tab(OLD / f"schema_{schema}")
    assert {run["name"] for run in tab.json("runs")["runs"]} >= {"good", "bad"}
    recorded = read_table_rows(OLD / f"schema_{schema}" / "bad", "metrics").filter(layer="layers.0.fc1", role="grad_output")
    for metric in ("underflow_pct", "amax", "relative_error", "ranks"):
        shown = tab.json("timeline", run="bad", layer="layers.0.fc1", role="grad_output", metrics=metric)
        assert shown["step"] == recorded["step"].to_list()
        assert shown["metrics"][metric] == pytest.approx(recorded[metric].cast(pl.Float64).to_list())
    histogram = tab.json("histogram", run="bad", layer="layers.0.fc1", role="grad_output", step=60)
    where = {"step": 60, "layer": "layers.0.fc1", "role": "grad_output"}
    (counted,) = read_table_rows(OLD / f"schema_{schema}" / "bad", "histograms", where=where)["counts"].to_list()
    assert [sum(row["counts"]) for row in histogram["rows"]] == [sum(counted)]


def test_a_resumed_run_goes_on_in_todays_schema(tmp_path: Path) -> None:
    """Both attempts are read as one record, though their parts lie in folders of different names."""
    from nemo_fp8_debug.record.writer import RunRecordWriter

    shutil.copytree(OLD / "schema_3" / "bad", tmp_path / "run")
    before = read_table_rows(tmp_path / "run", "metrics")
    resumed = RunRecordWriter(tmp_path / "run")
    resumed.open({"resumed": True})
    row = before.filter(step=110).with_columns(attempt=pl.lit(1, pl.Int32), step=pl.lit(130, pl.Int64))
    resumed.write_part("metrics", {name: row[name].to_list() for name in SCHEMAS["metrics"]}, 130)
    resumed.close()
    after = read_table_rows(tmp_path / "run", "metrics")
    assert after.filter(pl.col("step") <= 120).equals(before, null_equal=True)
    assert after.filter(step=130).equals(row, null_equal=True)
