"""Import statistics that nvdlfw_inspect logs: Transformer Engine's debug features, used directly or through Megatron-Bridge.

We read its text logs. If a run also wrote the statistics to TensorBoard, we read the event files too. Text logs are rounded
to four decimals, so event files take precedence.

Every rank writes a log. Statistics are gathered over the reduction group before each rank writes them (`stats_buffer.py`,
`_Buffer.log`). So the logs of a group are equal, and we read the lowest rank's log. If the logs of two ranks differ, the
ranks have different tensors with the same name.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from ...errors import warn
from .importer import ImportedLog, Key, LineErrors, normalize_layer_name, read_first_lines, read_numbered_lines

#: the part of a name before its first number, the number, and the rest
_NUMBERED = re.compile(r"((?:[^.]+\.)*?)(\d{1,9})((?:\..+)?)")
_MEGATRON = re.compile(r"(?:.*\.)?decoder\.layers\.\d{1,9}\.(?:self_attention|cross_attention|mlp)\b.*")


class LayerNumbers:
    """Decides, for each list of layers in a model, whether the log numbers its layers from 0 or from 1."""

    def __init__(self, logged: Iterable[str], assigned: Iterable[str]) -> None:
        """
        Args:
            logged: names of layers that have statistics.
            assigned: names of all modules, if nvdlfw_inspect's own log has them.
        """
        logged = list(logged)
        seen, whole = _by_list(logged), _by_list(assigned)
        megatron = {found[1] for name in logged if _MEGATRON.fullmatch(name) and (found := _NUMBERED.fullmatch(name))}
        from_1 = {name for name, numbers in whole.items() if numbers == set(range(1, len(numbers) + 1))}
        from_0 = {name for of in (seen, whole) for name, numbers in of.items() if 0 in numbers}
        self._shifted = (megatron | from_1) - from_0
        #: lists of layers for which we do not know whether the log numbers them from 0 or from 1
        self.unverified = sorted(set(seen) - self._shifted - from_0)

    def indexed(self, layer: str) -> str:
        """Return the name with the 0-based index of its layer. If the numbering is unknown, return the name unchanged."""
        found = _NUMBERED.fullmatch(layer)
        if not found or found[1] not in self._shifted:
            return layer
        return f"{found[1]}{int(found[2]) - 1}{found[3]}"

    def describe_unverified_numbering(self) -> list[str]:
        """Return a sentence for each list of layers in `unverified`."""
        return [
            f"The layers of {name.removesuffix('.') or 'the model'} keep the numbers in the log, which does not "
            "show whether it numbers layers from 0 or from 1. Import the folder that also contains nvdlfw_inspect_logs, "
            "which shows this, or compare with --rename."
            for name in self.unverified
        ]


def _by_list(names: Iterable[str]) -> Mapping[str, set[int]]:
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if found := _NUMBERED.fullmatch(name):
            numbers[found[1]].add(int(found[2]))
    return numbers


TOOL = "nvdlfw_inspect"
EXPECTED = "nvdlfw_inspect_statistics_logs/*.log or TensorBoard event files"

_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(?P<ms>\d{3}) - [A-Z]+ - (?P<name>\S+)\s+"
    r"iteration=(?P<step>\d{1,18})\s+value=(?P<value>-?\d{1,300}\.\d{4}|-?inf|nan)"
)
#: a line of nvdlfw_inspect's own log that names a module of the model
_ASSIGNED = re.compile(r"\S+ \S+ - [A-Z]+ - Assigned layer name: (?P<name>\S+)")
_DECIMALS = 4
_NAME = re.compile(r"(?P<layer>.+)_(?P<tensor>activation|weight|gradient|output|wgrad|dgrad)_(?P<stat>.+)")
_STAT = re.compile(
    r"(?:(?P<recipe>fp8_delayed_scaling|fp8_current_scaling|mxfp8|fp8_block_scaling|nvfp4)_)?(?P<name>.+?)(?P<turned>_columnwise)?"
)
_LOSS = re.compile(r"lm loss|(reduced_)?(train(ing)?[_/])?loss(_step)?")

_ROLES = {"activation": "input", "weight": "weight", "gradient": "grad_output"}
#: our metrics by the statistic with the same definition, for tensors before quantization and for quantized tensors
_OF_TENSOR = {"cur_amax": "amax", "dynamic_range": "dynamic_range_log2"}
_OF_RECIPE = {"underflows%": "underflow_pct", "overflows%": "overflow_pct", "mse": "mse"}
_SCALES = ("scale_inv_min", "scale_inv_max")
_EXTREMES = ("min", "max")
_KNOWN = {*_OF_TENSOR, *_OF_RECIPE, *_SCALES, *_EXTREMES}
#: recipes with one scale for the whole tensor
_PER_TENSOR = {"fp8_delayed_scaling", "fp8_current_scaling"}
#: metrics that we compare as ratios; the log's rounding distorts the ratios of small values
_RATIOS = {"amax", "mse", "scale"}


class Scalar(NamedTuple):
    """A number from the log."""

    name: str
    step: int
    value: float
    time: float
    #: number of decimals in the log, or None if the log does not round
    decimals: int | None


class Statistic(NamedTuple):
    """The statistic that a number belongs to."""

    layer: str
    role: str
    #: recipe in the statistic's name; None if the statistic describes the tensor before quantization, or the recipe in use
    recipe: str | None
    name: str


class _Value(NamedTuple):
    value: float
    decimals: int | None
    #: rank of the log, or None for an event file
    rank: int | None


#: values by step, then by the recipe and name of the statistic
_Steps = dict[int, dict[tuple[str | None, str], _Value]]


def recognizes_file(path: Path) -> bool:
    """Return whether this module reads a file."""
    if _is_events(path):
        return any(parse_name(scalar.name)[0] for scalar in read_events(path, quiet=True))
    lines = [line.strip() for line in read_first_lines(path, 200)] if path.suffix in (".log", ".txt") else ()
    return any(_LINE.fullmatch(line) or _ASSIGNED.fullmatch(line) for line in lines)


def _names_modules(path: Path) -> bool:
    """Return whether a file is nvdlfw_inspect's own log, which has module names and no statistics."""
    return not _is_events(path) and any(_ASSIGNED.fullmatch(line.strip()) for line in read_first_lines(path, 200))


def _assigned(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from (_our_name(line["name"]) for text in file if (line := _ASSIGNED.fullmatch(text.strip())))


def _our_name(layer: str) -> str:
    return normalize_layer_name(layer.removeprefix("model."))


def _is_events(path: Path) -> bool:
    return "tfevents" in path.name


def read_logs(files: Iterable[Path]) -> ImportedLog:
    """Read the logs of a run. If a step was logged twice, the later values count."""
    files = list(files)
    own = [path for path in files if _names_modules(path)]
    found = ImportedLog(TOOL, sorted((path for path in files if path not in own), key=_precedence))
    tensors: dict[tuple[str, str], _Steps] = defaultdict(lambda: defaultdict(dict))
    conflicts: dict[tuple[int, int], int] = defaultdict(int)
    for path in found.files:
        rank = None if _is_events(path) else _rank(path)
        for scalar in read_events(path) if rank is None else read_text_log(path):
            if _LOSS.fullmatch(scalar.name):
                # Megatron's own logs count iterations from 1, but the statistics count from 0.
                found.steps[max(0, scalar.step - (scalar.name == "lm loss"))]["loss"] = scalar.value
                continue
            statistic, reason = parse_name(scalar.name)
            if statistic is None:
                if reason:
                    found.left_out[reason] += 1
                continue
            values = tensors[statistic.layer, statistic.role][scalar.step]
            before = values.get(key := (statistic.recipe, statistic.name))
            values[key] = _Value(scalar.value, scalar.decimals, rank)
            found.steps[scalar.step]["time"] = scalar.time
            if before and None not in (before.rank, rank) and before.rank != rank and before.value != scalar.value:
                conflicts[rank or 0, before.rank or 0] += 1
    for (rank, other), n in sorted(conflicts.items()):
        what = f"values in the log of rank {other} that differ from rank {rank}'s for the same layer: import each separately"
        found.left_out[what] = n
        warn(f"{n} {what}")
    numbers = LayerNumbers((layer for layer, _ in tensors), (name for path in own for name in _assigned(path)))
    for note in numbers.describe_unverified_numbering():
        found.notes.append(note)
        warn(note.removesuffix("."))
    _fill(found, tensors, numbers)
    return found


def _precedence(path: Path) -> tuple[bool, int, str]:
    """Return a sort key. The last file counts: event files follow text logs, low ranks follow high ranks, late starts follow
    early starts.
    """
    return _is_events(path), -_rank(path), path.name


def _rank(path: Path) -> int:
    found = re.search(r"rank-?_?(\d{1,9})", path.name)
    return int(found[1]) if found else 0


def read_text_log(path: Path) -> Iterator[Scalar]:
    """Yield the numbers in a text log. Give one warning for all lines that cannot be read."""
    faults = LineErrors(path, "'<time> - INFO - <layer>_<tensor>_<statistic> iteration=000010 value=0.1234'")
    for number, text in read_numbered_lines(path, faults):
        if line := _LINE.fullmatch(text):
            try:
                time = datetime.fromisoformat(line["time"]).timestamp() + int(line["ms"]) / 1000
            except (ValueError, OverflowError, OSError):
                faults.add_unreadable_line(number, f"{line['time']} is not a time")
                continue
            yield Scalar(line["name"], int(line["step"]), float(line["value"]), time, _DECIMALS)
        else:
            faults.add_unreadable_line(number, "it is not a statistic")
    faults.warn_of_unreadable_lines()


def read_events(path: Path, quiet: bool = False) -> Iterator[Scalar]:
    """Yield the scalars of an event file. Stop at its end or at the first damaged event."""
    with path.open("rb") as file:
        while header := file.read(12):
            record = file.read(min(int.from_bytes(header[:8], "little"), 1 << 28))
            whole = file.read(4) == masked_crc32c(record).to_bytes(4, "little")
            event = Event()
            try:
                event.ParseFromString(record)
            except Exception:  # protobuf's own errors have no types to import
                whole = False
            if not whole:
                if not quiet:
                    warn(f"{path} is damaged or cut off before byte {file.tell()}; the rest is left out")
                return
            for value in event.summary.value:
                if value.HasField("simple_value") and event.step >= 0:
                    yield Scalar(value.tag, event.step, value.simple_value, event.wall_time, None)


@functools.cache
def parse_name(name: str) -> tuple[Statistic | None, str]:
    """Parse the name of a statistic. Return None and a reason if the record cannot represent the statistic.

    The reason is empty if the name does not belong to a statistic.
    """
    found = _NAME.fullmatch(name)
    if not found:
        return None, "" if "_" not in name else f"{name.rpartition('_')[2]} of tensors that are not named as GEMM operands"
    if (role := _ROLES.get(found["tensor"])) is None:
        return None, f"{found['tensor']}: not an operand of a GEMM"
    stat = _STAT.fullmatch(found["stat"])
    assert stat
    if stat["turned"]:
        return None, f"{stat['name']}_columnwise: belongs to the transposed copy, which is quantized separately"
    if stat["name"] not in _KNOWN:
        return None, f"{found['stat']}: no metric has this definition"
    return Statistic(_our_name(found["layer"]), role, stat["recipe"], stat["name"]), ""


def _fill(found: ImportedLog, tensors: Mapping[tuple[str, str], _Steps], numbers: LayerNumbers) -> None:
    """Add the statistics to `found` as rows."""
    logged = [(key, value) for steps in tensors.values() for values in steps.values() for key, value in values.items()]
    doubt = _doubt_about_underflow(logged)
    for (layer, role), steps in tensors.items():
        layer = numbers.indexed(layer)
        in_use, what_if = _in_use({key for values in steps.values() for key in values})
        if what_if and in_use is None:
            found.left_out["recipe in use: unknown, because several recipes are logged; all are in the table what_if"] += 1
        for step, values in steps.items():
            for recipe in (None, *what_if):
                row: Key = (layer, role, recipe or in_use, recipe is not None)
                mine = {stat: v for (of, stat), v in values.items() if of == recipe or (recipe is None and of == in_use)}
                if doubt and mine.pop("underflows%", None):
                    found.left_out[doubt] += 1
                _fill_row(found, step, row, mine)


def _fill_row(found: ImportedLog, step: int, row: Key, values: Mapping[str, _Value]) -> None:
    for stat, metric in {**_OF_TENSOR, **_OF_RECIPE}.items():
        if stat in values:
            found.add_value(step, row, metric, values[stat].value, values[stat].decimals if metric in _RATIOS else None)
    low, high = (values.get(stat) for stat in _EXTREMES)
    if low and high and "cur_amax" not in values:
        amax = max(abs(low.value), abs(high.value)) if math.isfinite(low.value + high.value) else math.nan
        found.add_value(step, row, "amax", amax, low.decimals)
    elif (low or high) and "cur_amax" not in values:
        found.left_out["only min or only max: the amax needs both"] += 1
    low, high = (values.get(stat) for stat in _SCALES)
    if low or high:
        _fill_scale(found, step, row, low, high)


def _fill_scale(found: ImportedLog, step: int, row: Key, low: _Value | None, high: _Value | None) -> None:
    if row[2] not in _PER_TENSOR:
        found.left_out["scale_inv_min, scale_inv_max: the recipe has many scales or is not named"] += 1
    elif low is None or high is None or low.value != high.value:
        found.left_out["scale_inv_min, scale_inv_max: the scale varies within the step"] += 1
    elif low.decimals is not None and low.value < 5 * 10.0**-low.decimals:
        found.add_value(step, row, "scale", low.value, low.decimals)  # `add` leaves this value out as too small
    else:
        found.add_value(step, row, "scale", 1 / low.value if low.value > 0 else math.nan)


def _in_use(statistics: Iterable[tuple[str | None, str]]) -> tuple[str | None, list[str]]:
    """Return the recipe that a tensor was cast with (None if unknown), and the what-if recipes.

    Statistics without a recipe's name belong to the recipe in use. Delayed scaling is logged only if it is in use. Overflow
    is logged only under delayed scaling (`log_fp8_tensor_stats.py`, `check_if_stat_is_supported`).
    """
    statistics = set(statistics)
    named = sorted({recipe for recipe, _ in statistics if recipe})
    unnamed = {stat for recipe, stat in statistics if not recipe}
    if "fp8_delayed_scaling" in named or "overflows%" in unnamed:
        in_use: str | None = "fp8_delayed_scaling"
    elif len(named) == 1 and not unnamed & {*_OF_RECIPE, *_SCALES}:
        in_use = named[0]
    else:
        in_use = None
    return in_use, [recipe for recipe in named if recipe != in_use]


def _doubt_about_underflow(logged: Iterable[tuple[tuple[str | None, str], _Value]]) -> str | None:
    """Return a sentence if this log defines underflow differently from us, or None if it does not.

    Transformer Engine 2.4 to 2.6 logged the share of zeros under the same name, and nothing else about quantized tensors.
    2.7 left out values that became -0, which can make the share negative.
    """
    newer = negative = False
    for (recipe, stat), value in logged:
        newer |= recipe is not None or stat in ("overflows%", "mse", *_SCALES)
        negative |= stat == "underflows%" and value.value < 0
    if negative:
        return "underflows%: from Transformer Engine 2.7, which misses values that became -0 (some percentages are negative)"
    if not newer:
        return (
            "underflows%: means the share of zeros in Transformer Engine 2.4 to 2.6, and the log does not show the release; "
            "also log mse or fp8_delayed_scaling_underflows%"
        )
    return None
