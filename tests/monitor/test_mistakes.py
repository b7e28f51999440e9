"""Mistakes of a newcomer: before the first step a ConfigError, after it one warning, and the run goes on bit-identically."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Samples
from torch import nn

from nemo_fp8_debug import ConfigError, FP8DebugCallback, FP8DebugWarning, FP8EmulationCallback, FP8PlanCallback, Monitor
from nemo_fp8_debug.adapters.megatron_bridge import FP8DebugBridgeCallback
from nemo_fp8_debug.adapters.megatron_lm import FP8DebugForwardStep
from nemo_fp8_debug.adapters.transformers import FP8DebugTrainerCallback
from nemo_fp8_debug.options.config import Config
from nemo_fp8_debug.record.reader import read_table

Loop = Callable[[Monitor, int, Callable[[], torch.Tensor]], Any]


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def in_a_step(monitor: Monitor, step: Any, train: Callable[[], torch.Tensor]) -> None:
    with monitor.step(step) as report:
        report(loss=train())


def trained(
    folder: Path | None,
    loop: Loop = in_a_step,
    steps: Iterable[Any] = range(4),
    change: Callable[[nn.Sequential], Any] = lambda model: None,
    **options: Any,
) -> tuple[list[float], list[str]]:
    """Losses of a run, and what was warned; not monitored where there is no folder."""
    model, losses = two_layers(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, dtype=model[1].weight.dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return loss

    options = {"interval": 1, "table_rows": 0} | options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = Monitor(model, folder, **options) if folder else None
        for i, step in enumerate(steps):
            if i == 1:
                change(model)
            loop(monitor, step, train) if monitor else train()
        if monitor:
            monitor.close()
    return losses, [str(w.message).removeprefix("nemo_fp8_debug: ") for w in caught if w.category is FP8DebugWarning]


def warned(folder: Path, *arguments: Any, **options: Any) -> list[str]:
    """What was warned in a run that went on bit-identically."""
    losses, messages = trained(folder, *arguments, **options)
    assert losses == trained(None, *arguments, **options)[0] and losses
    return messages


def sampled(folder: Path) -> list[int]:
    return read_table(folder, "metrics")["step"].unique().to_list()


CLASSES: dict[str, Callable[..., Any]] = {
    "Monitor": lambda **options: Monitor(two_layers(), recorders=[Samples()], **options),
    "Config": Config,
    "Lightning": FP8DebugCallback,
    "Transformers": FP8DebugTrainerCallback,
    "Megatron-Bridge": FP8DebugBridgeCallback,
    "Megatron-LM": lambda **options: FP8DebugForwardStep(print, **options),
}


class TestOptions:
    @pytest.mark.parametrize("name", CLASSES)
    def test_a_misspelt_one_is_a_config_error_that_says_what_is_valid(self, name: str) -> None:
        with pytest.raises(ConfigError) as caught:
            CLASSES[name](intervall=100)
        message = str(caught.value)
        assert message.startswith("there is no option 'intervall' (did you mean 'interval'?); the options are ")
        assert {"interval", "layers", "output_rows"} <= set(message.rpartition("options are ")[2].split(", "))
        assert "\n" not in message

    @pytest.mark.parametrize("name", CLASSES)
    @pytest.mark.parametrize("options", [{"interval": "100"}, {"interval": 0}, {"layers": "linear_fc2"}, {"recipe": 5}])
    def test_a_value_of_the_wrong_type(self, name: str, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            CLASSES[name](**options)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: FP8EmulationCallback(recip="delayed"),
                r"no option 'recip' \(did you mean 'recipe'\?\); the options",
            ),
            (lambda: FP8EmulationCallback(layers="layers.*"), r"layers is 'layers\.\*'; it takes a list of strings, as \["),
            (lambda: FP8EmulationCallback(first_layers_bf16="1"), "first_layers_bf16 is '1'; it must be a whole number"),
            (
                lambda: FP8PlanCallback(plans="plan.json"),
                r"no option 'plans' \(did you mean 'plan'\?\)",
            ),
            (lambda: FP8PlanCallback(plan=5), "plan is 5; it takes the path of a plan"),
            (lambda: FP8DebugForwardStep(interval=1), "missing a required argument: 'forward_step'"),
            (lambda: FP8DebugForwardStep(5), "forward_step is 5; it must be the script's function"),
            (lambda: FP8DebugTrainerCallback(100), "too many positional arguments.*by name, as interval=100"),
            (lambda: Monitor(), "missing a required argument: 'model'"),
            (lambda: Monitor(two_layers()), "needs the folder of the record"),
            (lambda: Monitor("runs/a", "runs/b"), "model is 'runs/a'; Monitor takes a torch.nn.Module first"),
            (lambda: Monitor("runs/a", two_layers()), "output is Sequential"),
            (lambda: Monitor(two_layers(), ""), "output is ''; it must be a path"),
            (lambda: Monitor(two_layers(), recorder=[]), r"no option 'recorder' \(did you mean 'recorders'\?\)"),
            (lambda: Config(roles=["inputs"]), r"unknown roles \['inputs'\] \(did you mean 'input'\?\); choose from input"),
        ],
    )
    def test_other_arguments(self, make: Callable[[], Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)

    def test_signatures_show_every_option(self) -> None:
        options = set(inspect.signature(Config).parameters)
        for shown in (Monitor, FP8DebugCallback, FP8DebugTrainerCallback, FP8DebugBridgeCallback, FP8DebugForwardStep):
            assert options <= set(inspect.signature(shown).parameters)

    def test_whole_numbers_of_other_types_are_taken(self) -> None:
        for value in (np.int64(10), torch.tensor(10), 10.0):
            assert type(Config(interval=value).interval) is int and Config(interval=value).interval == 10


INVALID = [-1, "3", None, 2.5, True, 2**70, float("nan"), [3], torch.ones(2), torch.tensor(True), np.array([1, 2]), object()]


class TestSteps:
    @pytest.mark.parametrize("step", INVALID, ids=lambda step: type(step).__name__)
    def test_an_invalid_number_costs_its_samples_and_one_warning(self, tmp_path: Path, step: Any) -> None:
        (message,) = warned(tmp_path, steps=[0, step, step, 3])
        assert "is not sampled: the number of a step is a whole number, at least 0 and below 10**18" in message
        assert sampled(tmp_path) == [0, 3] == read_table(tmp_path, "steps")["step"].to_list()

    def test_whole_numbers_of_other_types_are_taken(self, tmp_path: Path) -> None:
        assert not warned(tmp_path, steps=[np.int64(0), torch.tensor(1), torch.tensor([2]), 3.0, np.uint8(4), 10**18 - 1])
        assert sampled(tmp_path) == [0, 1, 2, 3, 4, 10**18 - 1]

    def test_a_step_that_goes_back_changes_nothing_that_is_recorded(self, tmp_path: Path) -> None:
        (message,) = warned(tmp_path, steps=[0, 5, 5, 3, 6])
        assert message.startswith("step 5 is not sampled, since step 5 was before it: numbers of steps must grow")
        assert sampled(tmp_path) == [0, 5, 6] == read_table(tmp_path, "steps")["step"].to_list()

    def test_triggers_go_on_after_an_invalid_number(self, tmp_path: Path) -> None:
        options = {"interval": 100, "triggers": ["nonfinite"], "trigger_steps": 1}

        def loop(monitor: Monitor, step: Any, train: Callable[[], torch.Tensor]) -> None:
            with monitor.step(step) as report:
                report(loss=train() * (float("nan") if step == "2" else 1))

        (message,) = warned(tmp_path, loop, steps=[1, "2", 3, 4], **options)
        assert "step '2' is not sampled" in message
        assert sampled(tmp_path) == [3]

    def test_begun_and_never_ended(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            monitor.begin_step(step)
            train()

        (message,) = warned(tmp_path, loop)
        assert message.startswith("step 0 was begun and not ended, and its sample is dropped: call end_step")

    def test_the_last_one_begun_and_never_ended(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            monitor.begin_step(step)
            loss = train()
            if step < 3:
                monitor.end_step(loss=loss)

        (message,) = warned(tmp_path, loop)
        assert message.startswith("step 3 was begun and not ended")
        assert sampled(tmp_path) == [0, 1, 2]

    def test_ended_and_never_begun(self, tmp_path: Path) -> None:
        (message,) = warned(tmp_path, lambda monitor, step, train: monitor.end_step(loss=train()))
        assert message.startswith("end_step was called without begin_step")

    def test_never_told_of_a_step(self, tmp_path: Path) -> None:
        (message,) = warned(tmp_path, lambda monitor, step, train: train())
        assert message.startswith("the monitor was told of no step: call begin_step and end_step around each training step")

    def test_a_run_that_fails_in_a_step_is_told_nothing_more(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with (
                pytest.raises(ZeroDivisionError),
                contextlib.closing(Monitor(two_layers(), tmp_path, table_rows=0)) as monitor,
            ):
                monitor.begin_step(0)
                raise ZeroDivisionError

    def test_steps_that_the_loop_breaks_off_itself(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            with contextlib.suppress(ZeroDivisionError), monitor.step(step):
                train()
                if step == 1:
                    raise ZeroDivisionError

        assert not trained(tmp_path, loop)[1]
        assert sampled(tmp_path) == [0, 2, 3]

    def test_closed_twice_and_used_after_that(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            in_a_step(monitor, step, train)
            monitor.close()

        (message,) = warned(tmp_path, loop)
        assert message == "the monitor is closed, and the steps after that are not recorded"
        assert sampled(tmp_path) == [0]


class TestScalars:
    def test_a_misspelt_one_is_named_once(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            with monitor.step(step) as report:
                report(los=train(), lr=0.1)

        (message,) = warned(tmp_path, loop)
        assert message.startswith(
            "los of a step is not in the record (did you mean 'loss'?); the record takes loss, grad_norm"
        )
        assert read_table(tmp_path, "steps")["lr"].to_list() == [0.1] * 4

    def test_recorders_of_the_user_get_scalars_of_any_name(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monitor = Monitor(two_layers(), recorders=[samples := Samples()], interval=1)
            in_a_step(monitor, 0, lambda: torch.tensor(1.0))
            monitor.begin_step(1)
            monitor.end_step(temperature=0.5)
            monitor.close()
        assert samples.steps[1]["temperature"] == 0.5

    @pytest.mark.parametrize("value", ["0.5", torch.ones(2), [0.5], 10**400, 1j, torch.tensor(1j), np.ones(2)], ids=repr)
    def test_a_value_that_is_no_scalar_costs_itself(self, tmp_path: Path, value: Any) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            with monitor.step(step) as report:
                report(loss=train(), grad_norm=value)

        (message,) = warned(tmp_path, loop, triggers=["loss_spike"])
        assert message.startswith("grad_norm of a step is not recorded: it is not a scalar but ")
        assert None not in read_table(tmp_path, "steps")["loss"].to_list() and sampled(tmp_path) == [0, 1, 2, 3]

    @pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), torch.tensor([0.5]), np.array(0.5)])
    def test_numbers_of_other_types_are_taken(self, tmp_path: Path, value: Any) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            with monitor.step(step) as report:
                report(loss=train(), lr=value)

        assert not warned(tmp_path, loop)
        assert read_table(tmp_path, "steps")["lr"].to_list() == [0.5] * 4

    def test_a_value_without_a_name(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            if step % 2:
                with monitor.step(step) as report:
                    report(train())
            else:
                monitor.begin_step(step)
                monitor.end_step(train())

        (message,) = warned(tmp_path, loop)
        assert message == "what end_step was given without a name is not recorded: use end_step(loss=...)"


class TestModels:
    def test_a_model_made_float64_after_attaching_is_one_warning(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (message,) = warned(tmp_path, change=lambda model: model.double(), table_rows=2)
        assert message.startswith(
            "X of 0, W of 0, X of 1, W of 1 and 2 more operands are missing from the sample of step 1: "
        )
        assert "it is torch.float64, which FP8 does not stand in for; bfloat16, float16 and float32 are measured" in message
        assert sampled(tmp_path) == [0]
        empty = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FP8 at step 2, loss")]
        assert empty[0].endswith("0 of 0 tensors, worst first")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_model_made_of_another_dtype_is_measured_as_it_is(self, tmp_path: Path, dtype: torch.dtype) -> None:
        assert not warned(tmp_path, change=lambda model: model.to(dtype))
        metrics = read_table(tmp_path, "metrics")
        assert metrics.filter(step=3)["dtype"].unique().to_list() == [str(dtype).removeprefix("torch.")]

    def test_layers_replaced_after_attaching_are_one_warning(self, tmp_path: Path) -> None:
        (message,) = trained(tmp_path, change=lambda model: model.__setitem__(0, nn.Linear(8, 8)))[1]
        assert message.startswith("1 of 2 layers gave no sample, first 0")

    def test_attached_twice_in_one_folder(self, tmp_path: Path) -> None:
        model = two_layers()
        first = Monitor(model, tmp_path, table_rows=0)
        with pytest.warns(FP8DebugWarning, match=f"another monitor of this process records to {tmp_path} too"):
            second = Monitor(model, tmp_path, table_rows=0)
        for monitor in (first, second):
            in_a_step(monitor, 0, lambda: model(torch.randn(4, 8)).sum())
            monitor.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            third = Monitor(model, tmp_path, table_rows=0)
            in_a_step(third, 0, lambda: model(torch.randn(4, 8)).sum())
            third.close()


class TestLinesOfARun:
    def test_the_folder_is_named_at_the_start_and_the_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert not warned(Path("a b"), interval=2, table_rows=1)
        first, *_, last = capsys.readouterr().out.splitlines()
        assert first == f"nemo_fp8_debug: recording 2 GEMMs, every 2 steps, to {tmp_path}/a b"
        assert last == (
            f"nemo_fp8_debug: recorded 2 samples in {tmp_path}/a b. View: tensorboard --logdir '{tmp_path}/a b' "
            f"or nemo-fp8-debug diagnose '{tmp_path}/a b'"
        )

    def test_without_tables_there_are_none(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert not warned(tmp_path, table_rows=0)
        assert capsys.readouterr().out == ""

    def test_a_record_that_failed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from nemo_fp8_debug.record.writer import RunRecord

        original = RunRecord.record

        def record(self: RunRecord, sample: Any) -> None:
            if sample.step > 0:
                raise OSError(5, "Input/output error")
            original(self, sample)

        monkeypatch.setattr(RunRecord, "record", record)
        (message,) = warned(tmp_path, table_rows=1)
        assert "Input/output error" in message
        assert f"recorded only 1 of 4 samples (warnings say why) in {tmp_path}." in capsys.readouterr().out

    def test_no_step_was_sampled(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (message,) = warned(tmp_path, steps=range(1, 5), interval=100, table_rows=1)
        assert message.startswith("no step was sampled: the run took 4 steps (1 to 4), and every 100 steps is sampled")
        assert capsys.readouterr().out.endswith(f"recorded 0 samples in {tmp_path}.\n")

    def test_a_window_that_the_run_does_not_reach(self, tmp_path: Path) -> None:
        (message,) = warned(tmp_path, first_step=50, last_step=60)
        assert "the run took 4 steps (0 to 3), and every step from step 50 up to step 60 is sampled" in message

    @pytest.mark.parametrize("steps", [(1, 99), (101, 199)])
    def test_a_run_that_knows_its_length_is_told_at_the_start(self, tmp_path: Path, steps: tuple[int, int]) -> None:
        monitor = Monitor(two_layers(), tmp_path, interval=100, table_rows=0)
        with pytest.warns(FP8DebugWarning, match=f"no step of this run will be sampled: it takes steps {steps[0]} to"):
            monitor.expect_steps(*steps)
        in_a_step(monitor, 1, lambda: torch.tensor(1.0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monitor.close()  # says it once

    @pytest.mark.parametrize("steps", [(0, 0), (1, 100), (100, 100), (150, 260)])
    def test_and_otherwise_not(self, tmp_path: Path, steps: tuple[int, int]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Monitor(two_layers(), tmp_path, interval=100, table_rows=0).expect_steps(*steps)
