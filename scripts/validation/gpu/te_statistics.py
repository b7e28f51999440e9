"""Transformer Engine's own statistics of a GPT's tensors, through nvdlfw_inspect, beside ours: what they cost and say.

Both are recorded in the same steps of the same model, its log imported as `nemo-fp8-debug import` does it, and metrics that
are defined alike compared operand by operand. Left out are operands that a fused kernel casts from float32 (X behind a norm
under delayed scaling): while its statistics are taken, Transformer Engine rounds them to BF16 first, so they are others.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.paired import Estimate, timed
from benchmarks.common.step_costs import WARMUP as FIRST
from benchmarks.common.step_costs import sampled, step, unsampled

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.record.imports import import_logs
from nemo_fp8_debug.record.reader import read_table_rows

from .gpt import GPT, Setup, forget_models, megatron
from .measures import Measure, Piece, all_of, measure
from .parts import Part

#: steps from one that is looked at to the next
GROUP = 10
#: groups that are not counted: the first compiles
WARMUP = 1
GROUPS, PAIRS, EMULATED_GROUPS, EMULATED_PAIRS = 10, 30, 1, 2
TENSORS = ("activation", "weight", "gradient")
#: those that take no parameters; `max_blockwise_dynamic_range` does
OF_VALUES = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range")
OF_FP8 = ("underflows%", "scale_inv_min", "scale_inv_max", "mse")
TOOLS = {
    "LogTensorStats": ("LogTensorStats",),
    "LogFp8TensorStats": ("LogFp8TensorStats",),
    "both": ("LogTensorStats", "LogFp8TensorStats"),
}
#: their names of recipes
NAMES = {
    "delayed": "fp8_delayed_scaling",
    "tensorwise": "fp8_current_scaling",
    "blockwise": "fp8_block_scaling",
    "mxfp8": "mxfp8",
}
#: steps in which both are recorded
STEPS = 3
#: of a float32 and of its inverse
ROUNDED = 2.0**-22
KEYS = ("step", "layer", "role")
#: metrics that both define, and their statistic
SHARED = {
    "amax": "cur_amax",
    "dynamic_range_log2": "dynamic_range",
    "scale": "scale_inv",
    "underflow_pct": "underflows%",
    "overflow_pct": "overflows%",
    "mse": "mse",
}


def run(part: Part, emulate: bool) -> Iterator[Piece]:
    """A line for each tool, and one for each metric that both have."""
    groups, pairs = (EMULATED_GROUPS, EMULATED_PAIRS) if emulate else (GROUPS, PAIRS)
    with megatron(emulate) as device:
        setup = Setup.of(part, device)
        yield {"lines": [of_ours(setup, pairs, groups)]}
        for tool in TOOLS:
            try:
                yield {"lines": [of_theirs(setup, tool, groups)]}
            except Exception as error:  # whatever another release of theirs raises
                yield {"measures": [_does_not_run(tool, error)]}
        forget_models()
        try:
            equality = compared(setup)
            yield {"measures": agreed(equality), "equality": equality}
        except Exception as error:  # likewise
            yield {"measures": [_does_not_run("the comparison", error)]}


def _does_not_run(what: str, error: Exception) -> Measure:
    traceback.print_exception(error)
    told = f"{type(error).__name__}: {error}".splitlines()[0]
    return measure(what, f"does not run: {told}", limit="runs", kept=False)


def of_ours(setup: Setup, pairs: int, groups: int) -> dict[str, Any]:
    """Everything that the monitor records."""
    forget_models()
    gpt = GPT(setup)
    for _ in range(FIRST):
        gpt.step()
    off, on = unsampled(gpt, pairs), sampled(gpt, groups)
    return _line("nemo_fp8_debug", on.whole, off.ratio, on.base, metrics_a_step(gpt))


def metrics_a_step(gpt: GPT) -> float:
    """Metrics in the record of one step; NaN and infinities are counts of their own."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(Monitor(gpt.model, folder, interval=1, table_rows=0)) as monitor:
            step(gpt, monitor, 0)
        rows = read_table_rows(folder, "metrics")
        return float(sum(rows[name].count() for name in (*METRICS, "nan", "inf")))


def of_theirs(setup: Setup, tool: str, groups: int) -> dict[str, Any]:
    """The statistics of one tool."""
    forget_models()
    found = cost(setup, tool, groups)
    name = f"Transformer Engine {' + '.join(TOOLS[tool])}"
    return _line(name, found.sampled, found.unsampled, found.base, found.metrics)


def _line(tool: str, sampled: Estimate, unsampled: Estimate, base: float, metrics: float) -> dict[str, Any]:
    def estimate(found: Estimate) -> dict[str, float]:
        return {"value": found.median, "low": found.low, "high": found.high}

    each = 1e6 * (sampled.median - 1) * base / metrics
    return {
        "tool": tool,
        "sampled": estimate(sampled),
        "unsampled": estimate(unsampled),
        "metrics": metrics,
        "us_a_metric": each,
    }


@dataclass(frozen=True)
class Cost:
    """What statistics cost, in steps of the same model without Transformer Engine's debugging."""

    #: a step that is looked at, its log included
    sampled: Estimate
    #: the nine after it
    unsampled: Estimate
    #: a step without, in seconds
    base: float
    metrics: float


def cost(setup: Setup, tool: str, groups: int) -> Cost:
    """Steps that may be looked at, each in turn with one of the same model with debugging switched off."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "statistics"
        found: dict[str, list[float]] = {"sampled": [], "unsampled": [], "base": []}
        with _inspected(setup, _features(setup, tool, GROUP), Path(folder), _to_file(log)) as (gpt, look):
            for group in range(WARMUP + groups):
                pairs = [(timed(look).wall, timed(gpt.step).wall) for _ in range(GROUP)]
                if group >= WARMUP:
                    base = statistics.median(without for _, without in pairs[1:])
                    found["base"].append(base)
                    found["sampled"].append(pairs[0][0] / base)
                    found["unsampled"].append(statistics.median(on for on, _ in pairs[1:]) / base)
        logged = len(log.read_text().splitlines()) / (WARMUP + groups)
        return Cost(Estimate.of(found["sampled"]), Estimate.of(found["unsampled"]), statistics.median(found["base"]), logged)


def compared(setup: Setup) -> list[dict[str, Any]]:
    """For each metric that both have: how many values, how many of them identical, and how far apart the others are."""
    from nvdlfw_inspect.logging import wrap_tensorboard_writer
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        ours, events, theirs = (Path(folder) / name for name in ("ours", "events", "theirs"))
        features = _features(setup, "both", 1, f"{NAMES[setup.recipe]}_")
        with (
            SummaryWriter(str(events)) as writer,
            _inspected(setup, features, Path(folder), wrap_tensorboard_writer(writer)) as (gpt, look),
            contextlib.closing(Monitor(gpt.model, str(ours), interval=1, table_rows=0)) as monitor,
        ):
            for number in range(STEPS):
                with monitor.step(number) as report:
                    report(loss=look())
        import_logs(events, theirs)
        tables = [{_key(row): row for row in read_table_rows(folder, "metrics").to_dicts()} for folder in (ours, theirs)]
    keys = [key for key in sorted(tables[0].keys() & tables[1].keys()) if tables[0][key]["dtype"] != "float32"]
    return [_compare(name, [tuple(table[key].get(name) for table in tables) for key in keys]) for name in SHARED]


def agreed(equality: list[dict[str, Any]]) -> list[Measure]:
    """What has to be the same: the amax, and the scale but for the rounding of its inverse, which is what they log."""
    amax, scale = (next(line for line in equality if line["metric"] == name) for name in ("amax", "scale"))
    rows = [all_of("amax that is theirs", amax["identical"], amax["compared"])]
    if scale["compared"]:
        limit = f"at most {ROUNDED:.1e}"
        rows.append(measure("scale and theirs, relative", scale["apart"], limit=limit, kept=scale["apart"] <= ROUNDED))
    return rows


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEYS)


def _compare(metric: str, pairs: list[tuple[Any, ...]]) -> dict[str, Any]:
    """In float32, which is what their log holds; relative to the larger."""
    values = [tuple(torch.tensor(value).float().item() for value in pair) for pair in pairs if None not in pair]
    apart = [abs(a - b) / max(abs(a), abs(b)) for a, b in values if a != b]
    return {
        "metric": metric,
        "statistic": SHARED[metric],
        "compared": len(values),
        "identical": len(values) - len(apart),
        "apart": max(apart, default=0.0),
    }


def _features(setup: Setup, tool: str, interval: int, prefix: str = "") -> dict[str, Any]:
    """The configuration of a tool's features; a prefix names the recipe in the log."""
    of_fp8 = [*OF_FP8, *(["overflows%"] if setup.recipe == "delayed" else [])]
    stats = {"LogTensorStats": [*OF_VALUES], "LogFp8TensorStats": [prefix + name for name in of_fp8]}
    return {
        feature: {"enabled": True, "tensors": [*TENSORS], "stats": stats[feature], "freq": interval}
        for feature in TOOLS[tool]
    }


@contextlib.contextmanager
def _inspected(
    setup: Setup, chosen: dict[str, Any], folder: Path, logger: Any
) -> Iterator[tuple[GPT, Callable[[], torch.Tensor]]]:
    """A GPT, and its step with debugging; without it is the GPT's own."""
    import nvdlfw_inspect.api as inspect
    from transformer_engine.debug.features import api as features
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    everything = {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "transformer_engine": chosen}
    TEDebugState._reset()  # modules of others were made without debugging
    try:
        inspect.initialize(
            config_file={"everything": everything},
            feature_dirs=[str(Path(features.__file__).parent)],
            log_dir=str(folder),
            statistics_logger=logger,
        )
        gpt = GPT(setup)
        inspect.infer_and_assign_layer_names(gpt.model)

        def look() -> torch.Tensor:
            TEDebugState.debug_enabled = True
            loss = gpt.step()
            inspect.step()
            TEDebugState.debug_enabled = False
            return loss

        yield gpt, look
    finally:
        inspect.end_debug()
        TEDebugState._reset()
        logging.getLogger("nvdlfw_inspect").handlers.clear()  # files in the folder


def _to_file(log: Path) -> Any:
    """As nvdlfw_inspect's own log, which would go on in the folder of an earlier call."""
    from nvdlfw_inspect.logging import BaseLogger

    class Lines(BaseLogger):
        def log_scalar(self, name: str, value: Any, iteration: int, **kwargs: Any) -> None:
            print(f"{name} \t\t\t\t iteration={iteration:06d} \t\t\t\t value={value:.4f}", file=file, flush=True)

    file = log.open("w")
    return Lines()
