"""The parts of the GPU command that train, over emulated kernels: every row is there, and all but times holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_command import run_command

PARTS = ("train-delayed", "products-delayed", "overhead-delayed", "te-statistics-delayed")
KEPT = (
    "losses with the monitor that are those without, bit by bit",
    "scales of X and W that Transformer Engine's own tensors carry",
    "histograms that are the CPU's, count by count",
    "metrics from histograms that are the CPU's, bit by bit",
    "the others, relative",
    "products that are within their bounds",
    *(f"{product} that is wrong by a factor is named, and no other" for product in ("fprop", "dgrad", "wgrad")),
    "hooks in unsampled steps",
    "amax that is theirs",
    "scale and theirs, relative",
)
PROMISES_OF_TIME = (
    "unsampled step, attached",
    "sampled step, until the next can start",
    "sampled step, with all that it costs the next four",
    "average at interval 100",
)
MEASURED = (
    *("the same in processor time of all threads", "hooks in a sampled step", "peak of device memory"),
    *(f"host time of a {kind}" for kind in ("forward pre-hook (X)", "forward hook (W)", "gradient hook (dY)")),
    "peak of host memory in sampled steps",
)
#: GEMMs of the tiny model's layers, and their operands
OPERANDS = 2 * 4 * 3
#: of each of them: those that take no parameters, and those of delayed scaling
STATISTICS = {"LogTensorStats": 8, "LogFp8TensorStats": 5, "LogTensorStats + LogFp8TensorStats": 13}
#: steps, and the operands that no kernel casts from float32
COMPARED = 3 * (OPERANDS - 4)


@pytest.mark.long
def test_every_row_over_emulated_kernels(tmp_path: Path) -> None:
    done = run_command("--emulate", "--results", tmp_path / "found.json", "--part", *PARTS)
    assert done.returncode == 0, done.stdout + done.stderr
    attempts = {name: attempts[0] for name, attempts in json.loads((tmp_path / "found.json").read_text())["parts"].items()}
    assert {name: attempt["status"] for name, attempt in attempts.items()} == dict.fromkeys(PARTS, "done")
    measures: dict[str, dict[str, Any]] = {}
    for attempt in attempts.values():
        measures |= {measure["what"]: measure for measure in attempt["results"]["measures"]}
    assert [what for what in KEPT if measures[what]["kept"] is not True] == []
    assert not [what for what in KEPT if measures[what].get("of") == 0]
    assert [what for what in MEASURED if measures[what]["kept"] is not None] == []
    promises = {what for what, measure in measures.items() if measure["of_time"] and measure["kept"] is not None}
    assert promises == set(PROMISES_OF_TIME)
    lines = attempts["te-statistics-delayed"]["results"]["lines"]
    metrics = {line["tool"]: line["metrics"] for line in lines}
    ours = metrics.pop("nemo_fp8_debug")
    assert metrics == {f"Transformer Engine {tool}": OPERANDS * each for tool, each in STATISTICS.items()}
    assert ours > max(metrics.values())
    equality = {line["metric"]: line for line in attempts["te-statistics-delayed"]["results"]["equality"]}
    assert {line["compared"] for line in equality.values()} == {COMPARED}
    assert equality["underflow_pct"]["identical"] == COMPARED and equality["mse"]["apart"] < 0.05
    told = done.stdout
    assert "no time here means anything" in told and "BROKEN" not in told
