"""What a release is tried with, in a process of its own: `probes.py PACKAGE FILE` trains a small model with and without the
package attached, and writes what it found to FILE."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

STEPS = 3
DELAYED = {"name": "delayed", "fp8_format": "hybrid", "amax_history_len": 2, "amax_compute_algo": "max"}

Metrics = dict[str, dict[str, Any]]


def probe_torch(folder: Path, watched: bool) -> tuple[list[float], Metrics]:
    """Linear layers in BF16 under `Monitor`."""
    import torch
    from torch import nn

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
        return model(x).float().square().mean()

    torch.manual_seed(0)
    return _train(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).bfloat16(), loss_of, folder, watched)


def probe_megatron(folder: Path, watched: bool) -> tuple[list[float], Metrics]:
    """A small GPT under `Monitor`: real megatron-core layers in BF16, one process on gloo."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401 - the stand-ins for CUDA go on after all imports
    from megatron_on_cpu import megatron_on_cpu
    from small_models.megatron import gpt, loss_of

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel()
        try:
            return _train(gpt(), loss_of, folder, watched)
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def _train(model: Any, loss_of: Callable[[Any, int], Any], folder: Path, watched: bool) -> tuple[list[float], Metrics]:
    import torch

    from nemo_fp8_debug import Monitor

    _initialize(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    options: dict[str, Any] = {"interval": 1, "recipe": DELAYED, "on_error": "raise", "table_rows": 0}
    monitor = Monitor(model, str(folder / "run"), **options) if watched else None
    for step in range(STEPS):
        with monitor.step(step) if monitor else contextlib.nullcontext():
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    if monitor:
        monitor.close()
    return losses, _recorded(folder) if watched else {}


def _initialize(model: Any) -> None:
    """The same weights, whatever order a release draws its random numbers in."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def probe_lightning(folder: Path, watched: bool) -> tuple[list[float], Metrics]:
    """A plain Lightning trainer with both callbacks of the package."""
    import lightning.pytorch as pl
    import torch
    from small_models.lightning import Module, fit

    from nemo_fp8_debug import FP8DebugCallback, FP8EmulationCallback

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *rest: Any) -> None:
            losses.append(float(outputs["loss"]))

    losses: list[float] = []
    torch.manual_seed(0)
    module = Module()
    _initialize(module)
    debug = [FP8DebugCallback(interval=1, on_error="raise", table_rows=0)] if watched else []
    fit(folder, [*debug, FP8EmulationCallback(DELAYED), Losses()], batches=STEPS, module=module, precision="bf16-mixed")
    return losses, _recorded(folder) if watched else {}


def probe_nemo(folder: Path, watched: bool) -> tuple[list[float], Metrics]:
    """The recipe's GPT under nl.Trainer and MegatronStrategy, quantized by emulation."""
    from megatron_on_cpu import megatron_on_cpu
    from nemo.collections import llm
    from small_models.nemo import train

    from nemo_fp8_debug import FP8DebugCallback, FP8EmulationCallback

    if not hasattr(llm.GPTConfig, "vocab_size"):  # 2.2 leaves it to subclasses, and the recipe has no tokenizer to ask
        llm.GPTConfig = make_dataclass("GPTConfig", [("vocab_size", int, 0)], bases=(llm.GPTConfig,))
    debug = [FP8DebugCallback(interval=1, on_error="raise", table_rows=0)] if watched else []
    with megatron_on_cpu():
        done = train(folder, [*debug, FP8EmulationCallback(DELAYED)])
    return done["losses"], _recorded(folder) if watched else {}


def _recorded(folder: Path) -> Metrics:
    from nemo_fp8_debug.record.reader import find_record, read_table_rows

    rows = read_table_rows(find_record(folder), "metrics").to_dicts()
    return {"|".join((str(row["step"]), row["layer"], row["role"])): row for row in rows}


PROBES: dict[str, Callable[[Path, bool], tuple[list[float], Metrics]]] = {
    "megatron-core": probe_megatron,
    "lightning": probe_lightning,
    "nemo-toolkit": probe_nemo,
    "torch": probe_torch,
}


def run_probe(package: str, answer: Path) -> None:
    """Write losses, metrics and the version that was really imported."""
    with tempfile.TemporaryDirectory() as folder:
        plain, watched = Path(folder, "plain"), Path(folder, "watched")
        plain.mkdir()
        watched.mkdir()
        losses, _ = PROBES[package](plain, False)
        losses_watched, metrics = PROBES[package](watched, True)
    version = importlib.metadata.version(package).partition("+")[0]
    found = {"version": version, "losses": losses, "losses_watched": losses_watched, "metrics": metrics}
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    run_probe(sys.argv[1], Path(sys.argv[2]))
