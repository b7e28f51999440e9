"""What dY is multiplied by, measured: models that return their loss, loops that show it, Megatron's schedules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Samples
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.dispatcher import EventDispatcher
from nemo_fp8_debug.capture.grad_scale import GradientMultiplier
from nemo_fp8_debug.capture.patching import watch_function_calls
from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.record.reader import find_record, read_table_rows

UNITS = ("amax", "amin", "mse")


class Model(nn.Module):
    """Returns its loss in any of the ways that models do."""

    def __init__(self, returned: Callable[[torch.Tensor], Any] = lambda loss: loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.returned = returned

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(self.layers(x).square().mean())


def batch(step: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + micro))


def unscaled_rows(model: nn.Module, batches: list[torch.Tensor], recipe: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Metrics of these batches run plainly: one `loss.backward()` each, nothing scaled or divided."""
    model, seen = copy.deepcopy(model), Samples()
    monitor = Monitor(model, recorders=[seen], interval=1, recipe=recipe, on_error="raise")
    monitor.begin_step(0)
    for x in batches:
        model(x).backward()
    monitor.end_step()
    monitor.close()
    return seen.rows(0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("returned", "taken"),
    [
        (lambda loss: loss, lambda out: out),
        (lambda loss: loss.view(1), lambda out: out),
        (lambda loss: {"loss": loss, "logits": None}, lambda out: out["loss"]),
        (lambda loss: (loss, "more"), lambda out: out[0]),
    ],
)
def test_a_loss_that_the_model_returns(
    returned: Callable[[torch.Tensor], Any], taken: Callable[[Any], torch.Tensor], in_place: bool
) -> None:
    model = Model(returned)
    dispatcher = EventDispatcher()
    multiplier = GradientMultiplier([model], (), nullcontext, dispatcher)
    multiplier.subscribe()
    for micro in range(2):
        loss = taken(model(batch(0, micro)))
        if in_place:
            loss /= 4
            loss *= 256
        else:
            loss = loss / 4 * 256
        loss.sum().backward()
    dispatcher.close()
    assert float(multiplier.compute_multiplier()) == 64
    assert not model._forward_hooks


def test_what_is_not_known_is_not_made_up() -> None:
    model = Model()
    multiplier = GradientMultiplier([model, model.layers], (), nullcontext, EventDispatcher())
    multiplier.subscribe()
    model.layers(batch(0)).square().mean().backward()  # no scalar
    with torch.no_grad():
        model(batch(0))
    model(batch(0))  # never backpropagated
    assert multiplier.compute_multiplier() is None
    for factor in (1, 2):
        (model(batch(0)) * factor).backward()
    assert math.isnan(multiplier.compute_multiplier())
    (model(batch(0)) * torch.inf).backward()
    assert math.isnan(multiplier.compute_multiplier())


def train(output: Path | None, factor: float | None, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Two micro-batches a step, whose loss is multiplied by `factor`; None: 1 in one of them and 2 in the other."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, output, interval=2, table_rows=0, on_error="raise", **options) if output else None
    losses = []
    for step in range(4):
        if monitor:
            monitor.begin_step(step)
        optimizer.zero_grad()
        for micro in range(2):
            loss = model(batch(step, micro))
            losses.append(loss.item())
            loss *= 1 + micro if factor is None else factor
            loss.backward()
        optimizer.step()
        if monitor:
            monitor.end_step(loss=losses[-1])
    if monitor:
        monitor.close()
    return losses, list(model.parameters())


@pytest.mark.parametrize("factor", [0.5, 64.0, 1 / 3])
def test_a_run_is_not_disturbed_and_has_its_metrics_in_units_of_its_loss(tmp_path: Path, factor: float) -> None:
    losses, weights = train(None, factor)
    watched, watched_weights = train(tmp_path, factor, what_if=["delayed"])
    assert watched == losses and all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))
    steps = read_table_rows(find_record(tmp_path), "steps", ["step", "grad_scale"])
    measured = float(torch.tensor(factor))  # of a loss in float32
    assert steps.rows() == [(0, measured), (1, None), (2, measured), (3, None)]
    plain = unscaled_rows(Model(), [batch(0, micro) for micro in range(2)], "current")
    for table in ("metrics", "what_if"):
        rows = list(read_table_rows(find_record(tmp_path), table, where={"step": 0}).iter_rows(named=True))
        assert len(rows) in (6, 0)  # float32 operands are not tried
        for row in rows:
            for metric in UNITS:
                if row["role"] != "grad_output":
                    assert row[f"unscaled_{metric}"] is None
                elif table == "metrics":
                    expected = plain[row["layer"], "grad_output"][metric]
                    exact = math.frexp(factor)[0] == 0.5
                    assert row[f"unscaled_{metric}"] == (expected if exact else pytest.approx(expected, rel=1e-5))


def test_micro_batches_that_differ_leave_it_open(tmp_path: Path) -> None:
    train(tmp_path, None)
    assert read_table_rows(find_record(tmp_path), "steps")["grad_scale"].null_count() == 4
    assert read_table_rows(find_record(tmp_path), "metrics")["unscaled_amax"].null_count() == 12


def test_what_the_user_says_counts(tmp_path: Path) -> None:
    model = Model()
    monitor = Monitor(model, tmp_path, interval=1, table_rows=0, on_error="raise")
    with monitor.step(0) as report:
        model(batch(0)).backward()
        report(grad_scale=8.0)
    with monitor.step(1) as report:
        loss = model.layers(batch(0)).sum()
        monitor.watch_loss(loss, tokens=16)
        (loss / 32).backward()
    with monitor.step(2) as report:
        model(batch(0)).backward()
        report(grad_scale=0.0)
    monitor.close()
    assert read_table_rows(find_record(tmp_path), "steps")["grad_scale"].to_list() == [8.0, 0.5, None]


def test_a_grad_scaler_that_skips_a_step() -> None:
    """In FP16 with a scale that is too large at first."""
    model, seen = Model(), Samples()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=100)
    monitor = Monitor(model, recorders=[seen], interval=1, what_if=["delayed"], on_error="raise")
    for step in range(4):
        before = scaler.get_scale()
        with monitor.step(step) as report:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model.layers(batch(0)).float().square().mean()
            monitor.watch_loss(loss)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            report(loss=loss, loss_scale=before, skipped=scaler.get_scale() < before)
    monitor.close()
    skipped = [bool(seen.steps[step]["skipped"]) for step in range(4)]
    assert skipped[0] and not skipped[3]
    for step in range(4):
        sample = seen.samples[step]
        assert ("the optimizer skipped this step" in sample.describe_anomalies) == skipped[step]
        assert sample.scalars["grad_scale"] == 2.0 ** (20 - step if step < sum(skipped) else 20 - sum(skipped))
    first = skipped.index(False)  # no step before has changed the weights
    expected = Samples()
    monitor = Monitor(plain, recorders=[expected], interval=1, on_error="raise")
    with monitor.step(0):
        plain.layers(batch(0)).square().mean().backward()
    monitor.close()
    for layer in ("layers.0", "layers.2"):
        true = seen.rows(first)[layer, "grad_output"]["unscaled_amax"]
        assert true == pytest.approx(expected.rows(0)[layer, "grad_output"]["amax"], rel=2e-3)
    what_if = seen.samples[first].get_table("what_if")
    of_dy = [i for i, role in enumerate(what_if["role"]) if role == "grad_output"]
    scale = seen.samples[first].scalars["grad_scale"]
    assert of_dy and all(what_if["unscaled_mse"][i] == what_if["mse"][i] / scale**2 for i in of_dy)


def test_several_may_stand_in_and_leave_in_any_order() -> None:
    class Backend:
        def work(self, x: int) -> int:
            return x + 1

    def call(original: Callable[[int], int], tell: Callable[[int], None], x: int) -> int:
        result = original(x)
        tell(result)
        return result

    for order in ((0, 1), (1, 0)):
        host, seen = Backend(), ([], [])
        leave = [watch_function_calls(host, "work", call, seen[i].append) for i in range(2)]
        assert host.work(1) == 2
        leave[order[0]]()
        assert host.work(2) == 3
        leave[order[1]]()
        assert host.work(3) == 4 and not vars(host)
        assert seen[order[0]] == [2] and seen[order[1]] == [2, 3]


def megatron_step(micro_batches: int, loss_scale: float = 1.0, summed: bool = False) -> Sample:
    """A step of Megatron's schedule in which every micro-batch is the same."""
    from megatron_lm_loop import SEQUENCE, get_forward_backward_func, model
    from text_windows import TextWindows

    gpt, seen = model(), Samples()
    gpt.config.grad_scale_func = None if loss_scale == 1 else lambda loss: loss * loss_scale
    window = {name: value[None] for name, value in TextWindows(1, SEQUENCE)[0].items()}

    def loss_function(output: torch.Tensor) -> tuple[Any, ...]:
        total, tokens = (output.float() * window["loss_mask"]).sum(), window["loss_mask"].sum()
        return (total, tokens.int(), {}) if summed else (total / tokens, {})

    def forward_step(data: Any, gpt: nn.Module) -> tuple[torch.Tensor, Any]:
        return gpt(
            *(window[n] for n in ("tokens", "position_ids", "attention_mask")), labels=window["labels"]
        ), loss_function

    monitor = Monitor(gpt, recorders=[seen], interval=1, on_error="raise")
    with monitor.step(0):
        gpt.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=gpt,
            num_microbatches=micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
    monitor.close()
    return seen.samples[0]


@pytest.mark.usefixtures("megatron")
def test_megatron_schedules() -> None:
    from megatron.core.pipeline_parallel import schedules

    original, plain = schedules.forward_step, megatron_step(1)
    expected = {
        (layer, role): value if role == "grad_output" else None
        for layer, role, value in zip(*(plain.operand_columns[c] for c in ("layer", "role", "amax")), strict=True)
    }
    assert len(expected) > 20
    for micro_batches, loss_scale, summed in ((1, 1.0, False), (2, 1.0, False), (4, 256.0, False), (2, 8.0, True)):
        sample = megatron_step(micro_batches, loss_scale, summed)
        assert sample.scalars["grad_scale"] == loss_scale / micro_batches
        rows = zip(*(sample.operand_columns[c] for c in ("layer", "role", "unscaled_amax")), strict=True)
        assert {(layer, role): value for layer, role, value in rows} == expected
    assert schedules.forward_step is original
