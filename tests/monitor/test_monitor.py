"""The guarantees: the run is not disturbed, nothing of ours stays between samples, a fault costs a sample and no more."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Samples
from small_models.megatron import gpt, loss_of
from test_emulate import attached
from torch import nn
from torch.utils.data import DataLoader

from nemo_fp8_debug import ConfigError, FP8DebugWarning, Monitor
from nemo_fp8_debug.core.keys import STATES
from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.record.reader import find_record, read_table_rows

STEPS = 4
_EVERYTHING = {
    **{"states": tuple(STATES), "activations": ("norm", "attention"), "what_if": ["current-e5m2", "mxfp8", "bf16"]},
    **{"copies": True, "block_scales": True, "replicas": True},
}
RECOMPUTE = {"recompute_method": "uniform", "recompute_granularity": "full", "recompute_num_layers": 1}


def train(interval: int | None, options: dict[str, Any], recipe: str | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and final weights of a Megatron GPT, two micro-batches a step; monitored where an interval is given."""
    model = gpt(**options)
    emulation = attached(model, recipe, ["layers.*"]) if recipe else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = 8 if interval == 1 else 0
    beside = _EVERYTHING if interval == 1 else {}
    watched = {"interval": interval, "output_rows": rows, "verify_rows": rows, "on_error": "raise", **beside}
    monitor = Monitor(model, recorders=[Samples()], **watched) if interval else None
    losses = []
    for step in range(STEPS):
        if monitor:
            monitor.begin_step(step)
        optimizer.zero_grad()
        micro = [loss_of(model, 2 * step + i) for i in range(2)]
        for loss in micro:
            loss.backward()
        optimizer.step()
        losses += [loss.item() for loss in micro]
        if emulation:
            emulation.end_step()
        if monitor:
            monitor.end_step(loss=micro[0])
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("options", [{}, RECOMPUTE, {"recompute_granularity": "selective"}])
def test_losses_and_weights_are_bit_identical(options: dict[str, Any], recipe: str | None) -> None:
    losses, weights = train(None, options, recipe)
    for interval in (1, 10):
        monitored_losses, monitored_weights = train(interval, options, recipe)
        assert monitored_losses == losses
        assert all(torch.equal(a, b) for a, b in zip(weights, monitored_weights, strict=True))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "nvfp4"])
def test_a_run_is_bit_identical_on_threads_that_it_shares_with_the_kernels(two_threads: None, recipe: str) -> None:
    """Its operands are large enough to be shared out to them."""

    def train(recorders: list[Samples]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = Monitor(model, recorders=recorders, interval=1, recipe=recipe, on_error="raise") if recorders else None
        losses = []
        for step in range(STEPS):
            if monitor:
                monitor.begin_step(step)
            optimizer.zero_grad()
            loss = model(torch.randn(1024, 1024).bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if monitor:
                monitor.end_step(loss=loss)
        if monitor:
            monitor.close()
        return [*losses, *(p.detach().clone() for p in model.parameters())]

    samples = Samples()
    watched, plain = train([samples]), train([])
    assert all(torch.equal(a, b) for a, b in zip(watched, plain, strict=True))
    assert list(samples.samples) == list(range(STEPS))
    assert len(samples.rows(0)) == 6


def hooks_on(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)


def test_no_hook_outside_a_sampled_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    monitor = Monitor(model, recorders=[Samples()], interval=2)
    assert hooks_on(model) == 0
    for step in range(5):
        monitor.begin_step(step)
        assert (hooks_on(model) > 0) == (step % 2 == 0)
        model(torch.randn(2, 4)).sum().backward()
        monitor.end_step()
        assert hooks_on(model) == 0


def test_no_activation_outlives_the_step() -> None:
    import gc
    import weakref

    model = nn.Linear(4, 4)
    monitor = Monitor(model, recorders=[Samples()], interval=1)
    monitor.begin_step(0)
    x = torch.randn(3, 4).requires_grad_()
    y = model(x)
    y.sum().backward()
    references = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [r() for r in references] == [None, None]
    monitor.end_step()


def test_first_last_interval() -> None:
    samples = Samples()
    model = nn.Linear(4, 4)
    monitor = Monitor(model, recorders=[samples], interval=3, first_step=2, last_step=9)
    for step in range(15):
        with monitor.step(step) as report:
            loss = model(torch.randn(2, 4)).sum()
            loss.backward()
            report(loss=loss)
    monitor.close()
    assert list(samples.samples) == [3, 6, 9]
    assert list(samples.steps) == list(range(15))


def test_a_step_that_raises_leaves_no_hook_and_raises_on() -> None:
    model = nn.Linear(4, 4)
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1)
    with pytest.raises(KeyError), monitor.step(0):
        raise KeyError("the user's own")
    assert hooks_on(model) == 0
    assert not samples.samples


def test_a_fault_in_a_hook_costs_that_operand_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_fp8_debug.capture import operands

    original = operands.OperandAccumulator.add_tensor

    def faulty(self: operands.OperandAccumulator, x: torch.Tensor, order: int, use: Any = None) -> None:
        if self.gemm.name == "1":
            raise ZeroDivisionError("injected")
        original(self, x, order, use)

    monkeypatch.setattr(operands.OperandAccumulator, "add_tensor", faulty)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            with monitor.step(step):
                model(torch.randn(2, 4)).sum().backward()
        monitor.close()
    messages = [str(w.message) for w in caught if w.category is FP8DebugWarning]
    missing = "X of 1, W of 1, dY of 1 are missing from the sample of step 0: ZeroDivisionError: injected"
    assert messages == [f"nemo_fp8_debug: {missing}"]
    assert {layer for layer, _ in samples.rows(2)} == {"0"}


class FaultyRecorder(Samples):
    def record(self, sample: Sample) -> None:
        raise OSError(28, "No space left on device")


def test_a_fault_in_a_recorder_costs_that_recorder_only() -> None:
    model, samples = nn.Linear(4, 4), Samples()
    monitor = Monitor(model, recorders=[FaultyRecorder(), samples], interval=1)
    with pytest.warns(FP8DebugWarning, match="error in FaultyRecorder near step 0.*OSError.*No space left"):
        with monitor.step(0):
            model(torch.randn(2, 4)).sum().backward()
        monitor.close()
    assert 0 in samples.samples


def test_on_error_raise_lets_faults_through() -> None:
    model = nn.Linear(4, 4)
    monitor = Monitor(model, recorders=[FaultyRecorder()], interval=1, on_error="raise")
    with pytest.raises(OSError, match="No space left"), monitor.step(0):
        model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval is 0; it must be a whole number, at least 1"),
        ({"interval": 2.5}, r"interval is 2\.5"),
        ({"recipe": "delayd"}, "unknown recipe 'delayd'; known recipes: delayed, current"),
        ({"recipe": {"name": "delayed", "marign": 1}}, "has no option 'marign'"),
        ({"layers": ["re:("]}, "not a regular expression"),
        ({"layers": "linear_fc2"}, "takes a list of strings"),
        ({"layers": [1]}, "takes a list of strings"),
        ({"first_step": None}, "first_step is None; it must be a whole number"),
        ({"output": 123}, "output is 123; it must be a path"),
        ({"layers": ["nothing"]}, "no GEMM layer matches"),
        ({"roles": ["output"]}, r"unknown roles \['output'\]; choose from input, weight, grad_output"),
        ({"roles": []}, "unknown roles"),
        ({"first_step": 5, "last_step": 4}, "last_step 4 is before first_step 5"),
        ({"on_error": "ignore"}, "use 'warn' or 'raise'"),
        ({"max_tags": -1}, "max_tags is -1; it must be a whole number, at least 0"),
    ],
)
def test_configuration_errors_are_clear_and_early(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Monitor(nn.Linear(4, 4), recorders=[Samples()], **options)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be written to .*file"):
        Monitor(nn.Linear(4, 4), str(tmp_path / "file"))


def test_a_plain_loop_in_three_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the data loader, whose workers fork, goes on working."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = Monitor(model, str(tmp_path), interval=2)
    for step, batch in enumerate(DataLoader(torch.randn(24, 8), batch_size=6, num_workers=1)):
        with monitor.step(step) as report:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            report(loss=loss)
    monitor.close()
    run = find_record(tmp_path)
    assert read_table_rows(run, "metrics")["step"].unique().to_list() == [0, 2]
    assert read_table_rows(run, "steps")["step"].to_list() == [0, 1, 2, 3]
    assert "Nothing is quantized: what FP8 would do at step 2, loss" in capsys.readouterr().out


def test_explicit_delayed_recipe_keeps_a_history_of_its_own() -> None:
    model, samples = nn.Linear(4, 4).bfloat16(), Samples()
    recipe = {"name": "delayed", "amax_history_len": 1}
    monitor = Monitor(model, recorders=[samples], interval=1, recipe=recipe, on_error="raise")
    xs = [torch.full((2, 4), value).bfloat16() for value in (1.0, 4.0, 2.0)]
    for step, x in enumerate(xs):
        with monitor.step(step):
            model(x).sum().backward()
    rows = [samples.rows(step)["model", "input"] for step in range(3)]
    assert [row["scale_source"] for row in rows] == ["current", "emulated", "emulated"]
    assert [row["scale"] for row in rows[1:]] == [448.0, 112.0]
    assert [row["scale_ratio_log2"] for row in rows[1:]] == [2.0, -1.0]
    assert rows[1]["overflow_pct"] == 100.0
