"""Import CSV files of msProbe's monitors (`TrainerMon` and `TrainerMonitorV2`): amax and NaN counts of X, W and dY.

Each rank writes its own values without reducing them over ranks. We import the lowest rank's values. If a step has several
rows for a tensor, each row is a micro-batch.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from .importer import ImportedLog, Key, LineErrors, normalize_layer_name, read_first_lines, read_numbered_lines

TOOL = "msprobe"
EXPECTED = "CSV files with the columns vpp_stage, step and name or module_name"

#: pattern for tensor names, and role of the operand, by the kind of tensor in the file name or in the column `scope`
_OPERANDS = {
    "actv": (re.compile(r"(.*)\.input(?:_0)?"), "input"),
    "forward": (re.compile(r"(.*)\.input\.0"), "input"),
    "actv_grad": (re.compile(r"(.*)\.output(?:_0)?"), "grad_output"),
    "backward": (re.compile(r"(.*)\.grad_output\.0"), "grad_output"),
    "param_origin": (re.compile(r"(.*)\.weight"), "weight"),
}
_USED = {"vpp_stage", "name", "module_name", "scope", "step", "micro_step", "min", "max", "nans", "dtype"}
#: number of decimals that `TrainerMon` writes with the default `ndigits`
_DECIMALS = 6


class Row(NamedTuple):
    """The statistics of an operand, read from one line."""

    layer: str
    role: str
    step: int
    amax: float
    #: None if the file has no NaN counts
    nans: float | None
    dtype: str | None
    decimals: int | None


def recognizes_file(path: Path) -> bool:
    """Return whether this module reads a file."""
    header = next(iter(read_first_lines(path, 1)), "") if path.suffix == ".csv" else ""
    columns = set(header.strip().split(","))
    return {"vpp_stage", "step"} <= columns and bool({"name", "module_name"} & columns)


def read_logs(files: Iterable[Path]) -> ImportedLog:
    """Read the files of a run. If several files contain the same step, the last file counts."""
    files = sorted(files, key=_order)
    rank = min(_rank(path) for path in files)
    found = ImportedLog(TOOL, [path for path in files if _rank(path) == rank])
    if others := len(files) - len(found.files):
        found.left_out[f"files of ranks above {rank}, with other parts of the tensors: import each separately"] = others
    totals: dict[tuple[int, str, str], tuple[object, list[Row]]] = {}
    for path in found.files:
        block, last = 0, None
        for row in read_file(path, found):
            block, last = block + (row.step != last), row.step
            key = (row.step, row.layer, row.role)
            place, rows = totals.get(key, (None, []))
            if rows and place != (path, block):
                found.left_out["operands of steps that were written again, for example after a restart"] += 1
            if place != (path, block):
                totals[key] = (path, block), [row]
            else:
                rows.append(row)
    for (step, layer, role), (_, rows) in totals.items():
        _fill_row(found, step, (layer, role, None, False), rows)
    return found


def _order(path: Path) -> tuple[datetime, str, int, str]:
    """Return a sort key: the start time in the folder's name, the folder, and then the file's step and name."""
    try:
        # Names have no year. Use a leap year, so that the 29th of February is valid.
        start = datetime.strptime("2000" + path.parent.name.partition("-rank")[0], "%Y%b%d_%H-%M-%S")
    except ValueError:
        start = datetime.min
    found = re.search(r"_(?:step)?(\d{1,18})-\d+\.csv$", path.name)
    return start, str(path.parent), int(found[1]) if found else 0, path.name


def _rank(path: Path) -> int:
    found = re.search(r"(?:-rank(\d{1,9})-|^rank_(\d{1,9})$)", path.parent.name)
    return int(found[1] or found[2]) if found else 0


def read_file(path: Path, found: ImportedLog) -> Iterator[Row]:
    """Yield the rows of operands. Warn about unreadable lines, and count unused rows in `found.left_out`."""
    lines = read_numbered_lines(path, faults := LineErrors(path, "a row with the columns of the first line"))
    _, header = next(lines, (0, ""))
    columns = header.split(",")
    kind = re.sub(r"_(step)?\d+-\d+\.csv$|\.csv$", "", path.name)
    for column in columns:
        if column not in _USED and column != "shape":
            found.left_out[f"column {column}: no metric has this definition"] += 1
    for number, line in lines:
        try:
            fields = next(csv.reader([line]))
            if len(fields) != len(columns):
                raise ValueError(f"it has {len(fields)} columns, not {len(columns)}")
            row = _parse(dict(zip(columns, fields, strict=True)), kind)
        except (ValueError, ArithmeticError, csv.Error) as error:
            faults.add_unreadable_line(number, str(error) or "it is not a row of numbers")
            continue
        if isinstance(row, str):
            found.left_out[row] += 1
        else:
            yield row
    faults.warn_of_unreadable_lines()


def _parse(fields: dict[str, str], kind: str) -> Row | str:
    """Return the operand of a line, or the reason why the line has no operand."""
    name, kind = fields.get("module_name") or fields.get("name") or "", fields.get("scope", kind)
    if kind not in _OPERANDS:
        return f"{kind}: not an operand of a GEMM"
    stage, _, name = name.rpartition(":")
    pattern, role = _OPERANDS[kind]
    if not (operand := pattern.fullmatch(name)):
        return f"{kind}: other tensors than {role.replace('grad_output', 'the gradient of the output')}"
    low, high, nans = (float(fields[column]) if column in fields else None for column in ("min", "max", "nans"))
    if low is None or high is None:
        return f"{role}: min and max were not monitored, but the amax needs both"
    step = int(fields["step"])
    if not 0 <= step < 1 << 63 or not (nans is None or math.isnan(nans) or 0 <= nans < 1 << 63):
        raise ValueError(f"step {step} or NaN count {nans} is out of range: both must be from 0 to 2^63 - 1")
    return Row(
        _layer(operand[1], int(stage or fields["vpp_stage"])),
        role,
        step,
        max(abs(low), abs(high)) if math.isfinite(low + high) else math.nan,
        nans,
        fields["dtype"].removeprefix("torch.") if "dtype" in fields else None,
        # `TrainerMonitorV2` does not round.
        None if "scope" in fields else max(_DECIMALS, *(_decimals(fields[column]) for column in ("min", "max"))),
    )


def _layer(name: str, stage: int) -> str:
    """Return a layer's name, with the number of its pipeline chunk except for chunk 0. Each chunk counts its layers from 0,
    so the name alone is ambiguous.
    """
    return f"chunk{stage}.{normalize_layer_name(name)}" if stage > 0 else normalize_layer_name(name)


def _decimals(number: str) -> int:
    exponent = Decimal(number).as_tuple().exponent
    return -exponent if isinstance(exponent, int) else 0


def _fill_row(found: ImportedLog, step: int, key: Key, rows: list[Row]) -> None:
    amax = max(row.amax for row in rows) if all(math.isfinite(row.amax) for row in rows) else math.nan
    nans = [row.nans for row in rows if row.nans is not None]
    if len(nans) == len(rows) and all(map(math.isfinite, nans)):
        found.add_value(step, key, "nan", int(sum(nans)))
    elif nans:
        found.left_out["nan: no count, because the value is not a tensor"] += 1
    found.add_value(step, key, "amax", amax, rows[0].decimals)
    if key in found.rows.get(step, {}):
        row = found.rows[step][key]
        row["calls"] = len(rows)
        if rows[0].dtype:
            row["dtype"] = rows[0].dtype
