"""A table that one folder adds: it is recorded, read, summed up over ranks, tagged, and a rule judges it."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
import torch

from nemo_fp8_debug import Monitor, diagnose, read_record
from nemo_fp8_debug.record.writer import RunRecord


def test_memory_is_recorded_and_a_leak_is_found(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model, tmp_path / "run", interval=1, table_rows=0, on_error="raise")
    for step in range(12):
        with monitor.step(step) as report:
            optimizer.zero_grad()
            (loss := model(torch.randn(8, 16)).square().mean()).backward()
            optimizer.step()
            report(loss=loss)
    monitor.close()
    rows = read_record(tmp_path / "run", table="memory")
    assert rows["rank"].to_list() == [0] * 12
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert rows["host_bytes"].to_list() == [pytest.approx(pages * 4096, rel=0.5)] * 12
    assert [f for f in diagnose(tmp_path / "run").findings if f.rule == "memory"] == []

    grown = rows.with_columns(step=pl.col("step") + 100, host_bytes=pl.col("host_bytes") * (1 + pl.col("step")))
    record = RunRecord(tmp_path / "run")
    for row in grown.iter_rows(named=True):
        columns = {name: [value] for name, value in row.items()}
        record.write_part("memory", columns, row["step"])
    (found,) = [f for f in diagnose(tmp_path / "run").findings if f.rule == "memory"]
    assert "rank 0 takes" in found.evidence
