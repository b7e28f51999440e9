"""The tables of docs/gpu.md, from JSON alone: `run.sh --tables` rewrites what stands between the page's markers."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from .parts import PARTS
from .results import Refused, broken, last_attempts, read, write

PAGE = Path(__file__).parents[3] / "docs/gpu.md"
FOLDER = Path(__file__).parent / "results"
EMULATED = "emulated"
WIDTH = 120

#: a key of a line -> (heading, format, whether it depends on how fast something ran)
COLUMNS: dict[str, tuple[str, str, bool]] = {
    "values": ("values", ",", False),
    "ms": ("ms", ".3f", True),
    "rate": ("TB/s read", ".3g", True),
    "copy_rate": ("copy, TB/s", ".3g", True),
    "ratio": ("of a copy's rate", ".2g", True),
    "plain_ms": ("plain torch, ms", ".2f", True),
    "host_us": ("host, us a call", ".0f", True),
    "host_ms": ("host, ms", ".1f", True),
    "device_ms": ("device with the copy, ms", ".1f", True),
    "equal": ("as on the CPU", "", False),
    "sampled": ("a sampled step, in plain steps", ".2f", True),
    "unsampled": ("an unsampled step", ".3f", True),
    "metrics": ("metrics a step", ".0f", False),
    "us_a_metric": ("us a metric", ".0f", True),
    "statistic": ("their statistic", "", False),
    "compared": ("compared", ",", False),
    "identical": ("identical", ",", False),
    "apart": ("apart by at most", ".1e", False),
    "error_over_bound": ("error over its bound, at most", ".2f", False),
    "relative_error": ("relative error, median", ".1e", False),
}


def rewrite(page: Path = PAGE, folder: Path = FOLDER) -> None:
    """Put what the JSON files of a folder say between the markers of a page."""
    found = [read(path) for path in sorted(folder.glob("*.json"))]
    write(page, _between(_between(page.read_text(), "state", state(found)), "tables", body(found)))


def _between(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}: from scripts/validation/gpu/results -->\n", f"<!-- end of {name} -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise Refused(f"{PAGE.name} has no {begin.strip()} ... {end}; put both where the {name} is to stand")
    return f"{head}{begin}\n{text}\n\n{end}{tail}"


def on_devices(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of GPUs."""
    return [data for data in found if not data["emulated"]]


def state(found: list[dict[str, Any]]) -> str:
    """What was run on GPUs so far, in a sentence each."""
    lines = [_run_on(data) for data in on_devices(found)]
    if lines:
        return "\n\n".join([*lines, "See [what was measured](#what-was-measured). The models below came before."])
    return "**None of this was run on a GPU yet.**"


def _run_on(data: dict[str, Any]) -> str:
    attempts = dict(last_attempts(data))
    done = {name: broken(attempt, False) for name, attempt in attempts.items() if attempt["status"] == "done"}
    kept = [f"`{name}`" for name, promises in done.items() if not promises]
    not_kept = [f"`{name}`" for name, promises in done.items() if promises]
    told = [f"{len(done)} of {len(PARTS)} parts are finished"]
    told += [f"all that is promised holds in {', '.join(kept)}"] if kept else []
    told += [f"not in {', '.join(not_kept)}"] if not_kept else []
    return _wrapped(f"**Run on {data['device']['name']}** (sources {data['sources'][:8]}): {'; '.join(told)}.")


def body(found: list[dict[str, Any]]) -> str:
    """The tables of all GPUs, or, as long as there are none, those of emulated kernels."""
    return "\n\n".join(tables_of(data) for data in on_devices(found) or found)


def tables_of(data: dict[str, Any]) -> str:
    """All tables of one file."""
    attempts = dict(last_attempts(data))
    blocks = [_heading(data, attempts), _overview(attempts)]
    for name, attempt in attempts.items():
        results = attempt.get("results")
        if results:
            tables = [_lines(results[key], data["emulated"]) for key in ("lines", "equality") if results.get(key)]
            measures = [_measures(results["measures"], data["emulated"])] if results["measures"] else []
            blocks.append("\n\n".join([f"**`{name}`**: {attempt['title']}", *measures, *tables]))
    return "\n\n".join(blocks)


def _heading(data: dict[str, Any], attempts: dict[str, dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    if data["emulated"]:
        return _wrapped(f"**Emulated kernels on a CPU: no time here means anything, and none is shown.** {versions}.")
    device = data["device"]
    dates = sorted(attempt["date"][:10] for attempt in attempts.values())
    commits = sorted({attempt["commit"] or f"unknown (sources {data['sources']})" for attempt in attempts.values()})
    driver = f", driver {device['driver']}" if device["driver"] else ""
    return _wrapped(
        f"**{device['name']}**, compute capability {device['capability']}{driver}, {data['machine']['processor']}, "
        f"{data['machine']['cores']} cores; {versions}; sources {data['sources'][:8]}, commit {', '.join(commits)}; "
        f"{dates[0] if dates else 'no part yet'}."
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _overview(attempts: dict[str, dict[str, Any]]) -> str:
    rows = [[f"`{name}`", attempt["status"], attempt.get("reason", "")] for name, attempt in attempts.items()]
    return _table(["part", "status", "why"], rows)


def _measures(measures: list[dict[str, Any]], emulated: bool) -> str:
    return _table(["what", "measured", "may be"], [_row(m, emulated and m["of_time"]) for m in measures])


def _row(m: dict[str, Any], meaningless: bool) -> list[str]:
    if meaningless:
        return [m["what"], EMULATED, m["limit"]]
    shown = f"{m['value']} of {m['of']}" if "of" in m else _number(m, _format_of(m["value"]))
    verdict = "" if m["kept"] is None else ": kept" if m["kept"] else ": BROKEN"
    return [m["what"], f"{shown} {m['unit']}".rstrip(), f"{m['limit']}{verdict}"]


def _lines(lines: list[dict[str, Any]], emulated: bool) -> str:
    """A table of lines with the same keys."""
    columns = {key: COLUMNS.get(key, (key, "", False)) for key in lines[0]}

    def shown(line: dict[str, Any], key: str) -> str:
        _, how, of_time = columns[key]
        return EMULATED if of_time and emulated else _cell(line[key], how)

    return _table([heading for heading, _, _ in columns.values()], [[shown(line, key) for key in columns] for line in lines])


def _cell(value: Any, how: str) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return _number(value, how)
    return ("yes" if value else "NO") if isinstance(value, bool) else format(value, how)


def _number(value: dict[str, Any], how: str) -> str:
    shown = format(value["value"], how)
    return f"{shown} [{value['low']:{how}}, {value['high']:{how}}]" if "low" in value else shown


def _format_of(value: Any) -> str:
    """Three digits, or a whole number."""
    if isinstance(value, (str, int)):
        return ""
    if not math.isfinite(value) or value == 0:
        return "g"
    return ".0f" if abs(value) >= 100 else ".3g" if abs(value) < 0.1 else ".2f" if abs(value) >= 1 else ".3f"


def _table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
