"""Logs that other tools wrote: where they lie, lines of them, and the tables that they become."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from nemo_fp8_debug.record.imports import import_logs
from nemo_fp8_debug.record.reader import read_table_rows

LOGS = Path(__file__).parent / "logs"
TE = LOGS / "transformer_engine"
TE_TEXT = TE / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log"
(TE_EVENTS,) = (TE / "tensorboard").iterdir()
FIRST_MONITOR = LOGS / "msprobe" / "monitor"
SECOND_MONITOR = LOGS / "msprobe" / "monitor_v2"
(FIRST_RUN,) = FIRST_MONITOR.iterdir()

ROLES = {"activation": "input", "weight": "weight", "gradient": "grad_output"}


def table(source: Path, output: Path, name: str = "metrics") -> pl.DataFrame:
    import_logs(source, output)
    return read_table_rows(output, name)


def line(name: str, value: object, step: int = 0) -> str:
    return f"2026-11-21 11:33:55,123 - INFO - {name} \t\t\t\t iteration={step:06d} \t\t\t\t value={value}\n"


def text_log(folder: Path, *lines: str, rank: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"nvdlfw_inspect_globalrank-{rank}.log"
    path.write_text("".join(lines))
    return path
