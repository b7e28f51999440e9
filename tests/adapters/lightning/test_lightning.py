"""The callback under a plain Lightning trainer: the record, loggers, printed lines, emulation, errors."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import polars as pl_frames
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from small_models.lightning import Module, fit
from torch import nn
from torch.utils.data import DataLoader

from nemo_fp8_debug import ConfigError, FP8DebugCallback, FP8DebugWarning, FP8EmulationCallback
from nemo_fp8_debug.monitor.monitor import StepOrder
from nemo_fp8_debug.record.merging import has_ended
from nemo_fp8_debug.record.reader import find_record, read_table_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step"),
]


def test_the_record_lies_beside_the_events_and_has_every_loss(tmp_path: Path) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=4)])
    run = find_record(tmp_path)
    assert str(run) == str(tmp_path / "run" / "fp8_debug")
    assert read_table_rows(run, "metrics")["step"].unique().to_list() == [0, 4]
    assert read_table_rows(run, "steps")["step"].to_list() == list(range(6))


def test_a_csv_logger_keeps_its_file_and_gets_one_of_few_columns_beside_it(tmp_path: Path) -> None:
    def columns(logger: CSVLogger, callbacks: list[pl.Callback]) -> tuple[list[str], Path]:
        fit(tmp_path, callbacks, logger=logger)
        return pl_frames.read_csv(Path(logger.log_dir) / "metrics.csv").columns, Path(logger.log_dir)

    without, _ = columns(CSVLogger(tmp_path, name="without"), [])
    watching = FP8DebugCallback(interval=2, output=str(tmp_path / "record"))
    beside, folder = columns(CSVLogger(tmp_path, name="with"), [watching])
    assert beside == without
    rows = pl_frames.read_csv(folder / "fp8_metrics.csv")
    assert rows["step"].to_list() == [0, 2, 4]
    assert len(rows.columns) <= 60
    metrics = read_table_rows(tmp_path / "record", "metrics").filter(pl_frames.col("role") == "weight")
    worst = metrics.group_by("step", maintain_order=True).agg(pl_frames.col("relative_error").max())
    assert rows["fp8/relative_error/weight/worst"].to_list() == worst["relative_error"].to_list()


class TwoThreads(DummyLogger):
    """Notes who calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[int, int | None, bool]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.called.append((threading.get_ident(), step, any(name.startswith("fp8/") for name in metrics)))


def test_another_logger_of_the_trainer_gets_nothing_unless_it_is_named(tmp_path: Path) -> None:
    unnamed, named = TwoThreads(), TwoThreads()
    with pytest.warns(FP8DebugWarning, match="TwoThreads gets nothing, because it may not allow calls from two threads"):
        fit(tmp_path, [FP8DebugCallback(interval=2, output=str(tmp_path / "a"))], logger=unnamed)
    fit(tmp_path, [FP8DebugCallback(interval=2, output=str(tmp_path / "b"), loggers=[named])], logger=named)
    assert not any(ours for *_, ours in unnamed.called)
    ours = [(step, thread == threading.get_ident()) for thread, step, ours in named.called if ours]
    assert ours == [(0, False), (2, False), (4, False)]


def test_no_logger_at_all(tmp_path: Path) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=2)], logger=False, default_root_dir=tmp_path)
    assert str(find_record(tmp_path)) == str(tmp_path / "fp8_debug")


def test_table_is_printed_each_sampled_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=3, table_rows=2)])
    out = capsys.readouterr().out
    assert out.count("2 of 6 tensors, worst first") == 2
    assert "Nothing is quantized: what FP8 would do at step 3, loss" in out


def test_lines_at_the_start_and_the_end_name_the_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=3, table_rows=2)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nemo_fp8_debug: ")]
    assert lines == [
        f"nemo_fp8_debug: recording 2 GEMMs, every 3 steps, to {tmp_path}/run/fp8_debug",
        "nemo_fp8_debug: all of the multiply-adds per token in known modules are observed",
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


def test_a_resumed_run_has_the_steps_of_one_that_went_through(tmp_path: Path) -> None:
    """From a checkpoint saved as a batch ends, as `ModelCheckpoint` does, and from one saved as a batch begins."""
    batches = DataLoader([torch.ones(4)] * 6)  # alike: Lightning resumes with the first one

    class Save(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "begins.ckpt")

    def losses(name: str, *callbacks: pl.Callback, checkpoint: Path | None = None) -> dict[int, float]:
        debug = FP8DebugCallback(interval=1, output=tmp_path / name, on_error="raise")
        options = {"logger": False, "max_steps": 6, "enable_progress_bar": False, "default_root_dir": tmp_path / name}
        trainer = pl.Trainer(accelerator="cpu", callbacks=[debug, *callbacks], **options)
        pl.seed_everything(0)
        trainer.fit(Module(), batches, ckpt_path=checkpoint)
        steps = read_table_rows(tmp_path / name, "steps")
        return dict(steps.select("step", "loss").rows())

    ends = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    whole = losses("whole", ends, Save())
    assert [*whole] == [*range(6)]
    for checkpoint in (tmp_path / "step=3.ckpt", tmp_path / "begins.ckpt"):
        assert losses(checkpoint.stem, checkpoint=checkpoint) == {step: whole[step] for step in (3, 4, 5)}, checkpoint


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
    assert read_table_rows(find_record(tmp_path), "metrics")["step"].unique().to_list() == list(range(6))


def test_callbacks_can_be_copied_and_pickled_before_the_run() -> None:
    for callback in (FP8DebugCallback(interval=7, layers=["linear_fc2"]), FP8EmulationCallback("current")):
        for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
            assert copied.__dict__ == callback.__dict__


def test_emulated_scales_hold_through_accumulated_batches(tmp_path: Path) -> None:
    fit(tmp_path, [FP8EmulationCallback("delayed"), FP8DebugCallback(interval=1)], accumulate_grad_batches=3)
    rows = read_table_rows(find_record(tmp_path), "metrics").filter(layer="layers.0", role="input")
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
    assert read_table_rows(find_record(tmp_path), "metrics")["step"].unique().to_list() == [0, 1, 2]


def test_a_second_fit_goes_on_with_the_scales_of_the_first(tmp_path: Path) -> None:
    emulation = FP8EmulationCallback("delayed")
    fit(tmp_path / "a", [emulation])
    scales = emulation.state_dict()["states"][0]["scale"]
    fit(tmp_path / "b", [emulation, FP8DebugCallback(interval=1)])
    rows = read_table_rows(find_record(tmp_path / "b"), "metrics").filter(step=0, layer="layers.0", role="input")
    assert rows["scale"].to_list() == [pytest.approx(scales[0].item())]


def test_two_callbacks_get_a_folder_each(tmp_path: Path) -> None:
    fit(tmp_path, [FP8DebugCallback(interval=2, layers=["layers.0"]), FP8DebugCallback(interval=3, layers=["layers.2"])])
    for name, layer in (("fp8_debug", "layers.0"), ("fp8_debug_2", "layers.2")):
        assert set(read_table_rows(tmp_path / "run" / name, "metrics")["layer"]) == {layer}


def test_a_fault_at_the_start_costs_the_monitor_and_not_the_run(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        __module__ = "megatron.odd"

        @property
        def layer_number(self) -> int:
            raise RuntimeError("not yet known")

    module = Module()
    module.layers[0] = Odd(4, 8)
    with pytest.warns(FP8DebugWarning, match="this run is not monitored.*RuntimeError: not yet known"):
        assert fit(tmp_path, [FP8DebugCallback(interval=1)], module=module).global_step == 6


def test_a_fault_while_looking_ahead_leaves_a_monitor_that_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("not yet known")

    monkeypatch.setattr(StepOrder, "warn_if_never_sampled", fail)
    with pytest.warns(FP8DebugWarning, match="while looking ahead.*not yet known"):
        fit(tmp_path / "warned", [FP8DebugCallback(interval=1)], max_steps=6)
    assert read_table_rows(find_record(tmp_path / "warned"), "metrics")["step"].n_unique() == 6
    callback = FP8DebugCallback(interval=1, on_error="raise")
    with pytest.raises(RuntimeError, match="not yet known"):
        fit(tmp_path / "raised", [callback], max_steps=6)
    assert callback._monitor is not None and callback._monitor.closed
    assert has_ended(find_record(tmp_path / "raised"))
