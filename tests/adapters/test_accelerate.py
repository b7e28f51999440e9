"""A loop with Accelerate: accumulated gradients, what `prepare` wraps the model in, two processes."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import AORecipeKwargs
from plain_loop import model
from processes import finished
from text_windows import VOCABULARY, TextWindows
from torch import nn
from torch.utils.data import DataLoader
from torchao.float8 import Float8LinearConfig

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.record.reader import find_record, read_table_rows

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Accelerate keeps the precision of the first Accelerator of a process."""
    AcceleratorState._reset_state(True)


def train(output: Path | None, accumulate: int, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """The loss of each optimizer step, and the weights in the end."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, cpu=True, **options)
    gpt = model()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    gpt, optimizer, data = accelerator.prepare(gpt, optimizer, DataLoader(TextWindows(2 * 4 * accumulate, 16), batch_size=2))
    monitor = Monitor(gpt, output, interval=2, table_rows=0, on_error="raise") if output else None
    losses, batches = [], []
    for batch in data:
        if monitor and not batches:
            monitor.begin_step(len(losses))
        with accelerator.accumulate(gpt):
            loss = nn.functional.cross_entropy(gpt(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
            batches.append(loss.item())
            if monitor:
                monitor.watch_loss(loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            losses.append(sum(batches) / len(batches))
            if monitor:
                monitor.end_step(loss=losses[-1])
            batches = []
    if monitor:
        monitor.close()
    return losses, list(gpt.parameters())


@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_and_weights_are_bit_identical_and_a_sample_is_an_optimizer_step(tmp_path: Path, accumulate: int) -> None:
    losses, weights = train(None, accumulate)
    watched_losses, watched_weights = train(tmp_path, accumulate)
    assert len(losses) == 4 and watched_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))
    metrics = read_table_rows(find_record(tmp_path), "metrics")
    assert metrics["step"].unique().to_list() == [0, 2]
    assert (metrics.filter(role="input")["calls"] == accumulate).all()
    steps = read_table_rows(find_record(tmp_path), "steps")
    assert steps["loss"].to_list() == losses
    assert steps["grad_scale"].to_list() == [float(torch.tensor(1.0) / accumulate), None] * 2


def test_its_torchao_backend_is_read_layer_by_layer(tmp_path: Path) -> None:
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    options: dict[str, Any] = {"mixed_precision": "fp8", "kwargs_handlers": [AORecipeKwargs(config=config)]}
    losses, weights = train(None, 2, **options)
    watched_losses, watched_weights = train(tmp_path, 2, **options)
    assert watched_losses == losses
    assert all(map(torch.equal, weights, watched_weights))
    metrics = read_table_rows(find_record(tmp_path), "metrics")
    cast = metrics.filter(scale_source="engine")
    # The first and the last linear layer stay in high precision.
    assert set(metrics["layer"]) - set(cast["layer"]) == {"layers.0.qkv", "output_layer"}
    assert set(metrics.filter(scale_source="not quantized")["layer"]) | set(
        metrics.filter(scale_source="current")["layer"]
    ) == {"layers.0.qkv", "output_layer"}
    assert (set(cast["recipe"]), set(cast["format"])) == ({"rowwise-e4m3"}, {"e4m3"})


# Long tests rest on recipes/accelerate_loop.py.
@pytest.mark.long
def test_the_recipe_on_two_processes(tmp_path: Path) -> None:
    launch = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2"]
    recipe = [str(RECIPES / "accelerate_loop.py"), "--float8", "rowwise"]
    command = [*launch, *recipe, "--output", str(tmp_path), "--steps", "4", "--interval", "2"]
    done = finished(*command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"The record is in {tmp_path}" in done.stdout
    metrics = read_table_rows(find_record(tmp_path), "metrics")
    assert metrics["step"].unique().to_list() == [0, 2]
    assert (metrics.filter(role="input")["calls"] == 2).all()
    assert (metrics.filter(layer="layers.1.qkv")["scale_source"] == "engine").all()
    assert "layers.0.qkv" in metrics["layer"]  # and not module.layers.0.qkv, as DistributedDataParallel has it
    assert len(list(tmp_path.glob("attempt-*.json"))) == 1
    steps = read_table_rows(find_record(tmp_path), "steps")
    assert steps["grad_scale"].to_list() == [0.5, None] * 2
    assert steps["loss"][0] == pytest.approx(math.log(VOCABULARY), rel=0.1)
