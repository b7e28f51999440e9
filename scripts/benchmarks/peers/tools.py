"""How each tool is put on the small GPT, looking at its GEMMs in every step; for peers.py.

Each function takes the model and a folder, and returns what does one step that the tool looks at, and what counts the
metrics that it has of a step, once all steps are over.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common.small_gpt import GEMMS, MICRO_BATCHES, SmallGPT
from benchmarks.peers.eager_metrics import NAMES, eager_metrics

Watched = tuple[Callable[[], object], Callable[[], float]]
#: told of (layer, operand, tensor)
See = Callable[[str, str, torch.Tensor], None]


@dataclass(frozen=True)
class Tool:
    """A tool, and what its authors say it computes."""

    name: str
    watch: Callable[[SmallGPT, Path], Watched]
    computes: str
    sees: str
    fp8: str


def gemms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name.endswith(GEMMS)}


def see_operands(model: nn.Module, see: See) -> None:
    """Hooks as one would write them: X and W in forward, W in the first micro-batch only, dY as it arrives at the output."""
    calls: Counter[str] = Counter()

    def forward(name: str, module: Any, args: tuple[Any, ...], out: Any) -> None:
        see(name, "activation", args[0].detach())
        if calls[name] % MICRO_BATCHES == 0:
            see(name, "weight", module.weight.detach())
        calls[name] += 1
        (out[0] if isinstance(out, tuple) else out).register_hook(lambda dy: see(name, "gradient", dy))

    for name, module in gemms(model).items():
        module.register_forward_hook(lambda module, args, out, name=name: forward(name, module, args, out))


def ours(gpt: SmallGPT, folder: Path) -> Watched:
    """With everything that is recorded: the run record, TensorBoard's events, the printed table."""
    import polars as pl

    from nemo_fp8_debug import Monitor

    monitor, numbers = Monitor(gpt.model, folder, interval=1), count()

    def figures() -> float:
        monitor.close()
        rows = pl.read_parquet(folder / "metrics" / "*.parquet")
        return sum(rows[name].count() for name in NAMES) / next(numbers)

    return _monitored(gpt, monitor, numbers), figures


class Kept:
    """Samples in memory, which is all that tools without files do."""

    in_callers_thread = False

    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.record = self.samples.append
        self.open = self.record_steps = lambda given: None
        self.close = lambda: None


def ours_in_memory(gpt: SmallGPT, folder: Path) -> Watched:
    """The same metrics, and nothing written."""
    from nemo_fp8_debug import Monitor

    kept = Kept()
    monitor, numbers = Monitor(gpt.model, recorders=[kept], interval=1), count()

    def figures() -> float:
        monitor.close()
        return sum(value is not None for name in NAMES for value in kept.samples[-1].operand_columns[name])

    return _monitored(gpt, monitor, numbers), figures


def _monitored(gpt: SmallGPT, monitor: Any, numbers: count[int]) -> Callable[[], object]:
    def step() -> None:
        with monitor.step(next(numbers)) as report:
            report(loss=gpt.step())

    return step


def _seen(gpt: SmallGPT, see: See, metrics_a_call: int, after: Callable[[], None] = lambda: None) -> Watched:
    steps, calls = Counter[str](), Counter[str]()

    def counted(*seen: Any) -> None:
        calls["all"] += 1
        see(*seen)

    see_operands(gpt.model, counted)

    def step() -> None:
        steps["all"] += 1
        gpt.step()
        after()

    return step, lambda: metrics_a_call * calls["all"] / steps["all"]


def eager(precision: torch.dtype) -> Callable[[SmallGPT, Path], Watched]:
    def watch(gpt: SmallGPT, folder: Path) -> Watched:
        kept: dict[tuple[str, str], dict[str, float]] = {}

        def see(name: str, operand: str, x: torch.Tensor) -> None:
            target = torch.float8_e5m2 if operand == "gradient" else torch.float8_e4m3fn
            kept[name, operand] = eager_metrics(x, target, precision)

        return _seen(gpt, see, len(NAMES))

    return watch


def nvdlfw(gpt: SmallGPT, folder: Path) -> Watched:
    """nvdlfw_inspect logs what it is shown; Transformer Engine's modules show it by themselves, ours here are others."""
    import nvdlfw_inspect.api as inspect

    stats = ["min", "max", "mean", "std", "l1_norm", "l2_norm"]
    shown = [{"tensor": tensor, "stats": stats, "freq": 1} for tensor in ("activation", "weight", "gradient")]
    everything = {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "LogTensorStats": {"enabled": True, "tensors_struct": shown},
    }
    inspect.initialize(config_file={"everything": everything}, log_dir=str(folder), default_logging_enabled=True)

    def see(name: str, operand: str, x: torch.Tensor) -> None:
        inspect.log_tensor_stats(name, tensor=x, tensor_name=operand, skip_reduction=True)

    return _seen(gpt, see, len(stats), inspect.step)


def tracker(gpt: SmallGPT, folder: Path) -> Watched:
    """In the way of Graphcore's tensor-tracker, which is not on PyPI: outputs and their gradients, by one's own function."""
    kept: list[list[float]] = []

    def see(x: torch.Tensor) -> None:
        kept.append([x.mean().item(), x.std().item(), x.abs().max().item()])

    for module in gemms(gpt.model).values():
        module.register_forward_hook(lambda module, args, out: see(out[0].detach()))
        module.register_full_backward_pre_hook(lambda module, gradients: see(gradients[0]))
    steps = count()

    def step() -> None:
        next(steps)
        gpt.step()

    return step, lambda: 3 * len(kept) / next(steps)


def transformers(gpt: SmallGPT, folder: Path) -> Watched:
    """Hugging Face's debugger, on the GEMMs alone: Megatron's boolean attention mask stops it elsewhere."""
    from transformers.debug_utils import DebugUnderflowOverflow

    calls, steps = count(), count()

    class OnGemms(DebugUnderflowOverflow):
        def register_forward_hook(self) -> None:
            for module in gemms(self.model).values():
                module.register_forward_hook(self.forward_hook)

        def analyse_variable(self, var: Any, ctx: str) -> None:
            if torch.is_tensor(var):
                next(calls)
            super().analyse_variable(var, ctx)

    OnGemms(gpt.model)

    def step() -> None:
        next(steps)
        gpt.step()

    return step, lambda: 2 * next(calls) / next(steps)  # a smallest and a largest magnitude


def trainer_mon(gpt: SmallGPT, folder: Path) -> Watched:
    """msProbe's monitor with all of its statistics of inputs, outputs, their gradients and weights, as CSV."""
    os.environ["MONITOR_OUTPUT_DIR"] = str(folder)
    from msprobe.pytorch import TrainerMon

    config = {
        "targets": {name: {} for name in gemms(gpt.model)},
        "xy_distribution": True,
        "param_distribution": True,
        "format": "csv",
        "ops": ["min", "max", "mean", "norm", "nans", "zeros"],
        "step_count_per_record": 100,
    }
    (folder / "config.json").write_text(json.dumps(config))
    monitor = TrainerMon(str(folder / "config.json"), params_have_main_grad=False)
    monitor.set_monitor(gpt.model, grad_acc_steps=MICRO_BATCHES, optimizer=gpt.optimizer)

    def figures() -> float:
        import pandas as pd

        tables = [pd.read_csv(path) for path in folder.glob("**/*.csv")]
        of_a_step = [table[table["step"] == 2] for table in tables if "step" in table]
        return float(sum(table[[c for c in config["ops"] if c in table]].count().sum() for table in of_a_step))

    return gpt.step, figures


def dump(gpt: SmallGPT, folder: Path) -> Watched:
    """msProbe's dump of statistics, at the level of modules."""
    from msprobe.pytorch import PrecisionDebugger

    config = {
        "task": "statistics",
        "dump_path": str(folder),
        "rank": [],
        "step": [],
        "level": "L0",
        "statistics": {"scope": [], "list": list(GEMMS), "data_mode": ["all"], "summary_mode": "statistics"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    debugger = PrecisionDebugger(config_path=str(folder / "config.json"))

    def step() -> None:
        debugger.start(model=gpt.model)
        gpt.step()
        debugger.stop()
        debugger.step()

    def figures() -> float:
        def numbers(found: Any) -> int:
            if isinstance(found, dict):
                own = sum(isinstance(found.get(name), float | int) for name in ("Max", "Min", "Mean", "Norm"))
                return own + sum(map(numbers, found.values()))
            return sum(map(numbers, found)) if isinstance(found, list) else 0

        return numbers(json.loads(next(folder.glob("step2/**/dump.json")).read_text()))

    return step, figures


def nothing(gpt: SmallGPT, folder: Path) -> Watched:
    return gpt.step, lambda: 0


TOOLS = {
    "none": Tool("nothing (control)", nothing, "-", "-", "-"),
    "ours": Tool("nemo_fp8_debug", ours, "14, and the counts of all values", "X W dY", "yes"),
    "ours_in_memory": Tool("nemo_fp8_debug, nothing written", ours_in_memory, "the same", "X W dY", "yes"),
    "eager64": Tool("eager formulas, float64", eager(torch.float64), "the same 14", "X W dY", "yes"),
    "eager32": Tool("eager formulas, float32", eager(torch.float32), "the same 14, to fewer digits", "X W dY", "yes"),
    "nvdlfw": Tool("nvdlfw_inspect LogTensorStats", nvdlfw, "min, max, mean, std, l1, l2", "what it is shown: X W dY", "no"),
    "trainer_mon": Tool("msProbe TrainerMon", trainer_mon, "min, max, mean, norm, nans, zeros", "X W dY, Y dX", "no"),
    "dump": Tool("msProbe dump of statistics, L0", dump, "min, max, mean, norm", "X W dY, Y dX dW", "no"),
    "transformers": Tool(
        "transformers DebugUnderflowOverflow", transformers, "abs min, abs max, any NaN or Inf", "X W, Y", "no"
    ),
    "tracker": Tool("as tensor-tracker", tracker, "one's own: here mean, std, abs max", "dY, Y", "no"),
}
