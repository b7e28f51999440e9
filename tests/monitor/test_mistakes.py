"""Mistakes of a newcomer in options, scalars and models: before the first step a ConfigError, after it one warning."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from helpers import Samples
from mistaken_runs import in_a_step, sampled, trained, two_layers, warned
from torch import nn

from nemo_fp8_debug import ConfigError, FP8DebugCallback, FP8DebugWarning, FP8EmulationCallback, FP8PlanCallback, Monitor
from nemo_fp8_debug.adapters.megatron import FP8DebugBridgeCallback, FP8DebugForwardStep
from nemo_fp8_debug.adapters.transformers import FP8DebugTrainerCallback
from nemo_fp8_debug.options.config import Config
from nemo_fp8_debug.record.reader import read_table_rows

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
            (lambda: FP8DebugTrainerCallback(100), "too many positional arguments.*by name, such as interval=100"),
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
        options, types = inspect.signature(Config).parameters, get_type_hints(Config)
        for watching in (Monitor, FP8DebugCallback, FP8DebugTrainerCallback, FP8DebugBridgeCallback, FP8DebugForwardStep):
            shown = inspect.signature(watching).parameters
            assert set(options) <= set(shown)
            for name in set(options) - {"output"}:  # which Monitor takes as a path too
                assert (shown[name].default, shown[name].annotation) == (options[name].default, types[name])
                assert get_type_hints(watching.__init__)[name] == types[name]

    def test_whole_numbers_of_other_types_are_taken(self) -> None:
        for value in (np.int64(10), torch.tensor(10), 10.0):
            assert type(Config(interval=value).interval) is int and Config(interval=value).interval == 10


class TestScalars:
    def test_a_misspelt_one_is_named_once(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            with monitor.step(step) as report:
                report(los=train(), lr=0.1)

        (message,) = warned(tmp_path, loop)
        assert message.startswith(
            "los of a step is not in the record (did you mean 'loss'?); the record takes loss, grad_norm"
        )
        assert read_table_rows(tmp_path, "steps")["lr"].to_list() == [0.1] * 4

    def test_recorders_of_the_user_get_scalars_of_any_name(self) -> None:
        with warnings.catch_warnings(record=True) as told:
            monitor = Monitor(two_layers(), recorders=[samples := Samples()], interval=1)
            in_a_step(monitor, 0, lambda: torch.tensor(1.0))
            monitor.begin_step(1)
            monitor.end_step(temperature=0.5)
            monitor.close()
        assert not [warning for warning in told if "temperature" in str(warning.message)]
        assert samples.steps[1]["temperature"] == 0.5

    @pytest.mark.parametrize("value", ["0.5", torch.ones(2), [0.5], 10**400, 1j, torch.tensor(1j), np.ones(2)], ids=repr)
    def test_a_value_that_is_no_scalar_costs_itself(self, tmp_path: Path, value: Any) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            with monitor.step(step) as report:
                report(loss=train(), grad_norm=value)

        (message,) = warned(tmp_path, loop, triggers=["loss_spike"])
        assert message.startswith("grad_norm of a step is not recorded: it is not a scalar but ")
        assert None not in read_table_rows(tmp_path, "steps")["loss"].to_list() and sampled(tmp_path) == [0, 1, 2, 3]

    @pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), torch.tensor([0.5]), np.array(0.5)])
    def test_numbers_of_other_types_are_taken(self, tmp_path: Path, value: Any) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            with monitor.step(step) as report:
                report(loss=train(), lr=value)

        assert not warned(tmp_path, loop)
        assert read_table_rows(tmp_path, "steps")["lr"].to_list() == [0.5] * 4

    def test_a_value_without_a_name(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            if step % 2:
                with monitor.step(step) as report:
                    report(train())
            else:
                monitor.begin_step(step)
                monitor.end_step(train())

        (message,) = warned(tmp_path, loop)
        assert message == "end_step does not record a value without a name: use end_step(loss=...)"


class TestModels:
    def test_a_model_made_float64_after_attaching_is_one_warning(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (message,) = warned(tmp_path, change=lambda model: model.double(), table_rows=2)
        assert message.startswith(
            "X of 0, W of 0, X of 1, W of 1 and 2 more operands are missing from the sample of step 1: "
        )
        assert "it is torch.float64, which FP8 does not replace; bfloat16, float16 and float32 are measured" in message
        assert sampled(tmp_path) == [0]
        empty = [line for line in capsys.readouterr().out.splitlines() if " at step 2, loss" in line]
        assert empty[0].endswith("0 of 0 tensors, worst first")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_model_made_of_another_dtype_is_measured_as_it_is(self, tmp_path: Path, dtype: torch.dtype) -> None:
        assert not warned(tmp_path, change=lambda model: model.to(dtype))
        metrics = read_table_rows(tmp_path, "metrics")
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
        with warnings.catch_warnings(record=True) as told:
            third = Monitor(model, tmp_path, table_rows=0)
            in_a_step(third, 0, lambda: model(torch.randn(4, 8)).sum())
            third.close()
        assert told == []
