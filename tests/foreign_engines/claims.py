"""Trains an engine under the monitor and holds what the record claims of its casts against what the engine cast."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_engines.witness import WITNESS, Cast, Witness
from torch import nn

from nemo_fp8_debug import Monitor, read_record

STEPS = 2
METRICS = ("amax", "scale", "underflow_pct", "relative_error")
TOLERANCE = {"underflow_pct": 0.0, "amax": 0.0, "scale": 1e-6, "relative_error": 1e-4}


@dataclass
class Claims:
    """What of the record and its ledger is not so."""

    wrong: list[str]
    """An `engine` that is not what was cast, and a cast that is neither seen, nor `unknown`, nor named in the ledger."""
    nothing_quantizes: list[str]
    """Rows of operands that were cast whose `scale_source` says that nothing casts them."""


def claims_of(model: nn.Module, folder: Path, loss_of: Callable[[int], torch.Tensor]) -> Claims:
    """Trains with every step sampled, and holds the record against the witness."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    WITNESS.casts.clear()
    WITNESS.watch(model)
    with closing(Monitor(model, str(folder), interval=1, table_rows=0)) as monitor:
        for WITNESS.step in range(STEPS):
            with monitor.step(WITNESS.step) as report:
                loss = loss_of(WITNESS.step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                report(loss=loss)
    WITNESS.step = -1
    assert WITNESS.casts
    record = read_record(str(folder), "metrics", ["step", "layer", "role", "scale_source", *METRICS])
    rows = {(row["step"], row["layer"], row["role"]): row for row in record.iter_rows(named=True)}
    ledger = json.loads((folder / "attempt-0.json").read_text())["coverage"]
    named = _named({**ledger["not_observed"], **ledger["partly_observed"]}, model)
    return Claims(_of_casts(WITNESS, rows, named) + _of_rows(WITNESS, rows), _denials(WITNESS, rows))


def _of_casts(witness: Witness, rows: dict[Any, dict[str, Any]], named: Callable[[str], bool]) -> list[str]:
    wrong = []
    for key, cast in witness.casts.items():
        row, what = rows.get(key), f"step {cast.step}, {cast.role} of {cast.layer}"
        source = row["scale_source"] if row else None
        if row and source == "engine":
            wrong += [f"{what}: {difference}" for difference in _differences(cast, row)]
        elif source != "unknown" and not named(cast.layer):
            wrong.append(f"{what}: was cast, the row says {source!r}, and the ledger does not name it")
    return wrong


def _denials(witness: Witness, rows: dict[Any, dict[str, Any]]) -> list[str]:
    sources = {key: rows[key]["scale_source"] for key in witness.casts if key in rows}
    return [f"{key}: {source}" for key, source in sources.items() if source not in ("engine", "unknown")]


def _of_rows(witness: Witness, rows: dict[Any, dict[str, Any]]) -> list[str]:
    return [
        f"step {step}, {role} of {layer}: was not cast, the row says 'engine'"
        for (step, layer, role), row in rows.items()
        if row["scale_source"] == "engine" and (step, layer, role) not in witness.casts
    ]


def _differences(cast: Cast, row: dict[str, Any]) -> list[str]:
    true = cast.metrics
    return [
        f"'engine' claims {metric} {row[metric]:.5g}, the engine's is {value:.5g}"
        for metric, value in true.items()
        if row[metric] is None or not math.isclose(row[metric], value, rel_tol=TOLERANCE[metric])
    ]


def _named(ledger: dict[str, Any], model: nn.Module) -> Callable[[str], bool]:
    """Whether the ledger names a module; products in code, which it always lists, are what modules without matrices do."""
    firsts = [entry["first"] for entry in ledger.values()]

    def named(layer: str) -> bool:
        module = model.get_submodule(layer)
        if not [*module.parameters(), *module.buffers()]:
            return "*" in firsts
        return any(first == layer or first.startswith(f"{layer}.") for first in firsts)

    return named


def finding(reason: str) -> pytest.MarkDecorator:
    """Of an engine that has the record claim what is not so; strict, so that whoever mends it takes the mark away."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


def params(engines: Iterable[str], findings: Mapping[str, str]) -> list[Any]:
    """The engines by name, those with a finding marked."""
    return [pytest.param(name, marks=[finding(findings[name])] if name in findings else []) for name in engines]
