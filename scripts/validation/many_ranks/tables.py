"""The tables of docs/scaling.md, from the results that are committed: `.venv/bin/python -m many_ranks.tables`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .fault_cases import FAULTS
from .faults import longest
from .simulation import WHOLE

#: what follows from each fault, if all is as promised
FOLLOWS = {
    "killed": "the lowest other rank warned, sampling ended",
    "stopped": "as killed. The rank stayed silent when it went on after 9 s",
    "delayed": "no sample is missing (delay 1.5 s)",
    "cut off": "one rank on each side warned, sampling ended",
    "disk full": "rank 0 warned. No sample is missing once there was room",
    "restarted": "as killed. The new process trained unmonitored",
    "other batch": "its rows count too",
    "other shapes": "its histograms count too",
    "other GEMMs": "rows give their number of ranks",
    "other dtype": "a warning names the operands that are left out",
    "other steps": "rank 0 warned, sampling ended",
}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text())
    return found


def waits() -> list[str]:
    worlds = read("waits.json")["worlds"]
    return [row(world, of["net_ms"]["median"], of["net_ms"]["p95"], of["net_ms"]["most"]) for world, of in worlds.items()]


def faults() -> list[str]:
    runs = read("faults.json")["faults"]
    return [row(name, FOLLOWS[name], longest(runs[name])) for name in FAULTS]


def compared() -> list[str]:
    rows = []
    for world, of in read("simulation.json")["worlds"].items():
        both = [sum(of[kind][part] for part in ("packing", "reducing")) for kind in ("predicted", "measured")]
        pairs = [(of["predicted"][part], of["measured"][part], of["off_by"][part]) for part in ("message", "gathering")]
        cells = [f"{p:.2g} ({m:.2g}), {off:+.0%}" for p, m, off in [(*both, of["off_by"][WHOLE]), *pairs]]
        rows.append(row(world, *cells))
    return rows


def predicted() -> list[str]:
    names = ("packing", "reducing", "gathering", "message")
    return [row(f"{of['ranks']:,}", of["stages"], *(of[name] for name in names)) for of in read("simulation.json")["table"]]


def row(*cells: object) -> str:
    return f"| {' | '.join(map(shown, cells))} |"


def shown(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.0f}" if cell >= 100 else f"{cell:.2g}"
    return str(cell)


TABLES = {"waits": waits, "faults": faults, "compared": compared, "predicted": predicted}

if __name__ == "__main__":
    for name, table in TABLES.items():
        print(name, *table(), sep="\n")
