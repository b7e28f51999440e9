"""The callback under Hugging Face's own Trainer: steps, losses, accumulation, resuming, faults, two processes."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_run import Watching, build, weights
from processes import run_script
from transformers import TrainerCallback

from nemo_fp8_debug import ConfigError, FP8DebugWarning
from nemo_fp8_debug.adapters.transformers import FP8DebugTrainerCallback
from nemo_fp8_debug.record.reader import find_record, read_table_rows


def watch(**options: Any) -> FP8DebugTrainerCallback:
    return FP8DebugTrainerCallback(**{"interval": 1, "table_rows": 0, "on_error": "raise", **options})


def fit(folder: Path, callbacks: list[TrainerCallback], **options: Any) -> Any:
    trainer = build(folder, callbacks, **options)
    trainer.train()
    return trainer


def steps_of(folder: Path) -> dict[str, dict[int, Any]]:
    steps = read_table_rows(find_record(folder), "steps").sort("step")
    return {name: dict(zip(steps["step"], steps[name], strict=True)) for name in ("loss", "lr", "grad_norm")}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_and_weights_are_bit_identical(tmp_path: Path, accumulate: int) -> None:
    plain = fit(tmp_path / "plain", [], accumulate=accumulate)
    assert len(plain.losses) == 6
    for interval in (1, 4):
        watched = fit(tmp_path / str(interval), [watch(interval=interval)], accumulate=accumulate)
        assert (watched.losses, weights(watched)) == (plain.losses, weights(plain))


class WithoutItems(Watching):
    """Divides the loss of a batch by the batches of its step, as it does for models that are not told of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


@pytest.mark.parametrize("kind", [Watching, WithoutItems])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_is_an_optimizer_step_under_the_number_that_the_trainer_logs(
    tmp_path: Path, accumulate: int, kind: type[Watching]
) -> None:
    trainer = fit(tmp_path, [watch(interval=2)], accumulate=accumulate, kind=kind)
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    recorded = steps_of(tmp_path)
    assert recorded["loss"] == pytest.approx(trainer.losses, rel=1e-6)
    assert recorded["loss"] == pytest.approx({step: entry["loss"] for step, entry in logged.items()}, abs=6e-5)
    assert recorded["lr"] == pytest.approx({step: entry["learning_rate"] for step, entry in logged.items()})
    assert recorded["grad_norm"] == pytest.approx({step: entry["grad_norm"] for step, entry in logged.items()})
    metrics = read_table_rows(find_record(tmp_path), "metrics")
    assert metrics["step"].unique().to_list() == [2, 4, 6]
    assert (metrics.filter(role="input")["calls"] == accumulate).all()
    assert "model.layers.1.mlp.down_proj" in metrics["layer"]


@pytest.mark.parametrize(("kind", "accumulate"), [(Watching, 2), (WithoutItems, 1), (WithoutItems, 2), (WithoutItems, 3)])
def test_gradients_are_recorded_in_units_of_the_loss_too(tmp_path: Path, kind: type[Watching], accumulate: int) -> None:
    """A model that is told of the items of a step divides by them itself."""
    fit(tmp_path, [watch(interval=2)], accumulate=accumulate, kind=kind)
    expected = float(torch.tensor(1.0) / (1 if kind is Watching else accumulate))
    multipliers = read_table_rows(find_record(tmp_path), "steps")["grad_scale"].to_list()
    assert multipliers == [None, expected] * 3
    metrics = read_table_rows(find_record(tmp_path), "metrics").filter(role="grad_output")
    assert metrics["unscaled_amax"].to_list() == pytest.approx([amax / expected for amax in metrics["amax"]])


def test_a_loss_scale_is_recorded_with_the_steps_that_it_skips(tmp_path: Path) -> None:
    trainer = build(tmp_path, [watch(interval=2)], accumulate=2, kind=WithoutItems)
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
    trainer.train()
    steps = read_table_rows(find_record(tmp_path), "steps")
    skipped = [bool(value) for value in steps["skipped"]]
    assert skipped[0] and scaler.get_scale() == 2.0 ** (127 - sum(skipped))
    assert steps["loss_scale"].to_list() == [2.0 ** (127 - sum(skipped[:step])) for step in range(6)]


def test_unlogged_steps_have_their_loss_too(tmp_path: Path) -> None:
    trainer = fit(tmp_path, [watch(interval=4)], logging_steps=3)
    recorded = steps_of(tmp_path)
    assert recorded["loss"] == pytest.approx(trainer.losses, rel=1e-6)
    assert [step for step, norm in recorded["grad_norm"].items() if norm is not None] == [3, 6]


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_a_loss_that_the_trainer_computes_is_recorded_where_it_logs_that_of_one_step(
    tmp_path: Path, logging_steps: int
) -> None:
    trainer = fit(tmp_path, [watch(interval=2)], label_smoothing_factor=0.1, logging_steps=logging_steps)
    expected = trainer.losses if logging_steps == 1 else dict.fromkeys(range(1, 7))
    assert steps_of(tmp_path)["loss"] == pytest.approx(expected, abs=6e-5)


def test_an_evaluation_in_between_adds_nothing(tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", [watch()])
    evaluated = fit(tmp_path / "evaluated", [watch()], eval_strategy="steps", eval_steps=1)
    assert evaluated.losses == plain.losses
    assert steps_of(tmp_path / "evaluated")["loss"] == steps_of(tmp_path / "plain")["loss"]
    first, second = (read_table_rows(find_record(tmp_path / name), "metrics") for name in ("plain", "evaluated"))
    assert first.equals(second)
    reported = {entry["step"]: entry["eval_loss"] for entry in evaluated.state.log_history if "eval_loss" in entry}
    found = read_table_rows(find_record(tmp_path / "evaluated"), "validation")
    assert dict(found.select("step", "loss").rows()) == reported and set(found["name"]) == {"eval_loss"}


def test_a_resumed_run_is_another_attempt_that_goes_on_counting(tmp_path: Path) -> None:
    fit(tmp_path, [watch()], save_strategy="steps", save_steps=2, max_steps=4)
    build(tmp_path, [watch()]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    metrics = read_table_rows(find_record(tmp_path), "metrics", ["attempt", "step"]).unique().sort("step")
    assert metrics.rows() == [(0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (1, 6)]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process ended with a fault of the user's, and two with none."""
    folder = tmp_path_factory.mktemp("processes")
    run_script(Path(__file__).with_name("hf_run.py"), folder)
    assert json.loads((folder / "statuses.json").read_text()) == [1]
    return folder


# Long tests rest on nemo_fp8_debug/adapters/transformers.py.
# Long tests rest on nemo_fp8_debug/adapters/session.py.
@pytest.mark.long
def test_what_failed_runs_saw_survives_them(processes: Path) -> None:
    assert (processes / "failed" / "error").read_text() == "the user's own"
    assert read_table_rows(find_record(processes / "failed"), "metrics")["step"].unique().to_list() == [2]
    assert list(steps_of(processes / "failed")["loss"]) == [1, 2, 3]


def test_a_second_run_closes_one_that_broke_off(tmp_path: Path) -> None:
    class OutOfMemory(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            raise RuntimeError("out of memory")

    callback = watch()
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(tmp_path / "first", [callback, OutOfMemory()])
    trainer = fit(tmp_path / "second", [callback])
    assert list(steps_of(tmp_path / "first")["loss"]) == [1]
    assert list(steps_of(tmp_path / "second")["loss"]) == list(range(1, 7))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())


class Copies(TrainerCallback):
    """What a reference model or a moving average does."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        self.copies.append(pickle.loads(pickle.dumps(copy.deepcopy(model))))


def test_the_callback_and_the_model_can_be_copied_and_pickled(tmp_path: Path) -> None:
    callback, copies = watch(layers=["down_proj"]), Copies()
    fit(tmp_path / "model", [callback, copies])
    assert len(copies.copies) == 6
    for name, copied in (("copy", copy.deepcopy(callback)), ("pickle", pickle.loads(pickle.dumps(callback)))):
        fit(tmp_path / name, [copied])
        assert {layer.rpartition(".")[2] for layer in read_table_rows(find_record(tmp_path / name), "metrics")["layer"]} == {
            "down_proj"
        }


def test_configuration_errors_come_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="interval is 0"):
        FP8DebugTrainerCallback(interval=0)
    with pytest.raises(ConfigError, match=r"no option 'intervall' \(did you mean 'interval'"):
        FP8DebugTrainerCallback(intervall=10)

    def refused(message: str, **options: Any) -> None:
        trainer = build(tmp_path / "refused", [watch(**options)])
        with pytest.raises(ConfigError, match=message):
            trainer.train()
        assert trainer.state.global_step == 0 and not trainer.losses

    refused("no GEMM layer matches", layers=["decoder.*"])
    (tmp_path / "file").touch()
    refused("cannot be written to", output=str(tmp_path / "file"))
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    refused("compiles the whole model")


def test_a_run_too_short_for_its_interval_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(FP8DebugWarning) as caught:
        fit(tmp_path, [watch(interval=100, table_rows=1)])
    (message,) = [str(w.message) for w in caught if w.category is FP8DebugWarning]
    assert "no step of this run will be sampled: it takes steps 1 to 6, and every 100 steps is sampled" in message
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nemo_fp8_debug: ")]
    assert lines[0].endswith(f"GEMMs, every 100 steps, to {tmp_path}/fp8_debug")
    assert "all of the multiply-adds per token in known modules are observed" in lines[1]
    assert lines[2:] == [f"nemo_fp8_debug: recorded 0 samples in {tmp_path}/fp8_debug."]


def test_faults_cost_the_monitor_and_not_the_run(tmp_path: Path) -> None:
    class Odd(torch.nn.Linear):
        __module__ = "megatron.odd"

        @property
        def layer_number(self) -> int:
            raise RuntimeError("not yet known")

    trainer = build(tmp_path, [watch(on_error="warn")])
    trainer.model.add_module("0", Odd(2, 2))
    with pytest.warns(FP8DebugWarning, match="this run is not monitored.*not yet known"):
        trainer.train()
    assert trainer.state.global_step == 6


@pytest.mark.long
def test_two_processes(processes: Path) -> None:
    ranks = [json.loads((processes / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for rank in ranks:
        assert rank["watched"] == rank["plain"]
    assert ranks[0]["plain"]["losses"] != ranks[1]["plain"]["losses"]  # each has batches of its own
    recorded = steps_of(processes / "watched")["loss"]
    assert recorded == pytest.approx({int(step): loss for step, loss in ranks[0]["plain"]["losses"].items()}, rel=1e-6)
    metrics = read_table_rows(find_record(processes / "watched"), "metrics")
    assert metrics["step"].unique().to_list() == [2, 4, 6]
    assert (metrics.filter(role="input")["calls"] == 4).all() and (metrics.filter(role="input")["ranks"] == 2).all()
    assert "model.layers.0.mlp.down_proj" in metrics["layer"]
