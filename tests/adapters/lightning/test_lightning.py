"""The callback under a plain Lightning trainer: steps, loggers, accumulation, errors."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import polars as pl_frames
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from small_models.lightning import Module, fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

from nemo_fp8_debug import ConfigError, FP8DebugCallback, FP8DebugWarning, FP8EmulationCallback
from nemo_fp8_debug.record.reader import find_run, read_table

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
    metrics = read_table(find_run(tmp_path), "metrics").filter(layer="layers.0", role="input")
    assert metrics["calls"].to_list() == [accumulate] * (6 // accumulate)


def test_the_record_lies_beside_the_events_and_has_every_loss(tmp_path: Path) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=4)])
    run = find_run(tmp_path)
    assert str(run) == str(tmp_path / "run" / "fp8_debug")
    assert read_table(run, "metrics")["step"].unique().to_list() == [0, 4]
    assert read_table(run, "steps")["step"].to_list() == list(range(6))


def test_any_logger_gets_the_scalars(tmp_path: Path) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=2, output=str(tmp_path / "record"))], logger=CSVLogger(tmp_path, name="csv"))
    rows = pl_frames.read_csv(next(tmp_path.rglob("metrics.csv")))
    written = rows.filter(pl_frames.col("fp8_cosine/weight/layers.2").is_not_null())
    assert written["step"].to_list() == [0, 2, 4]


def test_no_logger_at_all(tmp_path: Path) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=2)], logger=False, default_root_dir=tmp_path)
    assert str(find_run(tmp_path)) == str(tmp_path / "fp8_debug")


def test_table_is_printed_each_sampled_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=3, table_rows=2)])
    out = capsys.readouterr().out
    assert out.count("2 of 6 tensors, worst first") == 2
    assert "FP8 at step 3, loss" in out


def test_lines_at_the_start_and_the_end_name_the_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=3, table_rows=2)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nemo_fp8_debug: ")]
    assert lines == [
        f"nemo_fp8_debug: recording 2 GEMMs, every 3 steps, to {tmp_path}/run/fp8_debug",
        f"nemo_fp8_debug: recorded 2 samples in {tmp_path}/run/fp8_debug. "
        f"View: tensorboard --logdir {tmp_path}/run or nemo-fp8-debug diagnose {tmp_path}/run/fp8_debug",
    ]


def test_a_run_too_short_for_its_interval_is_told_before_its_first_step(tmp_path: Path) -> None:
    class First(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            self.seen = getattr(self, "seen", len(caught))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, [FP8DebugCallback(interval=100, first_step=5), first := First()], max_steps=4)
    ours = [i for i, w in enumerate(caught) if w.category is FP8DebugWarning]
    assert len(ours) == 1 and ours[0] < first.seen
    assert "it takes steps 0 to 3, and every 100 steps from step 5 on is sampled" in str(caught[ours[0]].message)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_training_is_bit_identical_with_the_callback(tmp_path: Path, recipe: str) -> None:
    def weights(name: str, callbacks: list[pl.Callback]) -> list[torch.Tensor]:
        trainer = fit(tmp_path / name, [*callbacks, FP8EmulationCallback(recipe)], precision="bf16-mixed")
        return list(trainer.model.parameters())

    plain = weights("plain", [])
    for interval in (1, 10):
        monitored = weights(str(interval), [FP8DebugCallback(interval=interval, on_error="raise")])
        assert all(torch.equal(a, b) for a, b in zip(plain, monitored, strict=True))


def test_emulation_ends_with_the_fit(tmp_path: Path) -> None:
    trainer = fit(tmp_path, [FP8EmulationCallback("current")])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())


def test_emulation_resumes_with_its_scales(tmp_path: Path) -> None:
    first = FP8EmulationCallback({"name": "delayed", "amax_history_len": 4})
    trainer = fit(tmp_path, [first])
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    scales = first.state_dict()["states"][0]["scale"]
    assert (scales != 1).all()

    second = FP8EmulationCallback({"name": "delayed", "amax_history_len": 4})
    resumed = pl.Trainer(accelerator="cpu", logger=False, callbacks=[second], max_epochs=1, enable_checkpointing=False)
    resumed.fit(Module(), DataLoader([torch.ones(4)]), ckpt_path=tmp_path / "run.ckpt")
    assert torch.equal(second.state_dict()["states"][0]["scale"], scales)


def test_configuration_errors_come_before_the_first_step(tmp_path: Path) -> None:
    for options, message in (
        ({"interval": 0}, "interval is 0"),
        ({"recipe": "fp9"}, "unknown recipe 'fp9'"),
        ({"layers": ["re:["]}, "not a regular expression"),
    ):
        with pytest.raises(ConfigError, match=message):
            FP8DebugCallback(**options)
    with pytest.raises(ConfigError, match="no GEMM layer matches"):
        fit(tmp_path / "a", [FP8DebugCallback(layers=["decoder.*"])])
    with pytest.raises(ConfigError, match="no GEMM layer matches"):
        fit(tmp_path / "b", [FP8EmulationCallback(layers=["decoder.*"])])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written to"):
        fit(tmp_path / "c", [FP8DebugCallback(output=str(tmp_path / "file"))])


def test_a_disk_that_is_full_for_a_while_costs_neither_the_run_nor_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, refused = os.replace, []

    def full(source: str, target: str) -> None:
        if "step-00000002" in target and len(refused) < 3:
            refused.append(target)
            raise OSError(28, "No space left on device")
        original(source, target)

    monkeypatch.setattr(os, "replace", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(tmp_path, [FP8DebugCallback(interval=1)])
    assert (trainer.global_step, len(refused)) == (6, 3)
    assert sum("No space left" in str(w.message) for w in caught) == 1
    assert read_table(find_run(tmp_path), "metrics")["step"].unique().to_list() == list(range(6))


def test_callbacks_can_be_copied_and_pickled_before_the_run() -> None:
    for callback in (FP8DebugCallback(interval=7, layers=["linear_fc2"]), FP8EmulationCallback("current")):
        for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
            assert copied.__dict__ == callback.__dict__


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
    run = find_run(tmp_path)
    steps = read_table(run, "steps")
    assert dict(zip(steps["step"], steps["loss"], strict=True)) == pytest.approx(seen.losses)
    assert (read_table(run, "metrics")["calls"] <= accumulate).all()


def test_emulated_scales_hold_through_accumulated_batches(tmp_path: Path) -> None:
    fit(tmp_path, [FP8EmulationCallback("delayed"), FP8DebugCallback(interval=1)], accumulate_grad_batches=3)
    rows = read_table(find_run(tmp_path), "metrics").filter(layer="layers.0", role="input")
    # Batch i is all i + 1: the second step casts with the scale of the largest of the first three.
    assert rows["scale"].to_list() == [1.0, pytest.approx(448 / 3)]
    assert rows["calls"].to_list() == [3, 3]


def test_a_failed_run_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise RuntimeError("the user's own")
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(RuntimeError, match="the user's own"):
        fit(tmp_path, [FP8EmulationCallback("current"), FP8DebugCallback(interval=1)], module=module)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert read_table(find_run(tmp_path), "metrics")["step"].unique().to_list() == [0, 1, 2]


def test_a_second_fit_goes_on_with_the_scales_of_the_first(tmp_path: Path) -> None:
    emulation = FP8EmulationCallback("delayed")
    fit(tmp_path / "a", [emulation])
    scales = emulation.state_dict()["states"][0]["scale"]
    fit(tmp_path / "b", [emulation, FP8DebugCallback(interval=1)])
    rows = read_table(find_run(tmp_path / "b"), "metrics").filter(step=0, layer="layers.0", role="input")
    assert rows["scale"].to_list() == [pytest.approx(scales[0].item())]


def test_two_callbacks_get_a_folder_each(tmp_path: Path) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=2, layers=["layers.0"]), FP8DebugCallback(interval=3, layers=["layers.2"])])
    for name, layer in (("fp8_debug", "layers.0"), ("fp8_debug_2", "layers.2")):
        assert set(read_table(tmp_path / "run" / name, "metrics")["layer"]) == {layer}


def test_a_fault_at_the_start_costs_the_monitor_and_not_the_run(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        @property
        def layer_number(self) -> int:
            raise RuntimeError("not yet known")

    module = Module()
    module.layers[0] = Odd(4, 8)
    with pytest.warns(FP8DebugWarning, match="this run is not monitored.*RuntimeError: not yet known"):
        assert fit(tmp_path, [FP8DebugCallback(interval=1)], module=module).global_step == 6


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
    return find_run(folder / "run" / "fp8_debug")


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_gradients_are_recorded_in_units_of_the_loss_too(tmp_path: Path, precision: Any) -> None:
    amax: dict[int, list[float]] = {}
    for accumulate in (1, 2, 4):
        run = repeated(tmp_path / str(accumulate), accumulate_grad_batches=accumulate, precision=precision)
        steps = read_table(run, "steps")
        assert [m for m in steps["grad_scale"] if m is not None] == [1 / accumulate] * len(steps[::2])
        amax[accumulate] = read_table(run, "metrics").filter(role="grad_output", step=0)["unscaled_amax"].to_list()
    assert amax[1] == amax[2] == amax[4] and len(amax[1]) == 2 and all(amax[1])


def test_two_callbacks_both_measure(tmp_path: Path) -> None:
    repeated(tmp_path, callbacks=2, accumulate_grad_batches=2)
    for name in ("fp8_debug", "fp8_debug_2"):
        assert read_table(find_run(tmp_path / "run" / name), "steps")["grad_scale"].drop_nulls().to_list() == [0.5] * 3


def test_mixed_precision_in_fp16_skips_steps_and_says_so(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=100)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    run = repeated(tmp_path, plugins=[plugin], accumulate_grad_batches=2)
    steps = read_table(run, "steps")
    skipped = [bool(value) for value in steps["skipped"]]
    assert skipped[0] and not skipped[-1]
    scales = [2.0 ** (20 - sum(skipped[:step])) for step in range(6)]
    assert steps["loss_scale"].to_list() == scales and scaler.get_scale() == scales[-1]
    assert steps["grad_scale"].to_list()[::2] == [scale / 2 for scale in scales[::2]]
    remarks = {e.step for e in events(tmp_path / "run").Tensors("fp8_debug/remarks/text_summary")}
    assert {step for step in range(0, 6, 2) if skipped[step]} <= remarks
    plain = read_table(repeated(tmp_path / "plain"), "metrics").filter(role="grad_output", step=4)
    scaled = read_table(run, "metrics").filter(role="grad_output", step=4)
    assert scaled["unscaled_amax"].to_list() == pytest.approx(plain["amax"].to_list(), rel=2e-3)
    tags = events(tmp_path / "run").Tags()["scalars"]
    assert {"fp8/unscaled_amax/grad_output/worst", "fp8/unscaled_mse/grad_output/median", "fp8/grad_scale"} <= set(tags)
