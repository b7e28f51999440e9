"""What quantization does to the outputs of GEMMs, against whole products in float64 with casts by ml_dtypes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from products import errors, metrics_of, quantized, rows
from small_models.megatron import gpt, loss_of
from test_emulate import attached
from torch import nn
from torch.utils.checkpoint import checkpoint
from watched_products import ALL, ROLES, linear_operands, lowered, run, watching

from nemo_fp8_debug.capture import operands
from nemo_fp8_debug.numerics.block_scaling import BlockScalingRule
from nemo_fp8_debug.numerics.gemm_error import sample_indices
from nemo_fp8_debug.numerics.recipe import parse_recipe

CPU = torch.device("cpu")


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
        at = sample_indices(m.shape[columns], n, CPU, 0, False)
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
        for step in (0, 7, 10**9):
            at = sample_indices(n, k, CPU, step, False).tolist()
            assert len(at) == min(n, k)
            assert all(i * n // len(at) <= place < (i + 1) * n // len(at) for i, place in enumerate(at))
    phases = {place % 128 for place in sample_indices(8192, 64, CPU, 0, False).tolist()}
    assert len(phases) > 32  # of heads of 128 features, say


@pytest.mark.parametrize("interval", [1, 2, 10, 25, 50, 64, 89, 100, 500, 1000])
@pytest.mark.parametrize("columns", [False, True])
def test_samples_reach_every_place(interval: int, columns: bool) -> None:
    for n, k, first in ((256, 16, 0), (1000, 64, 0), (1664, 64, 137)):
        steps = range(first, first + 60 * interval, interval)
        assert {place for step in steps for place in sample_indices(n, k, CPU, step, columns).tolist()} == {*range(n)}


def test_every_row_meets_every_column() -> None:
    """So that a single wrong value is found in the end."""
    steps = range(59 * 53)
    met = {(int(sample_indices(26, 1, CPU, step, False)), int(sample_indices(26, 1, CPU, step, True))) for step in steps}
    assert len(met) == 26 * 26


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise", "nvfp4"])
def test_blocks_run_along_what_is_summed_over(recipe: str) -> None:
    """As Transformer Engine quantizes the copies that each product takes; W in square blocks is one copy."""
    linear, given = linear_operands()
    parsed = parse_recipe(recipe)
    rule = parsed.scaling
    assert isinstance(rule, BlockScalingRule)

    def low(role: str, columns: bool) -> Any:
        m = given[role].reshape(-1, given[role].shape[-1])
        q = rule.quantize(m.t() if columns else m, role, parsed.get_format(role)).dequantize()
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
    original = operands.OperandAccumulator.add_tensor

    def keep(self: operands.OperandAccumulator, x: torch.Tensor, order: int, use: Any = None) -> None:
        taken.setdefault((self.gemm.name, self.role), []).append(x.detach().clone())
        original(self, x, order, use)

    monkeypatch.setattr(operands.OperandAccumulator, "add_tensor", keep)
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
