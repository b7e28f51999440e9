"""The tables of docs/scaling.md, from the results that are committed: `.venv/bin/python -m many_ranks.tables`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .fault_cases import FAULTS
from .faults import longest
from .simulation import WHOLE

#: what follows from each fault, if all is as promised. Faults with the same text share a row
FOLLOWS = {
    "killed": "the lowest other rank warned, sampling ended",
    "stopped": "the lowest other rank warned, sampling ended",
    "delayed": "no sample is missing",
    "cut off": "one rank on each side warned, sampling ended",
    "disk full": "no sample is missing",
    "restarted": "the lowest other rank warned, sampling ended",
    "other batch": "all ranks count",
    "other shapes": "all ranks count",
    "other GEMMs": "rows give their number of ranks",
    "other dtype": "a warning names the operands left out",
    "other steps": "rank 0 warned, sampling ended",
}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text())
    return found


def waits() -> list[str]:
    """Return a row of all numbers of processes but the largest, and one of the largest."""
    worlds = sorted(read("waits.json")["worlds"].items(), key=lambda item: int(item[0]))
    return [_waits_of(worlds[:-1]), _waits_of(worlds[-1:])]


def _waits_of(worlds: list[tuple[str, Any]]) -> str:
    medians = sorted(of["net_ms"]["median"] for _, of in worlds)
    ranges = [(worlds[0][0], worlds[-1][0]), (shown(medians[0]), shown(medians[-1]))]
    return row(*(" to ".join(dict.fromkeys(ends)) for ends in ranges), max(of["net_ms"]["most"] for _, of in worlds))


def faults() -> list[str]:
    runs = read("faults.json")["faults"]
    alike = {text: [name for name in FAULTS if FOLLOWS[name] == text] for text in FOLLOWS.values()}
    return [row(", ".join(names), text, max(longest(runs[name]) for name in names)) for text, names in alike.items()]


def compared() -> list[str]:
    """Return one sentence: how far predictions are off, over all parts of a sample."""
    worlds = read("simulation.json")["worlds"]
    off = [abs(of["off_by"][part]) for of in worlds.values() for part in (WHOLE, "message", "gathering")]
    fewest, most = min(map(int, worlds)), max(map(int, worlds))
    return [f"On {fewest} to {most} real processes, it was off by {min(off):.0%} to {max(off):.0%}."]


def predicted() -> list[str]:
    rows = []
    for of in read("simulation.json")["table"]:
        added = of["packing"] + of["reducing"]
        rows.append(row(f"{of['ranks']:,}", of["stages"], added, of["gathering"], of["message"]))
    return rows


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
