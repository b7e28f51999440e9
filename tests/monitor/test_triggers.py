"""What has the next steps sampled: spikes, values that are not finite, metrics past a limit; and who was the first."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Samples
from hypothesis import given
from hypothesis import strategies as st
from samples import sample
from small_models.megatron import gpt, loss_of
from torch import nn

from nemo_fp8_debug import ConfigError, Monitor
from nemo_fp8_debug.distributed import MonitoredRanks
from nemo_fp8_debug.monitor.schedule import Triggers
from nemo_fp8_debug.options.trigger_rules import LossSpikeRule, NonFiniteRule, ThresholdRule, parse_trigger_rule
from nemo_fp8_debug.record.reader import read_table_rows

RECOMPUTE = {"recompute_method": "uniform", "recompute_granularity": "full", "recompute_num_layers": 1}


def reasons(losses: list[Any], *rules: str) -> dict[int, str]:
    """Why steps were sampled, by the step that followed."""
    triggers = Triggers([parse_trigger_rule(rule) for rule in rules], MonitoredRanks())
    found = {}
    for step, loss in enumerate(losses):
        if why := triggers.find_pending_reason():
            found[step] = why
        triggers.check_step(step, loss)
    return found


class TestLoss:
    def falling(self, n: int = 100) -> list[float]:
        noise = random.Random(0)
        return [2 + 3 * math.exp(-step / 30) + noise.gauss(0, 0.02) for step in range(n)]

    def test_a_spike_fires_once_at_the_next_step(self) -> None:
        losses = self.falling()
        losses[60:63] = [9.0, 9.5, 8.0]
        ((step, why),) = reasons(losses, "loss_spike").items()
        assert step == 61
        assert why.startswith("loss spike at step 60: 9, median ")

    def test_two_spikes_fire_twice(self) -> None:
        losses = self.falling()
        losses[60] = losses[80] = 9.0
        assert list(reasons(losses, "loss_spike")) == [61, 81]

    def test_an_ordinary_loss_does_not(self) -> None:
        assert not reasons(self.falling(1000), "loss_spike")

    @given(st.floats(0.01, 1e6), st.integers(0, 2**32))
    def test_nor_one_that_wobbles_by_a_per_mille(self, level: float, seed: int) -> None:
        noise = random.Random(seed)
        assert not reasons([level * (1 + noise.uniform(-1e-3, 1e-3)) for _ in range(200)], "loss_spike")

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
    def test_a_loss_that_is_not_finite(self, bad: Any) -> None:
        losses: list[Any] = [2.0] * 10
        losses[5] = bad
        assert reasons(losses, "nonfinite") == {6: "the loss of step 5 is not finite"}
        assert not reasons(losses, "loss_spike")

    @pytest.mark.parametrize("bad", [math.nan, math.inf, torch.tensor(math.nan)])
    def test_a_gradient_norm_that_is_not_finite(self, bad: Any) -> None:
        triggers = Triggers([parse_trigger_rule("nonfinite")], MonitoredRanks())
        for step in range(10):
            triggers.check_step(step, 2.0, bad if step == 5 else 1.0)
            assert (triggers.find_pending_reason() == "the gradient norm of step 5 is not finite") == (step == 5)
        triggers.check_step(10, math.nan, bad)
        assert triggers.find_pending_reason() == "the loss and the gradient norm of step 10 are not finite"

    @pytest.mark.parametrize("odd", [None, 0.0, torch.zeros(3), "2.5", torch.tensor(0.0)])
    def test_a_step_without_a_loss_is_passed_over(self, odd: Any) -> None:
        losses: list[Any] = self.falling()
        losses[50] = odd
        losses[60] = 9.0
        assert list(reasons(losses, "loss_spike", "nonfinite")) == [61]

    def test_without_rules_nothing_is_kept(self) -> None:
        triggers = Triggers([], MonitoredRanks())
        triggers.check_step(0, torch.tensor(1.0))
        assert not triggers._pending


class TestRules:
    def test_they_are_read(self) -> None:
        assert parse_trigger_rule("loss_spike") == LossSpikeRule()
        assert parse_trigger_rule("nonfinite") == NonFiniteRule()
        assert parse_trigger_rule("underflow_pct > 20") == ThresholdRule("underflow_pct", None, ">", 20)
        assert parse_trigger_rule("sqnr_db/grad_output<1.5e1") == ThresholdRule("sqnr_db", "grad_output", "<", 15)

    @pytest.mark.parametrize(
        "text", ["", "spike", "underflow_pct", "underflow > 3", "mse/X > 1", "mse > x", "mse > 1e", "mse >= 1", 7, None]
    )
    def test_others_are_refused(self, text: Any) -> None:
        with pytest.raises(
            ConfigError,
            match=r"invalid trigger .*: expected loss_spike, nonfinite, early_warning, wrong_product, or METRIC > LIMIT",
        ):
            parse_trigger_rule(text)

    def test_a_metric_past_its_limit(self) -> None:
        rows = [{"layer": "a", "mse": 1.0}, {"layer": "b", "mse": 3.0}, {"layer": "b", "role": "weight", "mse": None}]
        assert parse_trigger_rule("mse > 2").describe_violation(sample(0, rows)) == "mse of X of b is 3 (> 2)"
        assert parse_trigger_rule("mse/input < 1.5").describe_violation(sample(0, rows)) == "mse of X of a is 1 (< 1.5)"
        assert parse_trigger_rule("mse/weight > 0").describe_violation(sample(0, rows)) is None

    def test_it_fires_when_it_begins_and_again_after_it_ended(self) -> None:
        triggers = Triggers([parse_trigger_rule("mse > 2")], MonitoredRanks())
        found = []
        for step, mse in enumerate([1.0, 3.0, 4.0, 1.0, 5.0]):
            triggers.check_sample(sample(step, [{"layer": "a", "mse": mse}]))
            triggers.check_step(step, 1.0)
            found.append(triggers.find_pending_reason())
        assert [bool(f) for f in found] == [False, True, False, False, True]
        assert found[4] == "mse of X of a is 5 (> 2) at step 4"


class Poisoned(nn.Module):
    """Three layers; the output of `at` gets a NaN."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).bfloat16()
        self.at = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == self.at:
                x = x + torch.full_like(x, math.nan)
        return x


def looked_at(model: nn.Module, train: Any) -> Samples:
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, on_error="raise")
    with monitor.step(0):
        train(model)
    monitor.close()
    return samples


class TestFirstNonFinite:
    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_it_is_the_operand_after_the_place_where_it_arose(self, at: int) -> None:
        found = looked_at(Poisoned(at), lambda m: m(torch.randn(4, 8).bfloat16()).float().sum().backward())
        assert (
            found.samples[0]
            .describe_first_nonfinite()
            .startswith(f"first with NaN or infinity is X of layers.{at + 1} (32 NaN")
        )

    def test_a_weight_that_holds_it(self) -> None:
        model = Poisoned(99)
        model.layers[2].weight.data[0, 0] = math.inf
        found = looked_at(model, lambda m: m(torch.randn(4, 8).bfloat16()).float().sum().backward())
        assert "is W of layers.2 (0 NaN, 1 infinite)" in found.samples[0].describe_first_nonfinite()

    def test_a_gradient_that_holds_it(self) -> None:
        def train(m: nn.Module) -> None:
            y = m(torch.randn(4, 8).bfloat16())
            y.backward(torch.full_like(y, math.inf))

        found = looked_at(Poisoned(99), train)
        assert "is dY of layers.3 (0 NaN, 32 infinite)" in found.samples[0].describe_first_nonfinite()

    def test_the_micro_batch_counts_and_not_the_layer(self) -> None:
        """The last layer's dY of the first micro-batch comes before the first layer's X of the second."""

        def train(m: nn.Module) -> None:
            y = m(torch.randn(4, 8).bfloat16())
            y.backward(torch.full_like(y, math.nan))
            m(torch.full((4, 8), math.nan).bfloat16()).float().sum().backward()

        assert "is dY of layers.3" in looked_at(Poisoned(99), train).samples[0].describe_first_nonfinite()

    @pytest.mark.usefixtures("megatron")
    @pytest.mark.parametrize(
        "options", [{}, RECOMPUTE, {"recompute_granularity": "selective"}], ids=["plain", "full", "selective"]
    )
    def test_recompute_does_not_change_who_was_the_first(self, options: dict[str, Any]) -> None:
        """Full recompute shows operands in the order of the backward pass: the last layer before the first."""
        model = gpt(**options)
        layer = model.decoder.layers[0].self_attention
        layer.register_forward_hook(lambda module, args, out: (out[0] + math.nan, *out[1:]))
        found = looked_at(model, lambda m: loss_of(m, 0).backward())
        assert "is X of decoder.layers.0.mlp.linear_fc1" in found.samples[0].describe_first_nonfinite()

    def test_float32_too(self) -> None:
        found = looked_at(Poisoned(1).float(), lambda m: m(torch.randn(4, 8)).sum().backward())
        assert "is X of layers.2" in found.samples[0].describe_first_nonfinite()

    def test_a_large_float32_is_none(self) -> None:
        """Rounded to bfloat16 it would be infinite."""
        model = nn.Linear(4, 4)
        found = looked_at(model, lambda m: m(torch.full((2, 4), torch.finfo(torch.float32).max)).sum().backward())
        first = found.samples[0].describe_first_nonfinite()
        assert first is None or "is X" not in first


class TestInARun:
    def run(self, folder: Path, **options: Any) -> list[int]:
        """Sampled steps of a run whose loss spikes at step 33."""
        torch.manual_seed(0)
        model = nn.Linear(8, 8).bfloat16()
        monitor = Monitor(model, str(folder), interval=20, table_rows=0, dump_min_free_bytes=0, on_error="raise", **options)
        for step in range(50):
            monitor.begin_step(step)
            model(torch.randn(4, 8).bfloat16()).float().sum().backward()
            monitor.end_step(loss=9.0 if step == 33 else 2.0)
        monitor.close()
        return read_table_rows(folder, "metrics")["step"].unique().to_list()

    def test_the_next_steps_are_sampled_dumped_and_tagged(self, tmp_path: Path) -> None:
        sampled = self.run(tmp_path, triggers=["loss_spike"], trigger_steps=3, trigger_dump=["*"])
        assert sampled == [0, 20, 34, 35, 36, 40]
        assert sorted(p.name for p in (tmp_path / "tensors").iterdir()) == [
            f"attempt-0-step-000000{s}" for s in (34, 35, 36)
        ]
        tagged = read_table_rows(tmp_path, "steps", ["step", "trigger"]).drop_nulls()
        assert tagged.rows() == [(s, "loss spike at step 33: 9, median 2") for s in (34, 35, 36)]

    def test_without_triggers_only_its_turn_counts(self, tmp_path: Path) -> None:
        assert self.run(tmp_path) == [0, 20, 40]


class TestEarlyWarning:
    def fired(self, *samples: list[dict[str, Any]]) -> list[str | None]:
        triggers, found = Triggers([parse_trigger_rule("early_warning")], MonitoredRanks()), []
        for step, rows in enumerate(samples):
            triggers.check_sample(sample(step, rows))
            triggers.check_step(step, 1.0)
            found.append(triggers.find_pending_reason())
        return found

    def test_of_an_operand_beyond_what_healthy_ones_do_and_once(self) -> None:
        lost = [{"underflow_pct": 30.0}, {"role": "grad_output", "underflow_pct": 24.0}]
        quiet = [{}]
        found = self.fired(quiet, quiet, lost, lost, lost, quiet, lost, lost)
        assert [bool(why) for why in found] == [False, False, True, False, False, False, True, False]
        assert found[2] and "early warning: underflow_pct of X of decoder.layers.0.mlp.linear_fc1 is 30" in found[2]
        assert "within 8 at step 2" in found[2]

    def test_one_sample_must_be_three_times_beyond_and_two_in_a_row_need_not(self) -> None:
        slightly = [{"underflow_pct": 12.0}]
        assert [bool(why) for why in self.fired([{}], [{}], slightly, [{}], slightly, slightly)] == [False] * 5 + [True]

    def test_not_of_the_first_samples_whose_scales_are_made_up(self) -> None:
        lost = [{"scale_ratio_log2": -20.0}]
        assert self.fired(lost, lost, [{}], [{}]) == [None] * 4

    def test_the_farthest_is_named(self) -> None:
        rows = [
            {"overflow_pct": 6.0},
            {"role": "weight", "scale_ratio_log2": -12.0},
            {"role": "query", "underflow_pct": 99.0},
        ]
        why = self.fired([{}], [{}], rows)[2]
        assert why and "scale_ratio_log2 of W of" in why
