"""Runs of models that differ in names, shapes and steps, written as records to be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samples import FINGERPRINT, sample
from typer.testing import CliRunner, Result

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.record.writer import RunRecordWriter

KINDS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
SIZES = {"linear_qkv": 3 << 10, "linear_proj": 1 << 10, "linear_fc1": 4 << 10, "linear_fc2": 4 << 10}
CULPRIT = ("decoder.layers.1.mlp.linear_fc2", "input")
#: as Hugging Face might name what Megatron has
FOREIGN = {"linear_qkv": "attn.c_attn", "linear_proj": "attn.c_proj", "linear_fc1": "mlp.c_fc", "linear_fc2": "mlp.c_out"}

Naming = Callable[[int, str], str]


def megatron(depth: int, kind: str) -> str:
    return f"decoder.layers.{depth}.{kind}"


def foreign(depth: int, kind: str) -> str:
    return f"transformer.h.{depth}.{FOREIGN[kind.rpartition('.')[2]]}"


def rows(named: Naming = megatron, harm: float = 0.0, wider: int = 1, depths: int = 2) -> list[dict[str, Any]]:
    """The tensors of a model at one step; X of the last layer's linear_fc2 underflows by `harm` percent."""
    result: list[dict[str, Any]] = []
    for depth in range(depths):
        for kind in KINDS:
            name, short = named(depth, kind), kind.rpartition(".")[2]
            for role in ("input", "weight", "grad_output"):
                n = SIZES[short] * wider if role == "weight" else 4096
                culprit = harm and role == "input" and (depth, short) == (depths - 1, "linear_fc2")
                harmed = {"underflow_pct": 0.1 + harm, "mse": 1e-2} if culprit else {}
                result.append({"layer": name, "gemm": name.rpartition(".")[2], "role": role, "n": n, **harmed})
    return result


def write(
    folder: Path,
    steps: range = range(0, 200, 10),
    since: int | None = None,
    batch: int | None = None,
    fingerprint: Mapping[str, Any] = FINGERPRINT,
    close: bool = True,
    **of_rows: Any,
) -> Path:
    """A run that is harmed, and whose loss rises, from a step on."""
    record = RunRecordWriter(folder)
    record.open(fingerprint)
    for step in steps:
        consumed = {} if batch is None else {"consumed_samples": float(step * batch)}
        harmed = {"harm": 20.0} if since is not None and step >= since else {}
        record.record(sample(step, rows(**of_rows, **harmed), **consumed))
        lost = 5.0 - step / 100 + (4 if since is not None and step >= since + 20 else 0)
        record.record_steps({step: {"loss": lost} | consumed})
    if close:
        record.close()
    return folder


def run_cli(baseline: object, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments), "--baseline", str(baseline)])


def first_out(baseline: Path, bad: Path, **how: Any) -> tuple[str, str, int]:
    row = compare(bad, baseline, **how).out_of_band.row(0, named=True)
    return row["layer"], row["role"], row["onset"]
