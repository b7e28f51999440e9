"""Metrics of the outputs of GEMMs in a run: where they are absent, what a fault costs, experts, and the record."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Samples
from products import errors, metrics_of, rows
from torch import nn
from watched_products import ALL, ROLES, linear_operands, lowered, run, watching

from nemo_fp8_debug import ConfigError, FP8DebugWarning, Monitor
from nemo_fp8_debug.record.reader import read_table_rows


@pytest.mark.parametrize("n", [ALL, 1])
def test_of_operands_that_hold_nan_or_nothing_metrics_are_absent(n: int) -> None:
    """Also where the part that is multiplied holds no NaN."""
    linear, given = linear_operands()
    given["input"][1, 1, 1] = torch.nan
    given["grad_output"].zero_()
    found = run(linear, given, output_rows=n)
    # What W does to a part of X without NaN does not hang on the scale of X.
    known = {"error_of_weight"} if n == 1 else set()
    assert {product: set(metrics_of(row)) for (_, product), row in found.items()} == {
        "fprop": known,
        "dgrad": set(),
        "wgrad": set(),
    }


def test_a_product_needs_both_of_its_operands() -> None:
    linear, given = linear_operands()
    assert {p for _, p in run(linear, given, roles=["input", "grad_output"])} == {"wgrad"}
    assert {p for _, p in run(linear, given, roles=["input", "weight"])} == {"fprop"}
    assert run(linear, given, output_rows=0) == {}


def test_no_activation_outlives_the_step() -> None:
    linear = nn.Linear(4, 4)
    monitor, _ = watching(linear)
    monitor.begin_step(0)
    x = torch.randn(3, 4).requires_grad_()
    y = linear(x)
    reference = weakref.ref(x), weakref.ref(y)
    y.sum().backward()
    del x, y
    gc.collect()
    assert [r() for r in reference] == [None, None]
    monitor.end_step()


def test_a_fault_costs_products_and_no_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_fp8_debug.observations.products import samples as output_samples

    def faulty(*arguments: Any) -> None:
        raise ZeroDivisionError("injected")

    linear, given = linear_operands()
    monitor, samples = watching(linear, on_error="warn")
    monkeypatch.setattr(output_samples.ProductTerms, "from_rows", faulty)
    with pytest.warns(FP8DebugWarning, match="while computing parts of outputs.*injected"):
        with monitor.step(0):
            linear(given["input"]).backward(given["grad_output"])
        monitor.flush()
    assert {role for _, role in samples.rows(0)} == set(ROLES)
    assert samples.samples[0].get_table("outputs") == {}


def test_experts_and_their_fold() -> None:
    """An aggregate is the outputs of all its experts laid end to end."""
    torch.manual_seed(0)
    model = nn.Module()
    model.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 12)) for _ in range(3)])
    model.bfloat16()
    monitor, samples = watching(model)
    parts = []
    with monitor.step(0):
        for i, expert in enumerate(model.experts):
            x, dy = (10.0**i * torch.randn(5 + i, width).bfloat16() for width in (8, 12))
            expert(x).backward(dy)
            given = {"input": x, "weight": expert[0].weight, "grad_output": dy}
            parts.append((given, lowered(given)))
    found = rows(samples.samples[0])
    for product, expected in errors(parts).items():
        assert metrics_of(found["experts.*.0", product]) == pytest.approx(expected, rel=1e-5)
        assert found["experts.*.0", product]["experts"] == 3
        assert found["experts.1.0", product]["experts"] == 1


def test_they_are_recorded_and_streamed(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    linear, given = linear_operands()
    monitor = Monitor(linear, str(tmp_path), interval=1, table_rows=0, on_error="raise", output_rows=8)
    for step in range(2):
        with monitor.step(step) as report:
            report(consumed_samples=4.0 * step)
            linear(given["input"]).backward(given["grad_output"])
    monitor.close()
    table = read_table_rows(tmp_path, "outputs")
    assert table["step"].to_list() == [0] * 3 + [1] * 3
    assert table["consumed_samples"].to_list() == [0.0] * 3 + [4.0] * 3
    by_product = {row["product"]: row for row in table.to_dicts()[:3]}
    assert list(by_product) == ["fprop", "dgrad", "wgrad"]
    assert by_product["wgrad"]["error_of_weight"] is None and by_product["wgrad"]["error_of_input"] > 0
    events = EventAccumulator(str(tmp_path)).Reload()
    for product, row in by_product.items():
        for tag in (f"fp8/output_error/{product}/worst", f"fp8_output_error/{product}/model"):
            assert [e.step for e in events.Scalars(tag)] == [0, 1]
            assert events.Scalars(tag)[0].value == pytest.approx(row["relative_error"], rel=1e-6)


def test_a_record_without_them_reads_as_empty(tmp_path: Path) -> None:
    linear, given = linear_operands()
    monitor = Monitor(linear, str(tmp_path), interval=1, table_rows=0, on_error="raise")
    with monitor.step(0):
        linear(given["input"]).backward(given["grad_output"])
    monitor.close()
    assert not (tmp_path / "outputs").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_table_rows(tmp_path, "outputs")) == 0


def test_rows_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="output_rows is -1; it must be a whole number, at least 0"):
        Monitor(nn.Linear(2, 2), recorders=[Samples()], output_rows=-1)
