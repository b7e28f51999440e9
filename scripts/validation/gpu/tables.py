"""The tables of docs/gpu.md, from JSON alone: `run.sh --tables` rewrites what stands between the page's markers."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable
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


#: measures that the page shows, and their names there; `tables_of` has all of them
SHOWN = {
    "tensors in which it finds what a CPU does (equal, count by count)": "tensors as on a CPU",
    "tensors in which it finds what a CPU does (counts and extremes equal, sums within 1e-12)": "tensors as on a CPU",
    "tensors in which it finds what a CPU does (counts equal, sums within 1e-12)": "tensors as on a CPU",
    "lines in which all is the device's, bit by bit": "transfers identical to the device's histograms",
    "amax that is theirs": "amax equal to theirs",
    "scale and theirs, relative": "relative difference of scales",
    "losses with the monitor that are those without, bit by bit": "losses identical with the monitor",
    "scales of X and W that Transformer Engine's own tensors carry": "scales equal to Transformer Engine's",
    "histograms that are the CPU's, count by count": "histograms equal to a CPU's",
    "metrics from histograms that are the CPU's, bit by bit": "metrics equal to a CPU's",
    "metrics from sums over float32 or blocks that are the CPU's, bit by bit: the others, relative": (
        "relative difference of other metrics"
    ),
    "products that are within their bounds": "products within their bounds",
    "fprop that is wrong by a factor is named, and no other": "smallest wrong factor detected in fprop",
    "dgrad that is wrong by a factor is named, and no other": "smallest such factor in dgrad and wgrad",
    "wgrad that is wrong by a factor is named, and no other": "smallest such factor in dgrad and wgrad",
    "sampled step, until the next can start": "a sampled step, until the next can start",
    "sampled step, with all that it costs the next four": "a sampled step, with the slowdown of the next four",
    "average at interval 100": "added to all steps at interval 100",
    "unsampled step, attached": "an unsampled step with the monitor",
    "hooks in unsampled steps": "hooks in an unsampled step",
}


def rewrite(page: Path = PAGE, folder: Path = FOLDER) -> None:
    """Write the results of a folder's JSON files between the markers of a page.

    Raises:
        Refused: the page has no markers.
    """
    begin, end = "<!-- tables: from scripts/validation/gpu/results -->\n", "<!-- end of tables -->"
    head, found, rest = page.read_text().partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise Refused(f"{PAGE.name} has no {begin.strip()} ... {end}; put both where the tables are to stand")
    write(page, f"{head}{begin}\n{summarize([read(path) for path in sorted(folder.glob('*.json'))])}\n\n{end}{tail}")


def summarize(found: list[dict[str, Any]]) -> str:
    """Return a summary of each GPU: the newest attempt of each part; of emulated kernels if no GPU ran anything."""
    devices: dict[str, list[dict[str, Any]]] = {}
    for data in found:
        if not data["emulated"]:
            devices.setdefault(data["device"]["name"], []).append(data)
    if devices:
        return "\n\n".join(_summary(files) for files in devices.values())
    return "\n\n".join(["**None of this was run on a GPU yet.**", *(_summary([data]) for data in found)])


def _summary(files: list[dict[str, Any]]) -> str:
    """Summarize all files of a device."""
    newest: dict[str, dict[str, Any]] = {}
    for data in files:
        for name, attempt in last_attempts(data):
            if name not in newest or newest[name]["date"] < attempt["date"]:
                newest[name] = attempt
    emulated = files[-1]["emulated"]
    done = {part.name: newest[part.name] for part in PARTS if newest.get(part.name, {}).get("status") == "done"}
    tables = {name: _rows_of(attempt["results"], emulated) for name, attempt in done.items()}
    cells: dict[str, list[list[str]]] = {}
    for result, *row in itertools.chain(*tables.values()):
        cells.setdefault(result, []).append(row)
    rows = [[result, *map(_joined, zip(*found, strict=True))] for result, found in cells.items()]
    not_kept = [f"`{name}`" for name, attempt in done.items() if broken(attempt, emulated)]
    said = f"All limits are kept except in {', '.join(not_kept)}." if not_kept else "All limits are kept."
    finished = f"{len(done)} of {len(PARTS)} parts finished ({', '.join(f'`{name}`' for name in done)})"
    about = f"**Emulated kernels on a CPU**: {finished}. No time here means anything."
    if not emulated:
        about = f"**Run on {_device(files[-1])}: {finished}. {said}"
    return f"{_wrapped(about)}\n\n{_table(['result', 'measured', 'limit'], rows)}"


def _joined(cells: Iterable[str]) -> str:
    """Put cells of several parts into one, each text once."""
    return ", ".join(dict.fromkeys(filter(None, cells)))


def _device(data: dict[str, Any]) -> str:
    """Name a device, and the releases that its times depend on."""
    names = ("transformer-engine", "megatron-core", "torch", "numpy", "numba-cuda")
    versions = ", ".join(f"{name} {data['versions'][name]}" for name in names if name in data["versions"])
    return f"{data['device']['name']}**, {versions}"


def _rows_of(results: dict[str, Any], emulated: bool) -> list[list[str]]:
    """Return the rows of a part: what `SHOWN` names, and everything else that has a limit."""
    rows, before = [], ""
    for m in results["measures"]:
        relative = m["what"].startswith(("the others", "the same", "more than"))  # to the row before
        before = f"{before}: {m['what']}" if relative else m["what"]
        limited = m["kept"] is not None and (m["kept"] is False or not isinstance(m["value"], str))
        if before in SHOWN or limited:
            meaningless = emulated and m["of_time"]
            limit = m["limit"] + (": **not kept**" if m["kept"] is False and not meaningless else "")
            rows.append([SHOWN.get(before, before), EMULATED if meaningless else _measured(m), limit])
    lines = results.get("lines", [])
    if ratios := [line["ratio"] for line in lines if line.get("ratio") is not None]:
        low, high = (_cell(value, COLUMNS["ratio"][1]) for value in (min(ratios), max(ratios)))
        rows.append(["rate, compared with a copy", EMULATED if emulated else f"{low} to {high}", ""])
    for line in (line for line in lines if "tool" in line):
        cost = EMULATED if emulated else f"{_cell(line['sampled'], COLUMNS['sampled'][1])} unsampled steps"
        rows.append([f"a sampled step with {line['tool']}", cost, ""])
    return rows


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
    verdict = "" if m["kept"] is None else ": kept" if m["kept"] else ": BROKEN"
    return [m["what"], _measured(m), f"{m['limit']}{verdict}"]


def _measured(m: dict[str, Any]) -> str:
    shown = f"{m['value']} of {m['of']}" if "of" in m else _number(m, _format_of(m["value"]))
    return f"{shown} {m['unit']}".rstrip()


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
