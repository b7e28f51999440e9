"""Reads a `.wandb` file: W&B's own records in the log format of LevelDB, as its `wandb/internal/datastore` documents it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Record]:
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, pending = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the end of a block is padded
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        pending += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield Record.FromString(pending)
            pending = b""


def _values(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def content(path: Path) -> dict[str, Any]:
    """History rows, the summary, the configuration, step metrics by name, types of artifacts, and how the run ended."""
    found: dict[str, Any] = {"history": [], "summary": {}, "config": {}, "metrics": {}, "artifacts": [], "exit": None}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found["history"].append(_values(record.history.item) | {"_step": record.history.step.num})
        elif kind == "summary":
            found["summary"] |= _values(record.summary.update)
        elif kind == "config":
            found["config"] |= _values(record.config.update)
        elif kind == "metric":
            found["metrics"][record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
        elif kind == "request" and record.request.HasField("log_artifact"):
            found["artifacts"].append(record.request.log_artifact.artifact.type)
        elif kind == "artifact":
            found["artifacts"].append(record.artifact.type)
    return found
