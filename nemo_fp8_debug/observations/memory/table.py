"""The table of memory: a row for each rank."""

from __future__ import annotations

from ...core.table import SAMPLE, Metric, Table, typed

METRICS = {"host_bytes": Metric("resident memory", "bytes"), "device_bytes": Metric("allocated on the device", "bytes")}

TABLES = (Table("memory", {**SAMPLE, **typed("int64", "rank"), **typed("float64", *METRICS)}, METRICS),)
