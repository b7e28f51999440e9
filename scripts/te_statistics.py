"""Transformer Engine's own statistics of a GPT's tensors, through nvdlfw_inspect: what they cost its steps."""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paired import Estimate, timed
from te_model import GPT, Setup

#: steps from one that is looked at to the next
GROUP = 10
#: groups that are not counted: the first compiles
WARMUP = 1
TENSORS = ("activation", "weight", "gradient")
#: those that take no parameters; `max_blockwise_dynamic_range` does
OF_VALUES = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range")
OF_FP8 = ("underflows%", "scale_inv_min", "scale_inv_max", "mse")
TOOLS = {
    "LogTensorStats": ("LogTensorStats",),
    "LogFp8TensorStats": ("LogFp8TensorStats",),
    "both": ("LogTensorStats", "LogFp8TensorStats"),
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
    figures: float


def cost(setup: Setup, tool: str, groups: int) -> Cost:
    """Steps that may be looked at, each in turn with one of the same model with debugging switched off."""
    with tempfile.TemporaryDirectory() as folder, _inspected(setup, tool, Path(folder)) as (look, plain, logged):
        found: dict[str, list[float]] = {"sampled": [], "unsampled": [], "base": []}
        for group in range(WARMUP + groups):
            pairs = [(timed(look).wall, timed(plain).wall) for _ in range(GROUP)]
            if group >= WARMUP:
                base = statistics.median(without for _, without in pairs[1:])
                found["base"].append(base)
                found["sampled"].append(pairs[0][0] / base)
                found["unsampled"].append(statistics.median(on for on, _ in pairs[1:]) / base)
        sampled, unsampled = Estimate.of(found["sampled"]), Estimate.of(found["unsampled"])
        return Cost(sampled, unsampled, statistics.median(found["base"]), logged() / (WARMUP + groups))


def _stats(feature: str, recipe: str) -> list[str]:
    if feature == "LogTensorStats":
        return [*OF_VALUES]
    return [*OF_FP8, *(["overflows%"] if recipe == "delayed" else [])]


@contextlib.contextmanager
def _inspected(
    setup: Setup, tool: str, folder: Path
) -> Iterator[tuple[Callable[[], None], Callable[[], object], Callable[[], int]]]:
    """A GPT's step with and without debugging, and how many figures were logged so far."""
    import nvdlfw_inspect.api as inspect
    from transformer_engine.debug.features import api as features
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    chosen = {
        feature: {"enabled": True, "tensors": [*TENSORS], "stats": _stats(feature, setup.recipe), "freq": GROUP}
        for feature in TOOLS[tool]
    }
    everything = {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "transformer_engine": chosen}
    TEDebugState._reset()  # modules of others were made without debugging
    log = folder / "statistics"
    try:
        inspect.initialize(
            config_file={"everything": everything},
            feature_dirs=[str(Path(features.__file__).parent)],
            log_dir=str(folder),
            statistics_logger=_to_file(log),
        )
        gpt = GPT(setup)
        inspect.infer_and_assign_layer_names(gpt.model)

        def look() -> None:
            TEDebugState.debug_enabled = True
            gpt.step()
            inspect.step()
            TEDebugState.debug_enabled = False

        yield look, gpt.step, lambda: len(log.read_text().splitlines())
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
