"""The bounds of a product: proven ones hold, and what is beyond them is told."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8_debug.numerics.product_check import CHECKED, FLOAT32, TIMES, ExactBlock, GemmAccumulation, check_block

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
_RATIOS = ("value_ratio", "row_ratio", "column_ratio", "block_ratio")


def checked(
    actual: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, how: GemmAccumulation = FLOAT32
) -> dict[str, float]:
    return dict(zip(CHECKED, check_block(actual, ExactBlock.from_rows(a, b), how, bias).tolist(), strict=True))


def operands(seed: int, terms: int, dtype: torch.dtype, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(n, terms, generator=dice) * torch.randn(terms, generator=dice).mul(spread).exp() for n in (48, 40))
    return a.to(dtype), b.to(dtype)


def summed_in(order: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A B^T by float32 additions in an order of its own, rounded once."""
    total = torch.zeros(len(a), len(b))
    for k in order.tolist():
        total = total + a[:, k, None].float() * b[None, :, k].float()
    return total.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 30), terms=st.sampled_from([1, 3, 64, 200]), spread=st.floats(0, 3))
def test_no_order_of_summation_is_beyond(dtype: torch.dtype, seed: int, terms: int, spread: float) -> None:
    a, b = operands(seed, terms, dtype, min(spread, 1.0) if dtype == torch.float16 else spread)
    for order in (torch.arange(terms), torch.randperm(terms, generator=torch.Generator().manual_seed(seed))):
        found = checked(summed_in(order, a, b, dtype), a, b)
        assert max(found[name] for name in _RATIOS) <= 1
        assert found["values_beyond"] == found["rows_beyond"] == found["columns_beyond"] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [1, 33, 1000])
def test_torchs_own_products_are_within(dtype: torch.dtype, terms: int) -> None:
    a, b = operands(0, terms, dtype, 0.5)
    found = checked(a @ b.t(), a, b)
    assert max(found[name] for name in _RATIOS) <= 1
    assert found["values"] + found["unchecked"] == 48 * 40


def test_the_exact_block_is_that_of_rational_numbers() -> None:
    a, b = operands(1, 5, torch.bfloat16)
    exact = ExactBlock.from_rows(a, b)
    for i, j in ((0, 0), (47, 39), (20, 7)):
        terms = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[i], b[j], strict=True)]
        assert exact.values[i, j].item() == pytest.approx(float(sum(terms)), rel=1e-14)
        magnitude = float(sum(map(abs, terms)))
        assert magnitude <= exact.magnitudes[i, j].item() <= magnitude * (1 + 2.0**-20)


def test_the_bound_is_the_one_that_docs_give() -> None:
    """One value, by hand: n terms and the addition to what is there, and one rounding to BF16."""
    a, b = torch.ones(1, 3).bfloat16(), torch.full((1, 3), 2.0).bfloat16()
    u, roundings = 2.0**-8, 4 * 2.0**-24
    bound = (1 + u) * (roundings / (1 - roundings)) * 6 + u * 6
    off = 0.03125
    found = checked(torch.full((1, 1), 6 + off).bfloat16(), a, b)
    assert found["value_ratio"] == pytest.approx(off / bound, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_below_the_bound_of_any_value_is_seen_in_the_block(dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 4096, generator=dice).to(dtype) for _ in range(2))
    right = a.double() @ b.double().t()
    wrong = checked((right * (1 + 2.0**-6)).to(dtype), a, b)
    assert wrong["block_ratio"] > 1 and wrong["factor"] == pytest.approx(1 + 2.0**-6, rel=1e-3)
    assert max(checked(right.to(dtype), a, b)[name] for name in _RATIOS) <= 1


def test_a_row_that_is_wrong_by_little_is_seen_as_a_row() -> None:
    dice = torch.Generator().manual_seed(1)
    a, b = (torch.randn(64, 2048, generator=dice).bfloat16() for _ in range(2))
    actual = a.double() @ b.double().t()
    actual[17] *= 1 + 2.0**-6
    found = checked(actual.bfloat16(), a, b)
    assert (found["rows_beyond"], found["worst_row"]) == (1, 17)
    assert found["row_ratio"] > max(found["column_ratio"], found["block_ratio"])


def test_rows_that_repeat_round_alike_and_are_no_evidence() -> None:
    """Padding, and tokens that occur again: their roundings are the same, and not many small ones."""
    dice = torch.Generator().manual_seed(2)
    a, b = torch.randn(1, 8, generator=dice).bfloat16().repeat(64, 1), torch.randn(64, 8, generator=dice).bfloat16()
    a[32:] *= -4  # the same but for a power of two and the sign
    found = checked(a @ b.t(), a, b)
    assert max(found[name] for name in _RATIOS) <= 1


@pytest.mark.parametrize("separate", [False, True])
def test_a_bias_may_be_added_before_or_after_the_rounding(separate: bool) -> None:
    a, b = operands(3, 100, torch.bfloat16)
    bias = (10 * torch.randn(40, generator=torch.Generator().manual_seed(3))).bfloat16()
    product = a.double() @ b.double().t()
    actual = product.bfloat16() + bias if separate else (product + bias.double()).bfloat16()
    assert max(checked(actual, a, b, bias)[name] for name in _RATIOS) <= 1
    assert checked(actual, a, b)["values_beyond"] > 0


def test_a_value_that_is_not_finite_and_ought_to_be_is_beyond() -> None:
    a, b = operands(4, 10, torch.bfloat16)
    actual = a @ b.t()
    actual[5, 6] = math.nan
    found = checked(actual, a, b)
    assert (found["value_ratio"], found["row"], found["column"]) == (math.inf, 5, 6)
    assert found["values_beyond"] == 1 and found["rows_beyond"] == 0


def test_what_cannot_be_judged_is_counted() -> None:
    """An infinite operand, and a product that its dtype does not hold."""
    a, b = operands(5, 10, torch.float16)
    a[2, 3] = math.inf
    a[4] = 300.0
    b[7] = 300.0
    found = checked(a @ b.t(), a, b)
    assert found["unchecked"] >= 40 and found["values_beyond"] == 0
    assert found["values"] == 48 * 40 - found["unchecked"]


def test_limits_of_sums_are_those_of_the_run_that_docs_name() -> None:
    tests = 500 * 1000 * 3 * (2 * 128 + 2)
    assert tests * 2 * math.exp(-(TIMES**2) / 2) == pytest.approx(0.01)


def test_a_coarser_accumulator_is_allowed_more() -> None:
    coarse = GemmAccumulation(roundoff=2.0**-13, exact_terms=32, bias=2.0**-13)
    a, b = operands(6, 256, torch.bfloat16)
    off = ((a.double() @ b.double().t()) * (1 + 2.0**-12)).float()
    assert checked(off, a, b)["block_ratio"] > 1
    assert checked(off, a, b, how=coarse)["block_ratio"] <= 1
