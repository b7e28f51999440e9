"""TensorBoard's own WSGI application with the FP8 tab, asked as a browser asks; records to show, and their frames."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import polars as pl
import torch
from samples import FINGERPRINT, measured_sample, sample
from tensorboard.backend.application import TensorBoardWSGIApp
from werkzeug.test import Client, TestResponse

from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.writer import RunRecordWriter
from nemo_fp8_debug.tensorboard_plugin import FP8Plugin

FC1, FC2 = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"


class Tab:
    """Requests to the tab."""

    def __init__(self, logdir: str | Path = "", spec: str = "", prefix: str = "") -> None:
        names = {"samples_per_plugin": {}, "window_title": "", "path_prefix": prefix}
        flags = Namespace(logdir=str(logdir), logdir_spec=spec, **names)
        self.client = Client(TensorBoardWSGIApp(flags, [FP8Plugin]))
        self.prefix = prefix

    def get(self, route: str, headers: dict[str, str] | None = None, **parameters: Any) -> TestResponse:
        query = urlencode({name.removesuffix("_"): value for name, value in parameters.items()})
        return self.client.get(f"{self.prefix}/data/plugin/fp8/{route}?{query}", headers=headers)

    def json(self, route: str, **parameters: Any) -> Any:
        response = self.get(route, **parameters)
        assert response.status_code == 200, response.text
        return json.loads(response.text, parse_constant=_no_constant)

    def error(self, route: str, **parameters: Any) -> tuple[int, str]:
        response = self.get(route, **parameters)
        return response.status_code, json.loads(response.text)["error"]

    def frames(self, **parameters: Any) -> tuple[dict[str, Any], Any]:
        response = self.get("frames", **parameters)
        assert response.status_code == 200, response.text
        return unpacked(response.data)


def unpacked(data: bytes) -> tuple[dict[str, Any], Any]:
    """Of `frames`, as the browser reads it: values by step."""
    header, values = unpacked_flat(data)
    return header, values.reshape(len(header["steps"]), len(header["layer"]))


def unpacked_flat(data: bytes) -> tuple[dict[str, Any], Any]:
    """A header and all values."""
    size = int.from_bytes(data[:4], "little")
    assert (4 + size) % 4 == 0
    return json.loads(data[4 : 4 + size]), np.frombuffer(data[4 + size :], "<f4")


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not valid JSON")


def start(folder: Path, **more: Any) -> RunRecordWriter:
    record = RunRecordWriter(folder)
    record.open(FINGERPRINT | more)
    return record


def write_odd_run(folder: Path) -> Path:
    """Merged parts and small ones, tensors that come and go, metrics that are absent or not finite, a second attempt."""
    random = np.random.default_rng(1)
    record = start(folder)
    for i in range(70):
        layers = [FC1, FC2] if i % 5 else [FC2, "output_layer"]
        rows = [
            {"layer": layer, "role": role, "mse": float(random.lognormal()), "nan": int(i == 9), "inf": 2 * int(i == 9)}
            for layer in layers
            for role in ("input", "weight")
        ]
        rows[0] |= {"underflow_pct": None, "cosine": float("nan"), "kurtosis": float("inf"), "amax": 1e300}
        record.record(sample(10 * i, rows))
        record.record_steps({10 * i + j: {"loss": 2.0 + 0.01 * j, "lr": 1e-3} for j in range(10)})
    record.close()
    record = start(folder)
    for step in (600, 690, 700):
        record.record(sample(step, [{"layer": FC1, "mse": 7.0, "recipe": "current-hybrid"}]))
        record.record_steps({step: {"loss": float("nan"), "skipped": 1.0, "trigger": "spike"}})
    record.close()
    return folder


def write_counted_run(folder: Path) -> Path:
    """Real tensors with their histograms at steps 0, 10 and 20."""
    record = start(folder)
    for step in (0, 10, 20):
        x = torch.randn(64, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(step))
        record.record(measured_sample(step, {(FC1, "input"): x, (FC1, "weight"): x[:8].float(), (FC2, "input"): 2 * x}))
        record.record_steps({step: {"loss": 2.5}})
    record.close()
    return folder


def expected_frames(run: Path, metric: str, first: int, last: int) -> dict[tuple[int, str, str], np.float32]:
    rows = read_table_rows(run, "metrics").filter(pl.col("step").is_between(first, last))
    column = pl.col("nan") + pl.col("inf") if metric == "nonfinite" else pl.col(metric)
    with np.errstate(over="ignore"):
        return {
            tuple(key): np.float32(np.nan if value is None else value)  # type: ignore[misc]
            for *key, value in rows.select("step", "layer", "role", column.cast(pl.Float64)).iter_rows()
        }
