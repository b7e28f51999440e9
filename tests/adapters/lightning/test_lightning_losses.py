"""Losses and gradients under a plain Lightning trainer: at their batch's step, the model's own, in units of the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from small_models.lightning import Module, fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_fp8_debug import FP8DebugCallback
from nemo_fp8_debug.record.reader import find_record, read_table_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step"),
]


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_metrics_carry_the_step_of_the_loss_of_their_batch(tmp_path: Path, accumulate: int) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=1)], accumulate_grad_batches=accumulate)
    found = events(tmp_path / "run")
    loss = {e.step: e.value for e in found.Scalars("train_loss")}
    amax = {e.step: e.value for e in found.Scalars("fp8_amax/input/layers.0")}
    assert amax == loss  # X of the first layer is the batch; with accumulation both have that of the last batch
    assert list(amax) == list(range(6 // accumulate))
    metrics = read_table_rows(find_record(tmp_path), "metrics").filter(layer="layers.0", role="input")
    assert metrics["calls"].to_list() == [accumulate] * (6 // accumulate)


class Seen(pl.Callback):
    """The true loss of each batch, by the step that Lightning logs it under."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses[trainer.fit_loop.epoch_loop._batches_that_stepped] = module.last


class Misleading(Module):
    """Logs other numbers than its loss under the names that losses go by."""

    last = 0.0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean()
        self.last = loss.item()
        self.log("train_loss", 100.0, on_step=False, on_epoch=True)
        return loss


class Manual(Misleading):
    """Steps an optimizer that Lightning does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.own = torch.optim.SGD(self.parameters(), lr=1e-3)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.own.zero_grad()
        loss.backward()
        self.own.step()
        return loss

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.parametrize(("module", "accumulate"), [(Misleading, 1), (Misleading, 3), (Manual, 1)])
def test_the_recorded_loss_is_the_models_own(tmp_path: Path, module: type[Module], accumulate: int) -> None:
    seen = Seen()
    fit(tmp_path, [FP8DebugCallback(interval=2), seen], module=module(), accumulate_grad_batches=accumulate)
    run = find_record(tmp_path)
    steps = read_table_rows(run, "steps")
    assert dict(zip(steps["step"], steps["loss"], strict=True)) == pytest.approx(seen.losses)
    assert (read_table_rows(run, "metrics")["calls"] <= accumulate).all()


class Repeated(Module):
    """Every batch is the same, and no step changes the weights."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return {"loss": self.layers(torch.ones_like(batch)).float().square().mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def repeated(folder: Path, callbacks: int = 1, **options: Any) -> Any:
    """The record of a run."""
    watching = [FP8DebugCallback(interval=2, table_rows=0, on_error="raise") for _ in range(callbacks)]
    trainer = fit(folder, watching, module=Repeated(), batches=12, **options)
    assert "training_step" not in vars(trainer.strategy)
    return find_record(folder / "run" / "fp8_debug")


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_gradients_are_recorded_in_units_of_the_loss_too(tmp_path: Path, precision: Any) -> None:
    amax: dict[int, list[float]] = {}
    for accumulate in (1, 2, 4):
        run = repeated(tmp_path / str(accumulate), accumulate_grad_batches=accumulate, precision=precision)
        steps = read_table_rows(run, "steps")
        assert [m for m in steps["grad_scale"] if m is not None] == [1 / accumulate] * len(steps[::2])
        amax[accumulate] = read_table_rows(run, "metrics").filter(role="grad_output", step=0)["unscaled_amax"].to_list()
    assert amax[1] == amax[2] == amax[4] and len(amax[1]) == 2 and all(amax[1])


def test_two_callbacks_both_measure(tmp_path: Path) -> None:
    repeated(tmp_path, callbacks=2, accumulate_grad_batches=2)
    for name in ("fp8_debug", "fp8_debug_2"):
        assert (
            read_table_rows(find_record(tmp_path / "run" / name), "steps")["grad_scale"].drop_nulls().to_list() == [0.5] * 3
        )


def test_mixed_precision_in_fp16_skips_steps_and_says_so(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=100)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    run = repeated(tmp_path, plugins=[plugin], accumulate_grad_batches=2)
    steps = read_table_rows(run, "steps")
    skipped = [bool(value) for value in steps["skipped"]]
    assert skipped[0] and not skipped[-1]
    scales = [2.0 ** (20 - sum(skipped[:step])) for step in range(6)]
    assert steps["loss_scale"].to_list() == scales and scaler.get_scale() == scales[-1]
    assert steps["grad_scale"].to_list()[::2] == [scale / 2 for scale in scales[::2]]
    remarks = {e.step for e in events(tmp_path / "run").Tensors("fp8_debug/remarks/text_summary")}
    assert {step for step in range(0, 6, 2) if skipped[step]} <= remarks
    plain = read_table_rows(repeated(tmp_path / "plain"), "metrics").filter(role="grad_output", step=4)
    scaled = read_table_rows(run, "metrics").filter(role="grad_output", step=4)
    assert scaled["unscaled_amax"].to_list() == pytest.approx(plain["amax"].to_list(), rel=2e-3)
    tags = events(tmp_path / "run").Tags()["scalars"]
    assert {"fp8/unscaled_amax/grad_output/worst", "fp8/unscaled_mse/grad_output/median", "fp8/grad_scale"} <= set(tags)


def test_losses_of_evaluations_are_recorded_with_the_step_that_they_came_after(tmp_path: Path) -> None:
    class Logged(pl.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if not trainer.sanity_checking:
                self.losses.append(float(trainer.callback_metrics["val_loss"]))

    logged = Logged()
    fit(tmp_path, [FP8DebugCallback(interval=2), logged], val_check_interval=3)
    found = read_table_rows(find_record(tmp_path), "validation")
    assert found.select("step", "name").rows() == [(2, "val_loss"), (5, "val_loss")]
    assert found["loss"].to_list() == logged.losses and len(set(logged.losses)) == 2
