"""What quantization does to the outputs of GEMMs, against whole products in float64 with casts by ml_dtypes."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Samples
from products import errors, metrics_of, quantized, rows
from small_models.megatron import gpt, loss_of
from test_emulate import attached
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_fp8_debug import ConfigError, FP8DebugWarning, Monitor
from nemo_fp8_debug.capture import operands
from nemo_fp8_debug.numerics.block_scaling import BlockRule
from nemo_fp8_debug.numerics.gemm_error import spread
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.record.reader import read_table

#: more than any output here has
ALL = 10_000
ROLES = ("input", "weight", "grad_output")


def watching(model: nn.Module, **options: Any) -> tuple[Monitor, Samples]:
    samples = Samples()
    options = {"interval": 1, "on_error": "raise", "output_rows": ALL} | options
    return Monitor(model, recorders=[samples], **options), samples


def linear_operands(bias: bool = True) -> tuple[nn.Linear, dict[str, torch.Tensor]]:
    """A layer, and operands of 3 x 50 tokens with an outlier each."""
    torch.manual_seed(0)
    linear = nn.Linear(48, 40, bias=bias).bfloat16()
    x, dy = torch.randn(3, 50, 48).bfloat16(), (1e-3 * torch.randn(3, 50, 40)).bfloat16()
    x[0, 7, 5], dy[2, 3, 1] = 40.0, 0.2
    return linear, {"input": x, "weight": linear.weight.detach().clone(), "grad_output": dy}


def run(linear: nn.Module, given: dict[str, torch.Tensor], **options: Any) -> dict[tuple[str, str], dict[str, Any]]:
    monitor, samples = watching(linear, **options)
    with monitor.step(0):
        linear(given["input"]).backward(given["grad_output"])
    return rows(samples.samples[0])


def lowered(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {role: quantized(x, role) for role, x in given.items()}


@pytest.mark.parametrize("bias", [True, False])
def test_whole_outputs_are_those_of_the_oracle(bias: bool) -> None:
    linear, given = linear_operands(bias)
    found = run(linear, given)
    expected = errors([(given, lowered(given))])
    assert set(found) == {("model", product) for product in expected}
    for (_, product), row in found.items():
        assert metrics_of(row) == pytest.approx(expected[product], rel=1e-5)
        assert (row["recipe"], row["scale_source"], row["ranks"]) == ("current-hybrid", "current", 1)
    assert [row["n"] for row in found.values()] == [150 * 40, 150 * 48, 40 * 48]


#: the operands of each product, and whether it sums over their rows
TAKEN = {
    "fprop": {"input": False, "weight": False},
    "dgrad": {"grad_output": False, "weight": True},
    "wgrad": {"grad_output": True, "input": True},
}


def of_a_block(product: str, given: dict[str, torch.Tensor], low: Mapping[str, Any], n: int) -> dict[str, float]:
    """Metrics of a product from n rows or columns of its operands alone."""

    def cut(m: torch.Tensor, columns: bool) -> torch.Tensor:
        at = spread(m.shape[columns], n, torch.device("cpu"))
        return m[:, at] if columns else m[at]

    # An operand that the product does not take is cut to nothing that could be multiplied.
    high, lower = ({role: torch.zeros(1, 1) for role in ROLES} for _ in range(2))
    for role, columns in TAKEN[product].items():
        high[role] = cut(given[role].reshape(-1, given[role].shape[-1]), columns)
        lower[role] = cut(torch.from_numpy(low[role]), columns)
    return errors([(high, {role: m.numpy() for role, m in lower.items()})])[product]


def test_a_part_of_an_output_is_a_block_of_it() -> None:
    """The scale is that of the whole operand, and the sum over what is multiplied is whole."""
    linear, given = linear_operands()
    found = run(linear, given, output_rows=16)
    for product in TAKEN:
        expected = of_a_block(product, given, lowered(given), 16)
        assert metrics_of(found["model", product]) == pytest.approx(expected, rel=1e-5)
        assert found["model", product]["n"] == 256


def test_places_are_spread_evenly_and_in_step_with_nothing() -> None:
    for n, k in ((1, 1), (7, 64), (64, 64), (65, 64), (150, 16), (8192, 64), (100_003, 128)):
        at = spread(n, k, torch.device("cpu")).tolist()
        assert len(at) == min(n, k)
        assert all(i * n // len(at) <= place < (i + 1) * n // len(at) for i, place in enumerate(at))
    phases = {place % 128 for place in spread(8192, 64, torch.device("cpu")).tolist()}
    assert len(phases) > 32  # of heads of 128 features, say


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise", "nvfp4"])
def test_blocks_run_along_what_is_summed_over(recipe: str) -> None:
    """As Transformer Engine quantizes the copies that each product takes; W in square blocks is one copy."""
    linear, given = linear_operands()
    parsed = parse_recipe(recipe)
    rule = parsed.scaling
    assert isinstance(rule, BlockRule)

    def low(role: str, columns: bool) -> Any:
        m = given[role].reshape(-1, given[role].shape[-1])
        q = rule.quantize(m.t() if columns else m, role, parsed.format_of(role)).dequantize()
        return (q.t() if columns else q).contiguous().numpy()

    for n in (ALL, 16):
        found = run(linear, given, recipe=recipe, output_rows=n)
        for product, taken in TAKEN.items():
            quantized_operands = {role: low(role, columns) for role, columns in taken.items()}
            expected = of_a_block(product, given, quantized_operands, n)
            assert metrics_of(found["model", product]) == pytest.approx(expected, rel=1e-5)
            assert found["model", product]["recipe"] == parsed.name


def kept_by(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], list[torch.Tensor]]:
    """Every operand that is counted, in order, a tensor for each call."""
    taken: dict[tuple[str, str], list[torch.Tensor]] = {}
    original = operands.Operand.add

    def keep(self: operands.Operand, x: torch.Tensor, order: int, use: Any = None) -> None:
        taken.setdefault((self.gemm.name, self.role), []).append(x.detach().clone())
        original(self, x, order, use)

    monkeypatch.setattr(operands.Operand, "add", keep)
    return taken


@pytest.mark.usefixtures("megatron")
def test_delayed_scales_in_use_and_the_first_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real Megatron layers under emulation whose scales lag behind: three steps, two micro-batches each."""
    model = gpt()
    emulation = attached(model, {"name": "delayed", "amax_history_len": 2}, ["layers.*"])
    (state,) = emulation.states.values()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor, samples = watching(model, layers=["layers.*"])
    for step in range(3):
        if step == 2:
            taken = kept_by(monkeypatch)
        scales = state.scale.clone()
        with monitor.step(step):
            optimizer.zero_grad()
            for seed in (2 * step, 2 * step + 1):
                loss_of(model, seed).backward()
        optimizer.step()
        emulation.end_step()
    found, index = rows(samples.samples[2]), state.index
    layers = {layer for layer, _ in taken}
    assert len(layers) == 8 and len(found) == 3 * len(layers)
    for layer in layers:
        assert len(taken[layer, "input"]) == len(taken[layer, "grad_output"]) == 2
        given = {role: taken[layer, role][0] for role in ROLES}
        low = {role: quantized(x, role, scales[index[layer, role]].item()) for role, x in given.items()}
        for product, expected in errors([(given, low)]).items():
            row = found[layer, product]
            assert metrics_of(row) == pytest.approx(expected, rel=1e-5), (layer, product)
            assert (row["scale_source"], row["recipe"]) == ("engine", "delayed-hybrid(amax_history_len=2)")


@pytest.mark.usefixtures("megatron")
def test_recompute_changes_nothing() -> None:
    def of(**options: Any) -> dict[tuple[str, str], dict[str, Any]]:
        model = gpt(**options)
        monitor, samples = watching(model, output_rows=8)
        with monitor.step(0):
            for seed in range(2):
                loss_of(model, seed).backward()
        return rows(samples.samples[0])

    plain = of()
    assert len(plain) == 3 * 9
    assert of(recompute_method="uniform", recompute_granularity="full", recompute_num_layers=1) == plain


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_layer_that_is_called_twice_gives_one_of_its_calls(reentrant: bool | None) -> None:
    """Gradients arrive in the opposite order: the first dY is that of the second call."""
    torch.manual_seed(0)
    linear = nn.Linear(16, 16).bfloat16()
    x = torch.randn(9, 16).bfloat16().requires_grad_()

    def call(x: torch.Tensor) -> torch.Tensor:
        return linear(x) if reentrant is None else checkpoint(linear, x, use_reentrant=reentrant)

    outs, inputs = [], [x]
    for _ in range(2):
        outs.append(linear(inputs[-1]))
        outs[-1].retain_grad()
        inputs.append(3 * outs[-1].tanh())
    outs[1].float().square().mean().backward()
    first = 1 if reentrant else 0  # of those that count: reentrant checkpoints run the last one first again
    given = {"input": inputs[first], "weight": linear.weight, "grad_output": outs[first].grad}
    monitor, samples = watching(linear)
    with monitor.step(0):
        call(3 * call(x).tanh()).float().square().mean().backward()
    found = rows(samples.samples[0])
    for product, expected in errors([(given, lowered(given))]).items():
        assert metrics_of(found["model", product]) == pytest.approx(expected, rel=1e-5)


def test_underflow_of_most_values_may_hurt_nothing() -> None:
    """Of X three quarters underflow beneath a few columns that make nearly all of the output."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 32, bias=False).bfloat16()
    x = 1e-7 * torch.randn(200, 64)
    x[:, :12] = torch.randn(200, 12)
    given = {"input": x.bfloat16(), "weight": linear.weight.detach(), "grad_output": torch.randn(200, 32).bfloat16()}
    monitor, samples = watching(linear)
    with monitor.step(0):
        linear(given["input"]).backward(given["grad_output"])
    assert samples.rows(0)["model", "input"]["underflow_pct"] > 70
    fprop = rows(samples.samples[0])["model", "fprop"]
    assert fprop["error_of_input"] < 0.03 and fprop["error_of_weight"] < 0.03
    assert fprop["relative_error"] == pytest.approx(math.hypot(fprop["error_of_input"], fprop["error_of_weight"]), rel=0.1)


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
    from nemo_fp8_debug.capture import output_samples

    def faulty(*arguments: Any) -> None:
        raise ZeroDivisionError("injected")

    linear, given = linear_operands()
    monitor, samples = watching(linear, on_error="warn")
    monkeypatch.setattr(output_samples, "product_sums", faulty)
    with pytest.warns(FP8DebugWarning, match="while computing parts of outputs.*injected"):
        with monitor.step(0):
            linear(given["input"]).backward(given["grad_output"])
        monitor.flush()
    assert {role for _, role in samples.rows(0)} == set(ROLES)
    assert samples.samples[0].outputs == {}


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
    table = read_table(tmp_path, "outputs")
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
        assert len(read_table(tmp_path, "outputs")) == 0


def test_rows_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="output_rows is -1; it must be a whole number, at least 0"):
        Monitor(nn.Linear(2, 2), recorders=[Samples()], output_rows=-1)
